"""Draws docs/demo.svg of the run that docs/demo.csv records, and docs/speed.svg of the table of
graphs in docs/figures.json; with --check, prints those that are not so. `make pictures` records
the run first.

Each picture has a background of its own, and is dark where the reader's system is: GitHub and the
site show the same file."""

import csv
import json
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
COLOURS = {  # in light, in dark
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "quiet": ("#59636e", "#9198a1"),
    "grid": ("#d1d9e0", "#30363d"),
    "blue": ("#0969da", "#58a6ff"),
    "orange": ("#bc4c00", "#f0883e"),
    "red": ("#cf222e", "#ff7b72"),
    "green": ("#1a7f37", "#3fb950"),
}
WIDTH, LEFT, RIGHT = 840, 48, 824
MIB = 1 << 20


# ---- SVG ----


def number(value):
    return f"{value:.1f}".removesuffix(".0")


def element(name, text=None, /, **attributes):
    """`class_` is class, and `font_size` font-size."""
    listed = [f'{key.rstrip("_").replace("_", "-")}="{attributes[key]}"' for key in attributes]
    opening = " ".join([name, *listed])
    return f"<{opening}/>" if text is None else f"<{opening}>{text}</{name}>"


def label(x, y, text, colour="quiet", **attributes):
    return element("text", text, x=number(x), y=number(y), class_=colour, **attributes)


def named(colour, text):
    """Words of a label in the colour of what they name: the legend."""
    return element("tspan", text, class_=colour)


def path(points, classes, **attributes):
    x = y = None
    way = ""
    for to_x, to_y in ((number(x), number(y)) for x, y in points):
        if x is None:
            way = f"M{to_x} {to_y}"
        elif to_y == y:
            way += f"H{to_x}"
        else:
            way += f"V{to_y}" if to_x == x else f"L{to_x} {to_y}"
        x, y = to_x, to_y
    return element("path", d=way, class_=classes, **attributes)


def svg(height, title, description, body):
    """A class is a colour of what is filled, or with `line` of a stroke."""
    rules = [
        "".join(
            f".{name}{{fill:{pair[mode]}}}.line.{name}{{fill:none;stroke:{pair[mode]}}}"
            for name, pair in COLOURS.items()
        )
        for mode in (0, 1)
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui,sans-serif" font-size="13">',
        element("title", title),
        element("desc", description),
        f"<style>{rules[0]}\n@media (prefers-color-scheme:dark){{{rules[1]}}}</style>",
        element("rect", width=WIDTH, height=height, class_="paper"),
        label(LEFT, 24, title, "ink", font_size=15, font_weight=600),
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


class Panel:
    """Values from low to high between two heights of the picture."""

    def __init__(self, top, bottom, low, high):
        self.top, self.bottom, self.low, self.high = top, bottom, low, high

    def y(self, value):
        return self.bottom - (self.bottom - self.top) * (value - self.low) / (self.high - self.low)

    def grid(self, values):
        for value in values:
            y = self.y(value)
            yield path([(LEFT, y), (RIGHT, y)], "line grid")
            yield label(LEFT - 8, y + 4, value, text_anchor="end")


# ---- a training under a cap ----


def read_run(file):
    """The steps with the cap, and those without. Raises ValueError where their losses differ."""
    runs = {"capped": [], "free": []}
    with open(file, newline="") as lines:
        for row in csv.DictReader(lines):
            kind, loss = row.pop("run"), float(row.pop("loss"))
            runs[kind].append({"loss": loss, **{key: int(value) for key, value in row.items()}})
    capped, free = runs.values()
    if not capped or [step["loss"] for step in capped] != [step["loss"] for step in free]:
        raise ValueError(f"{file}: expected the same losses with the cap and without one")
    return capped, free


def x_of(step, count):
    return LEFT + (RIGHT - LEFT) * step / count


def stairs(panel, values):
    """Each value until the next, the last to the right edge."""
    return [(x_of(i + j, len(values)), panel.y(v)) for i, v in enumerate(values) for j in (0, 1)]


def changes(values):
    """(step, value) of the first step, and where a value is not that of the step before."""
    return [(i, v) for i, v in enumerate(values) if i == 0 or v != values[i - 1]]


def draw_memory(panel, capped, free):
    caps = [step["cap_bytes"] / MIB for step in capped]
    yield label(
        LEFT,
        panel.top - 8,
        f"memory in MiB: {named('orange', 'cap')}, {named('blue', 'most in use in a step')}, "
        "and without a cap (dashed)",
    )
    yield from panel.grid(range(0, int(max(caps)), 50))
    line = stairs(panel, caps)
    peaks = stairs(panel, [step["peak_bytes"] / MIB for step in capped])
    for edge, points, colour in ((panel.top, line, "orange"), (panel.bottom, peaks, "blue")):
        yield path([(LEFT, edge), *points, (RIGHT, edge)], colour, opacity=0.15)
    dashed = stairs(panel, [step["peak_bytes"] / MIB for step in free])
    yield path(dashed, "line quiet", stroke_width=1.5, stroke_dasharray="5 4")
    yield path(peaks, "line blue", stroke_width=2)
    yield path(line, "line orange", stroke_width=2.5)
    for step, cap in changes(caps):
        yield label(x_of(step, len(caps)) + 6, panel.y(cap) - 6, f"cap {cap:.0f} MiB", "orange")


def draw_sizes(panel, capped):
    sizes = [step["micro"] for step in capped]
    count = len(sizes)
    yield label(
        LEFT,
        panel.top - 8,
        f"{named('blue', 'micro-batches × samples in each')}; {named('red', '×')} does not fit: "
        "the same samples run in smaller micro-batches",
    )
    yield from panel.grid(sorted(set(sizes)))
    yield path(stairs(panel, sizes), "line blue", stroke_width=2)
    for step, size in changes(sizes):
        text = f"{capped[step]['batch'] // size} × {size}"
        start = step + bool(capped[step]["ooms"])  # beside the mark
        yield label(x_of(start, count) + 6, panel.y(size) - 6, text, "blue")
    for step, row in enumerate(capped):
        if row["ooms"]:
            x, y = x_of(step + 0.5, count), panel.y(row["begun"])
            for slope in (-5, 5):
                points = [(x - 5, y - slope), (x + 5, y + slope)]
                yield path(points, "line red", stroke_width=2.5)


def draw_losses(panel, capped, free):
    count = len(capped)
    yield label(
        LEFT,
        panel.top - 8,
        f"loss: {named('blue', 'with the cap')}, drawn over the wide line of the run without one: "
        f"the same bits in all {count} steps",
    )
    yield from panel.grid(range(panel.low, panel.high + 1))
    for run, classes, width in ((free, "line grid", 9), (capped, "line blue", 2)):
        points = [(x_of(i + 0.5, count), panel.y(step["loss"])) for i, step in enumerate(run)]
        yield path(points, classes, stroke_width=width, stroke_linejoin="round")
    for step in range(0, count + 1, 8):
        yield label(x_of(step, count), panel.bottom + 18, step, text_anchor="middle")
    yield label(x_of(4, count), panel.bottom + 18, "step", text_anchor="middle")


def draw_run(file):
    capped, free = read_run(file)
    caps = [step["cap_bytes"] / MIB for step in capped]
    losses = [step["loss"] for step in capped]
    sizes = [step["begun"] for step in capped]
    memory = Panel(62, 192, 0, 1.15 * max(caps))
    micro = Panel(236, 306, 0, 1.3 * max(sizes))
    loss = Panel(346, 416, int(min(losses)), int(max(losses)) + 1)
    return svg(
        444,
        f"A training whose memory shrinks and grows: {len(capped)} updates of "
        f"{capped[0]['batch']} samples",
        "The cap on memory over the steps: "
        + ", ".join(f"{cap:.0f} MiB from step {step}" for step, cap in changes(caps))
        + ". The micro-batch follows, and the loss has the bits of the run without a cap.",
        [
            *draw_memory(memory, capped, free),
            *draw_sizes(micro, capped),
            *draw_losses(loss, capped, free),
        ],
    )


# ---- speed by micro-batch size ----

WAYS = {"plain loop": "quiet", "Step": "blue", "graphs=True": "green"}


def read_speeds(rows):
    """{(model, micro-batches, samples in each): milliseconds of each way} of rows of figures"""
    speeds = {}
    for row in rows:
        name = re.fullmatch(r"([^,]+), (\d+) samples(, in four)?", row["row"])
        if name and row["table"] == "small models":
            parts = 4 if name[3] else 1
            ms = [float(row["cells"][way].removesuffix(" ms")) for way in WAYS]
            speeds[name[1], parts, int(name[2]) // parts] = ms
    whole = {model for model, parts, _ in speeds if parts == 1}
    return {key: ms for key, ms in speeds.items() if key[0] in whole}


def draw_speed(rows):
    speeds = read_speeds(rows)
    whole = {model: ways[0] for (model, parts, _), ways in speeds.items() if parts == 1}
    ratios = {key: [whole[key[0]] / ms for ms in ways] for key, ways in speeds.items()}
    panel = Panel(76, 260, 0, int(max(map(max, ratios.values()))) + 1)
    legend = ", ".join(named(colour, way) for way, colour in WAYS.items())
    body = [
        label(LEFT, 48, f"{legend}; 1 is the plain loop with the batch in one micro-batch"),
        *panel.grid(range(panel.high + 1)),
    ]
    room = (RIGHT - LEFT) / len(ratios)
    bar = 0.3 * room
    for i, ((model, parts, samples), ways) in enumerate(ratios.items()):
        middle = LEFT + (i + 0.5) * room
        body.append(label(middle, panel.bottom + 18, f"{parts} × {samples}", text_anchor="middle"))
        if parts == 1:
            body.append(
                label(LEFT + (i + 1) * room, panel.bottom + 38, model, "ink", text_anchor="middle")
            )
        for j, (ratio, colour) in enumerate(zip(ways, WAYS.values())):
            x, y = middle + (j - 1.5) * bar, panel.y(ratio)
            box = [(x + 1, panel.bottom), (x + 1, y), (x + bar - 1, y), (x + bar - 1, panel.bottom)]
            body.append(path(box, colour))
            style = dict(text_anchor="middle", font_size=11)
            body.append(label(x + bar / 2, y - 4, f"{ratio:.2f}", "ink", **style))
    return svg(
        312,
        "Speed by micro-batch size: micro-batches × samples in each",
        "Samples a second, where 1 is the plain loop with the batch in one micro-batch: "
        + "; ".join(
            f"{model}, {parts} × {samples}: "
            + ", ".join(f"{way} {ratio:.2f}" for way, ratio in zip(WAYS, ways))
            for (model, parts, samples), ways in ratios.items()
        ),
        body,
    )


def pictures():
    """The text of each picture, by its name in docs/."""
    return {
        "demo.svg": draw_run(DOCS / "demo.csv"),
        "speed.svg": draw_speed(json.loads((DOCS / "figures.json").read_text())["rows"]),
    }


def main():
    for name, text in pictures().items():
        if "--check" not in sys.argv:
            (DOCS / name).write_text(text)
        elif (DOCS / name).read_text() != text:
            print(f"  docs/{name}")


if __name__ == "__main__":
    main()
