"""Modes of the process that loss_fn switches on and off by two calls: an attempt that fails between
them leaves none of them switched."""

import warnings

import pytest
import torch
from torch.nn.utils import parametrize

import rebatch.torch as rebatch
from models import same_bits
from rebatch.testing import fail_once

# What loss_fn notes of the modes.
pytestmark = pytest.mark.filterwarnings("ignore:rebatch. loss_fn changes 'began'")


def autocast_by_hand():
    context = torch.autocast("cpu", torch.bfloat16)
    return lambda: context.__enter__(), lambda: context.__exit__(None, None, None)


def no_grad_by_hand():
    context = torch.no_grad()
    return lambda: context.__enter__(), lambda: context.__exit__(None, None, None)


def cache_of_parametrize():
    def switch_on():
        parametrize._cache_enabled += 1

    def switch_off():
        parametrize._cache_enabled -= 1
        if not parametrize._cache_enabled:
            parametrize._cache = {}

    return switch_on, switch_off


def pair(switch, on, off):
    return lambda: (lambda: switch(on), lambda: switch(off))


def cudnn(name, is_on):
    setattr(torch.backends.cudnn, name, is_on)


# Name: what makes the two calls.
PAIRS = {
    "grad mode": pair(torch.set_grad_enabled, False, True),
    "no_grad by hand": no_grad_by_hand,
    "default dtype": pair(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": pair(torch.set_default_device, "meta", None),
    "autocast": pair(lambda is_on: torch.set_autocast_enabled("cpu", is_on), True, False),
    "autocast's dtype": pair(
        lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16, torch.bfloat16
    ),
    "autocast's cache": pair(torch.set_autocast_cache_enabled, False, True),
    "autocast by hand": autocast_by_hand,
    "anomalies": pair(torch.autograd.set_detect_anomaly, True, False),
    "deterministic": pair(torch.use_deterministic_algorithms, False, True),
    "cuDNN": pair(lambda is_on: cudnn("enabled", is_on), False, True),
    "cuDNN's search": pair(lambda is_on: cudnn("benchmark", is_on), True, False),
    "threads": pair(torch.set_num_threads, 2, 1),
    "parametrize": cache_of_parametrize,
}


def modes():
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.empty(()).device,
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "nesting": nesting,
        "anomalies": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        "threads": torch.get_num_threads(),
        "parametrize": parametrize._cache_enabled,
    }


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def made(name, error=None):
    """A Step whose loss_fn switches a mode on around a module that fails, that module, and what
    the modes were where loss_fn began."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    teacher = torch.nn.Identity()
    switch_on, switch_off = PAIRS[name]()
    began = []

    def loss_fn(model, x):
        began.append(modes())
        loss = model(x).square().mean()
        switch_on()
        teacher(loss)
        if error and len(began) == 2:
            raise error
        switch_off()
        return loss + model[0].weight.square().sum() / 100

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False)
    return step, teacher, began


def batch_of(i):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(i))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("in_step", (0, 4))
def test_an_attempt_that_fails_between_two_calls_leaves_no_mode_switched(name, in_step):
    before, states = modes(), []
    for fails in (True, False):
        step, teacher, began = made(name)
        for i in range(in_step + 3):
            if i == in_step and not fails:
                step.load_state_dict({**step.state_dict(), "micro": 8})
            with fail_once(teacher) if fails and i == in_step else warnings.catch_warnings():
                step(batch_of(i))
            assert step.report.ooms == (fails and i == in_step)
        assert all(each == before for each in (*began, modes()))
        states.append(list(step.model.parameters()))
    assert same_bits(*states)


@pytest.mark.parametrize("name", PAIRS)
def test_an_exception_of_your_own_between_two_calls_leaves_no_mode_switched(name):
    before = modes()
    step, _, _ = made(name, KeyError("mine"))
    step(batch_of(0))
    with pytest.raises(KeyError):
        step(batch_of(1))
    assert modes() == before
    step(batch_of(1))


AROUND = ("autocast", "autocast by hand", "autocast's cache", "anomalies", "cuDNN", "threads")


@pytest.mark.parametrize("name", AROUND)
def test_a_mode_around_the_step_stays_when_an_attempt_fails(name):
    step, teacher, began = made("grad mode")
    switch_on, switch_off = PAIRS[name]()
    switch_on()
    around = modes()
    try:
        with fail_once(teacher):
            step(batch_of(0))
        assert step.report.ooms == 1 and all(each == around for each in (*began, modes()))
    finally:
        switch_off()


def test_a_map_and_an_evaluation_leave_no_mode_switched():
    before, model = modes(), torch.nn.Linear(8, 1)

    def predict(x):
        torch.set_default_dtype(torch.float64)
        y = model(x)
        torch.set_default_dtype(torch.float32)
        return y

    with fail_once(model):
        assert rebatch.map(predict, batch_of(0)).dtype == torch.float32
    step, teacher, began = made("autocast by hand")
    with fail_once(teacher):
        step.evaluate(batch_of(0))
    assert modes() == before and len(began) == 3
