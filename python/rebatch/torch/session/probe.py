"""The result of a probe, as a table."""

from __future__ import annotations

import ctypes as C
import dataclasses
from typing import Any, List

from rebatch import _library as c
from rebatch._library import lib
from rebatch.torch.session.session import Session


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The memory that a micro-batch size is predicted to need, in bytes."""

    size: int
    fits: bool
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a probe has found. Sizes are in samples, or in cost if the step has one."""

    size: int
    peak_bytes: int
    available_bytes: int
    trials: int
    ooms: int
    confidence: str
    predictions: List[Prediction]

    def __str__(self) -> str:
        largest = max((p.peak_bytes for p in self.predictions), default=0)
        unit, bytes_each = ("GiB", 1 << 30) if largest >= 1 << 30 else ("MiB", 1 << 20)
        lines = [f"{'micro-batch':>12}  {'peak':>11}"]
        for p in self.predictions:
            remark = "largest" if p.size == self.size else "" if p.fits else "does not fit"
            peak = f"{p.peak_bytes / bytes_each:>7.2f} {unit}"
            lines.append(f"{p.size:>12}  {peak}  {remark}".rstrip())
        lines.append(
            f"largest micro-batch: {self.size}: {self.confidence} ({self.trials} sizes ran, "
            f"{self.ooms} ran out of memory)"
        )
        return "\n".join(lines)


def _predict(session: Session, size: int, samples: int) -> Any:
    out = c.Prediction()
    if lib.rebatch_predict(C.byref(out), session.rb, size, samples, None):
        return None
    return Prediction(size, out.fits, out.peak_bytes)


def run_probe(session: Session, ops: c.StepOps, samples: int, reserve_bytes: int) -> Probe:
    """Probe with the session's pool. Raises Exhausted when not even one sample fits."""
    if not session.is_pooled:
        raise c.Error(
            "rebatch: a probe goes by the allocations of rebatch's pool: call rebatch.install() "
            "first, or use Step(learn=True)",
            c.Status.E_UNSUPPORTED,
        )
    options = c.ProbeOptions(reserve_bytes=reserve_bytes)
    report = c.ProbeReport()
    status = session.call(
        lib.rebatch_probe, C.byref(ops), samples, None, C.byref(options), C.byref(report)
    )
    session.raise_failure(status)
    sizes = sorted({1, report.size // 2, report.size, report.size + 1, 2 * report.size} - {0})
    found = [_predict(session, size, samples) for size in sizes if size <= 2 * samples]
    return Probe(
        size=report.size,
        peak_bytes=report.measured_peak_bytes,
        available_bytes=report.available_bytes,
        trials=report.trials,
        ooms=report.ooms,
        confidence=lib.rebatch_confidence_text(report.confidence).decode(),
        predictions=[p for p in found if p],
    )
