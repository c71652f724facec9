"""Functions over samples outside of training, in as many calls as memory asks for."""

from __future__ import annotations

import ctypes as C
from typing import Any, Callable, List, Tuple

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch.torch._batch import slice_batch
from rebatch.torch._report import MapReport, map_report_of
from rebatch.torch._session import Session


def run_map(
    session: Session,
    function: Callable[[Any], Any],
    batch: Any,
    samples: int,
    key: int,
    slice: Callable = None,
) -> Tuple[List[tuple], MapReport, int]:
    """Call function(samples) without gradients until all samples are done: a list of (count,
    result), in ascending order; the report; and the status for raise_failure(). A call that runs
    out of memory is repeated with fewer samples."""
    results: List[tuple] = []

    def run(microbatch, _user) -> int:
        first, count = microbatch[0].first, microbatch[0].count
        return session.run(body, first, count)

    def body(first: int, count: int) -> None:
        if slice:
            part = slice(batch, first, count)
        else:
            part = slice_batch(batch, first, count, samples)
        with torch.no_grad():
            result = function(part)
        results.append((count, result))

    ops = c.MapOps(run=c.ForwardBackward(run), key=key)
    report = c.StepReport()
    status = session.call(lib.rebatch_map, C.byref(ops), samples, None, C.byref(report))
    return results, map_report_of(report, samples), status


def _named(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def join_results(results: List[Any]) -> Any:
    """One result of several, each with the samples in its first dimension."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            raise ValueError(
                "rebatch: the model returned a scalar: expected tensors with the samples in their "
                "first dimension"
            )
        return torch.cat(results) if len(results) > 1 else first
    if isinstance(first, dict):
        joined = {k: join_results([r[k] for r in results]) for k in first if first[k] is not None}
        return joined if type(first) is dict else type(first)(**joined)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join_results(list(parts)) for parts in zip(*results)))
    if isinstance(first, tuple):
        return tuple(join_results(list(parts)) for parts in zip(*results))
    if isinstance(first, list):
        return [item for result in results for item in result]
    raise ValueError(
        f"rebatch: the model returned {_named(first)}: expected tensors, or dicts, tuples or "
        "lists of them"
    )
