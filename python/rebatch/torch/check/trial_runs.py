"""Runs of a Step's batch without its update, for a check: at any cut, and with OOMs on purpose."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from typing import Any, Callable, Iterable, Iterator, List, Optional, Set, Tuple

import torch

from rebatch._library import GuardPoint
from rebatch.torch.batches.cut import batch_tensors
from rebatch.torch.batches.kinds import lacks_memory
from rebatch.torch.batches.switched_off import (
    BATCH_NORM,
    DROPOUT,
    power_iterations,
    switched_off,
    training_modules,
)
from rebatch.torch.check.fixed_draws import FixedDraws
from rebatch.torch.check.training_snapshot import Changes, Reached, Snapshot, places_of
from rebatch.torch.private import TorchDispatchMode
from rebatch.torch.program.program import Program, Running
from rebatch.torch.undo.places import used_by
from rebatch.torch.undo.undo import Undo
from rebatch.torch.update.passes import Passes

RunAs = Callable[[Program], Tuple[float, int]]

# Of the session of a run: it does not grow, and says nothing.
_OPTIONS = {"growth": False, "on_oom": "halve", "log_level": "quiet"}


@dataclasses.dataclass
class Outcome:
    """What a run has left. A gradient is None where there is none."""

    loss: float
    losses: List[Tuple[int, int, float]]  # of each micro-batch: first sample, count, its share
    gradients: List[Optional[torch.Tensor]]
    part_norms: float  # sum of the norms of the micro-batches' gradients
    changes: Changes
    rounding: float = 0.0  # of the largest scalar that led to a loss
    left_bytes: int = 0  # in use after the run, and not before it
    sizes: Tuple[int, ...] = ()


class _FailingAt(TorchDispatchMode):
    """Runs out of memory at one operation, counted from 1; 0: counts only."""

    def __init__(self, at: int = 0):
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.seen = at, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. This is one on purpose, of a check.")
        return function(*arguments, **(keywords or {}))


def _under(mode: _FailingAt, function: Any) -> Any:
    def run(*arguments: Any) -> Any:
        with mode:
            return function(*arguments)

    return run


class _NoUpdate(Passes):
    """One that changes nothing, in the place of a program's own. Of each micro-batch it notes the
    loss; the norm of the gradients, where they are those of one micro-batch; and which tensors of
    the `batch` have lost their memory, which a Step gives back."""

    def __init__(self, own: Passes, mode: Optional[_FailingAt]):
        super().__init__((), own.optimizers)
        self._own, self.mode = own, mode
        self.batch: List[Tuple[str, torch.Tensor]] = []
        self.freed: Set[str] = set()
        self.losses: List[float] = []
        self.norms = 0.0

    def every_parameter(self) -> Iterable[torch.nn.Parameter]:
        return self._own.every_parameter()

    def with_gradients(
        self, parameters: List[torch.nn.Parameter], need: List[bool]
    ) -> Tuple[List[torch.nn.Parameter], List[torch.nn.Parameter]]:
        return self._own.with_gradients(parameters, need)

    def kept_bytes(self) -> int:
        return self._own.kept_bytes()

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None
        self.losses, self.norms = [], 0.0

    def backward(self, loss: torch.Tensor) -> None:
        with self.mode or contextlib.nullcontext():
            loss.backward()
        self.losses.append(float(loss.detach()))
        self.norms += _norm(_gradients_of(self.parameters))
        self.freed.update(name for name, tensor in self.batch if lacks_memory(tensor))

    def first_bytes(self) -> int:
        return 0


def _gradients_of(parameters: Iterable[torch.nn.Parameter]) -> List[Optional[torch.Tensor]]:
    return [None if p.grad is None else p.grad.detach() for p in parameters]


def _norm(gradients: List[Optional[torch.Tensor]]) -> float:
    squares = sum(float(g.double().square().sum()) for g in gradients if g is not None)
    return float(squares**0.5)


class TrialRuns:
    """The runs of a batch that runs. Each begins with the state that the training had when the
    TrialRuns was made; restore() goes back to it. run_as(program) runs the batch as a Step of
    another program does, with its recovery: (loss, size of the micro-batches at the end)."""

    def __init__(self, running: Running, run_as: RunAs):
        self._running, self._program, self._run_as = running, running.program, run_as
        modules = self._program.modules
        self.named = modules[0] if len(modules) == 1 else modules
        self.parameters = self._program.update.parameters
        optimizers = used_by(self._program.loss_fn, torch.optim.Optimizer)
        state = Undo((), [*running.undo.state, *optimizers])
        state.begin(())
        state.save(GuardPoint.STEP)
        self.reached = Reached.by(running)  # between runs what differs is named
        self._snapshot = Snapshot(running, places_of(running), state, GuardPoint.STEP)
        self.restore = self._snapshot.restore
        self._off = training_modules(modules, BATCH_NORM + DROPOUT)
        self._off += power_iterations(modules)
        self.runs = self.ooms = 0
        self.is_16_bit = False
        self.draws = True  # unless the first run has drawn no random number

    # ---- a run at a cut ----

    def run(
        self,
        cut: int,
        is_fixed: bool = False,
        is_reversed: bool = False,
        seed: int = 0,
        has_batch_norm: bool = False,
    ) -> Outcome:
        """The batch in micro-batches of `cut` samples. Fixed: with the same random numbers for
        every sample. Reversed: the samples in the opposite order. With a seed: other numbers.
        BatchNorm is in evaluation mode, unless has_batch_norm is set."""
        self.restore()
        self.runs += 1
        if seed:
            self._running.generators.seed(seed)
        running = self._running
        batch = running.batch
        if is_reversed:
            ones = [(at, 1) for at in reversed(range(running.samples))]
            turned = self._program.cut.arranged(batch, ones, running.samples)
            running.batch = batch if turned is None else turned
        mode = FixedDraws(is_fixed)
        try:
            off = [m for m in self._off if not (has_batch_norm and isinstance(m, BATCH_NORM))]
            with switched_off(off), mode:
                outcome = self._run_at(cut)
            self.is_16_bit |= mode.is_16_bit
            weight = float(running.weight) if self._program.normalizer else 1.0
            outcome.rounding = mode.rounding() / abs(weight)
        finally:
            running.batch = batch
            for p in self.parameters:
                p.grad = None
        outcome.changes.update(self._snapshot.changes())
        if self.runs == 1:
            self.draws = self._snapshot.draws()
        return outcome

    def _run_at(self, cut: int) -> Outcome:
        """As a Step runs the batch that may have micro-batches of this size alone."""
        update = _NoUpdate(self._program.update, None)
        update.batch = list(batch_tensors(self._running.batch))
        program = dataclasses.replace(
            self._without_update(update, cut),
            is_fresh=True,
            options=dict(_OPTIONS, micro_allowed=[cut]),
        )
        for p in self.parameters:
            p.grad = None
        before = self._live_bytes()
        loss, _ = self._run_as(program)
        gradients = _gradients_of(self.parameters)
        kept = sum(g.numel() * g.element_size() for g in gradients if g is not None)
        left = self._live_bytes() - before - kept if before else 0
        firsts = [cut * i for i in range(len(update.losses))]
        ends = [*firsts[1:], self._running.samples]
        losses = [(at, end - at, part) for at, end, part in zip(firsts, ends, update.losses)]
        changes: Changes = {("batch", name): None for name in update.freed}
        return Outcome(loss, losses, gradients, update.norms, changes, left_bytes=left)

    def _live_bytes(self) -> int:
        if self._program.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.synchronize(self._program.device)
        return torch.cuda.memory_allocated(self._program.device)

    # ---- a run with an OOM on purpose, by a Step's own recovery ----

    def count_operations(self, count: int) -> Tuple[int, int]:
        """Of the first micro-batch of `count` samples: those of loss_fn, and of its backward pass
        too."""
        self.restore()
        mode = _FailingAt()
        running = copy.copy(self._running)
        running.program = self._without_update(_NoUpdate(self._program.update, mode), count)
        loss, _ = running.weighted_loss(0, count)
        forward = mode.seen
        running.program.update.backward(loss)
        return forward, mode.seen

    def run_step(self, micro: int, fails_at: int = 0) -> Outcome:
        """The batch as the Step runs it, beginning with micro-batches of `micro` samples. `sizes`
        of the outcome has the size that they had at the end."""
        self.restore()
        self.runs += 1
        self.ooms += fails_at > 0
        mode = _FailingAt(fails_at) if fails_at else None
        program = self._without_update(_NoUpdate(self._program.update, mode), micro)
        try:
            loss, last = self._run_as(program)
            gradients = _gradients_of(self.parameters)
        finally:
            for p in self.parameters:
                p.grad = None
        changes = self._snapshot.changes()
        return Outcome(loss, [], gradients, 0.0, changes, sizes=(last,))

    def _without_update(self, update: _NoUpdate, micro: int) -> Program:
        """The program with this update. Its loss_fn runs under the update's mode, as its backward
        pass does."""
        own, mode = self._program, update.mode
        kept = ("micro_smallest", "micro_largest", "micro_multiple_of", "micro_allowed")
        limits = {name: v for name, v in own.options.items() if name in kept}
        return dataclasses.replace(
            own,
            update=update,
            loss_fn=_under(mode, own.loss_fn) if mode else own.loss_fn,
            embed=_under(mode, own.embed) if mode and own.embed else own.embed,
            cost=None,
            lighten=[],
            graphs=0,
            on_event=None,
            options=dict(_OPTIONS, micro_start=micro, **limits),
        )


@contextlib.contextmanager
def restored(runs: TrialRuns) -> Iterator[None]:
    try:
        yield
    finally:
        runs.restore()
        runs.reached.put_back()
