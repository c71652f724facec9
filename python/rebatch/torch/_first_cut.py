"""The loss at two cuts, compared by itself when a batch is first cut: a loss that depends on the
cut is a warning."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from typing import Any, List, Optional, Tuple

import torch
from torch.utils._pytree import tree_map_only

from rebatch._library import Event, EventKind, GuardPoint, LogLevel, StepReport
from rebatch.torch._batch import batch_tensors
from rebatch.torch._batch_norm import join_rest
from rebatch.torch._draws import FixedDraws
from rebatch.torch._findings import explain
from rebatch.torch._modules_off import (
    BATCH_NORM,
    DROPOUT,
    name_of,
    power_iterations,
    switched_off,
    training_modules,
)
from rebatch.torch._oom import is_oom, let_go
from rebatch.torch._program import Running
from rebatch.torch._rounding import SEEDS, floors, in_reverse, tolerance
from rebatch.torch._sequences import Sequences
from rebatch.torch._snapshot import AllGenerators, Snapshot, places_outside
from rebatch.torch._state import cuda_devices_of

# Batches that were cut and may pass by before the comparison, where memory ran out in each.
_MOST_WAITS = 3
# Fewer samples than these may well be of one class.
_FEWEST = 8
# Comparisons that may run out of memory.
_MOST_OOMS = 8


class CutWarning(UserWarning):
    """The loss of a Step depends on how its batch is cut."""


class _Due:
    """When there is a comparison: in the first batch that is cut, after 1, 2, 4, 8 ... more,
    and whenever micro-batches are at most half as large as those that were compared last. The
    samples of one batch may hide what others show."""

    def __init__(self) -> None:
        self.number = 0  # of comparisons
        self._size = 0  # of the micro-batches that were compared last; 0: none
        self._wait, self._left = 1, 0  # batches: of the next wait, and that are left of this one

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def ask(self, size: int) -> bool:
        """Of a batch that ran in micro-batches of a size."""
        self._left -= 1
        return self._left <= 0 or 2 * size <= self._size

    def note(self, size: int) -> None:
        """Micro-batches of this size were compared, and nothing was found."""
        self.number += 1
        self._size = size
        self._left, self._wait = self._wait, 2 * self._wait


class FirstCut:
    """Compares after batches that have run in more than one micro-batch, as often as _Due says.
    Some samples run in a micro-batch and in smaller ones, without gradients, after a batch in which
    memory did not run out. Where an attempt at the whole batch has given the loss that the
    micro-batches have, nothing runs; where it has given another, the whole batch does. The first
    difference is the last comparison."""

    def __init__(self, is_done: bool = False):
        self.is_done = is_done
        self._due = _Due()
        self._waits = self._ooms = 0
        self._whole: Optional[float] = None  # the loss of this batch as a whole
        self._step = 0  # its number

    def begin(self) -> None:
        self._whole = None

    def note_failed(self, running: Running, loss: torch.Tensor) -> None:
        """An attempt at the whole batch has failed, after its forward pass. Its loss can be
        compared if it depends on no random numbers."""
        if self.is_done or not self._due.is_first or running.has_ranks:
            return
        with contextlib.suppress(RuntimeError):
            if not running.has_drawn():
                self._whole = float(loss.detach())

    def compare(self, running: Running, filled: StepReport) -> None:
        """After a batch that succeeded, before it ends. Warns; raises nothing that the comparison
        itself may run into."""
        if self.is_done or filled.microbatches < 2:
            return
        sizes = running.allowed_sizes()
        self.is_done = len(sizes) == 1 or _may_wait_for_others(running)
        ran = -(-running.samples // filled.microbatches)
        if self.is_done or not self._due.ask(ran):
            return
        self._step = filled.step
        if self._whole is not None and running.loss is not None:
            is_same = _is_same(self._whole, float(running.loss), running.program.device)
            if is_same:
                self._due.note(ran)
                return
            if is_same is False:  # not by rounding, but it may be by numbers that are drawn
                self._run(running, (running.samples, ran), ran)
                return
        self._waits += 1
        if filled.ooms and self._waits < _MOST_WAITS:
            return  # the time that an OOM costs is enough
        least = 2 if training_modules(_modules_of(running), BATCH_NORM) else 1
        self._run(running, _pair(sizes, running.samples, ran, least), ran)

    def _run(self, running: Running, pair: Tuple[int, int], ran: int) -> None:
        text = self._text(running, *pair)
        if text is None:
            self._ooms += 1
            self.is_done = self._ooms == _MOST_OOMS
            return
        self._waits, self.is_done = 0, bool(text)
        self._due.note(ran)
        if text:
            self._tell(running, f"rebatch: {text}", ran)

    def _text(self, running: Running, large: int, small: int) -> Optional[str]:
        """What is wrong; "": nothing; None: memory ran out."""
        try:
            with running.program.aside():
                first = _most_different(running, large, self._due.number)
                text = _Comparison(running, first, large, small).run()
                return f"step {self._step}: {text}" if text else ""
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            was_oom = is_oom(error)
            let_go(error)
            if was_oom:
                return None
            return (
                f"the loss could not be compared at two cuts ({said}): where samples belong "
                "together, as pairs do, keep them so with micro_multiple_of, or slice and length; "
                "step.check(batch) says more"
            )

    def _tell(self, running: Running, text: str, ran: int) -> None:
        on_event = running.program.on_event
        if on_event is None:
            warnings.warn(text, CutWarning, stacklevel=_level_of_the_caller())
            return
        event = Event(
            kind=EventKind.CUT,
            level=LogLevel.WARN,
            step=self._step,
            batch=running.samples,
            micro_before=ran,
            micro_after=ran,
            text=text.encode(),
        )
        on_event(text, event)


def _may_wait_for_others(running: Running) -> bool:
    """Whether a forward pass that this rank makes alone may contain collectives. Those of a Step
    that trains with other ranks have none, but for fully_shard()."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    is_quiet = running.has_ranks and not running.has_window
    return distributed.get_world_size() > 1 and not is_quiet


def _pair(sizes: List[int], samples: int, ran: int, least: int) -> Tuple[int, int]:
    """Two sizes, the larger one at most half of that which ran: the samples run forward twice, and
    that is no more than one micro-batch then. Where those would be too few samples to tell
    something, or are not allowed, the size that ran and a smaller one; and where there is none, its
    double and the size."""
    for large in (size for size in sizes if _FEWEST <= size <= ran // 2):
        smaller = [size for size in sizes if least <= size < large]
        if smaller:
            return large, _quarter_of(large, smaller)
    smaller = [size for size in sizes if least <= size < ran]
    if not smaller:
        return min(2 * ran, samples), ran
    return ran, _quarter_of(ran, smaller)


def _quarter_of(size: int, smaller: List[int]) -> int:
    """Of smaller sizes, the largest first, the one that is a quarter or less, if there is: in two
    halves alone, what differs between samples may well be equal."""
    return next((s for s in smaller if s <= (size + 3) // 4), smaller[-1])


def _level_of_the_caller() -> int:
    """The stacklevel, for warn() in the function that calls this, of the first frame outside of
    this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).startswith("rebatch"):
        level, frame = level + 1, frame.f_back
    return level


def _totals(running: Running) -> List[list[Any]]:
    """What each sample's entries add up to, of the small tensors of a batch: classes, lengths and
    weights of samples."""
    dim, found = running.program.cut.dim, []
    for _, tensor in batch_tensors(running.batch):
        is_small = dim < tensor.dim() <= 2 and tensor.shape[dim] == running.samples
        if is_small and tensor.layout == torch.strided:
            found.append((tensor.sum(1 - dim) if tensor.dim() > 1 else tensor).tolist())
    return found


def _most_different(running: Running, large: int, number: int) -> int:
    """Where `large` samples begin that differ most from each other: a multiple of `large`, which is
    a size that the limits allow. Where all are alike, comparisons of other numbers have others."""
    starts = range(0, running.samples - large + 1, large)
    if len(starts) == 1:
        return 0
    totals = _totals(running)
    order = [starts[(i + number) % len(starts)] for i in range(len(starts))]
    return max(order, key=lambda at: sum(len(set(t[at : at + large])) for t in totals))


def _modules_of(running: Running) -> torch.nn.ModuleList:
    """Those of the model, and others that loss_fn reaches."""
    return running.program.modules


class _Comparison:
    """The loss of `large` samples from `first` on, at two cuts."""

    def __init__(self, running: Running, first: int, large: int, small: int):
        self._running, self._program = running, running.program
        self._first, self._large, self._small = first, large, small
        self._root = _modules_of(running)
        tensors = [*self._program.update.parameters, *self._root.buffers()]
        named = self._root[0] if len(self._root) == 1 else self._root
        self._named = named
        places = places_outside(named, self._program.loss_fn, self._program.owners)
        self._generators = AllGenerators(cuda_devices_of(tensors), self._program.generators)
        self._snapshot = Snapshot(places, self._generators)
        end = first + large
        self._whole = [(first, large)]
        self._parts = [(at, min(small, end - at)) for at in range(first, end, small)]
        if self._program.has_pairs:
            self._parts = join_rest(self._parts)
        running.undo.save(GuardPoint.STEP)  # parameters that loss_fn changes, and `state`
        self._off = training_modules(self._root, DROPOUT) + power_iterations(self._root)
        self._batch_norm = training_modules(self._root, BATCH_NORM)
        self._has_gradients = self._has_run = False
        self._sequences = Sequences(named)

    def run(self) -> str:
        """What is wrong; "": nothing."""
        try:
            whole, parts, is_same = self._compare(self._off)
            through_time = self._sequences.found()
            if through_time[0]:
                return self._say(whole, parts, *through_time)
            if is_same:
                return ""
            if self._batch_norm:
                plain = self._compare(self._off + self._batch_norm)
                if plain[2]:
                    return self._say(whole, parts, *self._blame_batch_norm())
                whole, parts = plain[:2]
        finally:
            self._restore()
        _, text, advice = explain(
            whole,
            parts,
            self._large,
            self._small,
            self._program.normalizer is not None,
            self._program.loss_name,
        )
        return self._say(whole, parts, text, advice)

    def _restore(self) -> None:
        if not self._has_run:
            return
        self._running.undo.restore(GuardPoint.STEP, has_failed=False)
        self._snapshot.restore()
        self._has_run = False

    def _blame_batch_norm(self) -> Tuple[str, str]:
        name = name_of(self._named, self._batch_norm[0])
        return (
            f"BatchNorm ({name!r}) normalizes by the statistics of a micro-batch",
            "use GroupNorm, put it into evaluation mode, or keep one size with micro_allowed=[N]",
        )

    def _say(self, whole: float, parts: float, why: str, advice: str) -> str:
        scale = 1 if self._program.normalizer else self._running.samples / self._large
        samples = f"{self._first}-{self._first + self._large - 1}"
        return (
            f"the loss of samples {samples} is {whole * scale:.4g} in one micro-batch and "
            f"{parts * scale:.4g} in micro-batches of {self._small}, so the update depends on how "
            f"memory cuts the batch: {why}: {advice}; step.check(batch) says more"
        )

    def _compare(self, off: List[torch.nn.Module]) -> Tuple[float, float, bool]:
        found = self._compare_plainly(off)
        if found:
            return found
        mode = FixedDraws()
        whole = self._fixed_loss(self._whole, off, mode)
        parts = self._fixed_loss(self._parts, off, mode)
        return whole, parts, self._is_rounding(whole, parts, off, mode)

    def _compare_plainly(self, off: List[torch.nn.Module]) -> Optional[Tuple[float, float, bool]]:
        """None where that tells nothing: random numbers are drawn, or the losses differ, which may
        be rounding, or by numbers of a generator that the Step does not know."""
        parts = self._loss(self._parts, off)  # the first of these tells whether some are
        whole = None if parts is None else self._loss(self._whole, off)
        if whole is None or parts is None:
            return None
        return (whole, parts, True) if _is_same(whole, parts, self._program.device) else None

    def _is_rounding(self, whole: float, parts: float, off: list[Any], mode: FixedDraws) -> bool:
        running = self._running
        if not math.isfinite(parts):
            return False
        floor = floors(mode.is_16_bit, self._program.device)[1]
        if _relative(whole, parts) <= floor:
            return True
        share = self._large / running.samples
        if self._program.normalizer:
            share = 1 / float(running.weight)
        difference = abs(whole - parts) - mode.rounding() * share
        difference /= max(abs(whole), abs(parts))
        if difference <= floor:
            return True
        backwards = self._fixed_loss(self._whole, off, mode, is_reversed=True)
        seeds = [self._fixed_loss(self._whole, off, mode, seed=seed) for seed in SEEDS]
        drawn = max(_relative(whole, other) for other in seeds)
        return difference <= tolerance(floor, _relative(whole, backwards)) + 3 * drawn

    def _fixed_loss(
        self,
        parts: List[tuple[Any, ...]],
        off: list[Any],
        mode: FixedDraws,
        is_reversed: bool = False,
        seed: int = 0,
    ) -> float:
        """The sum over parts, in a mode in which every sample draws the same numbers."""
        loss = self._loss(parts, off, mode, is_reversed, seed)
        assert loss is not None
        return loss

    def _loss(
        self,
        parts: List[tuple[Any, ...]],
        off: list[Any],
        mode: Optional[FixedDraws] = None,
        is_reversed: bool = False,
        seed: int = 0,
    ) -> Optional[float]:
        """The sum over parts. None: without a mode random numbers were drawn."""
        self._restore()
        self._has_run = True
        if seed:
            self._generators.seed(seed)
        try:
            gradients = contextlib.nullcontext() if self._has_gradients else torch.no_grad()
            watching = self._sequences.watching()
            with switched_off(off), mode or _eagerly(), gradients, watching:
                return self._sum_of(parts, mode is not None, is_reversed)
        except RuntimeError as error:
            if self._has_gradients or is_oom(error):
                raise
            let_go(error)
        self._has_gradients = True  # a loss with a gradient penalty needs them
        return self._loss(parts, off, mode, is_reversed, seed)

    def _sum_of(
        self, parts: List[tuple[Any, ...]], may_draw: bool, is_reversed: bool
    ) -> Optional[float]:
        total = 0.0
        for at, count in parts:
            total += self._share(at, count, is_reversed)
            if not may_draw and self._snapshot.draws():
                return None
        return total

    def _share(self, at: int, count: int, is_reversed: bool) -> float:
        running, self._sequences.count = self._running, count
        samples = tree_map_only(torch.Tensor, torch.Tensor.clone, running.part(at, count))
        if is_reversed:
            samples = in_reverse(samples, count)
        loss = float(self._program.loss_of(samples)[0].detach())
        has_weight = self._program.normalizer is not None
        return loss / (float(running.weight) if has_weight else running.samples / count)


def _eagerly() -> Any:
    """Nothing is compiled for a comparison."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # of PyTorch 2.6
    return set_stance("force_eager") if set_stance else contextlib.nullcontext()


def _relative(a: float, b: float) -> float:
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def _is_same(whole: float, parts: float, device: torch.device) -> Optional[bool]:
    """None: they differ by what may be rounding."""
    if not math.isfinite(whole):
        return True  # it says nothing, and the Step's loss tells
    difference = _relative(whole, parts)
    if difference <= floors(False, device)[1]:
        return True
    return False if difference > tolerance(floors(True, device)[1], math.inf) else None
