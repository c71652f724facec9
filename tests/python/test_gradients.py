"""Gradients: those that a step hands out stay as they are, and those of parameters that no
optimizer of the Step has are added to as autograd does."""

import gc
import sys

import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch.program.gradients import Accumulators
from models import Unseen, fails_above, make, out_of_memory, same_bits, state_of, step_or_backward


@pytest.mark.parametrize("kind", ("step", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_a_gradient_that_is_kept_is_not_written_by_the_next_step(kind, gradients):
    model, batch, loss_fn = make("mlp")
    step = step_or_backward(
        kind,
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        fails_above(loss_fn, 4),
        gradients=gradients,
        log_level="quiet",
        growth=False,
    )
    for _ in range(3):
        model.zero_grad()
        step(batch)
        kept = [p.grad for p in model.parameters()]
        copies = [g.clone() for g in kept]
        model.zero_grad()
        step(tuple(t.roll(1) for t in batch))
        assert same_bits(kept, copies)
        assert not any(p.grad is g for p, g in zip(model.parameters(), kept))


def train_with_a_head_of_its_own(fail=0, **options):
    """The head's optimizer is not the Step's: the loop calls it. `fail` backward passes fail."""
    model, batch, loss_fn = make("mlp")
    model.eval()
    body, head, left = model.body[0], model.body[3], Unseen(fail)

    def strike(gradient):
        if left[0]:
            left[0] -= 1
            out_of_memory(gradient)

    body.weight.register_hook(strike)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    step = rebatch.Step(
        model,
        torch.optim.SGD(body.parameters(), 0.1),
        loss_fn,
        log_level="quiet",
        growth=False,
        **options,
    )
    for i in range(4):
        step(batch)
        if i % 2:  # gradients of two batches are added
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model), step


@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
@pytest.mark.parametrize("fail", (1, 2))
def test_gradients_of_parameters_in_no_optimizer_count_each_sample_once(gradients, fail):
    state, step = train_with_a_head_of_its_own(fail, gradients=gradients)
    expected, _ = train_with_a_head_of_its_own(micro_start=16 >> fail, gradients=gradients)
    assert step.report.micro == 16 >> fail
    assert same_bits(state, expected)


def test_without_an_oom_they_are_those_of_a_plain_loop():
    state, _ = train_with_a_head_of_its_own()
    model, batch, loss_fn = make("mlp")
    model.eval()
    body = torch.optim.SGD(model.body[0].parameters(), 0.1)
    head = torch.optim.SGD(model.body[3].parameters(), 0.1)
    for i in range(4):
        body.zero_grad()
        loss_fn(model, batch).backward()
        body.step()
        if i % 2:
            head.step()
            head.zero_grad()
    assert same_bits(state, state_of(model))


def test_a_step_that_fails_leaves_them_as_they_were():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(
        model, torch.optim.SGD(model.body[0].parameters(), 0.1), loss_fn, log_level="quiet"
    )
    step(batch)
    head = model.body[3].weight
    before, copy = head.grad, head.grad.clone()
    step.loss_fn = fails_above(loss_fn, 0, "backward")
    with pytest.raises(rebatch.Exhausted):
        step(batch)
    assert head.grad is before and torch.equal(before, copy)


@pytest.mark.parametrize("missing", (None, 0, 1))
@pytest.mark.parametrize("sparse", (False, True))
def test_sums_that_are_made_before_a_batch_have_the_bits_of_its_gradients(missing, sparse):
    """As a pool that plans has them: in the second batch, of those that had a gradient."""
    parameters = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(2)]
    accumulators = Accumulators()
    for batch in range(3):
        accumulators.begin_batch(parameters, makes_sums=True)
        expected = [None, None]
        for micro in range(3):
            for i, p in enumerate(parameters):
                if i == missing and batch == 1 and micro == 0:
                    continue
                gradient = torch.randn(3, 2)
                p.grad = gradient.to_sparse() if sparse and i == 0 else gradient
                expected[i] = gradient if expected[i] is None else expected[i] + gradient
            accumulators.add()
            assert all(p.grad is None for p in parameters)
        accumulators.expose()
        assert all(torch.equal(p.grad.to_dense(), e) for p, e in zip(parameters, expected))


def test_sums_that_are_made_before_a_batch_take_no_call_a_parameter():
    calls = []
    for count in (4, 64):
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]
        accumulators, seen = Accumulators(), []
        for _ in range(2):
            accumulators.begin_batch(parameters, makes_sums=True)
            for p in parameters:
                p.grad = torch.ones(2)
            seen.clear()
            gc.disable()  # what a collection calls is not counted
            sys.setprofile(lambda _frame, event, _of, seen=seen: seen.append(event))
            accumulators.add()
            sys.setprofile(None)
            gc.enable()
            accumulators.expose()
        calls.append(len(seen))
    assert calls[0] == calls[1]
