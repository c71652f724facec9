"""What a step or a map did, as plain numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

from rebatch import _library as c


@dataclasses.dataclass(frozen=True)
class MapReport:
    """What one call of a Map or of Step.evaluate() did. Sizes are in bytes, times in
    milliseconds."""

    samples: int = 0  # in the batch
    micro: int = 0  # samples of a micro-batch; 0: not all samples ran
    microbatches: int = 0  # that succeeded
    ooms: int = 0
    redone_samples: int = 0  # that ran again because of OOMs
    lost_ms: float = 0.0  # beyond what the same work takes without an OOM
    lost_is_least: bool = False  # that is not known: of discarded attempts alone
    peak_bytes: int = 0  # highest memory in use, where it was measured
    reserved_bytes: int = 0  # memory held from the device at the end
    lighten_level: int = 0

    def _sizes(self) -> str:
        if self.micro == 0 or self.microbatches * self.micro == self.samples:
            return f"{self.microbatches} x {self.micro}"
        if self.microbatches == 2:
            return f"{self.micro} + {self.samples - self.micro}"
        return f"{self.microbatches} x up to {self.micro} of {self.samples}"

    def __str__(self) -> str:
        text = f"{self._sizes()} samples"
        if self.ooms:
            text += f", {self.ooms} OOM{'s' * (self.ooms > 1)} ({self.redone_samples} samples "
            least = "at least " if self.lost_is_least else ""
            text += f"again, {least}{self.lost_ms:.0f} ms lost)"
        if self.lighten_level:
            text += f", lighten level {self.lighten_level}"
        if self.peak_bytes:
            text += f", peak {self.peak_bytes / (1 << 30):.2f} GiB"
        return text


@dataclasses.dataclass(frozen=True)
class Report(MapReport):
    """What one call of a Step did. The batch is the effective batch, `micro` and `microbatches` are
    those of the update."""

    step: int = 0  # number of the effective batch
    learned: int = 0  # micro-batches from which the session learned
    budget: int = 0  # with `cost`: the most that a micro-batch may cost from now on
    torn: bool = False
    overflow_bytes: int = 0  # of host memory that the update took, as the GPU had no more
    short_of_memory: float = 0.0  # share of the last minute of steps that memory cut smaller
    ranks: Tuple[int, ...] = ()  # with several ranks, the `micro` of each
    replayed: int = 0  # micro-batches that were replays of CUDA graphs

    _norm = None  # no field: a GradNorm, where there was an update

    def take_norm(self, norm: Any) -> None:
        """That of the update, which has been made."""
        object.__setattr__(self, "_norm", norm)

    @property
    def grad_norm(self) -> float:
        """The total 2-norm of the gradients of the update, unscaled, after `before_update` and
        before `clip`. Without `clip` it is computed when it is first read, before the next step.
        With fully_shard() all ranks read it."""
        if self._norm is None:
            raise ValueError(
                "rebatch: report.grad_norm is that of an update, and this report has none: "
                "expected that of a Step that has updated, or torch.nn.utils.get_total_norm() "
                "after a Backward"
            )
        norm: float = self._norm.read()
        return norm

    def __str__(self) -> str:
        return f"step {self.step}: {super().__str__()}"


# What Step.numbers() has, and what it is. Names that end with _total never fall.
NUMBERS = {
    "step": "number of the last batch",
    "micro": "samples of a micro-batch; 0 after a failure",
    "microbatches": "micro-batches in the update",
    "replayed": "of these, replays of CUDA graphs",
    "samples_total": "samples that counted in an update",
    "ooms_total": "times that memory ran out",
    "redone_samples_total": "samples that ran again because memory ran out",
    "lost_seconds_total": "seconds spent on discarded work and on recovery",
    "peak_bytes": "highest memory in use, of the last batch in which it was measured",
    "room_bytes": "memory that may be allocated now beyond that peak",
    "reserved_bytes": "memory held from the device after the last batch",
    "lighten_level": "ways of lighten in use",
    "short_of_memory": "share of the last minute of steps that were cut smaller for want of memory",
}
OF_TRAINERS = ("micro", "ooms_total", "peak_bytes")  # these say what memory does to a training


class Totals:
    """What all calls of a Step did together, since it was made."""

    def __init__(self) -> None:
        self.samples = self.ooms = self.redone_samples = 0
        self.lost_ms = 0.0
        self.peak_bytes = 0  # the last that was measured

    def add(self, report: Report, is_applied: bool) -> None:
        """One call. Its samples count where it has updated the parameters."""
        if is_applied:
            self.samples += report.samples
        if report.ooms:
            self.ooms += report.ooms
            self.redone_samples += report.redone_samples
        self.lost_ms += report.lost_ms
        self.peak_bytes = report.peak_bytes or self.peak_bytes

    def numbers(self, last: Report, room_bytes: Optional[int], prefix: str) -> Dict[str, float]:
        """Those of NUMBERS that are known, after the call of which `last` is the report."""
        values: Dict[str, Optional[float]] = {
            "step": last.step,
            "micro": last.micro,
            "microbatches": last.microbatches,
            "replayed": last.replayed,
            "samples_total": self.samples,
            "ooms_total": self.ooms,
            "redone_samples_total": self.redone_samples,
            "lost_seconds_total": self.lost_ms / 1e3,
            "peak_bytes": self.peak_bytes or None,
            "room_bytes": room_bytes,
            "reserved_bytes": last.reserved_bytes or None,
            "lighten_level": last.lighten_level,
            "short_of_memory": last.short_of_memory,
        }
        return {prefix + name: float(v) for name, v in values.items() if v is not None}


def numbers_of_trainer(numbers: Dict[str, float], are_all: bool) -> Dict[str, float]:
    """What a trainer logs of Step.numbers(): all of them, or three."""
    if are_all:
        return numbers
    names = ("rebatch/" + name for name in OF_TRAINERS)
    return {name: numbers[name] for name in names if name in numbers}


def _counts_of(filled: c.StepReport, samples: int) -> Dict[str, Any]:
    return dict(
        samples=samples,
        micro=filled.micro,
        microbatches=filled.microbatches,
        ooms=filled.ooms,
        redone_samples=filled.redone_samples,
        lost_ms=filled.lost_ns / 1e6,
        peak_bytes=filled.peak_bytes,
        reserved_bytes=filled.reserved_bytes,
        lighten_level=filled.lighten_level,
    )


def map_report_of(filled: c.StepReport, samples: int) -> MapReport:
    return MapReport(**_counts_of(filled, samples), lost_is_least=filled.ooms > 0)


def report_of(
    filled: c.StepReport,
    samples: int,
    ranks: Tuple[int, ...],
    knows_time: bool,
    replayed: int,
    short: float,
) -> Report:
    """knows_time: a step of so many samples had no OOM. short: rebatch_short_of_memory()."""
    report = object.__new__(Report)  # a frozen dataclass sets one field after another
    report.__dict__.update(
        _counts_of(filled, samples),
        lost_is_least=filled.ooms > 0 and not knows_time,
        step=filled.step,
        learned=filled.learned,
        budget=filled.cost_after,
        torn=filled.torn,
        overflow_bytes=filled.overflow_bytes,
        short_of_memory=short,
        ranks=ranks,
        replayed=replayed,
    )
    return report
