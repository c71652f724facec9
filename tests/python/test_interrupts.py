"""An exception of a signal's handler, such as KeyboardInterrupt, arrives anywhere. It comes out of
the step, and no update lacks a micro-batch."""

import ctypes
import pathlib
import signal
import sys
import time

import pytest
import torch

import rebatch.torch as rebatch
from models import fails_above, make, same_bits, state_of

_FOLDER = str(pathlib.Path(rebatch.__file__).parent)


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th call or return of a function of rebatch.torch, counted
    from 1; 0: never."""

    def __init__(self, n):
        self.n, self.seen, self.where = n, 0, ""

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _event(self, frame, event, _argument):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(_FOLDER):
            return
        # Python itself drops what the end of a generator, or a finalizer, raises.
        if code.co_name in ("<genexpr>", "_chain", "_close"):
            return
        self.seen += 1
        if self.seen == self.n:
            sys.setprofile(None)
            self.where = f"{event} of {code.co_name}, line {frame.f_lineno}"
            raise KeyboardInterrupt


def make_step(**options):
    model, batch, loss_fn = make("conv", samples=6)
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        fails_above(loss_fn, 2),
        log_level="quiet",
        on_event=lambda text, event: None,
        lighten=[lambda on: None],
        **options,
    )
    return step, batch


def outcome(n, **options):
    """A first step that is interrupted at event n: (model's state, whether it was, InterruptAt)."""
    step, batch = make_step(**options)
    step._training.open()  # the session of a Step is opened once
    was_interrupted = False
    with InterruptAt(n) as interrupt:
        try:
            step(batch)
        except KeyboardInterrupt:
            was_interrupted = True
    return state_of(step.model), was_interrupted, interrupt


@pytest.mark.parametrize(
    "options",
    ({}, pytest.param({"cost": lambda batch, first, count: count}, marks=pytest.mark.night)),
)
def test_an_interrupt_at_any_call_or_return_comes_out(options, capfd):
    before = state_of(make_step()[0].model)
    after, _, counter = outcome(0, **options)
    assert counter.seen > 200 and not same_bits(before, after)
    updated = 0
    runs = range(1, counter.seen + 1, counter.seen // 300)
    for n in runs:
        state, was_interrupted, interrupt = outcome(n, **options)
        assert was_interrupted == bool(interrupt.where), f"lost at {interrupt.where}"
        is_updated = same_bits(state[:6], after[:6])
        assert is_updated or same_bits(state[:6], before[:6]), f"wrong at {interrupt.where}"
        updated += is_updated
    assert 0 < updated < len(runs)  # those after the update
    said = capfd.readouterr().err
    assert "Exception ignored" not in said


def test_the_step_after_an_interrupt_is_right():
    expected, batch = make_step()
    for _ in range(2):
        expected(batch)
    for n in range(1, 200, 7):
        step, _ = make_step()
        step._training.open()
        before = state_of(step.model)
        with InterruptAt(n), pytest.raises(KeyboardInterrupt):
            step(batch)
        assert same_bits(state_of(step.model)[:6], before[:6])  # parameters
        fresh, _ = make_step()
        step.model.load_state_dict(fresh.model.state_dict())
        for _ in range(2):
            step(batch)
        assert same_bits(state_of(step.model), state_of(expected.model))
        assert step.report.step == 1


def test_an_interrupt_of_a_map_comes_out():
    def double(x):
        return 2 * x

    x = torch.arange(6.0)
    for _ in range(2):  # what later calls know stands after the second
        rebatch.map(double, x)
    with InterruptAt(0) as counter:
        rebatch.map(double, x)
    for n in range(1, counter.seen + 1):
        with InterruptAt(n) as interrupt, pytest.raises(KeyboardInterrupt):
            rebatch.map(double, x)
        assert interrupt.where
        assert torch.equal(rebatch.map(double, x), 2 * x)


def test_timed_interrupts_come_out():
    step, batch = make_step(micro_start=1)
    step(batch)
    raised = False

    def handle(*_):
        nonlocal raised
        raised = True
        raise KeyboardInterrupt

    was = signal.signal(signal.SIGALRM, handle)
    generator = torch.Generator().manual_seed(1)
    try:
        began = time.perf_counter()
        step(batch)
        duration = time.perf_counter() - began
        delays = torch.rand(300, generator=generator) * duration + 1e-5
        for delay in delays.tolist():
            raised, came_out = False, False
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                step(batch)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                came_out = True
            assert came_out == raised
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)


def test_an_interrupt_within_the_update_is_reported():
    step, batch = make_step()

    def interrupted(*_):
        raise KeyboardInterrupt

    hook = step._training.program.update.optimizers[0].register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(batch)
    assert step.report.torn
    hook.remove()
    step(batch)
    assert not step.report.torn


def test_what_is_dropped_elsewhere_is_passed_on():
    """By others than ctypes, and outside of steps."""

    class Broken:
        def __del__(self):
            raise KeyError("theirs")

    @ctypes.CFUNCTYPE(None)
    def broken():
        raise KeyError("theirs")

    step, batch = make_step(micro_start=1)
    loss_fn = step.loss_fn
    seen = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda dropped: seen.append(dropped.err_msg)
    try:
        step.loss_fn = lambda model, samples: (Broken(), loss_fn(model, samples))[1]
        step(batch)
        dropped = len(seen)
        assert dropped >= 3
        broken()
        assert len(seen) == dropped + 1
        step.loss_fn = lambda model, samples: (broken(), loss_fn(model, samples))[1]
        with pytest.raises(KeyError, match="theirs"):
            step(batch)
        assert len(seen) == dropped + 1
    finally:
        sys.unraisablehook = hook


def test_samples_that_are_missing_are_no_update():
    """Where the exception that took them was lost all the same."""
    step, batch = make_step(micro_start=2)
    plain, calls = step._training.callbacks._forward_backward, []

    def skipping(first, count, is_trial):
        calls.append(first)
        if len(calls) != 2:
            plain(first, count, is_trial)

    step._training.callbacks._forward_backward = skipping
    before = state_of(step.model)
    with pytest.raises(RuntimeError, match="4 of 6 samples are in the gradients: expected all"):
        step(batch)
    assert same_bits(state_of(step.model), before)
