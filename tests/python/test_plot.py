"""rebatch.plot: what a log says is in the picture."""

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

import rebatch.plot
import rebatch.torch as rebatch_torch
from models import fails_above, make
from rebatch.plot import Point, read, svg_of

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
MIB = 1 << 20


def event(kind, step, before, after=None, *, phase=None, **numbers):
    members = {name: 0 for name in NUMBERS}
    members.update(event=kind, phase=phase, step=step, batch=32, micro_before=before)
    return {**members, "micro_after": before if after is None else after, **numbers}


def shrink(step, before, after, phase="forward_backward, before accumulating", **numbers):
    return event("shrink", step, before, after, phase=phase, count=before, **numbers)


def log_of(tmp_path, *events):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    return path


def parsed(text):
    root = ElementTree.fromstring(text)
    return [(e.tag.split("}")[1], e.attrib, e.text) for e in root.iter()]


def words(text):
    return [value for tag, _, value in parsed(text) if tag == "text"]


def titles(text):
    return [value for tag, _, value in parsed(text) if tag == "title"][1:]


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
    return step


# ---- the picture ----


def test_a_log_of_a_step_becomes_a_picture(tmp_path):
    train(tmp_path)
    rebatch.plot.draw(tmp_path / "log.jsonl", tmp_path / "picture.svg", title="a < b")
    text = (tmp_path / "picture.svg").read_text()
    assert titles(text) == [
        "step 5: grew from 4 to 8 samples",
        "step 7: grew from 8 to 16 samples",
        "step 2: out of memory, micro-batch 16 samples",
        "step 2: out of memory, micro-batch 8 samples",
    ]
    assert "a < b" in words(text) and "10 steps, 2 OOMs, memory not measured" in words(text)
    assert {"micro-batch", "ran out of memory", "grew", "micro-batch, samples"} <= set(words(text))


def test_a_step_draws_what_this_process_did(tmp_path):
    step = train(tmp_path)
    step.plot(tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert titles(text) == [
        "step 5: grew from 4 to 8 samples",
        "step 7: grew from 8 to 16 samples",
        "step 2: out of memory, micro-batch 16 samples",
    ]
    assert "10 steps, 2 OOMs, memory not measured" in words(text)


def test_a_step_that_did_not_run_has_no_picture(tmp_path):
    model, _, loss_fn = make("mlp")
    step = rebatch_torch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    with pytest.raises(ValueError, match="there are no steps to draw"):
        step.plot(tmp_path / "picture.svg")
    assert not (tmp_path / "picture.svg").exists()


@pytest.mark.parametrize("mib, unit, value", ((300, "MiB", "300"), (1536, "GiB", "1.5")))
def test_memory_has_a_panel_of_its_own(mib, unit, value):
    points = [Point(i, 8, 8, 8, mib * MIB, 2 * mib * MIB) for i in range(3)]
    text = svg_of(points)
    assert {f"memory, {unit}", "most in use in a step", "held from the device"} <= set(words(text))
    assert value in words(text) and "3 steps, 0 OOMs" in words(text)


def test_marks_stand_at_their_step_and_size():
    """The panel of sizes is from y 300, size 16, to 480, size 0; the steps from x 62 to 797."""
    points = [Point(0, 16, 16, 16, MIB), Point(1, 4, 4, 16, MIB, failed=(16, 8), ooms=2)]
    crosses = re.findall(r'd="(M[0-9.]+ [0-9.]+)m-4 -4', svg_of(points))
    assert crosses == ["M429.5 300.0", "M429.5 390.0"]
    assert 'd="M62.0 300.0H429.5V435.0H797.0"' in svg_of(points)


def test_peaks_that_were_not_measured_are_those_of_the_size():
    sizes = (16, 16, 4, 16, 4)
    peaks = (800, 0, 200, 0, 0)
    points = [Point(i, s, s, 16, p * MIB) for i, (s, p) in enumerate(zip(sizes, peaks))]
    drawn = rebatch.plot._known_peaks(points)
    assert [value // MIB for _, value in drawn] == [800, 800, 200, 800, 200]


def test_a_short_batch_does_not_change_the_size():
    points = [Point(0, 16, 16, 16), Point(1, 5, 5, 5), Point(2, 16, 16, 16)]
    assert 'd="M62.0 64.0H797.0"' in svg_of(points) and titles(svg_of(points)) == []


def test_growth_that_failed_is_an_oom_alone():
    points = [Point(0, 8, 16, 16), Point(1, 8, 8, 16, failed=(16,), ooms=1), Point(2, 8, 8, 16)]
    assert titles(svg_of(points)) == ["step 1: out of memory, micro-batch 16 samples"]


@pytest.mark.parametrize("count", (1, 2, 10000))
def test_pictures_of_any_length_are_small(count):
    points = [Point(i, 8, 8, 8, (i * 7919 % 1000 + 1) * MIB) for i in range(count)]
    text = svg_of(points)
    assert parsed(text) and len(text) < 30000


def test_it_can_be_read_on_white_and_on_black():
    """Contrast of 3 to 1 (WCAG 2, graphics) of each colour on either."""
    colours = {getattr(rebatch.plot, name) for name in ("_BLUE", "_GREEN", "_RED", "_INK")}
    for colour in colours:
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
    path = log_of(tmp_path, shrink(0, 32, 16, "rebatch_map"), event("step", 0, 32))
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
    text = svg_of(points)
    assert "micro-batch, cost" in words(text) and "10k" in words(text)
    assert titles(text) == ["step 0: out of memory, micro-batch 9,000 cost"]


def test_a_step_that_failed_is_the_last(tmp_path):
    path = log_of(
        tmp_path,
        event("step", 0, 2),
        shrink(1, 2, 1),
        event("exhausted", 1, 1, phase="optimizer_step, before updating"),
    )
    assert read(path)[-1] == Point(1, 1, 1, 32, failed=(2,), ooms=2)
    svg_of(read(path))


def test_a_resumed_run_takes_the_place_of_what_it_does_anew(tmp_path):
    path = log_of(
        tmp_path, *(event("step", i, 32) for i in range(4)), *(event("step", i, 8) for i in (2, 3))
    )
    assert [(p.step, p.size) for p in read(path)] == [(0, 32), (1, 32), (2, 8), (3, 8)]


def test_a_step_that_goes_back_draws_what_it_did_last(tmp_path):
    step = train(tmp_path)
    step.load_state_dict({**step.state_dict(), "step": 1})
    step(make("mlp")[1])
    step.plot(tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert "2 steps, 0 OOMs, memory not measured" in words(text)


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
    return subprocess.run(
        [sys.executable, "-m", "rebatch.plot", *arguments], capture_output=True, text=True
    )


def test_the_command(tmp_path):
    log, picture = log_of(tmp_path, event("step", 0, 8)), tmp_path / "picture.svg"
    done = command(log, picture, "--title", "mine")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "mine" in words(picture.read_text())
    log.write_text("broken\n")
    done = command(log, picture)
    assert done.returncode == 1 and done.stderr.startswith(f"rebatch: {log}:1: expected an event")
    done = command(tmp_path / "absent", picture)
    assert done.returncode == 1 and "No such file" in done.stderr and done.stderr.count("\n") == 1


def test_it_needs_no_pytorch():
    code = "import sys, rebatch.plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
