"""The passes of a batch in a loop of the program, in place of a loss_fn that C calls: the same
steps, and the same callbacks but for that one. Must not know what is reported of a batch."""

from __future__ import annotations

import ctypes as C
import re
import sys
import types
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Generator, Iterator, List, Optional, Set, Tuple

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch._user_code import is_own, user_stacklevel
from rebatch.torch.allocator import phases
from rebatch.torch.program.left_backward import add_sentence
from rebatch.torch.program.program import refuse_update_in_loss_fn
from rebatch.torch.session.threads import attempt
from rebatch.torch.undo.block_names import BlockNames, named_in
from rebatch.torch.undo.changes_outside import is_within
from rebatch.torch.undo.places import Place

if TYPE_CHECKING:
    from rebatch.torch.core.training import Training

_LOOP = "for part in backward.parts(batch): with part as samples: ...; part.backward(loss)"


def _frame_of_program() -> types.FrameType:
    """Of whoever enters a part."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__") == "contextlib":
        frame = frame.f_back
    return frame


def _frame_of_loop() -> Optional[types.FrameType]:
    """Of the program, which takes parts from a generator of this package, by others or not."""
    frame: Optional[types.FrameType] = sys._getframe(1)
    while frame and not is_own(str(frame.f_globals.get("__name__")).split(".")[0]):
        frame = frame.f_back
    return frame


class Part:
    """Samples of a batch, for a block of the program, which gets them: `with part as samples:`.

    first      the number of the first one in the batch
    count      how many there are
    succeeded  after the block: whether they are in .grad; else they come again, fewer"""

    def __init__(self, parts: Parts, first: int, count: int, samples: Any):
        self.first, self.count, self._samples = first, count, samples
        self.succeeded = self.goes_backward = False
        self._parts = parts
        self._names: Optional[BlockNames] = None  # while the block runs
        self._loss: Optional[torch.Tensor] = None  # weighted
        self._begun = (0, 0)
        self._is_over = False

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of these samples: `loss` is the mean over them, or the sum where the
        Backward has a normalizer. Once in each block."""
        if self._names is None:
            raise RuntimeError(
                "rebatch: part.backward() was called outside of its block: expected " + _LOOP
            )
        if self._loss is not None:
            raise RuntimeError(
                "rebatch: part.backward() was called twice in a block: expected one call, with the "
                "sum of the losses"
            )
        self.goes_backward = True
        self._loss = self._parts.callbacks.backward_of_block(loss, self.first, self.count)
        self._parts.told.ran()
        self.goes_backward = False

    def __enter__(self) -> Any:
        if self._names or self._is_over:
            raise RuntimeError("rebatch: a part was entered twice: expected " + _LOOP)
        self._names = self._parts.names_in(_frame_of_program())
        self._begun = self._parts.session.figures()
        attempt.runs = True
        phases.marked_by_session.__enter__()
        samples, self._samples = self._samples, None
        return samples

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> bool:
        phases.marked_by_session.__exit__()
        attempt.runs = False
        self._is_over, parts = True, self._parts
        names, self._names = self._names, None
        assert names is not None  # __enter__() has made them
        is_silent = error is None and self._loss is None
        if is_silent:
            error = RuntimeError(
                "rebatch: the block of a part has ended without part.backward(loss), so its "
                "samples would be missing: expected " + _LOOP
            )
        if error is None:
            parts.succeeded(self, self._loss, names)
            return False
        self._loss = None
        if parts.failed(self, error, self._begun, names):
            return True
        if is_silent:
            raise error
        return False

    def check_over(self) -> None:
        if not self._is_over:
            raise RuntimeError("rebatch: a part was not run: expected " + _LOOP)


class Parts:
    """Of one batch. `loop` gives its parts, and is what ends them, whoever leaves it."""

    def __init__(self, training: Training):
        self._training, self.callbacks = training, training.callbacks
        self.told = training.running.told
        self.session = training.open()
        self._status = int(c.Status.OK)  # of the part that ran last
        self._live = 0  # in use before it
        self._batch_names: Optional[BlockNames] = None  # where the first block begins
        self._failed_names: Optional[BlockNames] = None  # of the block that ran out of memory
        self._names: Optional[BlockNames] = None  # where the last one began, which succeeded
        self._frame: Optional[types.FrameType] = None  # of the program, whose loop it is
        self._looked: Optional[BlockNames] = None  # when `told` looked at what they name
        self._assigned: Set[str] = set()  # names, since then or since an earlier look
        self._emptied: Set[str] = set()  # names that were made None in this batch
        self._is_closed = False  # by the error of a block

    def loop(self, batch: Any) -> Iterator[Part]:
        loop = self._loop(batch)
        self._loop_of = weakref.ref(loop)  # whose end is that of the program's loop
        return loop

    def _loop(self, batch: Any) -> Generator[Part, None, None]:
        training, session, filled = self._training, self.session, c.StepReport()
        self.told.block = self
        try:
            with training.batch_runs(session, batch):
                ops = c.StepOps.from_buffer_copy(self.callbacks.ops)
                ops.forward_backward = type(ops.forward_backward)()  # the program's block
                session.begin_call()
                try:
                    arguments = C.byref(ops), training.running.samples, None
                    status = session.enter(lib.rebatch_step_begin, *arguments)
                    yield from self._run(status)
                except GeneratorExit:
                    if not self._is_closed:
                        training.left_parts = True
                        warnings.warn(_LEFT, RuntimeWarning, stacklevel=user_stacklevel())
                    raise
                finally:
                    status = session.enter(lib.rebatch_step_end, C.byref(filled))
                training.note_call(session, status, filled)
        finally:
            self._batch_names = self._looked = self._frame = self.told.block = None

    def _run(self, status: int) -> Iterator[Part]:
        session, accumulated = self.session, 0
        mb = session.enter(lib.rebatch_step_next, status)
        while mb:
            first, count = mb[0].first, mb[0].count
            if first < accumulated and self._batch_names:  # the batch runs again
                self.tell(self._batch_names.put_back())
                self._tell_held(self._batch_names)
                accumulated = 0
            part = self._open(first, count)
            if part is not None:
                yield part
                part.check_over()
                accumulated = first + count if part.succeeded else accumulated
                if self._names and accumulated < self._training.running.samples:
                    self._names.let_go()
                    self._emptied |= self._names.emptied
                self._names = part = None
            if self._status == c.Status.OOM:
                session.collect(self._live)  # here, where no exception is being handled
                failed, self._failed_names = self._failed_names, None
                self._tell_held(failed)
            mb = session.enter(
                lib.rebatch_step_next, c.Status.E_USER if session.error else self._status
            )

    def _open(self, first: int, count: int) -> Optional[Part]:
        """None: `_status` says why there is no block."""
        found: List[Tuple[int, Any]] = []
        self._status = self.session.run(self.callbacks.begin_block, first, count, found.append)
        self._looked = self._names_in(self._frame) if self.told.is_looking and self._frame else None
        return Part(self, first, *found[0]) if found else None

    # ---- a block ----

    def _names_in(self, frame: types.FrameType) -> BlockNames:
        running = self._training.running
        return BlockNames(frame, running.undo.handled() | running.program.handled())

    def names_in(self, frame: types.FrameType) -> BlockNames:
        names = self._names_in(frame)
        if self._batch_names is None:
            self._batch_names = names
        return names

    def succeeded(self, part: Part, loss: Any, names: BlockNames) -> None:
        self._names = names
        self._note_assigned()
        end = self.callbacks.end_block
        self._status = self.session.run(end, loss, part.first, part.count)
        part.succeeded = self._status == c.Status.OK

    def failed(
        self, part: Part, error: BaseException, begun: Tuple[int, int], names: BlockNames
    ) -> bool:
        """Whether memory ran out, so that the samples come again. Else the batch is over."""
        self.callbacks.put_back()
        self._live, _ = begun
        self._explain(error, part, names)
        self._status = self.session.status_of(error, begun)
        if self._status == c.Status.OOM:
            self._note_assigned()
            self.told.ran(has_failed=True)
            self.tell(names.put_back())
            self._emptied |= names.emptied
            # On a CPU PyTorch holds what a backward pass has not come to, until the next one.
            is_held = part.goes_backward and self._training.program.device.type == "cpu"
            self._failed_names = None if is_held else names
            return True
        self._is_closed, self.session.error = True, None  # it comes out of the block
        loop = self._loop_of()
        if loop is not None:
            loop.close()
        return False

    def _explain(self, error: BaseException, part: Part, names: BlockNames) -> None:
        """Where a name that is None, or the cut, may be why the block has failed."""
        empty = names.empty_among(self._emptied) if "None" in str(error) else []
        if empty:
            add_sentence(
                error,
                f"rebatch: {', '.join(map(repr, empty))} {'are' if empty[1:] else 'is'} None: an "
                "earlier block of this batch has assigned another value, and only numbers, texts, "
                "arrays of NumPy, small tensors without a graph and containers of these are put "
                "back: expected another name in the block, and below it, under "
                "`if part.succeeded:`, the line that takes it over",
            )
        else:
            self.callbacks.explain_cut(error, part.first, part.count)

    # ---- what blocks change, and is not put back ----

    def places(self) -> Iterator[Place]:
        """What the blocks name. Asked first while the loop takes a part."""
        self._frame = self._frame or _frame_of_loop()
        return named_in(self._frame) if self._frame else iter(())

    def _note_assigned(self) -> None:
        looked, self._looked = self._looked, None
        self._assigned |= looked.assigned() if looked else set()

    def not_assigned(self, names: List[str]) -> List[str]:
        """But for variables that blocks assign: these are put back."""
        return [name for name in names if re.split(r"[.[]", name)[0] not in self._assigned]

    def _tell_held(self, names: Optional[BlockNames]) -> None:
        """Where nothing was told, as what was changed often is what holds them."""
        if names and not self._training.told_parts:
            self.tell(names.still_held())

    def tell(self, names: List[str]) -> None:
        """Each once."""
        told = self._training.told_parts
        names = [name for name in names if name not in told and not is_within(name, told)]
        if not names:
            return
        told.update(names)
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        warnings.warn(
            f"rebatch: a block that ran out of memory has changed {', '.join(map(repr, names[:3]))}"
            f"{more}, or something else holds its tensors, and that is not put back before its "
            "samples run again: expected these lines after the block, under `if part.succeeded:`",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )


_LEFT = (
    "rebatch: a batch of parts() was left before all its parts had run, by break, return or an "
    "exception, so .grad is as before it: expected the loop to reach its end"
)


def refuse_left(training: Any) -> None:
    """RuntimeError in the call after a batch that was left, whose own place cannot raise one."""
    if training.left_parts:
        training.left_parts = False
        raise RuntimeError(_LEFT)


def parts_of(training: Training, batch: Any) -> Iterator[Part]:
    """Backward.parts()."""
    if training.ranks:
        raise ValueError(
            "rebatch: parts() runs micro-batches of this rank alone, and other ranks train the "
            "model too: expected Backward(model, loss_fn) and backward(batch)"
        )
    if training.program.embed is not None:
        raise ValueError(
            "rebatch: parts() runs a block for some samples at a time, and the loss of a Backward "
            "with embed is one of the whole batch: expected backward(batch)"
        )
    if training.program.graphs:
        raise ValueError(
            "rebatch: parts() runs a block of the program, which cannot be captured, and graphs "
            f"is {training.program.graphs}: expected graphs=False, or a loss_fn"
        )
    refuse_left(training)
    refuse_update_in_loss_fn()
    if not training.report.samples:  # the first batch
        training.program.update.find()
    return Parts(training).loop(batch)
