"""The gradients of a few samples at two cuts, and what is returned beside their loss, compared by
itself once a batch has been cut: an update or a result that depends on the cut is a warning.

The comparison is no part of the step in which memory ran out. In later steps a pass over a few
samples runs before a micro-batch begins, while the GPU still works on the one before; none waits
for the GPU, but where loss_fn names modules outside of the model, whose parameters are looked at.
There the first three of these steps load the kernels of these sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import warnings
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from rebatch._library import Event, EventKind, GuardPoint, LogLevel
from rebatch.torch.batches.cut import batch_tensors
from rebatch.torch.batches.switched_off import (
    BATCH_NORM,
    DROPOUT,
    Ran,
    name_of,
    power_iterations,
    switched_off,
    training_modules,
)
from rebatch.torch.check.findings import explain
from rebatch.torch.check.fixed_draws import FixedDraws
from rebatch.torch.check.results import ADVICE, Leaf, Seen, leaves_of, thinned, told_apart
from rebatch.torch.check.rounding import are_exact, floors
from rebatch.torch.check.time_first_modules import Sequences
from rebatch.torch.check.training_snapshot import (
    Snapshot,
    parameters_outside,
    snapshot_outside,
)
from rebatch.torch.check.without_warnings import without_warnings
from rebatch.torch.private import tree_map_only
from rebatch.torch.program.program import Running
from rebatch.torch.session.oom import failed_allocations, is_oom, let_go
from rebatch.torch.session.threads import others_train
from rebatch.torch.undo.copies import lazy_sums_of, read_sums, sums_of

# Which samples are compared, each in a step, and how many of them a half has: the two that differ
# most; two pairs of views that are stacked, so they lie half a batch apart; two pairs of views that
# alternate. A contrastive loss of one pair is 0.
ROUNDS = (("different", 1), ("halves", 2), ("neighbours", 2))
_SIZES = (4, 2, 1)  # of passes
# Steps in which the comparison may run out of memory, or fail otherwise.
MOST_FAILURES = 2
# So many numbers of each gradient are compared.
_SAMPLED = 1 << 14
# Losses closer to 0 are compared as if they were this large.
_TELLING = 0.1
_16_BIT = (torch.float16, torch.bfloat16)
# What calls a Step for the user, beside this package.
_NOT_THE_USERS = {
    "rebatch", "torch", "lightning", "lightning_fabric", "pytorch_lightning", "transformers",
    "accelerate", "contextlib",
}  # fmt: skip


KEEP_TOGETHER = (
    "where samples belong together, as pairs do, keep them so with micro_multiple_of, or slice and "
    "length; step.check(batch) says more"
)


class CutWarning(UserWarning):
    """An update, or the result of an evaluation or a map, depends on how memory cuts the batch."""


class Subject(NamedTuple):
    """Of what cuts are compared, as it is said."""

    where: str  # what was called; "": a step
    what: str  # depends on the cut
    beside: str  # the results that are beside a loss
    rows: str  # what is expected of such that have no entry for each sample
    has_loss: bool = True
    advice: str = ADVICE  # of sums and means


_ROWS = "an entry for each sample, rebatch.Sum(value) or rebatch.Mean(value)"
OF_STEP = Subject("", "the update", "outputs", _ROWS)
OF_EVALUATION = Subject("evaluate()", "the result", "evaluation_outputs", _ROWS)


def tell(running: Running, number: int, micro: int, text: str, where: str = "") -> None:
    """Of a step, in micro-batches of that size, or of what is called otherwise: as a warning, or
    where its events go."""
    text, on_event = f"rebatch: {where or f'step {number}'}: {text}", running.program.on_event
    if on_event is None:
        warnings.warn(text, CutWarning, stacklevel=_level_of_the_user())
        return
    event = Event(
        kind=EventKind.CUT,
        level=LogLevel.WARN,
        step=number,
        batch=running.samples,
        micro_before=micro,
        micro_after=micro,
        text=text.encode(),
    )
    on_event(text, event)


class FirstCut:
    """Compares a few samples in one micro-batch and in two, in steps after the first one that ran
    in several micro-batches. What the samples of one step do not tell, those of the next may. A
    difference is told when the next step has it too, in passes that follow one another and draw
    the same random numbers for each sample."""

    def __init__(self, is_done: bool = False):
        self.is_done = is_done
        self._warmed = self._compared = self._failures = 0  # steps
        self._least = 1  # samples of a micro-batch with which no pass has failed
        self._has_graph = False
        self._draws = False  # random numbers have to be the same for each sample
        self._is_suspect = self.has_told = False  # a difference was found, and found again
        self.comparison: Optional[Comparison] = None  # of the step that runs, whose guard this is
        self._results: Optional[Results] = None  # that are not judged yet

    def begin(self, running: Running, number: int, ran: int, micro: int) -> None:
        """A step begins, in micro-batches of `micro` samples; the last one ended with micro-batches
        of `ran`. Warns of what was compared before."""
        self.comparison = None
        self._judge()
        on_gpu = running.program.device.type == "cuda"
        is_looking = on_gpu and running.undo.is_looking  # so restoring takes long
        if self.is_done or ran != micro or micro >= running.samples or is_looking:
            return
        if others_train():  # PyTorch's switches are theirs too
            return
        sizes = running.allowed_sizes()
        unit = min((size for size in sizes if size >= self._least), default=0)
        if len(sizes) == 1 or not 0 < 2 * unit <= running.samples or may_wait_for_others(running):
            self.is_done = True
            return
        self._has_graph = 2 * unit <= micro and not self._failures
        is_warm = self._warmed == len(_SIZES) or not on_gpu
        kind, units = ROUNDS[self._compared] if is_warm else ROUNDS[-1]
        units = units if 2 * units * unit <= micro else 1
        try:
            self.comparison = Comparison.of(running, number, micro, unit, units, kind)
        except Exception as error:  # out of memory
            self._fail(error)
            return
        self.comparison.look_outside()
        if not is_warm:
            self.comparison.passes = [(0, min(_SIZES[self._warmed], 2 * units) * unit)]

    def save(self, point: int) -> None:
        """Before an attempt, once what it may change is saved: a pass; before the last micro-batch,
        all that are left."""
        comparison = self.comparison
        if comparison is None or point != GuardPoint.ATTEMPT or not comparison.is_between:
            return
        failed = failed_allocations()
        try:
            with comparison.program.aside():
                mode = FixedDraws if self._draws or not self._has_graph else contextlib.nullcontext
                comparison.run(self._is_suspect, mode, self._has_graph)
        except Exception as error:
            self._fail(error, failed_allocations() > failed)

    def _fail(self, error: Exception, has_allocation_failed: bool = False) -> None:
        """A comparison has. Another one may be smaller, or larger."""
        comparison, self.comparison = self.comparison, None
        self._failures += 1
        said = said_of(error)
        is_short = is_oom(error, has_allocation_failed)
        is_own = not self._has_graph and isinstance(error, AssertionError)  # of the program
        let_go(error)
        self.is_done = self._failures == MOST_FAILURES
        if is_short or is_own or comparison is None:
            return
        self._least = comparison.unit + 1
        if self.is_done:
            comparison.tell(
                f"the gradients could not be compared at two cuts ({said}): {KEEP_TOGETHER}"
            )

    def restore(self, _point: int) -> None:
        """An attempt has failed: this step pays for nothing else."""
        self.comparison = None

    def succeeded(self) -> None:
        """An attempt has."""

    def end(self) -> None:
        """The step has succeeded."""
        comparison, self.comparison = self.comparison, None
        if comparison is None or comparison.passes:
            return
        if comparison.moved:
            self.is_done = self.has_told = True
            comparison.tell(_of_moved(comparison.moved, comparison.program.loss_name))
            return
        is_unlike = comparison.has_drawn and not self._draws  # at each cut
        self._draws |= comparison.has_drawn
        if comparison.figures is None:
            self._warmed += 1
        elif is_unlike:
            self._is_suspect = True
        else:
            self._results = Results(comparison, comparison.figures)
            if comparison.figures.are_here():
                self._judge()

    def _judge(self) -> None:
        results, self._results = self._results, None
        if results is None:
            return
        text = results.judged()
        is_sure, self._is_suspect = self._is_suspect, bool(text) and not self._is_suspect
        self._draws |= self._is_suspect
        if self._is_suspect:
            return
        self._compared += 1
        self.is_done |= bool(text) or self._compared == len(ROUNDS)
        if text and is_sure:
            self.has_told = True
            results.comparison.tell(text)


def said_of(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def may_wait_for_others(running: Running) -> bool:
    """Whether a forward pass that this rank makes alone may contain collectives. Those of a Step
    that trains with other ranks have none, but for fully_shard()."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    is_quiet = running.has_ranks and not running.has_window
    return distributed.get_world_size() > 1 and not is_quiet


def _level_of_the_user() -> int:
    """The stacklevel, for warn() in the function that calls this, of the first frame of the user's
    program."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and _package_of(frame) in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level


def _package_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


class _OnHost:
    """Numbers of a device, on their way to the host."""

    def __init__(self, numbers: torch.Tensor):
        numbers = numbers.detach()
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def are_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers


# ---- which samples ----


@dataclasses.dataclass
class _Choice:
    """Of samples, in units that are cut together, by what each sample's entries add up to, and how
    much that tells."""

    totals: List[Tuple[_OnHost, float]]
    count: int  # units in the batch
    kind: str
    units: int
    skip: int = 0  # so many choices before it

    @torch.no_grad()
    def made(self) -> List[int]:
        """The numbers of two times so many units, which differ most in labels, lengths and weights;
        or pairs of them that are alike; or neighbours. Waits for no more than the batch."""
        middle, skip = self.count // 2, min(self.skip, self.count // (2 * self.units) - 1)
        if self.kind == "some":
            return list(range(2 * self.units * skip, 2 * self.units * (skip + 1)))
        rows = [_scaled(total.read(), self.count) * much for total, much in self.totals]
        place = torch.stack(rows or [torch.zeros(self.count)])
        if self.kind == "different":
            taken: List[int] = []
            for _ in range(skip + 1):
                apart = (place - place.mean(1, keepdim=True)).abs().sum(0)
                apart[taken] = -1.0
                first = int(apart.argmax())
                taken += [first, _farthest(place, first, taken)]
            return sorted(taken[-2:])
        if self.kind == "halves":
            apart = (place[:, :middle] - place[:, middle : 2 * middle]).abs().sum(0)
            nearest = apart.topk(self.units * (skip + 1), largest=False).indices
            ones = sorted(nearest[-self.units :].tolist())
            return ones + [one + middle for one in ones]
        evens, odds = place[:, 0 : 2 * middle : 2], place[:, 1 : 2 * middle : 2]
        pairs = [int((evens - odds).abs().sum(0).argsort(stable=True)[skip])]
        if self.units > 1:
            pairs = sorted([*pairs, _farthest(evens + odds, pairs[0])])
        return [2 * pair + i for pair in pairs for i in (0, 1)]


def _farthest(place: torch.Tensor, one: int, taken: Sequence[int] = ()) -> int:
    """From one of them, another that is not taken."""
    distance = (place - place[:, one : one + 1]).abs().sum(0)
    distance[[one, *taken]] = -1.0
    return int(distance.argmax())


def _scaled(totals: torch.Tensor, count: int) -> torch.Tensor:
    """Means of so many units, between 0 and 1."""
    unit = len(totals) // count
    means = totals[: count * unit].view(count, unit).double().mean(1).nan_to_num()
    spread = means.max() - means.min()
    return torch.where(spread > 0, (means - means.min()) / spread, 0.0)


def _totals(running: Running) -> Iterator[Tuple[torch.Tensor, float]]:
    """What each sample's entries add up to, of the small tensors of a batch: classes, lengths and
    weights of samples. And how much that tells: features do less."""
    dim = running.program.cut.dim
    for _, tensor in batch_tensors(running.batch):
        is_small = dim < tensor.dim() <= 2 and tensor.shape[dim] == running.samples
        if is_small and tensor.layout == torch.strided and not tensor.is_complex():
            if tensor.dim() == 1:
                yield tensor, 1.0
            else:
                yield tensor.sum(1 - dim), 0.25 if tensor.is_floating_point() else 1.0


# ---- the comparison ----


class Comparison:
    """The passes over two times `half` samples in one step: spans of these samples that are left to
    run. A result is a loss and numbers of its gradients."""

    def __init__(
        self,
        running: Running,
        number: int,
        micro: int,
        sizes: Tuple[int, int],
        choice: _Choice,
        passes: List[Tuple[int, int]],
    ):
        self._running, self.program, (self.unit, self.half) = running, running.program, sizes
        self._number, self._micro, self._choice = number, micro, choice
        self.passes, self.subject = passes, OF_STEP
        self.results: List[Tuple[torch.Tensor, torch.Tensor, Any]] = []
        self.figures: Optional[_OnHost] = None  # of three passes; a single one warms up
        self.leaves: List[Leaf] = []  # of what was beside the loss
        root = self.program.modules
        self.named = root[0] if len(root) == 1 else root
        self._off = training_modules(root, DROPOUT) + power_iterations(root)
        found = training_modules(root, BATCH_NORM)
        self._off += [m for m in found if m.running_mean is not None]
        self._ran = Ran(found)
        self.sequences = Sequences(self.named)
        self._has_rnn = any(isinstance(m, torch.nn.RNNBase) for m in root.modules())
        self.is_16_bit = self.program.autocast is not None
        self.is_16_bit |= any(p.dtype in _16_BIT for p in self.program.update.parameters)
        self.has_drawn = self.has_drawn_elsewhere = False  # by PyTorch; by NumPy or Python
        self.rounding = 0.0  # of what losses are made of
        self.ran = 0  # samples of the step's batch
        self._outside: List[torch.Tensor] = []  # parameters
        self._sums: List[Any] = []  # of these, when the step began
        self.moved: List[str] = []  # of these, those that a pass has changed
        self._batch: Any = None
        self._spans: List[Tuple[int, int]] = []  # of the samples: first, count

    @classmethod
    def of(
        cls,
        running: Running,
        number: int,
        micro: int,
        unit: int,
        units: int,
        kind: str,
        skip: int = 0,
    ) -> Comparison:
        """Of samples that are chosen by kind: three passes. May run out of memory."""
        half = units * unit
        totals = [(_OnHost(numbers), much) for numbers, much in _totals(running)]
        choice = _Choice(totals, running.samples // unit, kind, units, skip)
        passes = [(0, 2 * half), (0, half), (half, half)]
        return cls(running, number, micro, (unit, half), choice, passes)

    @property
    def batch_norm(self) -> List[torch.nn.Module]:
        """That trains. With embed, what loss_fn runs alone has the whole batch."""
        return self._ran.modules if self.program.embed is None else self._ran.that_ran()

    @property
    def is_between(self) -> bool:
        """Whether a micro-batch that is not the first one comes."""
        return 0 < self.ran < self._running.samples

    def run(self, all_left: bool, mode_of: Any, has_graph: bool) -> None:
        """One pass under a mode; all that are left where that is asked for, or the last micro-batch
        comes."""
        all_left |= self.ran + self._micro >= self._running.samples
        if self._batch is None:
            self._take_samples()
        snapshot = snapshot_outside(self._running, self._moving())
        while self.passes:
            mode, span = mode_of(), self.passes.pop(0)
            try:
                with (
                    without_warnings(),
                    _without_plans(self._has_rnn or not has_graph),
                    switched_off(self._off),
                    self.sequences.watching(),
                    self._ran.watching(),
                    mode,
                ):
                    self.results.append(self._pass(*span, has_graph))
                self._note_draws(snapshot, mode)
                self.moved = snapshot.moved()
            except BaseException:
                snapshot.restore()
                raise
            if self.moved:
                self.passes = []
            if not (all_left and self.passes and span[1] == self.half):
                snapshot.restore()  # else the second micro-batch follows the first one
            if not all_left:
                break
        if not self.passes:
            self._finish()

    def _finish(self) -> None:
        """Nothing of the passes stays on the device when the step ends."""
        if len(self.results) > 1:
            whole, *parts = (beside for *_, beside in self.results)
            if whole is not None:
                pair = self.program.results_of(whole, parts, self.half)
                self.leaves = list(leaves_of(whole, *pair, self._device))
            self.figures = _Figures.of(self.results, self.leaves)
        self.results, self._batch = [], None

    def look_outside(self) -> None:
        """What a micro-batch changes from now on, a pass may change too."""
        self._outside = parameters_outside(self._running)
        self._sums = lazy_sums_of(self._outside)

    def _moving(self) -> Set[int]:
        then, now = read_sums(self._sums), sums_of(self._outside)
        return {id(t) for t, a, b in zip(self._outside, then, now) if a != b}

    def _note_draws(self, snapshot: Snapshot, mode: Any) -> None:
        self.has_drawn |= snapshot.draws()
        self.has_drawn_elsewhere |= snapshot.draws(but_for_torchs=True)
        if isinstance(mode, FixedDraws):
            self.has_drawn |= mode.has_fixed
            self.is_16_bit |= mode.is_16_bit
            self.rounding = max(self.rounding, mode.rounding() * abs(self._unit))

    def _take_samples(self) -> None:
        """A `slice` of the program's own gives neighbours alone."""
        running, unit = self._running, self.unit
        self._spans = [(at * unit, unit) for at in self._choice.made()]
        self._first, self._samples, weight = 0, 2 * self.half, running.weight
        try:
            self._batch = self.program.cut.arranged(running.batch, self._spans, running.samples)
        except Exception as error:  # of tensors that cannot be joined
            let_go(error)
        if self._batch is None:
            self._batch, self._samples = running.batch, running.samples
            self._first = min(self._spans[0][0], running.samples - 2 * self.half)
            self._spans = [(self._first, 2 * self.half)]
        elif self.program.normalizer:
            weight = self.program.normalizer(self._batch)
        self.program.compares(self._batch)
        # What a scalar of loss_fn is multiplied by, at most.
        self._unit = self._samples / (2 * self.half) / float(weight) if weight is not None else 1.0
        self._is_sum = weight is not None

    @property
    def _device(self) -> torch.device:
        """On which figures are computed, so that nothing waits for it."""
        return self.results[0][1].device

    def _pass(
        self, first: int, count: int, has_graph: bool
    ) -> Tuple[torch.Tensor, torch.Tensor, Any]:
        part = self.program.cut.part(self._batch, self._first + first, count, self._samples)
        samples = tree_map_only(torch.Tensor, torch.Tensor.clone, part)
        self.sequences.count = count
        noting = torch.autograd.graph.saved_tensors_hooks(self._note, _itself)
        with torch.set_grad_enabled(has_graph), noting if has_graph else contextlib.nullcontext():
            loss, beside = self.program.loss_of(samples)
        beside = self.program.kept(thinned(beside))
        loss = loss * (self._unit if self._is_sum else count / (2 * self.half))
        gradients = self._gradients_of(loss) if has_graph else loss.new_zeros(1)
        return loss.detach(), gradients, beside

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is kept instead. A result that the backward pass does not come to, such as one that
        is logged, would otherwise hold the node that keeps it, for ever."""
        self.is_16_bit |= tensor.dtype in _16_BIT
        return tensor.detach()

    def _gradients_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Numbers of them, in a fixed order."""
        update, device = self.program.update, loss.device
        if not loss.requires_grad:
            return loss.new_zeros(1)
        trained = [p for p in update.parameters if p.requires_grad]
        scaled = loss if update.scaler is None else update.scaler.scale(loss)
        found = torch.autograd.grad(scaled, trained, allow_unused=True)
        return torch.cat([_numbers_of(p, g).to(device) for p, g in zip(trained, found)])

    def tell(self, text: str) -> None:
        tell(self._running, self._number, self._micro, text, self.subject.where)

    @property
    def names(self) -> str:
        """Of the samples."""
        if len(self._spans) > 4:  # neighbours
            return f"{self._spans[0][0]}-{sum(self._spans[-1]) - 1}"
        spans = [f"{at}-{at + n - 1}" if n > 1 else f"{at}" for at, n in self._spans]
        return ", ".join(spans[:-1]) + " and " * (len(spans) > 1) + spans[-1]


def _itself(value: Any) -> Any:
    return value


def _numbers_of(p: torch.Tensor, gradient: Optional[torch.Tensor]) -> torch.Tensor:
    """Of all places of a gradient; of a large one, of places that no row or column has alone."""
    if gradient is None:
        gradient = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
    elif gradient.layout != torch.strided:
        return torch.zeros(1, device=p.device)
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    stride = gradient.numel() // _SAMPLED | 1 if gradient.numel() > _SAMPLED else 1
    return gradient.detach().reshape(-1)[::stride].float()


@contextlib.contextmanager
def _without_plans(needs_cudnn: bool) -> Iterator[None]:
    """Nothing is compiled or tuned for the size of a pass: neither by PyTorch's compiler nor by
    cuDNN, which takes longer to plan a convolution of a new size than a few samples take. A pass
    after one that has failed may need cuDNN."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # of PyTorch 2.6
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    was_enabled, was_attending = cudnn.enabled, cuda.cudnn_sdp_enabled()
    try:
        cudnn.enabled = was_enabled and needs_cudnn
        cuda.enable_cudnn_sdp(was_attending and not cuda.math_sdp_enabled())
        with set_stance("force_eager") if set_stance else contextlib.nullcontext():
            yield
    finally:
        cudnn.enabled = was_enabled
        cuda.enable_cudnn_sdp(was_attending)


# ---- what it tells ----


@dataclasses.dataclass
class _Figures:
    """Of the samples in one micro-batch, and in two: losses and norms of the gradients; the norms
    of the two added; and the norm of the difference of the gradients."""

    whole: float
    parts: float
    whole_norm: float
    parts_norm: float
    added_norms: float
    difference: float

    @staticmethod
    def of(results: List[Tuple[torch.Tensor, torch.Tensor, Any]], leaves: List[Leaf]) -> _OnHost:
        """Those of three passes, in this order, and those of the leaves."""
        (whole, all_at_once, _), (first, one, _), (second, other, _) = results
        parts = one + other
        norms = [all_at_once.norm(), parts.norm(), one.norm() + other.norm()]
        figures = [whole, first + second, *norms, (all_at_once - parts).norm()]
        figures += [f for leaf in leaves for f in leaf.figures]
        device = all_at_once.device
        return _OnHost(torch.stack([f.to(device, torch.float32) for f in figures]))


class Results:
    """What a comparison has computed, on its way to the host."""

    def __init__(self, comparison: Comparison, figures: _OnHost):
        self.comparison, self._figures = comparison, figures
        self.place = ""  # of a result that is wrong
        self.zeros: Set[str] = set()  # a loss, and places of sums and means: 0 tells nothing

    def judged(self) -> str:
        """What is wrong, or nothing."""
        comparison, figures = self.comparison, self._figures.read().tolist()
        f, rest = _Figures(*figures[:6]), figures[6:]
        of_gradients, of_losses = floors(comparison.is_16_bit, comparison.program.device)
        if comparison.subject.has_loss and f.whole == f.parts == 0:
            self.zeros.add("the loss")
        text = self._of_passes(f, of_gradients, of_losses) if comparison.subject.has_loss else ""
        return text or self._of_leaves(rest, of_gradients)

    def _of_leaves(self, figures: List[float], floor: float) -> str:
        comparison, subject = self.comparison, self.comparison.subject
        is_told = comparison.batch_norm and not subject.has_loss  # by the map
        if comparison.has_drawn_elsewhere or is_told:
            return ""
        why = comparison.sequences.found()
        seen = Seen(subject.beside, comparison.names, comparison.half, subject.rows, subject.advice)
        for leaf in comparison.leaves:
            own, figures = figures[: len(leaf.figures)], figures[len(leaf.figures) :]
            text = leaf.judged(own, floor, seen)
            if text:
                self.place = leaf.place
                return f"{text}; {why[0]}: {why[1]}" if why[0] else text
            if leaf.is_zero(own):
                self.zeros.add(leaf.place)
        return ""

    def _of_passes(self, f: _Figures, of_gradients: float, of_losses: float) -> str:
        comparison = self.comparison
        why = comparison.sequences.found()
        if why[0]:
            return self._said(_of_losses(f), *why)
        if math.isfinite(f.whole) != math.isfinite(f.parts):
            return self._explained(_of_losses(f), f.whole, f.parts)
        scale = max(f.added_norms, f.whole_norm)
        is_exact = are_exact(comparison.is_16_bit, comparison.program.device)
        floor = of_losses if scale or is_exact else of_gradients  # where the loss alone tells
        floor *= max(abs(f.whole), abs(f.parts), _TELLING)
        is_other_loss = abs(f.whole - f.parts) - comparison.rounding > floor
        is_finite = math.isfinite(scale) and math.isfinite(f.whole)
        if is_finite and scale and f.difference > of_gradients * scale and not is_other_loss:
            return self._explained(_of_gradients(f), f.whole_norm, f.parts_norm)
        if is_finite and is_other_loss and (not scale or f.difference > of_gradients * scale):
            return self._explained(_of_losses(f), f.whole, f.parts)
        return self._of_batch_norm()

    def _explained(self, said: str, whole: float, parts: float) -> str:
        comparison, program = self.comparison, self.comparison.program
        half, has_normalizer = comparison.half, program.normalizer is not None
        kind, why, advice = explain(whole, parts, 2 * half, half, has_normalizer, program.cut_name)
        if kind == "cut" and (comparison.batch_norm or comparison.has_drawn_elsewhere):
            return self._of_batch_norm()
        return self._said(said, why, advice)

    def _of_batch_norm(self) -> str:
        """What needs no comparison, and was off in it."""
        comparison = self.comparison
        if not comparison.batch_norm:
            return ""
        name = name_of(comparison.named, comparison.batch_norm[0])
        return (
            f"BatchNorm ({name!r}) normalizes by the statistics of a micro-batch, so "
            f"{comparison.subject.what} depends on how memory cuts the batch: use GroupNorm, put "
            "it into evaluation mode, or keep one size with micro_allowed=[N]; step.check(batch) "
            "says more"
        )

    def _said(self, said: str, why: str, advice: str) -> str:
        comparison = self.comparison
        if comparison.program.embed is not None:
            said = said.replace("loss", "sum of the rows")
        return (
            f"{said.format(samples=comparison.names, half=comparison.half)}, so "
            f"{comparison.subject.what} depends on how memory cuts the batch: {why}: {advice}; "
            "step.check(batch) says more"
        )


def _of_moved(names: List[str], loss_name: str) -> str:
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return (
        f"{loss_name} changes {', '.join(map(repr, names[:3]))}{more} in each micro-batch, so what "
        "they become depends on how memory cuts the batch: expected such a line after step(batch), "
        "as of an average of the weights or a scheduler; step.check(batch) says more"
    )


def _of_losses(f: _Figures) -> str:
    one, other = told_apart(f.whole, f.parts)
    return (
        f"the loss of samples {{samples}} is {one} in one micro-batch and {other} in micro-batches "
        "of {half}"
    )


def _of_gradients(f: _Figures) -> str:
    share = f.difference / max(f.added_norms, f.whole_norm)
    return (
        f"the gradient of the loss of samples {{samples}} differs by {share:.1%} between one "
        "micro-batch and micro-batches of {half}"
    )
