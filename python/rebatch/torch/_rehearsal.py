"""Runs of a Step's batch without its update, for a check: at any cut, and with OOMs on purpose."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rebatch._library import Error, GuardPoint
from rebatch.torch._audit import Audit
from rebatch.torch._draws import FixedDraws
from rebatch.torch._first_cut import FirstCut
from rebatch.torch._gradients import Accumulators
from rebatch.torch._modules_off import (
    BATCH_NORM,
    DROPOUT,
    power_iterations,
    switched_off,
    training_modules,
)
from rebatch.torch._reached import Reached
from rebatch.torch._rounding import in_reverse
from rebatch.torch._snapshot import AllGenerators, Snapshot, all_places
from rebatch.torch._state import cuda_devices_of

Changes = Dict[Tuple[str, str], Any]


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


class _NoUpdate:
    """An update that changes nothing, in the place of a Step's own."""

    def __init__(self, update: Any, mode: Optional[_FailingAt]):
        self._own, self._mode = update, mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def zero_grad(self) -> None:
        for p in self._own.parameters:
            p.grad = None

    def backward(self, loss: torch.Tensor) -> None:
        with self._mode or contextlib.nullcontext():
            loss.backward()

    def finish_gradients(self) -> None:
        pass

    def first_bytes(self) -> int:
        return 0

    def apply(self) -> None:
        pass

    def done(self) -> None:
        pass


def _norm(gradients: List[Optional[torch.Tensor]]) -> float:
    squares = sum(float(g.double().square().sum()) for g in gradients if g is not None)
    return float(squares**0.5)


class _Outside:
    """What loss_fn reaches outside of the model, as it is when this is made."""

    def __init__(self, step: Any):
        self._reached = Reached(step._functions_that_run, step._audit.handled)
        modules, _ = self._reached.begin(step._audit.tree.known_without_reached())
        self._audit = Audit(modules)
        self._audit.begin(())
        for part in (self._reached, self._audit):
            part.save(GuardPoint.STEP)

    def restore(self) -> None:
        for part in (self._reached, self._audit):
            with contextlib.suppress(Error):  # a large tensor may have no copy
                part.restore(GuardPoint.STEP)


class Rehearsal:
    """The runs of a Step's batch, which has begun. Each begins with the state that the training had
    when the Rehearsal was made; restore() goes back to it."""

    def __init__(self, step: Any):
        self._step = step
        self._root = step._modules
        self._named = step._modules[0] if len(step._modules) == 1 else step._modules
        self.parameters = step._update.parameters
        tensors = [*self.parameters, *self._root.buffers()]
        generators = [*step._generators, *step._reached.generators]
        self._generators = AllGenerators(cuda_devices_of(tensors), generators)
        places = all_places(self._named, step._batch, step.loss_fn, step._owners)
        self._snapshot = Snapshot(places, self._generators)
        self._outside = _Outside(step)
        self._off = training_modules(self._root, BATCH_NORM + DROPOUT)
        self._off += power_iterations(self._root)
        self.runs = self.ooms = 0
        self.is_16_bit = False
        self.draws = True  # unless the first run has drawn no random number

    def restore(self) -> None:
        self._outside.restore()
        self._snapshot.restore()

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
            self._generators.seed(seed)
        batch = self._step._batch
        if is_reversed:
            self._step._batch = in_reverse(batch, self._step._samples)
        mode = FixedDraws(is_fixed)
        try:
            off = [m for m in self._off if not (has_batch_norm and isinstance(m, BATCH_NORM))]
            with switched_off(off), mode:
                outcome = self._accumulate(cut)
            self.is_16_bit |= mode.is_16_bit
            weight = float(self._step._weight) if self._step._normalizer else 1.0
            outcome.rounding = mode.rounding() / abs(weight)
        finally:
            self._step._batch = batch
            for p in self.parameters:
                p.grad = None
        outcome.changes = self._snapshot.changes()
        if self.runs == 1:
            self.draws = self._snapshot.draws()
        return outcome

    def _accumulate(self, cut: int) -> Outcome:
        sums: List[Optional[torch.Tensor]] = [None] * len(self.parameters)
        losses, norms, samples = [], 0.0, self._step._samples
        live = self._live_bytes()
        kept = 0
        for first in range(0, samples, cut):
            count = min(cut, samples - first)
            losses.append((first, count, self._run_part(first, count)))
            gradients = [p.grad for p in self.parameters]
            norms += _norm(gradients)
            for i, (p, gradient) in enumerate(zip(self.parameters, gradients)):
                p.grad = None
                if gradient is not None and sums[i] is None:
                    own = sums[i] = gradient.detach().clone()
                    kept += own.numel() * own.element_size()
                elif gradient is not None:
                    sums[i] = sums[i] + gradient.detach()
            del gradients, gradient
        loss = sum(loss for _, _, loss in losses)
        left = self._live_bytes() - live - kept if live else 0
        return Outcome(loss, losses, sums, norms, {}, left_bytes=left)

    def _run_part(self, first: int, count: int) -> float:
        for p in self.parameters:
            p.grad = None
        loss, _ = self._step._weighted_loss(first, count)
        loss.backward()
        return float(loss.detach())

    def _live_bytes(self) -> int:
        if self._step.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.synchronize(self._step.device)
        return torch.cuda.memory_allocated(self._step.device)

    # ---- a run with an OOM on purpose, by a Step's own recovery ----

    def count_operations(self, count: int) -> Tuple[int, int]:
        """Of the first micro-batch of so many samples: those of loss_fn, and of its backward pass
        too."""
        self.restore()
        mode = _FailingAt()
        double = self._double(count, mode)
        loss, _ = double._weighted_loss(0, count)
        forward = mode.seen
        double._update.backward(loss)
        return forward, mode.seen

    def run_step(self, micro: int, fails_at: int = 0) -> Outcome:
        """The batch as the Step runs it, beginning with micro-batches of `micro` samples. `sizes`
        of the outcome has the size that they had at the end."""
        self.restore()
        self.runs += 1
        self.ooms += fails_at > 0
        step = self._double(micro, _FailingAt(fails_at) if fails_at else None)
        try:
            loss = float(step._run_batch(self._step._batch))
            gradients = [None if p.grad is None else p.grad.detach() for p in self.parameters]
        finally:
            for p in self.parameters:
                p.grad = None
            if step._session:
                step._session.close()
        changes = self._snapshot.changes()
        return Outcome(loss, [], gradients, 0.0, changes, sizes=(step.report.micro,))

    def _double(self, micro: int, mode: Optional[_FailingAt]) -> Any:
        """A Step like this one that does not update, does not grow, and says nothing. Its loss_fn
        and its backward pass run under a mode."""
        double = copy.copy(self._step)
        kept = ("micro_smallest", "micro_largest", "micro_multiple_of", "micro_allowed")
        limits = {name: v for name, v in self._step._options.items() if name in kept}
        double._options = dict(
            limits, micro_start=micro, growth=False, on_oom="halve", log_level="quiet"
        )
        double._update = _NoUpdate(self._step._update, mode)
        if mode:
            double.loss_fn = _under(mode, self._step.loss_fn)
        double._accumulators, double._ranks = Accumulators(), None
        double._cost, double._lighten, double._extras = None, [], []
        double._session = double._micro = double._on_event = None
        double._history = collections.deque(maxlen=1)
        double._cuts = FirstCut(is_done=True)
        double._ops = double._make_ops()
        return double


@contextlib.contextmanager
def restored(rehearsal: Rehearsal) -> Iterator[None]:
    try:
        yield
    finally:
        rehearsal.restore()
