"""rebatch.testing: failures on purpose."""

import copy

import pytest
import torch

import rebatch.torch as rebatch
from models import make, same_bits, state_of
from rebatch.testing import fail_once


def made(**options):
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, batch, rebatch.Step(model, optimizer, loss_fn, log_level="quiet", **options)


def fails_in(model, calls, x):
    """Which of so many calls fail, from 1."""
    found = []
    for number in range(1, calls + 1):
        try:
            model(x)
        except torch.OutOfMemoryError as error:
            assert str(error) == "CUDA out of memory (on purpose: rebatch.testing.fail_once)"
            found.append(number)
    return found


@pytest.mark.parametrize(
    "options, expected",
    (
        ({}, [1]),
        ({"call": 3}, [3]),
        ({"every": 3}, [1, 4, 7]),
        ({"call": 4, "every": 2}, [4, 6, 8]),
        ({"call": 9}, []),
    ),
)
def test_the_calls_that_were_asked_for_fail_and_no_other(options, expected):
    model = torch.nn.Linear(2, 2)
    with fail_once(model, **options) as failing:
        assert fails_in(model, 8, torch.zeros(1, 2)) == expected
        assert (failing.calls, failing.failures) == (8, len(expected))
    assert fails_in(model, 8, torch.zeros(1, 2)) == [] and failing.calls == 8


def test_remove_ends_it_and_leaves_no_hook():
    model = torch.nn.Linear(2, 2)
    failing = fail_once(model, call=2)
    failing.remove()
    failing.remove()
    assert not model._forward_pre_hooks and fails_in(model, 3, torch.zeros(1, 2)) == []


def test_the_end_of_a_with_lets_an_exception_out():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(torch.OutOfMemoryError):
        with fail_once(model):
            model(torch.zeros(1, 2))
    model(torch.zeros(1, 2))


def with_half(step, batch):
    step.load_state_dict({**step.state_dict(), "micro": 8})
    return step(batch)


@pytest.mark.filterwarnings("ignore::rebatch.torch.CutWarning")  # of dropout
@pytest.mark.parametrize("in_step", (0, 1, 4))
def test_a_step_survives_it_with_the_bits_of_a_run_that_began_smaller(in_step):
    states, losses = [], []
    for fails in (True, False):
        model, batch, step = made(growth=False)
        for _ in range(in_step):
            step(batch)
        if fails:
            with fail_once(model) as failing:
                losses.append(step(batch).item())
            assert (step.report.ooms, step.report.redone_samples) == (1, 16)
            assert failing.failures == 1 and failing.calls >= 3  # and those of the comparison
        else:
            losses.append(with_half(step, batch).item())
        states.append(state_of(model))
    assert losses[0] == losses[1] and same_bits(*states)


def test_failures_that_come_again_exhaust_the_sizes():
    model, batch, step = made()
    before = state_of(model)
    with fail_once(model.body[0], every=1) as failing:
        with pytest.raises(rebatch.Exhausted, match="rebatch.testing.fail_once"):
            step(batch)
    assert failing.calls == failing.failures == step.report.ooms
    assert same_bits(state_of(model), before)


def test_a_program_that_raises_an_oom_in_each_attempt_hears_of_it():
    """A flag of the model is put back."""
    model, batch, step = made()
    model.has_failed = False

    def loss_fn(model, samples):
        if not model.has_failed:
            model.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory (mine)")
        return model(samples[0]).mean()

    step.loss_fn = loss_fn
    with pytest.raises(rebatch.Exhausted, match=r"\(loss_fn, .*\).* rebatch.testing.fail_once\(\)"):
        step(batch)


def test_a_copy_of_the_model_counts_for_itself():
    model = torch.nn.Linear(2, 2)
    with fail_once(model, call=2) as failing:
        other = copy.deepcopy(model)
        assert fails_in(other, 3, torch.zeros(1, 2)) == [2]
        assert failing.calls == 0 and fails_in(model, 3, torch.zeros(1, 2)) == [2]


@pytest.mark.parametrize(
    "arguments, error, text",
    (
        ((len,), TypeError, "fail_once() was called with a builtin_function_or_method: expected a"),
        (("model", 0), ValueError, "call of fail_once() is 0: expected 1 or more"),
        (("model", 1, -1), ValueError, "every of fail_once() is -1: expected 0 or more"),
        (("model", 1.0), TypeError, "call of fail_once() is 1.0: expected an int"),
        (("model", True), TypeError, "call of fail_once() is True: expected an int"),
        (("model", 1, "2"), TypeError, "every of fail_once() is '2': expected an int"),
    ),
)
def test_bad_arguments_are_refused_by_value(arguments, error, text):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(error) as caught:
        fail_once(*(model if part == "model" else part for part in arguments))
    assert f"rebatch: {text}" in str(caught.value)
    assert not model._forward_pre_hooks
