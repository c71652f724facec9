"""examples/python/plot.py: what a log says is in the picture."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rebatch.torch as rebatch_torch
from models import fails_above, make

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "python" / "plot.py"
spec = importlib.util.spec_from_file_location("plot", PROGRAM)
plot = importlib.util.module_from_spec(spec)
sys.modules["plot"] = plot
spec.loader.exec_module(plot)
Point, figure_of, read = plot.Point, plot.figure_of, plot.read

MIB = 1 << 20


def event(kind, step, before, after=None, *, phase=None, **numbers):
    members = dict.fromkeys(plot.NUMBERS, 0)
    members.update(event=kind, phase=phase, step=step, batch=32, micro_before=before)
    return {**members, "micro_after": before if after is None else after, **numbers}


def shrink(step, before, after, phase="forward_backward, before accumulating", **numbers):
    return event("shrink", step, before, after, phase=phase, count=before, **numbers)


def log_of(tmp_path, *events):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    return path


def panel(figure, name):
    """The axes of "memory" or "micro-batch"."""
    (found,) = [axes for axes in figure.axes if axes.get_ylabel().startswith(name + ",")]
    return found


def line(axes, label):
    """The points of a line, by its label."""
    (found,) = [drawn for drawn in axes.lines if drawn.get_label() == label]
    return [tuple(map(float, point)) for point in found.get_xydata()]


def marks(axes, label):
    """Where the marks with a label stand: (step, size)."""
    found = [drawn for drawn in axes.collections if drawn.get_label() == label]
    return [tuple(map(int, point)) for drawn in found for point in drawn.get_offsets()]


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def train(tmp_path):
    """A Step that wrote a log: two OOMs in step 2, growth after steps 4 and 6."""
    model, batch, loss_fn = make("mlp")
    step = rebatch_torch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn,
        grow_after=2,
        log_file=str(tmp_path / "log.jsonl"),
        log_format="json",
        log_level="debug",
    )
    for i in range(10):
        step.loss_fn = fails_above(loss_fn, 4) if i in (2, 3) else loss_fn
        step(batch)


# ---- the picture ----


def test_a_log_of_a_step_becomes_a_picture(tmp_path):
    train(tmp_path)
    plot.write(read(tmp_path / "log.jsonl"), tmp_path / "picture.svg", "a < b")
    text = (tmp_path / "picture.svg").read_text()
    assert "a &lt; b: 10 steps, 2 OOMs, memory not measured" in text
    figure = figure_of(read(tmp_path / "log.jsonl"))
    sizes = panel(figure, "micro-batch")
    assert marks(sizes, "grew") == [(5, 8), (7, 16)]
    assert marks(sizes, "ran out of memory") == [(2, 8), (2, 16)]
    assert labels(sizes) == ["micro-batch", "ran out of memory", "grew"]
    assert (sizes.get_ylabel(), sizes.get_xlabel()) == ("micro-batch, samples", "step")
    for words in ("micro-batch, samples", "ran out of memory"):
        assert words in text


@pytest.mark.parametrize(
    "end, begin", ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"))
)
def test_the_name_says_the_format(tmp_path, end, begin):
    plot.write([Point(0, 8, 8, 8)], tmp_path / f"picture{end}")
    assert (tmp_path / f"picture{end}").read_bytes().startswith(begin)


@pytest.mark.parametrize("name", ("picture", "picture.xyz"))
def test_a_name_without_a_format_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}': expected a name that ends in one of .*[.]svg"):
        plot.write([Point(0, 8, 8, 8)], tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_same_steps_give_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot.write([Point(i, 8, 8, 8, (i + 1) * MIB) for i in range(9)], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot: a picture needs matplotlib.*pip install"):
        plot.write([Point(0, 8, 8, 8)], tmp_path / "picture.svg")


@pytest.mark.parametrize("mib, unit, value", ((300, "MiB", 300), (1536, "GiB", 1.5)))
def test_memory_has_a_panel_of_its_own(mib, unit, value):
    limit = 3 * mib * MIB
    points = [Point(i, 8, 8, 8, mib * MIB, 2 * mib * MIB, limit_bytes=limit) for i in range(3)]
    memory = panel(figure_of(points), "memory")
    assert memory.get_ylabel() == f"memory, {unit}"
    assert labels(memory) == ["limit", "held from the device", "most in use in a step"]
    assert line(memory, "most in use in a step")[-1] == (3, value)
    assert line(memory, "held from the device")[-1] == (3, 2 * value)
    assert line(memory, "limit") == [(0, 3 * value), (1, 3 * value), (2, 3 * value), (3, 3 * value)]


def test_marks_stand_at_their_step_and_size():
    points = [Point(0, 16, 16, 16, MIB), Point(1, 4, 4, 16, MIB, failed=(16, 8), ooms=2)]
    sizes = panel(figure_of(points), "micro-batch")
    assert marks(sizes, "ran out of memory") == [(1, 8), (1, 16)]
    assert line(sizes, "micro-batch") == [(0, 16), (1, 4), (2, 4)]


def test_peaks_that_were_not_measured_are_those_of_the_size():
    sizes = (16, 16, 4, 16, 4)
    peaks = (800, 0, 200, 0, 0)
    points = [Point(i, s, s, 16, p * MIB) for i, (s, p) in enumerate(zip(sizes, peaks))]
    drawn = plot._known_peaks(points)
    assert [value // MIB for _, value in drawn] == [800, 800, 200, 800, 200]


def test_a_short_batch_does_not_change_the_size():
    points = [Point(0, 16, 16, 16), Point(1, 5, 5, 5), Point(2, 16, 16, 16)]
    sizes = panel(figure_of(points), "micro-batch")
    assert {size for _, size in line(sizes, "micro-batch")} == {16}
    assert labels(sizes) == ["micro-batch"]


def test_growth_that_failed_is_an_oom_alone():
    points = [Point(0, 8, 16, 16), Point(1, 8, 8, 16, failed=(16,), ooms=1), Point(2, 8, 8, 16)]
    sizes = panel(figure_of(points), "micro-batch")
    assert marks(sizes, "ran out of memory") == [(1, 16)] and not marks(sizes, "grew")


@pytest.mark.parametrize("count", (1, 2, 10000))
def test_pictures_of_any_length_are_small(tmp_path, count):
    points = [Point(i, 8, 8, 8, (i * 7919 % 1000 + 1) * MIB) for i in range(count)]
    memory = panel(figure_of(points), "memory")
    assert len(line(memory, "most in use in a step")) <= 736
    plot.write(points, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size < 400000


def test_it_can_be_read_on_white_and_on_black():
    """Contrast of 3 to 1 (WCAG 2, graphics) of each colour on either."""
    names = ("_BLUE", "_GREEN", "_RED", "_ORANGE", "_INK")
    for colour in {getattr(plot, name) for name in names}:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        light = sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear))
        assert 1.05 / (light + 0.05) > 3 and (light + 0.05) / 0.05 > 3


# ---- reading ----


def test_sizes_and_ooms_of_a_step(tmp_path):
    path = log_of(
        tmp_path,
        event("step", 0, 32, peak_bytes=5),
        shrink(1, 32, 16),
        shrink(1, 16, 8, "admission"),
        event("grow", 1, 8, 16),
        event("step", 1, 32, 16),
    )
    assert read(path) == [Point(0, 32, 32, 32, 5), Point(1, 8, 16, 32, failed=(32,), ooms=1)]


def test_ooms_of_an_evaluation_are_left_out(tmp_path):
    path = log_of(tmp_path, shrink(0, 32, 16, "map"), event("step", 0, 32))
    assert read(path) == [Point(0, 32, 32, 32)]


def test_a_step_with_a_cost_is_drawn_by_cost(tmp_path):
    path = log_of(
        tmp_path,
        shrink(0, 32, 32, cost=9000, cost_after=4500),
        event("step", 0, 32, cost_after=4500),
        event("step", 1, 32, cost_before=4500, cost_after=4500),
    )
    points = read(path)
    assert [p.size for p in points] == [4500, 4500] and points[0].failed == (9000,)
    sizes = panel(figure_of(points), "micro-batch")
    assert sizes.get_ylabel() == "micro-batch, cost"
    assert marks(sizes, "ran out of memory") == [(0, 9000)]


def test_a_step_that_failed_is_the_last(tmp_path):
    path = log_of(
        tmp_path,
        event("step", 0, 2),
        shrink(1, 2, 1),
        event("exhausted", 1, 1, phase="optimizer_step, before updating"),
    )
    assert read(path)[-1] == Point(1, 1, 1, 32, failed=(2,), ooms=2)
    figure_of(read(path))


def test_a_resumed_run_takes_the_place_of_what_it_does_anew(tmp_path):
    path = log_of(
        tmp_path, *(event("step", i, 32) for i in range(4)), *(event("step", i, 8) for i in (2, 3))
    )
    assert [(p.step, p.size) for p in read(path)] == [(0, 32), (1, 32), (2, 8), (3, 8)]


@pytest.mark.parametrize("line", ("step 3: 4 x 8", '{"event": "step"}', "[]", '{"event": "st'))
def test_a_broken_line_is_said_with_its_number(tmp_path, line):
    path = log_of(tmp_path, event("step", 0, 8))
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ValueError) as caught:
        read(path)
    assert f"{path}:3: expected an event of a log" in str(caught.value)
    assert line in str(caught.value)


def test_a_log_without_steps_is_said(tmp_path):
    with pytest.raises(ValueError, match='has no steps: expected a log with log_level="debug"'):
        read(log_of(tmp_path, shrink(0, 8, 4)))


# ---- the command ----


def command(*arguments):
    return subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True)


def test_the_command(tmp_path):
    log, picture = log_of(tmp_path, event("step", 0, 8)), tmp_path / "picture.svg"
    done = command(log, picture, "--title", "mine")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "mine: 1 step" in picture.read_text()
    log.write_text("broken\n")
    done = command(log, picture)
    assert done.returncode == 1 and done.stderr.startswith(f"plot: {log}:1: expected an event")
    done = command(tmp_path / "absent", picture)
    assert done.returncode == 1 and "No such file" in done.stderr and done.stderr.count("\n") == 1
