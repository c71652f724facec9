"""What a check has found, and how it is said."""

from __future__ import annotations

import dataclasses
import difflib
import math
import textwrap
from typing import Any, FrozenSet, List, Tuple

# The kinds of mistakes, which `accept` takes.
MISTAKES = (
    "after_oom",
    "batch",
    "batch_norm",
    "buffer",
    "cut",
    "failed",
    "leak",
    "mean_with_normalizer",
    "mode",
    "nan",
    "not_repeatable",
    "nothing_compared",
    "parameter",
    "sum",
)
# So wide are lines, and the kinds in front of them.
_COLUMNS, _INDENT = 100, 16


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding. A note may be as it should be, or was accepted; a mistake is wrong."""

    kind: str
    is_mistake: bool
    text: str

    def __str__(self) -> str:
        head = self.kind if self.is_mistake else "note"
        text = self.text if self.is_mistake else f"{self.kind}: {self.text}"
        return textwrap.fill(
            text,
            _COLUMNS,
            initial_indent=head.ljust(_INDENT - 1) + " ",
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )


@dataclasses.dataclass(frozen=True)
class Check:
    """What a check has found. True when there is no mistake.

    `sizes` are the micro-batch sizes whose results were compared; `gradients` and `buffers` are how
    many of each were; `ooms` are the OOMs that the check made on purpose."""

    findings: List[Finding]
    runs: int
    sizes: List[int] = dataclasses.field(default_factory=list)
    gradients: int = 0
    buffers: int = 0
    ooms: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return not any(f.is_mistake for f in self.findings)

    @property
    def mistakes(self) -> List[Finding]:
        """The findings that are no notes."""
        return [f for f in self.findings if f.is_mistake]

    def __str__(self) -> str:
        notes = [f for f in self.findings if not f.is_mistake]
        return "\n".join([*map(str, self.mistakes), *map(str, notes), self._summary()])

    def _summary(self) -> str:
        count = len(self.mistakes)
        sizes = ", ".join(map(str, self.sizes)) or "no size"
        return (
            f"{count or 'no'} mistake{'s' * (count != 1)}: {self.runs} runs, micro-batches of "
            f"{sizes}; compared the loss, {_counted(self.gradients, 'gradient')} and "
            f"{_counted(self.buffers, 'buffer')}; {_counted(self.ooms, 'OOM')} on purpose; "
            f"{self.seconds:.1f} s"
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def accepted_kinds(accept: Any) -> FrozenSet[str]:
    """The kinds of mistakes that an argument `accept` names."""
    if not isinstance(accept, (str, list, tuple, set, frozenset)):
        raise TypeError(f"rebatch: accept is {accept!r}: expected kinds of mistakes")
    kinds = [accept] if isinstance(accept, str) else accept
    for kind in kinds:
        if kind not in MISTAKES:
            near = difflib.get_close_matches(str(kind), MISTAKES, 1)
            known = f"expected some of {', '.join(map(repr, MISTAKES))}"
            meant = f"did you mean {near[0]!r}?" if near else known
            raise ValueError(f"rebatch: accept has {kind!r}: {meant}")
    return frozenset(kinds)


# ---- why a loss depends on the cut ----


_NEAR = 0.05  # how far a factor may be from that of a sum


def explain(
    whole: float,
    smaller: float,
    largest: int,
    cut: int,
    has_normalizer: bool,
    name: str,
) -> Tuple[str, str, str]:
    """Of a loss, by the function of that name, at two cuts: the kind of the mistake, what is so,
    and what to do."""
    if name == "embed":  # what it returns stands in for a loss
        return "cut", "a row depends on the other samples of its micro-batch", _ADVICE_ON_ROWS
    parts = largest / cut
    ratio = whole / smaller if smaller else 0.0
    if not math.isfinite(whole + smaller):
        return "cut", "the loss of some samples alone is no finite number", _ADVICE
    if name == "compute_loss":  # its Trainer weights it
        return "cut", f"{name} depends on the cut", _ADVICE_TO_TRAINERS
    if has_normalizer and abs(ratio * parts - 1) < _NEAR:
        return (
            "mean_with_normalizer",
            f"{name} returns a mean over its samples, although there is a normalizer",
            "return the sum",
        )
    if not has_normalizer and abs(ratio / parts - 1) < _NEAR:
        return (
            "sum",
            f"the loss is {parts:g} times as large in micro-batches that are {parts:g} times as "
            "large",
            f"{name} sums over its samples; return the mean, or pass a normalizer",
        )
    return "cut", f"{name} depends on the cut", _ADVICE


_ADVICE_ON_ROWS = (
    "compute rows each from its own sample (GroupNorm for BatchNorm, padding to a fixed length), "
    "and what compares or numbers samples in loss_fn"
)
_ADVICE = (
    "the loss is no mean over samples, for example one over the tokens, the padding or the class "
    "weights of a micro-batch (return their sum, and pass a normalizer), or what is computed of a "
    "sample depends on its neighbours (a loss over pairs of samples needs embed=, or "
    "micro_smallest=<the batch's size>, with `lighten`)"
)
_ADVICE_TO_TRAINERS = (
    "the loss is no mean over the labels that are not -100, for example one with class weights or "
    "over attention_mask (return a sum divided by num_items_in_batch), or what is computed of a "
    "sample depends on its neighbours (a loss over pairs of samples needs "
    "micro_smallest=<the batch's size>, with `lighten`)"
)
