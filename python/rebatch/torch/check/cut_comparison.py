"""The loss of a few samples at two cuts, compared by itself when a batch is first cut: a loss that
depends on the cut is a warning."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import warnings
from typing import Any, List, Optional, Tuple

import torch

from rebatch._library import Event, EventKind, GuardPoint, LogLevel, StepReport
from rebatch.torch.batches.cut import batch_tensors
from rebatch.torch.batches.switched_off import (
    BATCH_NORM,
    DROPOUT,
    name_of,
    power_iterations,
    switched_off,
    training_modules,
)
from rebatch.torch.check.findings import explain
from rebatch.torch.check.fixed_draws import FixedDraws
from rebatch.torch.check.rounding import floors
from rebatch.torch.check.time_first_modules import Sequences
from rebatch.torch.check.training_snapshot import AllGenerators, Snapshot, places_outside
from rebatch.torch.private import tree_map_only
from rebatch.torch.program.program import Running
from rebatch.torch.session.oom import failed_allocations, is_oom, let_go
from rebatch.torch.undo.generators import cuda_devices_of

# Samples that are compared: an eighth of the batch, within these.
_FEWEST, _MOST = 8, 16
# Of a loss closer to 0 the gradients are compared too.
_TELLING = 0.1
# Batches that are compared: another one where the first has told nothing.
_MOST_BATCHES = 2
# What calls a Step for the user, beside this package.
_NOT_THE_USERS = {
    "rebatch", "torch", "lightning", "lightning_fabric", "pytorch_lightning", "transformers",
    "accelerate", "contextlib",
}  # fmt: skip


class CutWarning(UserWarning):
    """The loss of a Step depends on how its batch is cut."""


class FirstCut:
    """Compares once, after the first batch that has run in more than one micro-batch: a few of its
    samples run forward in one micro-batch, and in two. Where that tells nothing, so do samples of
    the next batch that is cut."""

    def __init__(self, is_done: bool = False):
        self.is_done = is_done
        self._batches = 0  # that were compared
        self._is_tight = False  # memory ran out there

    def compare(self, running: Running, filled: StepReport) -> None:
        """After a batch that succeeded, before it ends. Warns; raises nothing that the comparison
        itself may run into."""
        if self.is_done or filled.microbatches < 2:
            return
        sizes, ran = running.allowed_sizes(), -(-running.samples // filled.microbatches)
        least = 2 if training_modules(_modules_of(running), BATCH_NORM) else 1
        fits = ran if self._is_tight else max(ran, min(2 * ran, _FEWEST))
        half = _half(sizes, running.samples, fits, least)
        if not half or len(sizes) == 1 or _may_wait_for_others(running):
            self.is_done = True
            return
        self._batches += 1
        text = self._text(running, sizes, half)
        self.is_done = text is not None or self._batches == _MOST_BATCHES
        if text:
            _tell(running, f"rebatch: step {filled.step}: {text}", filled.step, ran)

    def _text(self, running: Running, sizes: List[int], half: int) -> Optional[str]:
        """What is wrong; "": nothing; None: the comparison tells nothing."""
        failed = failed_allocations()
        try:
            with running.program.aside():
                return _Comparison(running, sizes, half).run()
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._is_tight = is_oom(error, failed_allocations() > failed)
            let_go(error)
        if self._is_tight:
            return None
        return (
            f"the loss could not be compared at two cuts ({said}): where samples belong together, "
            "as pairs do, keep them so with micro_multiple_of, or slice and length; "
            "step.check(batch) says more"
        )


def _may_wait_for_others(running: Running) -> bool:
    """Whether a forward pass that this rank makes alone may contain collectives. Those of a Step
    that trains with other ranks have none, but for fully_shard()."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    is_quiet = running.has_ranks and not running.has_window
    return distributed.get_world_size() > 1 and not is_quiet


def _half(sizes: List[int], samples: int, fits: int, least: int) -> int:
    """The largest of the sizes that are allowed of which two are no more samples than fit, and than
    are compared; or the smallest; 0: there is none."""
    most = min(fits, max(_FEWEST, min(samples // 8, _MOST)))
    halves = [size for size in sizes if least <= size <= samples // 2]
    return next((size for size in halves if 2 * size <= most), halves[-1] if halves else 0)


def _tell(running: Running, text: str, step: int, ran: int) -> None:
    on_event = running.program.on_event
    if on_event is None:
        warnings.warn(text, CutWarning, stacklevel=_level_of_the_user())
        return
    event = Event(
        kind=EventKind.CUT,
        level=LogLevel.WARN,
        step=step,
        batch=running.samples,
        micro_before=ran,
        micro_after=ran,
        text=text.encode(),
    )
    on_event(text, event)


def _level_of_the_user() -> int:
    """The stacklevel, for warn() in the function that calls this, of the first frame of the user's
    program."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and _package_of(frame) in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level


def _package_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


# ---- which samples ----


def _totals(running: Running) -> List[List[float]]:
    """What each sample's entries add up to, of the small tensors of a batch: classes, lengths and
    weights of samples."""
    dim, found = running.program.cut.dim, []
    for _, tensor in batch_tensors(running.batch):
        is_small = dim < tensor.dim() <= 2 and tensor.shape[dim] == running.samples
        if is_small and tensor.layout == torch.strided:
            found.append((tensor.sum(1 - dim) if tensor.dim() > 1 else tensor).tolist())
    return found


def _samples_of(running: Running, sizes: List[int], half: int) -> Tuple[Any, Tuple[int, int], bool]:
    """A batch of two runs of as many samples, one of each half of the batch, as what belongs
    together may lie half a batch apart: those whose labels, lengths or weights differ most. And
    where they begin, and whether they are alike: a wrong weight would then make no difference. The
    batch is None where it cannot be made; the samples are then the first ones."""
    samples, unit, totals = running.samples, math.gcd(*sizes), _totals(running)
    middle = samples // 2 // unit * unit

    def alike(first: int, second: int) -> int:
        return sum(sum(t[first : first + half]) == sum(t[second : second + half]) for t in totals)

    starts = [(at, middle + at) for at in range(0, middle - half + 1, unit)]
    best = min(starts, key=lambda pair: (alike(*pair), pair[0] % half))
    try:
        spans = [(at, half) for at in best]
        batch = running.program.cut.arranged(running.batch, spans, samples)
    except Exception as error:  # of tensors that cannot be joined
        let_go(error)
        batch = None
    best = best if batch is not None else (0, half)
    return batch, best, alike(*best) > 0


# ---- the comparison ----


def _modules_of(running: Running) -> torch.nn.ModuleList:
    """Those of the model, and others that loss_fn reaches."""
    return running.program.modules


@dataclasses.dataclass
class _Result:
    """Of samples at one cut. The gradients' are 0 where they were not asked for."""

    loss: float = 0.0
    norm: float = 0.0  # of the gradients
    part_norms: float = 0.0  # of those of each micro-batch, added


class _Comparison:
    """The loss of two times `half` samples, in one micro-batch and in two."""

    def __init__(self, running: Running, sizes: List[int], half: int):
        self._running, self._program, self._half = running, running.program, half
        self._batch, self._starts, self._are_alike = _samples_of(running, sizes, half)
        root = _modules_of(running)
        self._named = root[0] if len(root) == 1 else root
        tensors = [*self._program.update.parameters, *root.buffers()]
        places = places_outside(self._named, self._program.loss_fn, self._program.owners)
        self._generators = AllGenerators(cuda_devices_of(tensors), self._program.generators)
        self._snapshot = Snapshot(places, self._generators)
        running.undo.save(GuardPoint.STEP)  # parameters that loss_fn changes, and `state`
        self._off = training_modules(root, DROPOUT) + power_iterations(root)
        self._batch_norm = training_modules(root, BATCH_NORM)
        self._draws, self._sequences = FixedDraws(), Sequences(self._named)
        assert running.loss is not None  # the batch has succeeded
        self._has_gradients = abs(float(running.loss)) < _TELLING
        self._needs_graph = self._has_gradients
        self._is_drawn = False  # numbers that are others at another cut

    def run(self) -> Optional[str]:
        """What is wrong; "": nothing; None: that tells nothing."""
        running = self._running
        kept = dict(vars(running))
        try:
            if self._batch is not None:
                running.batch, running.samples = self._batch, 2 * self._half
                running.weigh()
            whole = self._at([(0, 2 * self._half)])
            parts = self._at([(0, self._half), (self._half, self._half)])
            return self._judge(whole, parts)
        finally:
            vars(running).update(kept)

    def _restore(self) -> None:
        self._running.undo.restore(GuardPoint.STEP, has_failed=False)
        self._snapshot.restore()

    # ---- at a cut ----

    def _at(self, spans: List[Tuple[int, int]]) -> _Result:
        """The sum over micro-batches, of which every sample draws the same numbers."""
        gradients = contextlib.nullcontext() if self._needs_graph else torch.no_grad()
        watching = self._sequences.watching()
        try:
            with switched_off(self._off), _eagerly(), gradients, watching:
                return self._sum_of(spans)
        except RuntimeError as error:
            if is_oom(error) or self._needs_graph and not self._has_gradients:
                raise
            let_go(error)
        finally:
            self._is_drawn |= self._snapshot.draws(but_for_torchs=self._draws.has_fixed)
            self._restore()
        # A gradient penalty needs a graph; through a reentrant checkpoint no gradient can be asked
        # for.
        self._needs_graph, self._has_gradients = True, False
        return self._at(spans)

    def _sum_of(self, spans: List[Tuple[int, int]]) -> _Result:
        result = _Result()
        sums: List[torch.Tensor] = []
        for first, count in spans:
            self._sequences.count = count
            loss = self._share(first, count)
            result.loss += float(loss.detach())
            gradients = self._gradients_of(loss)
            result.part_norms += _norm(gradients)
            if gradients:
                sums = [a + b for a, b in zip(sums, gradients)] or gradients
            del loss, gradients
        result.norm = _norm(sums)
        return result

    def _share(self, first: int, count: int) -> torch.Tensor:
        """Of some samples in the loss of all that are compared."""
        running = self._running
        samples = tree_map_only(torch.Tensor, torch.Tensor.clone, running.part(first, count))
        with self._draws:
            loss: torch.Tensor = self._program.loss_of(samples)[0]
        return loss * (count / (2 * self._half) if running.weight is None else self._unit)

    @property
    def _unit(self) -> float:
        """What a scalar of loss_fn is multiplied by, at most."""
        weight, part = self._running.weight, self._running.samples / (2 * self._half)
        return 1.0 if weight is None else part / float(weight)

    def _gradients_of(self, loss: torch.Tensor) -> List[torch.Tensor]:
        if not (self._has_gradients and loss.requires_grad):
            return []
        trained = [p for p in self._program.update.parameters if p.requires_grad]
        with FixedDraws():  # of checkpoints
            found = torch.autograd.grad(loss, trained, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found)]

    # ---- what it tells ----

    def _judge(self, whole: _Result, parts: _Result) -> Optional[str]:
        through_time = self._sequences.found()
        if through_time[0]:
            return self._say("loss", whole.loss, parts.loss, *through_time)
        values = whole.loss, whole.norm, parts.loss, parts.norm
        if not all(map(math.isfinite, values)) or not any(values):
            return None
        of_gradients, of_losses = floors(self._draws.is_16_bit, self._program.device)
        rounding = self._draws.rounding() * abs(self._unit)
        scale = max(abs(whole.loss), abs(parts.loss), _TELLING)
        if abs(whole.loss - parts.loss) - rounding > of_losses * scale:
            return self._explain("loss", whole.loss, parts.loss)
        scale = max(whole.part_norms, parts.part_norms)
        if self._has_gradients and abs(whole.norm - parts.norm) > of_gradients * scale:
            return self._explain("norm of the gradients", whole.norm, parts.norm)
        return None if self._are_alike else ""

    def _explain(self, what: str, whole: float, parts: float) -> Optional[str]:
        kind, text, advice = explain(
            whole,
            parts,
            2 * self._half,
            self._half,
            self._program.normalizer is not None,
            self._program.loss_name,
        )
        if kind == "cut" and self._batch_norm:
            name = name_of(self._named, self._batch_norm[0])
            text = f"BatchNorm ({name!r}) normalizes by the statistics of a micro-batch"
            advice = "use GroupNorm, put it into evaluation mode, or keep one size "
            advice += "with micro_allowed=[N]"
        elif kind == "cut" and self._is_drawn:
            return None
        return self._say(what, whole, parts, text, advice)

    def _say(self, what: str, whole: float, parts: float, why: str, advice: str) -> str:
        half, (first, second) = self._half, self._starts
        samples = f"{first}-{second + half - 1}"
        if second > first + half:
            samples = " and ".join(f"{at}-{at + half - 1}" for at in (first, second))
        return (
            f"the {what} of samples {samples} is {whole:.4g} in one micro-batch and {parts:.4g} in "
            f"micro-batches of {half}, so the update depends on how memory cuts the batch: {why}: "
            f"{advice}; step.check(batch) says more"
        )


def _norm(gradients: List[torch.Tensor]) -> float:
    return math.hypot(*(float(g.float().norm()) for g in gradients))


def _eagerly() -> Any:
    """Nothing is compiled for a comparison."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # of PyTorch 2.6
    return set_stance("force_eager") if set_stance else contextlib.nullcontext()
