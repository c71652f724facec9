"""A picture of memory and micro-batch over the steps of a training, as SVG.

    step = rebatch.Step(..., log_file="log.jsonl", log_format="json", log_level="debug")

    python -m rebatch.plot log.jsonl picture.svg
    rebatch.plot.draw("log.jsonl", "picture.svg")     # the same
    step.plot("picture.svg")                          # of this process, without a log

It needs neither PyTorch nor another library.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from html import escape
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union


class Point(NamedTuple):
    """One step. Sizes of micro-batches are in samples, or in cost where the step has a cost."""

    step: int
    size: int  # of the micro-batches that ran; 0: not known
    next_size: int  # with which the next step begins
    batch: int  # samples in the effective batch
    peak_bytes: int = 0  # highest memory in use; 0: not measured
    reserved_bytes: int = 0  # memory held from the device; 0: not known
    failed: Tuple[int, ...] = ()  # sizes that ran out of memory
    ooms: int = 0
    is_cost: bool = False


# ---- reading a log ----

_SHRINKS = ("retry", "shrink", "lighten", "exhausted", "torn")
_ENDS = ("step", "exhausted", "torn")
_NUMBERS = (
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


def _events(lines: Sequence[str], name: str) -> Iterator[dict]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            wrong = not all(isinstance(event[key], int) for key in _NUMBERS)
            wrong = wrong or not {"event", "phase"} <= event.keys()
        except (ValueError, KeyError, TypeError):
            wrong = True
        if wrong:
            raise ValueError(
                f'rebatch: {name}:{number}: expected an event of a log with log_format="json", '
                f"found {line.strip()[:60]!r}"
            )
        yield event


def _point(event: dict, shrinks: List[dict]) -> Point:
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


def _of_the_latest_run(points: Sequence[Point]) -> List[Point]:
    """Without the steps that were done anew."""
    result: List[Point] = []
    for p in points:
        while result and result[-1].step >= p.step:
            result.pop()
        result.append(p)
    return result


def read(path: Union[str, os.PathLike]) -> List[Point]:
    """The steps of a log. Where a run was resumed from a checkpoint, or begun again, what it did
    anew takes the place of what is in the log already. One log is of one Step.

    Raises ValueError for a line that is no event, and for a log without steps."""
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    name = os.fspath(path)
    points: List[Point] = []
    shrinks: List[dict] = []
    for event in _events(lines, name):
        is_of_training = event["phase"] != "rebatch_map"
        if event["event"] in _SHRINKS and is_of_training:
            shrinks.append(event)
        if event["event"] in _ENDS and is_of_training:
            shrinks = [shrink for shrink in shrinks if shrink["step"] == event["step"]]
            points.append(_point(event, shrinks))
            shrinks = []
    if not points:
        raise ValueError(f'rebatch: {name} has no steps: expected a log with log_level="debug"')
    return _of_the_latest_run(points)


# ---- drawing ----

_LEFT, _WIDTH, _RIGHT = 62, 735, 43
_BLUE, _GREEN, _RED = "#3b82d6", "#2e9e6b", "#dc3c50"
_INK = "#767676"  # half way between black and white: 4.5 to 1 on either (WCAG 2 AA)


def _number(value: float) -> str:
    """In at most six characters, up to 10 million."""
    if value >= 10000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _decimal_step(most: float, marks: int) -> float:
    """1, 2 or 5 times a power of ten: the smallest with at most so many intervals."""
    power = 10 ** math.floor(math.log10(most / marks))
    return next(power * k for k in (1, 2, 5, 10) if math.ceil(most / (power * k)) <= marks)


def _binary_step(most: float, marks: int) -> float:
    """A power of two."""
    return 2.0 ** math.ceil(math.log2(most / marks))


@dataclass
class _Panel:
    """A part of the picture with an axis of values, from 0."""

    top: float
    height: float
    title: str
    mark: float  # between the lines of the axis
    most: float

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.most)


def _panel(top: float, title: str, largest: float, mark: float) -> _Panel:
    return _Panel(top, 180, title, mark, mark * math.ceil(largest / mark))


class _Picture:
    """Lines of SVG, over an axis of steps."""

    def __init__(self, points: Sequence[Point], height: float):
        self.first, self.end = points[0].step, points[-1].step + 1
        self.height = height
        self.lines: List[str] = []

    def x(self, step: float) -> float:
        return _LEFT + _WIDTH * (step - self.first) / (self.end - self.first)

    def text(self, x: float, y: float, words: str, more: str = "") -> None:
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>')

    def shape(self, path: str, more: str, title: str = "") -> None:
        end = f"><title>{escape(title)}</title></path>" if title else "/>"
        self.lines.append(f'<path d="{path}" {more}{end}')

    def axes(self, panel: _Panel) -> None:
        for i in range(round(panel.most / panel.mark) + 1):
            y = panel.y(i * panel.mark)
            opacity = ".2" if i else ".8"
            self.shape(f"M{_LEFT} {y:.1f}h{_WIDTH}", f'stroke="{_INK}" stroke-opacity="{opacity}"')
            self.text(_LEFT - 7, y + 4, _number(i * panel.mark), ' text-anchor="end"')
        middle = panel.top + panel.height / 2
        self.lines.append(
            f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">'
            f"{panel.title}</text>"
        )

    def step_axis(self, y: float) -> None:
        mark = max(1, int(_decimal_step(self.end - self.first, 12)))
        for step in range(-(-self.first // mark) * mark, self.end + 1, mark):
            self.text(self.x(step), y, _number(step), ' text-anchor="middle"')
        self.text(_LEFT + _WIDTH / 2, y + 17, "step", ' text-anchor="middle"')

    def line(
        self, panel: _Panel, values: Sequence[Tuple[int, Optional[float]]], style: str
    ) -> None:
        """Values in steps; None: not known. The last is written at the right edge."""
        path, before = "", None
        for step, value in values:
            x = self.x(step)
            if value is None:
                path += f"H{x:.1f}" if before is not None else ""
            elif before is None:
                path += f"M{x:.1f} {panel.y(value):.1f}"
            elif value != before:
                path += f"H{x:.1f}V{panel.y(value):.1f}"
            before = value
        if path:
            path += f"H{self.x(self.end):.1f}" if before is not None else ""
            self.shape(path, f'fill="none" {style}')

    def value_at_end(self, panel: _Panel, value: float, colour: str) -> None:
        x, y = _LEFT + _WIDTH + 6, panel.y(value) + 4
        self.text(x, y, _number(value), f' fill="{colour}"')

    def legend(self, x: float, y: float, mark: str, words: str) -> float:
        """An entry; where the next one begins."""
        self.lines.append(mark.replace("X", f"{x:.1f}").replace("Y", f"{y - 4:.1f}"))
        self.text(x + 28, y, words)
        return x + 28 + 6.6 * len(words) + 24

    def written(self, title: str, remark: str) -> str:
        width = _LEFT + _WIDTH + _RIGHT
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {self.height:.0f}" '
            f'width="{width}" height="{self.height:.0f}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="12" fill="{_INK}">',
            f"<title>{escape(title)}</title>",
            f'<text x="{_LEFT}" y="18" font-size="15">{escape(title)}</text>',
            f'<text x="{_LEFT + _WIDTH}" y="18" text-anchor="end">{escape(remark)}</text>',
        ]
        return "\n".join([*head, *self.lines, "</svg>", ""])


_PEAK = f'stroke="{_BLUE}" stroke-width="1.6"'
_HELD = f'stroke="{_GREEN}" stroke-width="1.6" stroke-dasharray="5 3"'
_SIZE = f'stroke="{_BLUE}" stroke-width="1.8"'
_CROSS = f'stroke="{_RED}" stroke-width="1.8"'
_OOM_LINE = f'stroke="{_RED}" stroke-opacity=".45" stroke-dasharray="2 3"'


def _at_each_column(values: List[Tuple[int, Optional[float]]]) -> List[tuple]:
    """Where there are more values than columns, the largest in each column."""
    share = -(-len(values) // _WIDTH)
    groups = (values[i : i + share] for i in range(0, len(values), share))
    return [(g[0][0], max((v for _, v in g if v is not None), default=None)) for g in groups]


def _without_short_batches(points: Sequence[Point]) -> List[Point]:
    """A batch that is smaller than the micro-batch, as the last of an epoch is, runs in one piece,
    and does not change the size."""
    result: List[Point] = []
    for p in points:
        before = result[-1].size if result else 0
        if p.size == p.batch < before and not (p.ooms or p.is_cost):
            p = p._replace(size=before, next_size=before)
        result.append(p)
    return result


def _known_peaks(points: Sequence[Point]) -> List[Tuple[int, Optional[float]]]:
    """Without rebatch's pool, only the first steps at a size are measured."""
    last: Dict[int, int] = {}
    values: List[Tuple[int, Optional[float]]] = []
    for p in points:
        if p.peak_bytes:
            last[p.size] = p.peak_bytes
        values.append((p.step, last.get(p.size)))
    return values


def _draw_memory(picture: _Picture, points: Sequence[Point]) -> None:
    peaks = _at_each_column(_known_peaks(points))
    held = _at_each_column([(p.step, p.reserved_bytes or None) for p in points])
    most = max((v for _, v in peaks + held if v), default=0)
    unit, name = (1 << 30, "GiB") if most >= 1 << 30 else (1 << 20, "MiB")
    panel = _panel(64, f"memory, {name}", most / unit, _binary_step(most / unit, 5))
    picture.axes(panel)
    for x in sorted({round(picture.x(p.step), 1) for p in points if p.ooms}):
        picture.shape(f"M{x} {panel.top}v{panel.height}", _OOM_LINE)
    x = picture.legend(_LEFT, 44, f'<path d="MX Yh22" {_PEAK}/>', "most in use in a step")
    if any(v for _, v in held):
        picture.legend(x, 44, f'<path d="MX Yh22" {_HELD}/>', "held from the device")
    for values, style in ((held, _HELD), (peaks, _PEAK)):
        picture.line(panel, [(s, v and v / unit) for s, v in values], style)
    if peaks[-1][1]:
        picture.value_at_end(panel, peaks[-1][1] / unit, _BLUE)


def _mark_ooms(picture: _Picture, panel: _Panel, points: Sequence[Point], unit: str) -> None:
    seen = set()
    for p in points:
        for size in p.failed:
            at = f"M{picture.x(p.step):.1f} {panel.y(size):.1f}"
            if at not in seen:
                title = f"step {p.step}: out of memory, micro-batch {size:,} {unit}"
                picture.shape(f"{at}m-4 -4l8 8m0 -8l-8 8", _CROSS, title)
            seen.add(at)


def _mark_growth(picture: _Picture, panel: _Panel, points: Sequence[Point], unit: str) -> None:
    for p, following in zip(points, points[1:]):
        held = p.next_size not in following.failed
        if 0 < p.size < p.next_size and held:
            at = f"M{picture.x(following.step):.1f} {panel.y(p.next_size):.1f}"
            title = f"step {following.step}: grew from {p.size:,} to {p.next_size:,} {unit}"
            picture.shape(f"{at}m-5 5l5 -9l5 9z", f'fill="{_GREEN}"', title)


def _size_panel(top: float, points: Sequence[Point], unit: str) -> _Panel:
    largest = max(max([p.size, *p.failed]) for p in points)
    largest = max([1, largest, *(p.next_size for p in points[:-1])])
    if unit == "cost" or largest > 8192:
        mark = _decimal_step(largest, 5)
    else:
        mark = _binary_step(largest, 5)
    return _panel(top, f"micro-batch, {unit}", largest, max(1, mark))


def _draw_sizes(picture: _Picture, top: float, points: Sequence[Point]) -> None:
    unit = "cost" if any(p.is_cost for p in points) else "samples"
    panel = _size_panel(top, points, unit)
    picture.axes(panel)
    x = picture.legend(_LEFT, top - 20, f'<path d="MX Yh22" {_SIZE}/>', "micro-batch")
    if any(p.failed for p in points):
        mark = f'<path d="MX Ym7 -4l8 8m0 -8l-8 8" {_CROSS}/>'
        x = picture.legend(x, top - 20, mark, "ran out of memory")
    if any(0 < p.size < p.next_size for p in points[:-1]):
        picture.legend(x, top - 20, f'<path d="MX Ym6 5l5 -9l5 9z" fill="{_GREEN}"/>', "grew")
    picture.line(panel, [(p.step, p.size or None) for p in points], _SIZE)
    _mark_growth(picture, panel, points, unit)
    _mark_ooms(picture, panel, points, unit)
    if points[-1].size:
        picture.value_at_end(panel, points[-1].size, _BLUE)


def svg_of(points: Sequence[Point], title: str = "Memory and micro-batch") -> str:
    """The picture of some steps, in the order in which they were done, as text."""
    points = _of_the_latest_run(points)
    if not points:
        raise ValueError("rebatch: there are no steps to draw")
    is_measured = any(p.peak_bytes for p in points)
    top = 300 if is_measured else 64
    picture = _Picture(points, top + 230)
    if is_measured:
        _draw_memory(picture, points)
    _draw_sizes(picture, top, _without_short_batches(points))
    picture.step_axis(top + 198)
    ooms = sum(p.ooms for p in points)
    remark = f"{len(points):,} step{'s' * (len(points) != 1)}, {ooms:,} OOM{'s' * (ooms != 1)}"
    if not is_measured:
        remark += ", memory not measured"
    return picture.written(title, remark)


def write(
    points: Sequence[Point],
    picture: Union[str, os.PathLike],
    title: str = "Memory and micro-batch",
) -> None:
    """Draw some steps, in the order in which they were done, into an SVG file."""
    text = svg_of(points, title)
    with open(picture, "w", encoding="utf-8") as file:
        file.write(text)


def draw(
    log: Union[str, os.PathLike],
    picture: Union[str, os.PathLike],
    title: str = "Memory and micro-batch",
) -> None:
    """Draw a log that a Step wrote with log_format="json" and log_level="debug" into an SVG file.

    Raises ValueError for a line that is no event, with its number, and for a log without steps."""
    write(read(log), picture, title)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rebatch.plot",
        description="Draws memory and micro-batch over the steps of a training.",
    )
    parser.add_argument("log", help='of a Step with log_format="json" and log_level="debug"')
    parser.add_argument("picture", help="the SVG file to write")
    parser.add_argument("--title", default="Memory and micro-batch")
    options = parser.parse_args(arguments)
    try:
        draw(options.log, options.picture, options.title)
    except (OSError, ValueError) as error:
        text = str(error)
        print(text if text.startswith("rebatch: ") else f"rebatch: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
