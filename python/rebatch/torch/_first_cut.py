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

from rebatch._library import GuardPoint
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
from rebatch.torch._outputs import split_result
from rebatch.torch._rounding import SEEDS, floors, in_reverse, tolerance
from rebatch.torch._snapshot import AllGenerators, Snapshot, places_beside_parameters
from rebatch.torch._state import cuda_devices_of

# One comparison may see samples in which nothing depends on the cut, as those of one class, so
# there are eight: after 1, 2, 4, ... batches that were cut.
_COMPARISONS = 8


class CutWarning(UserWarning):
    """The loss of a Step depends on how its batch is cut."""


def allowed_sizes(options: dict, samples: int) -> List[int]:
    """The micro-batch sizes that the options of a Step allow for a batch, the largest first."""
    largest = min(options.get("micro_largest") or samples, samples)
    smallest = options.get("micro_smallest") or 1
    multiple = options.get("micro_multiple_of") or 1
    listed = options.get("micro_allowed") or range(multiple, largest + 1, multiple)
    sizes = {size for size in listed if smallest <= size <= largest and size % multiple == 0}
    return sorted(sizes, reverse=True) or [samples]


class FirstCut:
    """Compares after the first batch of a Step that ran in more than one micro-batch, and after
    some later ones: samples in a micro-batch of the size that ran, and in smaller ones, without
    gradients. The first difference is the last comparison."""

    def __init__(self, is_done: bool = False):
        self.is_done = is_done
        self._cuts = self._comparisons = self._ooms = 0

    def compare(self, step: Any, microbatches: int) -> None:
        """After a batch that succeeded, while the Step has it still. Warns; raises nothing that
        the comparison itself may run into."""
        if self.is_done or microbatches < 2:
            return
        if _has_other_ranks():  # a forward pass that this rank makes alone may wait for them
            self.is_done = True
            return
        sizes = allowed_sizes({} if step._cost else step._options, step._samples)
        self._cuts += 1
        self.is_done = len(sizes) == 1
        if self.is_done or self._cuts < 1 << self._comparisons:
            return
        text = self._text(step, *_pair(sizes, step, microbatches))
        self._ooms += text is None
        self._comparisons += text is not None
        self.is_done = bool(text) or _COMPARISONS in (self._comparisons, self._ooms)
        if text:
            warnings.warn(f"rebatch: {text}", CutWarning, stacklevel=_level_of_the_caller())

    def _text(self, step: Any, large: int, small: int) -> Optional[str]:
        """What is wrong; "": nothing; None: memory ran out."""
        first = self._comparisons % (step._samples // large) * large
        try:
            with step._aside():
                return _Comparison(step, first, large, small).run()
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            was_oom = is_oom(error)
            let_go(error)
            if was_oom:
                return None
            return (
                f"the loss could not be compared at two cuts ({said}): step.check(batch) says more"
            )


def _has_other_ranks() -> bool:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


def _pair(sizes: List[int], step: Any, microbatches: int) -> Tuple[int, int]:
    """The size that ran, and a smaller one; where there is none, its double and the size."""
    ran = -(-step._samples // microbatches)
    smaller = [size for size in sizes if size < ran]
    if not smaller:
        return min(2 * ran, step._samples), ran
    return ran, next((size for size in smaller if size <= (ran + 1) // 2), smaller[-1])


def _level_of_the_caller() -> int:
    """The stacklevel, for warn() in the function that calls this, of the first frame outside of
    this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).startswith("rebatch"):
        level, frame = level + 1, frame.f_back
    return level


class _Comparison:
    """The loss of samples `first` to `first` + `large` - 1, at two cuts."""

    def __init__(self, step: Any, first: int, large: int, small: int):
        self._step, self._first, self._large, self._small = step, first, large, small
        self._root = step._modules
        tensors = [*step._update.parameters, *self._root.buffers()]
        named = self._root[0] if len(self._root) == 1 else self._root
        self._named = named
        places = places_beside_parameters(named, step.loss_fn, step._owners)
        self._generators = AllGenerators(cuda_devices_of(tensors), step._generators)
        self._snapshot = Snapshot(places, self._generators)
        step._audit.save(GuardPoint.STEP)  # parameters that loss_fn changes, and `state`
        self._off = training_modules(self._root, DROPOUT) + power_iterations(self._root)
        self._batch_norm = training_modules(self._root, BATCH_NORM)
        self._has_gradients = False

    def run(self) -> str:
        """What is wrong; "": nothing."""
        try:
            whole, parts, is_same = self._compare(self._off)
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
            self._step._normalizer is not None,
            self._step._loss_name,
        )
        return self._say(whole, parts, text, advice)

    def _restore(self) -> None:
        self._step._audit.restore(GuardPoint.STEP)
        self._snapshot.restore()

    def _blame_batch_norm(self) -> Tuple[str, str]:
        name = name_of(self._named, self._batch_norm[0])
        return (
            f"BatchNorm ({name!r}) normalizes by the statistics of a micro-batch",
            "use GroupNorm, put it into evaluation mode, or keep one size with micro_allowed=[N]",
        )

    def _say(self, whole: float, parts: float, why: str, advice: str) -> str:
        scale = 1 if self._step._normalizer else self._step._samples / self._large
        return (
            f"step {self._step.report.step}: the loss of samples {self._first}-"
            f"{self._first + self._large - 1} is {whole * scale:.4g} in one micro-batch and "
            f"{parts * scale:.4g} in micro-batches of {self._small}, so the update depends on how "
            f"memory cuts the batch: {why}: {advice}; step.check(batch) says more"
        )

    def _compare(self, off: List[torch.nn.Module]) -> Tuple[float, float, bool]:
        mode = FixedDraws()
        whole = self._loss([(0, self._large)], off, mode)
        cuts = range(0, self._large, self._small)
        parts = self._loss([(i, min(self._small, self._large - i)) for i in cuts], off, mode)
        return whole, parts, self._is_rounding(whole, parts, off, mode)

    def _is_rounding(self, whole: float, parts: float, off: list, mode: FixedDraws) -> bool:
        step = self._step
        if not math.isfinite(whole):
            return True  # it says nothing, and the Step's loss tells
        if not math.isfinite(parts):
            return False
        floor = floors(mode.is_16_bit, step.device)[1]
        if _relative(whole, parts) <= floor:
            return True
        share = 1 / float(step._weight) if step._normalizer else self._large / step._samples
        difference = abs(whole - parts) - mode.rounding() * share
        difference /= max(abs(whole), abs(parts))
        if difference <= floor:
            return True
        whole_again = [(0, self._large)]
        backwards = self._loss(whole_again, off, mode, is_reversed=True)
        seeds = [self._loss(whole_again, off, mode, seed=seed) for seed in SEEDS]
        drawn = max(_relative(whole, other) for other in seeds)
        return difference <= tolerance(floor, _relative(whole, backwards)) + 3 * drawn

    def _loss(
        self,
        parts: List[tuple],
        off: list,
        mode: FixedDraws,
        is_reversed: bool = False,
        seed: int = 0,
    ) -> float:
        self._restore()
        if seed:
            self._generators.seed(seed)
        try:
            gradients = contextlib.nullcontext() if self._has_gradients else torch.no_grad()
            with switched_off(off), mode, gradients:
                return sum(self._share(at, count, is_reversed) for at, count in parts)
        except RuntimeError as error:
            if self._has_gradients or is_oom(error):
                raise
            let_go(error)
        self._has_gradients = True  # a loss with a gradient penalty needs them
        return self._loss(parts, off, mode, is_reversed, seed)

    def _share(self, at: int, count: int, is_reversed: bool) -> float:
        step = self._step
        samples = step._part(self._first + at, count)
        samples = tree_map_only(torch.Tensor, torch.Tensor.clone, samples)
        if is_reversed:
            samples = in_reverse(samples, count)
        with step._autocast_context():
            loss, _ = split_result(step.loss_fn(step.model, samples))
        loss = float(loss.detach())
        weight = float(step._weight) if step._normalizer else step._samples / count
        return loss / weight


def _relative(a: float, b: float) -> float:
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0
