"""The figures of PyTorch's native allocator, and when C asks for them."""

import collections

import pytest
import torch

import rebatch.torch as rebatch
from rebatch.testing import fail_once
from rebatch.torch.session.native_meter import NativeMeter

_SETTLED = 10  # steps


def make(loss_fn, model=None, **options):
    model = model or torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False, **options)


def loss_of(model, samples):
    return model(samples).square().mean()


def keeps_to_itself(model, samples):
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    return loss_of(model, samples)


@pytest.fixture
def asked(monkeypatch):
    """Calls of the meter, by name."""
    counts = collections.Counter()

    def counted(name):
        plain = getattr(NativeMeter, name)

        def call(self, *arguments):
            counts[name] += 1
            return plain(self, *arguments)

        monkeypatch.setattr(NativeMeter, name, call)

    for name in ("_begin", "_read", "_available", "_most_bytes", "_statistics"):
        counted(name)
    return counts


@pytest.mark.parametrize("micros", (1, 4, 8))
def test_a_settled_step_asks_what_is_available_and_nothing_else(asked, micros):
    """PyTorch before the first micro-batch and the second one, whose figures the others take."""
    step, batch = make(loss_of, micro_start=16 // micros), torch.randn(16, 4, device="cuda")
    for _ in range(_SETTLED):
        step(batch)
    assert asked["_begin"] and asked["_read"]
    asked.clear()
    step(batch)
    assert step.report.microbatches == micros
    assert asked == {"_available": micros, "_most_bytes": 1, "_statistics": min(micros, 2)}


def test_what_is_promised_to_an_update_is_available_to_it_in_a_settled_step(asked):
    """Though PyTorch is not asked again."""
    found = []

    def before_update():
        meter = step._training.session.meter
        asked.clear()
        for promised in (1 << 20, 0):
            out, meter.promised_bytes = [0], promised
            meter._available(out, None)
            found.append(out[0])

    options = dict(micro_start=4, before_update=before_update)
    step, batch = make(loss_of, **options), torch.randn(16, 4, device="cuda")
    for _ in range(_SETTLED + 1):
        step(batch)
    assert found[-1] - found[-2] == 1 << 20 and not asked["_statistics"]


def test_another_size_is_measured_and_settles_again(asked):
    step = make(loss_of, micro_start=4)
    for samples in (8, 6):
        batch = torch.randn(samples, 4, device="cuda")
        asked.clear()
        step(batch)
        assert asked["_begin"] and asked["_read"]
        for _ in range(_SETTLED):
            step(batch)
        asked.clear()
        step(batch)
        assert asked["_begin"] == (samples == 6)  # its last two samples


def test_a_settled_step_that_runs_out_of_memory_ends_as_another_does(asked):
    """And the steps after it are measured again."""
    model, batch = torch.nn.Linear(4, 1).cuda(), torch.randn(8, 4, device="cuda")
    step = make(loss_of, model)
    for _ in range(_SETTLED):
        step(batch)
    asked.clear()
    with fail_once(model):
        step(batch)
    assert step.report.ooms == 1 and step.report.redone_samples == 8
    assert asked["_read"]
    asked.clear()
    step(batch)
    assert asked["_begin"]


def test_an_oom_that_a_settled_step_keeps_to_itself_is_told_in_the_next_one():
    is_short, batch = False, torch.randn(8, 4, device="cuda")

    def loss_fn(model, samples):
        return keeps_to_itself(model, samples) if is_short else loss_of(model, samples)

    step = make(loss_fn)
    for _ in range(_SETTLED):
        step(batch)
    is_short = True
    step(batch)
    with pytest.warns(RuntimeWarning, match="kept that to itself"):
        step(batch)
