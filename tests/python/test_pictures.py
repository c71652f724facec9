"""docs/pictures.py: the pictures of README.md and docs/benchmarks.md are those of their data."""

import importlib.util
import itertools
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)
NAMES = sorted(pictures.pictures())


def lines_of(text, classes):
    """The corners of each line of these classes, as (x, y)."""
    found = []
    for node in ElementTree.fromstring(text).findall(".//{*}path"):
        if node.get("class") == classes:
            corners = []
            for kind, first, second in re.findall(r"([MLHV])([\d.]+)(?: ([\d.]+))?", node.get("d")):
                x, y = corners[-1] if corners else (0, 0)
                x, y = {"H": (first, y), "V": (x, first)}.get(kind, (first, second))
                corners.append((float(x), float(y)))
            found.append(corners)
    return found


def boxes_of(text):
    """(left, top, right, bottom, words) of each label, as a font has it whose letters are wide."""
    for node in ElementTree.fromstring(text).findall(".//{*}text"):
        words, size = "".join(node.itertext()), float(node.get("font-size", 13))
        wide = 0.62 * size * len(words)
        left = float(node.get("x")) - (wide / 2 if node.get("text-anchor") == "middle" else 0)
        left -= wide if node.get("text-anchor") == "end" else 0
        y = float(node.get("y"))
        yield left, y - 0.75 * size, left + wide, y + 0.2 * size, words


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_in_the_tree_is_the_drawn_one(name):
    drawn = pictures.pictures()[name]
    assert (ROOT / "docs" / name).read_text() == drawn, "make pictures draws it again"
    assert len(drawn.encode()) < 30_000 and "prefers-color-scheme:dark" in drawn
    assert "font-face" not in drawn and "data:" not in drawn


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_inside_and_do_not_overlap(name):
    text = pictures.pictures()[name]
    height = int(ElementTree.fromstring(text).get("height"))
    boxes = list(boxes_of(text))
    assert len(boxes) > 20
    for left, top, right, bottom, words in boxes:
        assert 0 <= left and right <= pictures.WIDTH and 0 <= top and bottom <= height, words
    for a, b in itertools.combinations(boxes, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{a[4]!r} lies on {b[4]!r}"


def test_the_recorded_run_shrinks_grows_and_keeps_its_bits():
    capped, free = pictures.read_run(ROOT / "docs" / "demo.csv")
    assert len(capped) == len(free) and {step["ooms"] for step in free} == {0}
    assert all(step["peak_bytes"] <= step["cap_bytes"] for step in capped)
    assert max(step["peak_bytes"] for step in free) > min(step["cap_bytes"] for step in capped)
    sizes = [step["micro"] for step in capped]
    assert min(sizes) < sizes[0] < sizes[-1] == free[0]["micro"]
    failed = [(step["step"], step["begun"]) for step in capped if step["ooms"]]
    marks = pictures.draw_run(ROOT / "docs" / "demo.csv")
    assert failed and len(lines_of(marks, "line red")) == 2 * len(failed)


def test_the_lines_are_where_the_data_are(tmp_path):
    rows = ["run,step,cap_bytes,peak_bytes,batch,begun,micro,ooms,loss"]
    for run in ("capped", "free"):
        rows += [f"{run},0,{100 << 20},{50 << 20},8,8,4,1,2.5", f"{run},1,0,0,8,4,4,0,3.5"]
    (tmp_path / "run.csv").write_text("\n".join(rows))
    text = pictures.draw_run(tmp_path / "run.csv")
    grid = {words: top for _, top, _, _, words in reversed(list(boxes_of(text)))}  # the first
    cap = lines_of(text, "line orange")[0]
    assert len(cap) == 4 and cap[0][0] == pictures.LEFT and cap[-1][0] == pictures.RIGHT
    peaks, sizes, losses = lines_of(text, "line blue")
    zero, fifty = grid["0"], grid["50"]
    assert cap[0][1] - cap[-1][1] == pytest.approx(2 * (fifty - zero), abs=0.3)
    assert peaks[0][1] - peaks[-1][1] == pytest.approx(fifty - zero, abs=0.3)
    assert len({y for _, y in sizes}) == 1 and "2 × 4" in text
    assert losses[0][1] - losses[1][1] == pytest.approx(grid["2"] - grid["3"], abs=0.3)


def test_another_loss_is_no_picture(tmp_path):
    text = (ROOT / "docs" / "demo.csv").read_text()
    last = text.splitlines()[-1]
    (tmp_path / "run.csv").write_text(text.replace(last, last + "e1"))
    with pytest.raises(ValueError, match="run.csv: expected the same losses"):
        pictures.draw_run(tmp_path / "run.csv")


def test_bars_are_as_high_as_the_table_says():
    ways = "plain loop", "Step", "graphs=True"
    rows = [
        {"table": "small models", "row": row, "cells": dict(zip(ways, ms))}
        for row, ms in (
            ("Net, 64 samples", ("2.0 ms", "4.0 ms", "1.0 ms")),
            ("Net, 64 samples, in four", ("8.0 ms", "16.0 ms", "2.0 ms")),
            ("Net, 64 samples, `install()`", ("1 ms", "1 ms", "1 ms")),
            ("Half, 64 samples, in four", ("1 ms", "1 ms", "1 ms")),
        )
    ]
    assert pictures.read_speeds(rows) == {("Net", 1, 64): [2, 4, 1], ("Net", 4, 16): [8, 16, 2]}
    text = pictures.draw_speed(rows)
    bars = [lines_of(text, colour) for colour in ("quiet", "blue", "green")]
    heights = [[max(y for _, y in box) - min(y for _, y in box) for box in way] for way in bars]
    whole, parts = zip(*heights)
    assert [h / whole[0] for h in whole] == pytest.approx([1, 0.5, 2], abs=0.01)
    assert [h / whole[0] for h in parts] == pytest.approx([0.25, 0.125, 1], abs=0.01)
