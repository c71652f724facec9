"""What a step or a map did, as plain numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Tuple

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
    lost_ms: float = 0.0  # spent on discarded work and on recovery
    peak_bytes: int = 0  # highest memory in use, where it was measured
    reserved_bytes: int = 0  # memory held from the device at the end
    lighten_level: int = 0

    def numbers(self, prefix: str = "rebatch/") -> Dict[str, float]:
        """For TensorBoard, W&B and the like: names and plain numbers. A peak that was not measured
        is left out."""
        values = dataclasses.asdict(self)
        if not self.peak_bytes:
            del values["peak_bytes"]
        return {prefix + name: float(v) for name, v in values.items() if not isinstance(v, tuple)}

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
            text += f"again, {self.lost_ms:.0f} ms)"
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
    torn: bool = False
    overflow_bytes: int = 0  # of host memory that the update took, as the GPU had no more
    ranks: Tuple[int, ...] = ()  # with several ranks, the `micro` of each

    def __str__(self) -> str:
        return f"step {self.step}: {super().__str__()}"


def numbers_of_trainer(report: Report, is_whole: bool) -> Dict[str, float]:
    """What a trainer logs of it: all, or the micro-batch and the OOMs."""
    numbers = report.numbers()
    return numbers if is_whole else {n: numbers[n] for n in ("rebatch/micro", "rebatch/ooms")}


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
    return MapReport(**_counts_of(filled, samples))


def report_of(filled: c.StepReport, samples: int, ranks: Tuple[int, ...]) -> Report:
    return Report(
        **_counts_of(filled, samples),
        step=filled.step,
        learned=filled.learned,
        torn=filled.torn,
        overflow_bytes=filled.overflow_bytes,
        ranks=ranks,
    )
