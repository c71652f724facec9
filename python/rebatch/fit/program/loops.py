"""A program without a Step: its loop is watched, and where its first pass begins sizes are tried in
copies of the process. A copy goes on with the program for some updates, in a batch of another size.
Must not know Steps."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import itertools
import json
import os
import sys
import traceback
from typing import Any, Dict, Iterator, List, NoReturn, Optional, Sequence, Set, Tuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten

from rebatch.fit import integers
from rebatch.fit.controls import standin
from rebatch.fit.error import FitError
from rebatch.fit.program import copies, sized
from rebatch.fit.program.batches import Growth, Transfers, is_batch
from rebatch.fit.program.copies import Reply, bytes_of, is_installed, ooms
from rebatch.fit.program.live import has_step, live, states_of, weights_of
from rebatch.fit.rows import Search, answer_and_exit, answer_of, rooms_of
from rebatch.fit.search import Line, Sizes
from rebatch.fit.tried import UNLIMITED, GoOn, Request, Tried

# Some optimizers step more often than others; those that never step are not waited for.
_MOST_UPDATES = 20
# More passes before an update are an accumulation of gradients, in which memory repeats itself.
_PASSES = 3
# Batches that are looked at for the largest; so many as long as they are alike, and the largest is
# tried no later, as each try has so many; and their samples and bytes.
_AHEAD, _ALIKE, _SAMPLES_AHEAD, _MOST_AHEAD = 32, 3, 1024, 1 << 30


def watch(asked: str) -> None:
    """Watch the program from now on. `asked` is what the command asks for, as JSON."""
    request = json.loads(asked)
    watch = Watch(request["sized"])
    if request["words"]:
        sized.serve(request, watch.becomes)


class _FileReply(Reply):
    """Of a program that is tried at its own size, to the command."""

    def __init__(self, path: str):
        super().__init__(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

    def tried(self, tried: Tried) -> NoReturn:
        self._say({"tried": dataclasses.asdict(tried)}, 0)

    def failed(self, text: str) -> NoReturn:
        sys.stderr.write(text)
        last = text.strip().splitlines()[-1]
        self._say({"error": f"rebatch: the program failed: {last}"}, 1)


class Watch:
    """The passes and updates of a program. Sizes are tried where the DataLoader returns the batch
    of the first pass, or without one where that pass begins."""

    def __init__(self, request: Optional[Dict[str, Any]]) -> None:
        self._sized = request and Request(**request)  # what this process is a try of, as a whole
        self._try: Optional[_Try] = None  # in a copy
        self._scout: Optional[Reply] = None  # in the copy that looks for the first pass
        self._is_over = False  # a Step answers
        self._returned, self._begins_at = 0, 0  # batches of loaders; 0: not with one
        self._loader: Optional[_Batches] = None  # that has returned the last batch
        self._wrap_module()
        self._wrap_loader()
        register_optimizer_step_post_hook(self._steps)
        # Parameters of a distribution that kernels would compute are 0 here, and found invalid.
        torch.distributions.Distribution.set_default_validate_args(False)
        integers.start()
        standin().standin_hide_modes(1)
        self._hook, sys.excepthook = sys.excepthook, self._raised

    def becomes(self, request: Request) -> None:
        """This process is another try of the program."""
        self._sized = request

    def _raised(self, kind: Any, error: BaseException, trace: Any) -> None:
        """The program ends before it is tried."""
        asked = os.environ.get("REBATCH_FIT")
        said = "".join(traceback.format_exception(kind, error, trace))
        refused = copies.refused_gpu(said)
        if asked and refused:
            answer_and_exit(asked, lambda _: _raise(refused))
        if asked and self._sized:
            _FileReply(json.loads(asked)["answer"]).failed(said)
        self._hook(kind, error, trace)

    def _wrap_module(self) -> None:
        plain = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
            if torch.is_grad_enabled() and not self._is_over:
                self._calls(module, (arguments, keywords))
            return plain(module, *arguments, **keywords)

        torch.nn.Module.__call__ = call  # type: ignore[method-assign]

    def _wrap_loader(self) -> None:
        plain = torch.utils.data.DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            loader.num_workers = loader.timeout = 0  # a copy of the process has no workers
            own = loader.collate_fn
            batches = _Batches(own, self)
            if loader.batch_sampler is not None:  # else a sample is a batch
                loader.collate_fn = batches.collate
            try:
                batches.plain = plain(loader)
            finally:
                loader.collate_fn = own
            return batches

        torch.utils.data.DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def _calls(self, module: torch.nn.Module, given: Any) -> None:
        if self._try:
            self._try.calls(module, given)
        elif _trains(module):
            if self._scout:
                self._scout.says(0 if has_step() else self._returned)
            self._begin(_common_size(given), module)

    def returns(self, loader: _Batches) -> None:
        """A loader has returned a batch."""
        if self._try or self._is_over or self._scout:
            self._returned += 1
            return
        self._loader = loader
        self._returned += 1
        if self._returned == 1:
            self._begins_at = self._look_for_pass()
        if self._returned == self._begins_at:
            loader.look_ahead()
            self._begin(_common_size(loader.last))

    def _look_for_pass(self) -> int:
        """The batch after which the first pass begins; 0: there is none."""

        def work(reply: Reply) -> None:
            self._scout = reply
            os.environ.pop("REBATCH_FIT", None)  # a Step answers in the program's process
            raise GoOn

        try:
            return int(copies.asked(work, 0))
        except GoOn:
            return 0
        except FitError:
            return 0

    def _begin(self, samples: int, root: Optional[torch.nn.Module] = None) -> None:
        """Answer; or in a copy go on with the program."""
        asked = os.environ.pop("REBATCH_FIT", "")
        if not asked or has_step():
            self._is_over = True
            if asked:
                os.environ["REBATCH_FIT"] = asked
            return
        try:
            answer_and_exit(asked, lambda request: self._answer(request, samples, root))
        except GoOn:
            return

    def _answer(
        self, request: Dict[str, Any], samples: int, root: Optional[torch.nn.Module]
    ) -> Dict[str, Any]:
        if self._sized:
            self.begin(self._sized, _FileReply(request["answer"]), root)
        loops = [_Loop(self, samples, root)]
        if self._loader is not None and not root and self._loader.is_made(samples):
            loops.insert(0, _Loop(self, len(self._loader.samples), root, self._loader))
        searches = [Search(loop, request["installs"]) for loop in loops]
        line, remark = None, ""
        for loop, search in zip(loops, searches):
            loop.passes = search.tried(loop.samples, UNLIMITED).passes
            line, why = _line_of(loop, search) if loop.found else (None, _UNKNOWN)
            if line:
                break
            remark = remark or why
        if not line:
            search = searches[0]
        outside = search.outside(request["beside"])
        rooms = rooms_of(request["free"], outside)
        try:
            rows = [search.row(room, line) for room in rooms] if line else []
        except FitError as error:
            rows, remark = [], str(error)
        if rows:
            is_told = root or loop is not loops[0]
            remark = _VARIED.format(samples, "model is called with" if root else "loader returns")
            remark = remark if is_told else ""
        else:
            rows = [search.row_of_own(room) for room in rooms]
            remark = _FIXED.format(remark.removeprefix("rebatch: "))
        remark = " ".join(filter(None, [remark, search.remark, _of_histories()]))
        return answer_of(rows, outside, is_installed() or request["installs"], remark)

    def begin(
        self,
        request: Request,
        reply: Reply,
        root: Optional[torch.nn.Module],
        loop: Optional[_Loop] = None,
    ) -> NoReturn:
        """A try in this process, with which the program goes on; of a batch that `loop` varies."""
        differ = self._loader is not None and self._loader.differ
        self._try = _Try(request, reply, root, loop, differ)
        raise GoOn

    def _steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._try:
            self._try.steps_on(optimizer)

    def repeats(self, loader: _Batches) -> bool:
        """Whether its batches come again: in a copy, which trains on these alone. A program that is
        tried as a whole has its own, of which no two need be alike."""
        return self._try is not None and not self._sized and self._loader is loader


_UNKNOWN = "the tensors of a batch have no first dimension in common, and count as 1 sample"
_VARIED = "A sample is one of the first dimension, {} in the program, of the tensors that its {}."
_LARGEST = "Batches differ: the largest of the first ones is tried, and larger ones may follow."
_HISTORY = (
    "LBFGS ends its iterations where gradients are 0, as all are here: its history, of up to "
    "{:.1f} MiB, does not count."
)
_FIXED = (
    "The size of the batch could not be varied, so the peak is that of the program's own batch: "
    "{}. Where the program takes the size from an argument, say --batch N and {{batch}} in its "
    "place."
)


def _line_of(loop: _Loop, search: Search) -> Tuple[Optional[Line], str]:
    """The line on which peaks lie; or None, and why there is none."""
    said, ways = "", (True, False) if loop.loader is None else (True,)
    for loop.grows_like_weights in ways:
        try:
            line = search.line()
        except FitError as error:
            said = said or str(error)
            continue
        return (line, "") if line.each > 0 else (None, "the peak does not grow with it")
    return None, said


def _of_histories() -> str:
    """What is said of an optimizer that goes on by its gradients."""
    size = sum(
        2 * group["history_size"] * sum(p.nbytes for p in group["params"] if p.is_cuda)
        for optimizer in live(torch.optim.LBFGS)
        for group in optimizer.param_groups
    )
    return _HISTORY.format(size / 2**20) if size else ""


def _raise(error: FitError) -> NoReturn:
    raise error


def _trains(module: torch.nn.Module) -> bool:
    return any(p.requires_grad and p.is_cuda for p in module.parameters())


def _bytes_of(batch: Any) -> int:
    """Of its tensors, which may be in objects."""
    parts = [
        leaf if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", None)
        for leaf in tree_flatten(batch)[0]
    ]
    return sum(part.nbytes for part in tree_flatten(parts)[0] if isinstance(part, torch.Tensor))


def _common_size(given: Any) -> int:
    """The first dimension that all tensors of a call share; 0: they share none."""
    tensors = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.size(0) for tensor in tensors if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def _with_largest(batches: List[Any]) -> List[Any]:
    """In their order, but the largest not later than a try comes."""
    at = max(range(len(batches)), key=lambda each: _bytes_of(batches[each]))
    early = min(at, _ALIKE - 1)
    return [*batches[:early], batches[at], *batches[early:at], *batches[at + 1 :]]


class _Batches:
    """An iterator of a DataLoader."""

    def __init__(self, collate: Any, watch: Watch):
        self.plain: Any = None
        self._collate, self._watch = collate, watch
        self.last: Any = None
        self.samples: Sequence[Any] = ()  # of which it was made
        self._ahead: List[Any] = []  # batches that the program has not been given yet
        self._pool: List[Any] = []  # the samples that are there
        self._round: Iterator[Any] = iter(())  # the batches of a try, again and again
        self.differ = False

    def collate(self, samples: Sequence[Any]) -> Any:
        """As the program does."""
        self.samples = samples
        return self._collate(samples)

    def is_made(self, shared: int) -> bool:
        """Whether batches of another size are made of samples: where their tensors do not share the
        size as their first dimension, or batches differ."""
        return len(self.samples) > 0 and (self.differ or len(self.samples) != shared)

    def become(self, size: int) -> None:
        """The batches have so many samples: those that are there in their order, each several times
        or some of them."""
        pool = self._pool
        if self.differ and size < len(pool):
            ends = range(size, len(pool) + 1, size)[:_AHEAD]
            batches = [self._collate(pool[end - size : end]) for end in ends]
        else:
            batches = [self._collate([pool[at * len(pool) // size] for at in range(size)])]
        self._repeat(_with_largest(batches))

    def _repeat(self, batches: List[Any]) -> None:
        self._round = itertools.cycle(batches)
        self.last = next(self._round)

    def look_ahead(self) -> None:
        """Those that follow, if they differ: the largest comes early. One that is smaller because
        it has fewer samples, as an epoch's last, does not differ."""
        there, sizes = [(self.last, self.samples)], [_bytes_of(self.last)]
        count = len(self.samples)
        while len(there) < (_AHEAD if self.differ else _ALIKE) and sum(sizes) < _MOST_AHEAD:
            if self.differ and count * len(there) >= _SAMPLES_AHEAD:
                break
            try:
                batch = next(self.plain)
            except StopIteration:
                break
            there.append((batch, self.samples))
            sizes.append(_bytes_of(batch))
            is_part = sizes[-1] < sizes[0] and len(self.samples) < count
            self.differ |= sizes[-1] != sizes[0] and not is_part
        self.samples = there[0][1]
        used = there if self.differ else there[:1]
        self._pool = [sample for _, samples in used for sample in samples]
        self._repeat(_with_largest([batch for batch, samples in used if len(samples) == count]))
        self._ahead = _with_largest([batch for batch, _ in there])[1:]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._watch.repeats(self):
            return copy.deepcopy(next(self._round))
        self.last = self._ahead.pop(0) if self._ahead else next(self.plain)
        self._watch.returns(self)
        # The program may change it: move it to the GPU, take something out.
        return copy.deepcopy(self.last) if self._watch.repeats(self) else self.last

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class _Loop:
    """What is tried: the program's loop, from its first batch or pass on."""

    name, is_loop = "", True

    def __init__(
        self,
        watch: Watch,
        samples: int,
        root: Optional[torch.nn.Module],
        loader: Optional[_Batches] = None,
    ):
        self._watch, self._root = watch, root
        self.loader = loader  # makes the batches of another size; None: the tensors are resized
        self.found = samples  # 0: not found
        self.samples = samples or 1
        self.grows_like_weights = True  # tensors with the shape of one
        self.passes = 0  # before the first update, once that is known

    def sizes(self) -> Sizes:
        return Sizes()

    def tried(self, request: Request) -> Tried:
        def work(reply: Reply) -> None:
            self._watch.begin(request, reply, self._root, self)

        return copies.in_copy(work, request.size)


class _Try:
    """In a copy, which goes on with the program: some updates in batches of one size."""

    def __init__(
        self,
        request: Request,
        reply: Reply,
        root: Optional[torch.nn.Module],
        loop: Optional[_Loop],
        differ: bool,  # the batches that the program loads
    ):
        self._request, self._reply = request, reply
        self._root = root  # whose call begins a pass
        self._growth: Optional[Growth] = None
        if loop and loop.loader is not None:
            loop.loader.become(request.size)
        elif loop and loop.found not in (0, request.size):
            self._growth = Growth(loop.found, request.size, loop.grows_like_weights)
        self._known_passes = loop.passes if loop else 0
        self._remark = _LARGEST if differ else ""
        self._passes, self._passes_before, self._updates = int(bool(root)), 0, dict[int, int]()
        self._rounds = 0  # in which each optimizer has stepped
        self._watched = copies.Updates()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._failed, self._failed_operations = ooms(self._device), integers.start().ooms
        if self._growth:
            self._growth.grow()
        torch.cuda.empty_cache()
        copies.limit(self._device, request)
        copies.restart(self._device)
        if self._growth:
            Transfers(self._growth).__enter__()  # type: ignore[no-untyped-call]
            standin().standin_hide_modes(2)
        atexit.register(self._end)
        sys.excepthook = self._raised

    def calls(self, module: torch.nn.Module, given: Any) -> None:
        """A module is called, of which gradients may come."""
        if self._root is None and _trains(module):
            self._root = module
        if self._root is module:
            self._passes_on(given)

    def _passes_on(self, given: Any) -> None:
        """A pass begins."""
        self._stop_after_oom()
        if self._growth and _common_size(given) == self._growth.size:  # made on the GPU
            self._growth.grow()
        self._passes += 1
        if self._is_accumulating():
            if self._passes == _PASSES and not self._updates:
                for optimizer in self._optimizers():
                    type(optimizer).step(optimizer)
            if self._passes > self._passes_before + _PASSES - 1:
                self._finish()
        elif self._passes > 1 and not self._optimizers() and self._watched.suffice():
            self._finish()

    def _is_accumulating(self) -> bool:
        """Passes repeat themselves, and not all before an update need run."""
        return self._known_passes > _PASSES or (
            bool(self._updates) and self._passes_before > _PASSES
        )

    def steps_on(self, optimizer: torch.optim.Optimizer) -> None:
        """An update ends."""
        self._stop_after_oom()
        if not self._updates:
            self._passes_before = self._passes
        self._updates[id(optimizer)] = self._updates.get(id(optimizer), 0) + 1
        counts = [self._updates.get(id(each), 0) for each in self._optimizers()]
        before, self._rounds = self._rounds, min(counts, default=0)
        is_over = self._rounds > before and self._watched.suffice()
        if is_over or max(counts, default=0) >= _MOST_UPDATES:
            self._finish()

    def _optimizers(self) -> List[torch.optim.Optimizer]:
        """Those of parameters that have gradients on the GPU."""
        return [
            optimizer
            for optimizer in live(torch.optim.Optimizer)
            if any(
                p.grad is not None and p.is_cuda
                for group in optimizer.param_groups
                for p in group["params"]
            )
            or id(optimizer) in self._updates
        ]

    # ---- the end ----

    def _stop_after_oom(self) -> None:
        """Where an operation has failed. A convolution whose workspace failed takes another."""
        if integers.start().ooms > self._failed_operations:
            self._reply.tried(Tried(self._request.size, False))

    def _finish(self) -> NoReturn:
        self._reply.tried(
            Tried(
                self._request.size,
                True,
                held=self._held(),
                passes=self._passes_before,
                remark=self._remark,
                refused=ooms(self._device) - self._failed,
                **copies.taken(self._device),
            )
        )

    def _end(self) -> NoReturn:
        """The program ends."""
        self._stop_after_oom()
        if self._updates or self._passes > 1:
            self._finish()
        self._reply.failed("the program ended before optimizer.step()")

    def _raised(self, kind: Any, error: BaseException, trace: Any) -> NoReturn:
        if ooms(self._device) > self._failed:
            self._reply.tried(Tried(self._request.size, False))
        self._reply.failed("".join(traceback.format_exception(kind, error, trace)))

    def _held(self) -> Dict[str, int]:
        """What stays between two updates, by kind."""
        weights = [t for t in weights_of() if t.device == self._device]
        own: Set[int] = {id(t) for t in weights}
        there = [t for t in live(torch.Tensor) if t.device == self._device]
        return {
            "parameters": bytes_of(weights),
            "gradients": bytes_of([t for t in weights if t.requires_grad]),
            "optimizer": bytes_of([t for t in states_of() if t.device == self._device]),
            "batch": bytes_of([t for t in there if is_batch(t, self._request.size, own)]),
        }
