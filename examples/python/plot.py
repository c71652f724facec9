"""A picture of memory and micro-batch over the steps of a training, drawn by matplotlib.

    step = rebatch.Step(..., log_file="log.jsonl", log_format="json", log_level="debug")

    python3 plot.py log.jsonl picture.png

The name of the file says its format: .svg, .png, .pdf. It needs matplotlib alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """One step. Sizes of micro-batches are in samples, or in cost where the step has a cost."""

    step: int
    size: int  # of the micro-batches that ran; 0: not known
    next_size: int  # with which the next step begins
    batch: int  # samples in the effective batch
    peak_bytes: int = 0  # highest memory in use; 0: not measured
    reserved_bytes: int = 0  # memory held from the device; 0: not known
    failed: tuple[int, ...] = ()  # sizes that ran out of memory
    ooms: int = 0
    is_cost: bool = False
    limit_bytes: int = 0  # of what may be held; 0: none, or not known


# ---- reading a log ----

_SHRINKS = ("retry", "shrink", "lighten", "exhausted", "torn")
_ENDS = ("step", "exhausted", "torn")
NUMBERS = (
    "step",
    "batch",
    "count",
    "cost",
    "micro_before",
    "micro_after",
    "cost_before",
    "cost_after",
    "peak_bytes",
)


def _events(lines: Sequence[str], name: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            wrong = not all(isinstance(event[key], int) for key in NUMBERS)
            wrong = wrong or not {"event", "phase"} <= event.keys()
        except (ValueError, KeyError, TypeError):
            wrong = True
        if wrong:
            raise ValueError(
                f'plot: {name}:{number}: expected an event of a log with log_format="json", '
                f"found {line.strip()[:60]!r}"
            )
        yield event


def _point(event: dict[str, Any], shrinks: list[dict[str, Any]]) -> Point:
    """Of the last event of a step, and those before it about memory that was not there."""
    # An attempt that was refused ("admission") was not started, and is no OOM.
    ooms = [shrink for shrink in shrinks if shrink["phase"] != "admission"]
    is_cost = event["cost_after"] > 0 or any(shrink["cost"] > 0 for shrink in shrinks)
    kind = "cost" if is_cost else "micro"
    failed = [oom["cost"] if is_cost else oom["count"] for oom in ooms]
    size = shrinks[-1][f"{kind}_after"] if shrinks else event[f"{kind}_before"]
    return Point(
        event["step"],
        size,
        event[f"{kind}_after"],
        event["batch"],
        event["peak_bytes"],
        failed=tuple(size for size in failed if size),
        ooms=len(ooms),
        is_cost=is_cost,
    )


def _of_the_latest_run(points: Sequence[Point]) -> list[Point]:
    """Without the steps that were done anew."""
    result: list[Point] = []
    for p in points:
        while result and result[-1].step >= p.step:
            result.pop()
        result.append(p)
    return result


def read(path: str | os.PathLike[str]) -> list[Point]:
    """The steps of a log. Where a run was resumed from a checkpoint, or begun again, what it did
    anew takes the place of what is in the log already. One log is of one Step.

    Raises ValueError for a line that is no event, and for a log without steps."""
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    name = os.fspath(path)
    points: list[Point] = []
    shrinks: list[dict[str, Any]] = []
    for event in _events(lines, name):
        is_of_training = event["phase"] != "map"
        if event["event"] in _SHRINKS and is_of_training:
            shrinks.append(event)
        if event["event"] in _ENDS and is_of_training:
            shrinks = [shrink for shrink in shrinks if shrink["step"] == event["step"]]
            points.append(_point(event, shrinks))
            shrinks = []
    if not points:
        raise ValueError(f'plot: {name} has no steps: expected a log with log_level="debug"')
    return _of_the_latest_run(points)


# ---- drawing ----

_BLUE, _GREEN, _RED, _ORANGE = "#3b82d6", "#2e9e6b", "#dc3c50", "#c2611c"
_INK = "#767676"  # half way between black and white: 4.5 to 1 on either (WCAG 2 AA)
_COLUMNS = 735
_Values = list[tuple[int, float | None]]

# Letters stay letters in an SVG file, and the same steps give the same file.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rebatch",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _INK,
    "grid.alpha": 0.2,
    "legend.frameon": False,
}


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "plot: a picture needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    return Figure(layout="constrained")


def _at_each_column(values: _Values) -> _Values:
    """Where there are more values than columns, the largest in each column."""
    share = -(-len(values) // _COLUMNS)
    groups = (values[i : i + share] for i in range(0, len(values), share))
    return [(g[0][0], max((v for _, v in g if v is not None), default=None)) for g in groups]


def _without_short_batches(points: Sequence[Point]) -> list[Point]:
    """A batch smaller than the micro-batch, as an epoch's last, runs whole and changes no size."""
    result: list[Point] = []
    for p in points:
        before = result[-1].size if result else 0
        if p.size == p.batch < before and not (p.ooms or p.is_cost):
            p = p._replace(size=before, next_size=before)
        result.append(p)
    return result


def _known_peaks(points: Sequence[Point]) -> _Values:
    """Without rebatch's pool, only the first steps at a size are measured."""
    last: dict[int, int] = {}
    values: _Values = []
    for p in points:
        if p.peak_bytes:
            last[p.size] = p.peak_bytes
        values.append((p.step, last.get(p.size)))
    return values


def _line(axes: Axes, values: _Values, end: int, **style: Any) -> None:
    """Values in steps, each until the next; None: not known. The last holds to the right edge."""
    if any(value is not None for _, value in values):
        steps, known = zip(*[*values, (end, values[-1][1])])
        numbers = [float("nan") if value is None else value for value in known]
        axes.plot(steps, numbers, drawstyle="steps-post", **style)


def _draw_memory(axes: Axes, points: Sequence[Point], end: int) -> None:
    peaks = _at_each_column(_known_peaks(points))
    held = _at_each_column([(p.step, p.reserved_bytes or None) for p in points])
    limits = _at_each_column([(p.step, p.limit_bytes or None) for p in points])
    most = max((v for _, v in peaks + held + limits if v), default=0)
    unit, name = (1 << 30, "GiB") if most >= 1 << 30 else (1 << 20, "MiB")
    for values, style in (
        (limits, {"color": _ORANGE, "label": "limit"}),
        (held, {"color": _GREEN, "label": "held from the device", "linestyle": "--"}),
        (peaks, {"color": _BLUE, "label": "most in use in a step"}),
    ):
        _line(axes, [(step, v and v / unit) for step, v in values], end, **style)
    for step in sorted({p.step for p in points if p.ooms}):
        axes.axvline(step, color=_RED, alpha=0.45, linestyle=":")
    axes.set_ylabel(f"memory, {name}")


def _out_of_memory(points: Sequence[Point]) -> list[tuple[int, int]]:
    return sorted({(p.step, size) for p in points for size in p.failed})


def _grown(points: Sequence[Point]) -> list[tuple[int, int]]:
    """Where a step began with a larger size than the one before it, and the size held."""
    return [
        (following.step, p.next_size)
        for p, following in zip(points, points[1:])
        if 0 < p.size < p.next_size and p.next_size not in following.failed
    ]


def _draw_sizes(axes: Axes, points: Sequence[Point], end: int) -> None:
    unit = "cost" if any(p.is_cost for p in points) else "samples"
    sizes: _Values = [(p.step, p.size or None) for p in points]
    _line(axes, sizes, end, color=_BLUE, label="micro-batch")
    for marks, marker, color, label in (
        (_out_of_memory(points), "x", _RED, "ran out of memory"),
        (_grown(points), "^", _GREEN, "grew"),
    ):
        if marks:
            axes.scatter(*zip(*marks), zorder=3, marker=marker, color=color, label=label)
    axes.set_ylabel(f"micro-batch, {unit}")
    axes.set_xlabel("step")


def _remark(points: Sequence[Point], is_measured: bool) -> str:
    ooms = sum(p.ooms for p in points)
    text = f"{len(points):,} step{'s' * (len(points) != 1)}, {ooms:,} OOM{'s' * (ooms != 1)}"
    return text if is_measured else text + ", memory not measured"


def figure_of(points: Sequence[Point], title: str = "Memory and micro-batch") -> Figure:
    """The picture of some steps, in the order in which they were done, as matplotlib has it."""
    points = _of_the_latest_run(points)
    if not points:
        raise ValueError("plot: there are no steps to draw")
    figure = _figure()
    import matplotlib

    is_measured = any(p.peak_bytes for p in points)
    with matplotlib.rc_context(_STYLE):
        count = 2 if is_measured else 1
        figure.set_size_inches(8.4, 1 + 2.4 * count)
        panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
        end = points[-1].step + 1
        if is_measured:
            _draw_memory(panels[0], points, end)
        _draw_sizes(panels[-1], _without_short_batches(points), end)
        for axes in panels:
            axes.set_xlim(points[0].step, end)
            axes.set_ylim(bottom=0)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0)
        figure.suptitle(f"{title}: {_remark(points, is_measured)}")
    return figure


def write(
    points: Sequence[Point],
    picture: str | os.PathLike[str],
    title: str = "Memory and micro-batch",
) -> None:
    """Draw some steps, in the order in which they were done, into a file.

    The end of its name says the format, such as .svg or .png. Raises ValueError for another end and
    where there are no steps, ImportError without matplotlib.
    """
    figure = figure_of(points, title)
    import matplotlib

    end = os.path.splitext(picture)[1][1:].lower()
    known = sorted(figure.canvas.get_supported_filetypes())
    if end not in known:
        raise ValueError(
            f"plot: the picture is {os.fspath(picture)!r}: expected a name that ends in one of "
            + ", ".join(f".{name}" for name in known)
        )
    with matplotlib.rc_context(_STYLE):
        stamp = {"metadata": {"Date": None}} if end in ("svg", "svgz") else {}
        figure.savefig(picture, transparent=True, dpi=150, **stamp)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Draws memory and micro-batch over the steps of a training.",
    )
    parser.add_argument("log", help='of a Step with log_format="json" and log_level="debug"')
    parser.add_argument("picture", help="the file to write: .svg, .png, .pdf")
    parser.add_argument("--title", default="Memory and micro-batch")
    options = parser.parse_args(arguments)
    try:
        write(read(options.log), options.picture, options.title)
    except (ImportError, OSError, ValueError) as error:
        text = str(error)
        print(text if text.startswith("plot: ") else f"plot: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
