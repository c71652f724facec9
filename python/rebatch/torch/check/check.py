"""Finding mistakes in a training step before it trains: what depends on how the batch is cut, and
what a failed attempt leaves behind. Must not know how a run is made."""

from __future__ import annotations

import math
import time
from typing import Any, Collection, Dict, List, Optional, Sequence, Tuple

import torch

from rebatch.torch.batches.kinds import plain_parts
from rebatch.torch.batches.switched_off import (
    BATCH_NORM,
    DROPOUT,
    name_of,
    power_iterations,
    training_modules,
)
from rebatch.torch.check.findings import Check, Finding, explain
from rebatch.torch.check.rounding import SEEDS, floors, tolerance
from rebatch.torch.check.trial_runs import Outcome, RunAs, TrialRuns, restored
from rebatch.torch.program.program import Running
from rebatch.torch.session.oom import is_oom, let_go
from rebatch.torch.undo.undo import NotPutBackError

# So much may stay in use after a run.
_LEAK_BYTES = 1 << 20


def _difference(a: Outcome, b: Outcome) -> float:
    """Norm of the difference of all gradients, relative to that of the gradients, or to the norms
    of their parts where these cancel."""
    squares = norm = 0.0
    for x, y in zip(a.gradients, b.gradients):
        like = x if y is None else y
        if like is None:
            continue
        x = torch.zeros_like(like) if x is None else x
        y = torch.zeros_like(like) if y is None else y
        squares += float((x.double() - y.double()).square().sum())
        norm += float(x.double().square().sum())
    norm = max(norm**0.5, b.part_norms)
    return float(squares**0.5 / norm if norm else squares**0.5)


def _loss_difference(a: Outcome, b: Outcome) -> float:
    largest = max(abs(a.loss), abs(b.loss), sum(abs(loss) for _, _, loss in b.losses))
    difference = max(abs(a.loss - b.loss) - max(a.rounding, b.rounding), 0.0)
    return difference / largest if largest else 0.0


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _names(changes: Dict[Tuple[str, str], Any], *kinds: str) -> List[str]:
    return [name for kind, name in changes if kind in kinds]


def _with_kinds(places: Sequence[Tuple[str, str]]) -> str:
    return ", ".join(f"{kind} {name!r}" for kind, name in places[:4]) + (
        f" and {len(places) - 4} more" if len(places) > 4 else ""
    )


def _half(sizes: List[int]) -> int:
    """The largest size that is at most half of the largest, or the smallest."""
    return next((size for size in sizes if size <= sizes[0] // 2), sizes[-1])


def check_step(running: Running, run_as: RunAs, accepted: Collection[str]) -> Check:
    """Check the batch that runs, at the largest size that fits; the state of the training is then
    as it was. run_as() runs it as a Step of another program does."""
    sizes = running.allowed_sizes()
    began = time.perf_counter()
    while True:
        try:
            runs = TrialRuns(running, run_as)
            with restored(runs):
                return _Checker(running, runs, accepted, began).check(sizes)
        except Exception as error:
            if len(sizes) == 1 or not is_oom(error):
                raise
            let_go(error)
        sizes = [size for size in sizes if size <= sizes[0] // 2] or sizes[-1:]


class _Checker:
    """The runs of a check, and what they show. Mistakes of the kinds `accepted` become notes."""

    def __init__(self, running: Running, runs: TrialRuns, accepted: Collection[str], began: float):
        self._samples, self._program = running.samples, running.program
        self._runs, self._accepted = runs, accepted
        self._root = runs.named
        self._began = began
        self._findings: List[Finding] = []
        self._compared: List[int] = []
        self._noise = 0.0  # of the same run, made twice

    def check(self, sizes: List[int]) -> Check:
        whole = self._runs.run(sizes[0])
        self._check_batch_norm(sizes)
        self._note_dropout()
        self._note_power_iterations()
        if self._check_finite(whole, sizes[0]):
            self._check_changes(whole)
            again = self._runs.run(sizes[0])
            self._check_leak(again)
            if self._check_repeats(whole, again):
                self._check_cuts(whole, sizes)
                self._check_ooms(whole, again, sizes)
        return Check(
            self._findings,
            self._runs.runs,
            self._compared,
            sum(g is not None for g in whole.gradients),
            sum(1 for _ in self._root.buffers()),
            self._runs.ooms,
            time.perf_counter() - self._began,
        )

    # ---- findings ----

    def _note(self, kind: str, text: str) -> None:
        self._findings.append(Finding(kind, False, text))

    def _mistake(self, kind: str, text: str, advice: str) -> None:
        if kind in self._accepted:
            self._note(kind, f"accepted: {text}")
        else:
            self._findings.append(Finding(kind, True, f"{text}: {advice}"))

    def _has(self, *kinds: str) -> bool:
        return any(f.kind in kinds for f in self._findings)

    # ---- one run ----

    def _check_batch_norm(self, sizes: List[int]) -> None:
        found = training_modules(self._root, BATCH_NORM)
        if not found:
            return
        what = f"{len(found)} modules, the first is {name_of(self._root, found[0])!r}, "
        what += "normalize by the statistics of a micro-batch"
        if len(sizes) == 1:
            self._note("batch_norm", f"{what}, and the size is always {sizes[0]}")
            return
        if self._is_same_with_batch_norm(sizes):  # it normalizes groups of its own
            return
        self._mistake(
            "batch_norm",
            f"{what}, so the result changes when memory makes it smaller",
            "use GroupNorm, put them into evaluation mode (SyncBatchNorm is no help: it joins "
            "ranks, not micro-batches), keep one size with micro_allowed=[N], or, if they are "
            'meant to do so, check(batch, accept="batch_norm")',
        )

    def _is_same_with_batch_norm(self, sizes: List[int]) -> bool:
        try:
            large, small = (
                self._runs.run(cut, is_fixed=True, has_batch_norm=True)
                for cut in (sizes[0], _half(sizes))
            )
        except ValueError:  # of one sample
            return False
        return bool(
            _difference(large, small) <= floors(self._runs.is_16_bit, self._program.device)[0]
        )

    def _note_dropout(self) -> None:
        dropout = training_modules(self._root, DROPOUT)
        if dropout:
            self._note(
                "dropout",
                f"{len(dropout)} dropout modules draw other numbers at another cut, as PyTorch "
                "does without rebatch; they were off where cuts were compared",
            )

    def _note_power_iterations(self) -> None:
        found = power_iterations(self._root)
        if found:
            self._note(
                "spectral_norm",
                f"{len(found)} modules improve their estimate of a norm once a micro-batch, so "
                "more often at another cut; they did not where cuts were compared",
            )

    def _check_finite(self, outcome: Outcome, cut: int) -> bool:
        bad = [
            name
            for name, g in zip(self._names_of_parameters(), outcome.gradients)
            if g is not None and not bool(g.isfinite().all())
        ]
        where = [
            f"{first}-{first + count - 1}" if count > 1 else f"{first}"
            for first, count, loss in outcome.losses
            if not math.isfinite(loss)
        ]
        if not (bad or where):
            return True
        text = f"in micro-batches of {cut}, "
        if where:
            text += f"the loss of samples {', '.join(where[:3])} is no finite number"
        if where and bad:
            text += ", and "
        if bad:
            text += f"{len(bad)} gradients are not, the first that of {bad[0]!r}"
        self._mistake(
            "nan",
            text,
            "look for a division by 0 (a mean over no items), a log or square root of 0, or data "
            "that has NaN; torch.autograd.set_detect_anomaly(True) finds the operation",
        )
        return False

    def _names_of_parameters(self) -> List[str]:
        names = {p: name for name, p in self._root.named_parameters()}
        return [names.get(p, "a parameter") for p in self._runs.parameters]

    def _check_changes(self, outcome: Outcome) -> None:
        parameters = _names(outcome.changes, "parameter")
        # With embed, loss_fn changes them once a batch, so cuts are compared.
        if parameters and self._program.embed is None:
            self._mistake(
                "parameter",
                f"loss_fn changes {_listed(parameters)}: that happens once a micro-batch, so the "
                "result depends on the cut",
                "change parameters after step(batch), as an average of the weights for example",
            )
        batch = _names(outcome.changes, "batch")
        if batch:
            self._mistake(
                "batch",
                f"loss_fn changes {_listed(batch)} in place, so samples that run again are changed "
                "twice",
                "make a new tensor, as x = x - mean instead of x.sub_(mean)",
            )
        modes = _names(outcome.changes, "mode")
        if modes:
            self._mistake(
                "mode",
                f"loss_fn leaves {_listed(modes)} in another mode (training or evaluation)",
                "set the mode before the step, or put it back within loss_fn",
            )

    def _check_leak(self, outcome: Outcome) -> None:
        if outcome.left_bytes > _LEAK_BYTES:
            self._mistake(
                "leak",
                f"{outcome.left_bytes / (1 << 20):.1f} MiB more are in use after a run than before "
                "it",
                "something keeps tensors of a micro-batch, for example a list of losses: keep "
                "loss.detach(), or float(loss)",
            )

    def _check_repeats(self, first: Outcome, second: Outcome) -> bool:
        self._noise = max(_difference(first, second), _loss_difference(first, second))
        if self._noise > floors(self._runs.is_16_bit, self._program.device)[0]:
            self._mistake(
                "not_repeatable",
                f"the same samples gave other gradients when they ran again, by {self._noise:.1%}",
                "a random generator or a state that rebatch does not know (pass `generators`), or "
                "a batch that changes",
            )
            return False
        if self._noise > 0:
            self._note(
                "not_deterministic",
                "the same samples gave other bits when they ran again, by "
                f"{self._noise:.1e} of the gradients: see torch.use_deterministic_algorithms()",
            )
        return True

    # ---- runs at several cuts ----

    def _check_cuts(self, whole: Outcome, sizes: List[int]) -> None:
        largest = sizes[0]
        self._compared = [largest]
        if self._samples == 1:
            self._mistake(
                "nothing_compared",
                "the batch has one sample, which cannot be cut",
                "check a batch of the size that the training has",
            )
            return
        if len(sizes) == 1:
            if not self._has("batch_norm"):
                self._note(
                    "one_size",
                    f"the options allow micro-batches of {largest} alone, so nothing depends on "
                    "the cut",
                )
            return
        is_fixed = self._runs.draws
        if is_fixed:
            whole = self._runs.run(largest, is_fixed=True)
            self._note(
                "random",
                "loss_fn draws random numbers, which are others at another cut, as in PyTorch "
                "without rebatch; where cuts were compared they were the same for every sample",
            )
        limit = self._measure(whole, largest, is_fixed)
        for cut in sorted({_half(sizes), sizes[-1]}, reverse=True):
            smaller = self._run_smaller(cut, is_fixed)
            if smaller is None or not self._compare(whole, smaller, largest, cut, limit):
                return

    def _measure(self, whole: Outcome, cut: int, is_fixed: bool) -> Tuple[float, float]:
        """How far gradients, and losses, may lie apart: what random numbers that are not fixed
        change, and what another order of the samples does."""
        other = self._runs.run(cut, is_fixed, is_reversed=True)
        floor = floors(self._runs.is_16_bit, self._program.device)
        gradients = tolerance(floor[0], max(_difference(whole, other), self._noise))
        losses = tolerance(floor[1], max(_loss_difference(whole, other), self._noise))
        if not is_fixed:
            return gradients, losses
        reseeded = [self._runs.run(cut, is_fixed, seed=seed) for seed in SEEDS]
        drawn = max(_difference(whole, other) for other in reseeded)
        if drawn > floor[0]:
            self._note(
                "random_left",
                f"other random numbers change the gradients by {drawn:.1%}, and this check cannot "
                "fix them (NumPy's, Python's, or those of a kernel of your own): smaller "
                "differences between cuts were not looked at",
            )
        of_losses = max(_loss_difference(whole, other) for other in reseeded)
        return gradients + 3 * drawn, losses + 3 * of_losses

    def _run_smaller(self, cut: int, is_fixed: bool) -> Optional[Outcome]:
        try:
            return self._runs.run(cut, is_fixed)
        except Exception as error:
            if is_oom(error):
                raise
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            let_go(error)
        self._mistake(
            "failed",
            f"micro-batches of {cut} raise {said}",
            f"let loss_fn take {cut} sample{'s' * (cut != 1)}, or set micro_smallest above",
        )
        return None

    def _compare(
        self, whole: Outcome, smaller: Outcome, largest: int, cut: int, limit: Tuple[float, float]
    ) -> bool:
        """Whether two cuts have the same result; else one mistake."""
        self._compared.append(cut)
        if not self._check_finite(smaller, cut):
            return False
        difference, of_loss = _difference(whole, smaller), _loss_difference(whole, smaller)
        buffers = self._changed_otherwise(whole, smaller)
        if difference > limit[0] or of_loss > limit[1]:
            self._explain(whole, smaller, largest, cut, max(difference, of_loss), buffers)
            return False
        if buffers:
            name, advice = self._program.cut_name, "after step(batch), as an average of the weights"
            if name == "embed":
                advice = "in loss_fn, which runs once a batch, or after step(batch)"
            self._mistake(
                "buffer",
                f"{_listed(buffers)} {_are(buffers)} not the same after "
                f"micro-batches of {cut} as after those of {largest}: {name} changes "
                f"{'it' if len(buffers) == 1 else 'them'} once a micro-batch",
                f"change {'it' if len(buffers) == 1 else 'them'} {advice}",
            )
            return False
        return True

    def _changed_otherwise(self, whole: Outcome, smaller: Outcome) -> List[str]:
        """Buffers, and with embed parameters."""
        places = {place: None for o in (whole, smaller) for place in o.changes}
        kinds = ("buffer",) if self._program.embed is None else ("buffer", "parameter")
        return [
            name
            for kind, name in places
            if kind in kinds
            and not _is_close(whole.changes.get((kind, name)), smaller.changes.get((kind, name)))
        ]

    def _explain(
        self,
        whole: Outcome,
        smaller: Outcome,
        largest: int,
        cut: int,
        difference: float,
        buffers: List[str],
    ) -> None:
        kind, text, advice = explain(
            whole.loss,
            smaller.loss,
            largest,
            cut,
            self._program.normalizer is not None,
            self._program.cut_name,
        )
        if kind == "cut" and self._is_explained():
            return
        if kind == "cut":
            text = (
                f"gradients in micro-batches of {cut} differ from those of {largest} by "
                f"{difference:.1%}"
            )
            if buffers:
                text += f", and {_listed(buffers)} {_are(buffers)} not the same"
        self._mistake(kind, text, advice)

    def _is_explained(self) -> bool:
        """Whether an earlier finding is why gradients depend on the cut."""
        found = training_modules(self._root, BATCH_NORM)
        return self._has("parameter") or any(m.running_mean is None for m in found)

    # ---- runs with an OOM on purpose ----

    def _check_ooms(self, whole: Outcome, again: Outcome, sizes: List[int]) -> None:
        """An OOM in the middle of the forward pass, and of the backward pass, against a run that
        began at the size at which the batch then ran."""
        if len(sizes) == 1 or self._has("nan", "failed"):
            return
        changed = set(whole.changes) | set(again.changes)
        unstable = {
            p for p in changed if not _is_close(whole.changes.get(p), again.changes.get(p), 0)
        }
        forward, every = self._runs.count_operations(sizes[0])
        clean: Dict[int, Outcome] = {}
        for where, at in (("forward", forward // 2), ("backward", (forward + every) // 2)):
            try:
                failed = self._runs.run_step(sizes[0], max(at, 1))
            except Exception as error:
                if is_oom(error) and not isinstance(error, torch.OutOfMemoryError):
                    raise
                if not (isinstance(error, NotPutBackError) and self._has("parameter", "batch")):
                    self._say_what_it_raises(where, error)
                return
            size = failed.sizes[0]
            if size not in clean:
                clean[size] = self._runs.run_step(size)
            if not self._compare_after_oom(clean[size], failed, where, unstable):
                return

    def _say_what_it_raises(self, where: str, error: Exception) -> None:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        let_go(error)
        self._mistake("after_oom", f"an OOM in the {where} pass ends the step", text)

    def _compare_after_oom(
        self, clean: Outcome, failed: Outcome, where: str, unstable: set[Any]
    ) -> bool:
        places = {p: None for o in (clean, failed) for p in o.changes if p not in unstable}
        left = [
            p
            for p in places
            if not _is_close(clean.changes.get(p), failed.changes.get(p), 0)
            and p not in {("gradient", n) for n in self._names_of_parameters()}
        ]
        if left and all(self._has(kind) for kind, _ in left):
            return False  # named already: loss_fn changes it
        floor = floors(self._runs.is_16_bit, self._program.device)[0]
        difference = max(_difference(clean, failed), _loss_difference(clean, failed))
        if not left and difference <= max(floor, 4 * self._noise):
            return True
        what = f"an attempt that runs out of memory in the {where} pass leaves behind "
        what += _with_kinds(left) if left else "something that is not known"
        if difference > floor:
            what += f"; the gradients then differ by {difference:.1%}"
        self._mistake(
            "after_oom",
            what,
            "return what you count beside the loss, as (loss, extras); give generators of your own "
            "as generators=[...]",
        )
        return False


def _are_plain_close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or not tolerance:
        return torch.equal(a, b)
    return float((a - b).norm()) <= tolerance * max(float(a.norm()), float(b.norm()))


def _is_close(a: Any, b: Any, tolerance: float = 1e-3) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        mine, others = plain_parts(a), plain_parts(b)
        return len(mine) == len(others) and all(
            _are_plain_close(x, y, tolerance) for x, y in zip(mine, others)
        )
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_is_close(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_is_close(a[k], b[k], tolerance) for k in a)
    if type(a) is not type(b):
        return False
    return a is b or a == b
