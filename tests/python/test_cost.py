"""What a Step costs where nothing goes wrong, in calls of Python and C functions beyond a plain
loop's, which do not depend on the machine. bench/small.py counts them, and has the times."""

import importlib
import pathlib
import sys

import pytest
import torch
from torch import nn

import rebatch.torch as rebatch
from rebatch.testing import fail_once
from rebatch.torch.undo.changes_outside import Told

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"

pytestmark = pytest.mark.filterwarnings("ignore::rebatch.torch.CutWarning")


@pytest.fixture(scope="module")
def small():
    """The module bench/small.py, which imports another of that folder."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("small")
    finally:
        sys.path.remove(str(BENCH))
        for name in ("small", "pytorch"):
            sys.modules.pop(name, None)


def mlp(layers):
    blocks = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(8, 10))


def with_batch_norm(layers):
    blocks = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    return nn.Sequential(*blocks, nn.Linear(8, 10))


def batch_of(samples):
    return torch.randn(samples, 8), torch.randint(0, 10, (samples,))


def beyond(small, make, layers, micros):
    """Calls of a settled step of 16 samples beyond those of a plain loop."""
    small.TRAININGS["made"] = (lambda: make(layers), batch_of, 16, False)
    training = small.Training("made", micros, "cpu")
    return small.calls_of(training.run_step) - small.calls_of(training.run_plain)


@pytest.mark.parametrize(
    "make, micros, most",
    ((mlp, 1, 260), (mlp, 4, 480), (with_batch_norm, 1, 285), (with_batch_norm, 4, 590)),
)
def test_calls_of_a_settled_step_beyond_those_of_a_plain_loop(small, make, micros, most):
    assert beyond(small, make, 4, micros) <= most


@pytest.mark.parametrize(
    "make, micros, most",
    ((mlp, 1, 4), (mlp, 4, 4), (with_batch_norm, 1, 4), (with_batch_norm, 4, 4)),
)
def test_calls_of_a_settled_step_with_60_layers_more(small, make, micros, most):
    """No call for each parameter: what is looked at of all is a list, made in one."""
    assert beyond(small, make, 64, micros) - beyond(small, make, 4, micros) <= most


def test_an_oom_leaves_no_cost_behind(small):
    """The steps after it are those of a run that began at that size."""
    calls = []
    for has_failed in (True, False):
        torch.manual_seed(0)
        model, batch = mlp(4), batch_of(16)
        step = rebatch.Step(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            lambda model, samples: nn.functional.cross_entropy(model(samples[0]), samples[1]),
            log_level="quiet",
            growth=False,
            micro_start=16 if has_failed else 8,
        )
        for i in range(5):
            step(batch)
        if has_failed:
            with fail_once(model):
                step(batch)
        calls.append(small.calls_of(lambda: step(batch)))
        assert step.report.micro == 8
    assert calls[0] <= calls[1]


def test_an_attempt_after_an_oom_looks_at_its_beginning_and_end_alone(monkeypatch):
    """Where the one that failed has left nothing: no look costs what a module does."""
    looks, marks = [], Told._marks

    def noted(told):
        looks.append(told)
        return marks(told)

    monkeypatch.setattr(Told, "_marks", noted)
    model = mlp(20)
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda model, samples: nn.functional.cross_entropy(model(samples[0]), samples[1]),
        log_level="quiet",
    )
    with fail_once(model):
        step(batch_of(16))
    assert step.report.ooms == 1
    assert len(looks) <= 6  # of two attempts
