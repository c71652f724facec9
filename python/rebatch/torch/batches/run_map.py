"""Functions over samples outside of training, in as many calls as memory asks for."""

from __future__ import annotations

import ctypes as C
from typing import Any, Callable, List, Tuple

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch.torch.batches.cut import Cuts
from rebatch.torch.session.report import MapReport, map_report_of
from rebatch.torch.session.session import Session


def run_map(
    session: Session,
    function: Callable[[Any], Any],
    batch: Any,
    samples: int,
    key: int,
    cut: Cuts,
    ran_out: Callable[[], None] = lambda: None,
) -> Tuple[List[tuple[Any, ...]], MapReport, int]:
    """Call function(samples) without gradients until all samples are done: a list of (count,
    result), in ascending order; the report; and the status for raise_failure(). A call that runs
    out of memory is repeated with fewer samples."""
    results: List[tuple[Any, ...]] = []

    def run(microbatch: Any, _user: Any) -> int:
        first, count = microbatch[0].first, microbatch[0].count
        status = session.run(body, first, count)
        if status == c.Status.OOM:
            ran_out()
        return status

    def body(first: int, count: int) -> None:
        part = cut.part(batch, first, count, samples)
        with torch.no_grad():
            result = function(part)
        session.succeeded()
        results.append((count, result))

    ops = c.MapOps(run=run, key=key)
    report = c.StepReport()
    if session.meter:
        session.meter.begin_step(("map", key, samples))
    status = session.call(lib.rebatch_map, C.byref(ops), samples, None, C.byref(report))
    return results, map_report_of(report, samples), status
