"""Finding mistakes in a training step before it trains: what depends on how the batch is cut."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from typing import Any, Callable, Collection, FrozenSet, Iterator, List, Tuple

import torch

# Relative differences of gradients above these are no rounding: of float32, and of 16 bits.
_TOLERANCE, _TOLERANCE_16 = 1e-3, 3e-2


# The kinds of mistakes.
_MISTAKES = ("batch_norm", "sum", "mean_with_normalizer", "cut", "not_repeatable")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding. A note may be as it should be, or was accepted; a mistake is wrong."""

    kind: str
    is_mistake: bool
    text: str

    def __str__(self) -> str:
        return f"{'mistake' if self.is_mistake else 'note'}: {self.kind}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Check:
    """What a check has found. True when there is no mistake."""

    findings: List[Finding]
    runs: int

    def __bool__(self) -> bool:
        return not any(f.is_mistake for f in self.findings)

    def __str__(self) -> str:
        mistakes = sum(f.is_mistake for f in self.findings)
        lines = [str(f) for f in self.findings]
        lines.append(f"{self.runs} runs, {mistakes} mistake{'s' * (mistakes != 1)}")
        return "\n".join(lines)


def accepted_kinds(accept: Any) -> FrozenSet[str]:
    """The kinds of mistakes that an argument `accept` names."""
    if not isinstance(accept, (str, list, tuple, set, frozenset)):
        raise TypeError(f"rebatch: accept is {accept!r}: expected kinds of mistakes")
    kinds = [accept] if isinstance(accept, str) else accept
    for kind in kinds:
        if kind not in _MISTAKES:
            near = difflib.get_close_matches(str(kind), _MISTAKES, 1)
            known = f"expected some of {', '.join(map(repr, _MISTAKES))}"
            meant = f"did you mean {near[0]!r}?" if near else known
            raise ValueError(f"rebatch: accept has {kind!r}: {meant}")
    return frozenset(kinds)


def only_size(options: dict) -> int:
    """The one micro-batch size that a Step's options allow; 0 where there are several."""
    largest = options.get("micro_largest", 0)
    if largest and largest in (options.get("micro_smallest"), options.get("micro_multiple_of")):
        return largest
    allowed = set(options.get("micro_allowed", ()))
    return allowed.pop() if len(allowed) == 1 else 0


@dataclasses.dataclass
class _Outcome:
    loss: float
    gradients: List[torch.Tensor]


def _difference(a: _Outcome, b: _Outcome) -> float:
    """Norm of the difference of all gradients, relative to their norm."""
    squares = sum(float((x.double() - y.double()).square().sum()) for x, y in _pairs(a, b))
    norm = sum(float(x.double().square().sum()) for x in a.gradients)
    return (squares / norm) ** 0.5 if norm else squares**0.5


def _pairs(a: _Outcome, b: _Outcome) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    return zip(a.gradients, b.gradients)


@contextlib.contextmanager
def _switched_off(modules: List[torch.nn.Module]) -> Iterator[None]:
    """Some modules in evaluation mode."""
    was_training = [m.training for m in modules]
    for m in modules:
        m.training = False
    try:
        yield
    finally:
        for m, training in zip(modules, was_training):
            m.training = training


def _training_modules(root: torch.nn.Module, kinds: tuple) -> List[torch.nn.Module]:
    return [m for m in root.modules() if isinstance(m, kinds) and m.training]


_BATCH_NORM = (torch.nn.modules.batchnorm._BatchNorm,)
_DROPOUT = (torch.nn.modules.dropout._DropoutNd,)


def _name_of(root: torch.nn.Module, module: torch.nn.Module) -> str:
    return next(name for name, m in root.named_modules() if m is module)


class Checker:
    """Runs a step's micro-batches without its update.

    run(cut) accumulates a whole batch in micro-batches of `cut` samples, and returns the loss; the
    gradients are then in .grad of `parameters`. `only_size` is the size of all micro-batches, 0:
    it may change. Mistakes of the kinds `accepted` become notes."""

    def __init__(
        self,
        root: torch.nn.Module,
        parameters: List[torch.nn.Parameter],
        run: Callable[[int], float],
        has_normalizer: bool,
        is_16_bit: bool,
        only_size: int,
        accepted: Collection[str],
    ):
        self._root, self._parameters, self._run = root, parameters, run
        self._has_normalizer, self._only_size = has_normalizer, only_size
        self._accepted = accepted
        self._tolerance = _TOLERANCE_16 if is_16_bit else _TOLERANCE
        self._findings: List[Finding] = []
        self._runs = 0

    def check(self, largest: int) -> Check:
        """Compare micro-batches of `largest` samples with smaller ones."""
        self._findings = []
        self._check_batch_norm()
        dropout = _training_modules(self._root, _DROPOUT)
        if dropout:
            self._note(
                "dropout",
                f"{len(dropout)} dropout modules draw other numbers at another cut, as PyTorch "
                "does without rebatch; they were off in this check",
            )
        with _switched_off(dropout + _training_modules(self._root, _BATCH_NORM)):
            self._compare(largest)
        return Check(self._findings, self._runs)

    def _add(self, kind: str, is_mistake: bool, text: str) -> None:
        self._findings.append(Finding(kind, is_mistake, text))

    def _note(self, kind: str, text: str) -> None:
        self._add(kind, False, text)

    def _mistake(self, kind: str, text: str, advice: str) -> None:
        if kind in self._accepted:
            self._note(kind, f"accepted: {text}")
        else:
            self._add(kind, True, f"{text}: {advice}")

    def _check_batch_norm(self) -> None:
        found = _training_modules(self._root, _BATCH_NORM)
        if not found:
            return
        what = f"{len(found)} modules, the first is {_name_of(self._root, found[0])!r}, "
        what += "normalize by the statistics of a micro-batch"
        if self._only_size:
            self._note("batch_norm", f"{what}, and the size is always {self._only_size}")
            return
        self._mistake(
            "batch_norm",
            f"{what}, so the result changes when memory makes it smaller",
            "use GroupNorm, put them into evaluation mode (SyncBatchNorm is no help: it joins "
            "ranks, not micro-batches), keep one size with micro_allowed=[N], or, if they are "
            'meant to do so, check(batch, accept="batch_norm")',
        )

    def _outcome(self, cut: int) -> _Outcome:
        self._runs += 1
        loss = self._run(cut)
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for p in self._parameters
        ]
        return _Outcome(loss, gradients)

    def _compare(self, largest: int) -> None:
        whole = self._outcome(largest)
        if not self._check_repeats(whole, self._outcome(largest)) or largest < 2:
            return
        for cut in sorted({largest // 2, 1}, reverse=True):
            difference = _difference(whole, smaller := self._outcome(cut))
            if difference > self._tolerance:
                self._explain(whole, smaller, largest, cut, difference)
                return

    def _check_repeats(self, first: _Outcome, second: _Outcome) -> bool:
        difference = _difference(first, second)
        if difference > self._tolerance:
            self._mistake(
                "not_repeatable",
                f"the same samples gave other gradients when they ran again, by {difference:.1%}",
                "a random generator or a state that rebatch does not know (pass `generators`), or "
                "a batch that changes",
            )
            return False
        if difference > 0:
            self._note(
                "not_deterministic",
                f"the same samples gave other bits when they ran again, by {difference:.1e} of the "
                "gradients: see torch.use_deterministic_algorithms()",
            )
        return True

    def _explain(
        self, whole: _Outcome, smaller: _Outcome, largest: int, cut: int, difference: float
    ) -> None:
        parts = largest / cut
        ratio = whole.loss / smaller.loss if smaller.loss else 0.0
        if self._has_normalizer and abs(ratio * parts - 1) < 0.05:
            self._mistake(
                "mean_with_normalizer",
                "loss_fn returns a mean over its samples, although there is a normalizer",
                "return the sum",
            )
        elif not self._has_normalizer and abs(ratio / parts - 1) < 0.05:
            self._mistake(
                "sum",
                f"the loss is {parts:g} times as large in micro-batches that are {parts:g} times "
                "as large",
                "loss_fn sums over its samples; return the mean, or pass a normalizer",
            )
        else:
            self._mistake(
                "cut",
                f"gradients in micro-batches of {cut} differ from those of {largest} by "
                f"{difference:.1%}",
                "the loss is no mean over samples, for example one over the tokens of a "
                "micro-batch (return their sum, and pass a normalizer), or what is computed of a "
                "sample depends on its neighbours",
            )
