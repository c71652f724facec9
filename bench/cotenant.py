"""Draws docs/cotenant.svg from what bench/cotenant.c has written.

python3 bench/cotenant.py FILE.csv PICTURE.svg; it needs matplotlib.
"""

import csv
import sys

import matplotlib
from matplotlib.figure import Figure

BLUE, GREEN, RED, ORANGE = "#3b82d6", "#2e9e6b", "#dc3c50", "#c2611c"
INK = "#767676"  # half way between black and white: 4.5 to 1 on either (WCAG 2 AA)
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rebatch",
    **{f"{name}.color": INK for name in ("text", "xtick", "ytick", "grid")},
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.2,
    "legend.frameon": False,
}


def rows_of(path):
    """The numbers of each kind of row, column by column."""
    rows = {}
    with open(path, newline="") as file:
        for kind, *numbers in csv.reader(file):
            rows.setdefault(kind, []).append(tuple(map(float, numbers)))
    return {kind: list(zip(*numbers)) for kind, numbers in rows.items()}


def steps(axes, end, times, values, **style):
    """Each value until the next, the last to the end; without points at which nothing changes."""
    kept = [
        (time, value)
        for i, (time, value) in enumerate(zip(times, values))
        if i == 0 or value != values[i - 1]
    ]
    times, values = zip(*kept, (end, values[-1]))
    axes.plot(times, values, drawstyle="steps-post", **style)


def draw(rows, picture):
    (end,) = rows["end"][0]
    figure = Figure(figsize=(8.4, 5.6), layout="constrained")
    memory, sizes = figure.subplots(2, 1, sharex=True)
    times, room = rows["room"]
    steps(memory, end, times, room, color=ORANGE, label="room: what the co-tenant leaves")
    edges, below = [*times, end], [*room, room[-1]]
    memory.fill_between(edges, below, max(room), step="post", color=ORANGE, alpha=0.15)
    times, peak, held, micro = rows["step"]
    steps(memory, end, times, held, color=GREEN, linestyle="--", label="held by the pool")
    steps(memory, end, times, peak, color=BLUE, label="most in use in a step")
    memory.set_ylabel("memory, MiB")
    steps(sizes, end, *rows["best"], color=INK, linestyle=":", label="best fixed size of the phase")
    steps(sizes, end, times, micro, color=BLUE, label="micro-batch")
    if "failed" in rows:
        sizes.scatter(*rows["failed"], marker="x", color=RED, label="growth that did not hold")
    sizes.set_ylabel("micro-batch, samples")
    sizes.set_xlabel("virtual time, minutes")
    for axes in (memory, sizes):
        axes.grid(axis="y")
        axes.set_xlim(0, end)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0)
    figure.suptitle("A co-tenant that comes and goes")
    figure.savefig(picture, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    with matplotlib.rc_context(STYLE):
        draw(rows_of(sys.argv[1]), sys.argv[2])
