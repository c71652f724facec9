"""Gradients that loss_fn gives to what is no part of its Step count once, whatever fails."""

import pytest
import torch

import rebatch.torch as rebatch
from models import out_of_memory, same_bits
from rebatch.testing import fail_once
from test_told import batch_of, model_of, plain, said, step_of


class FailsInBackward(torch.autograd.Function):
    """Where `left` calls are over: when the gradients of what comes after it are there."""

    __module__ = "torch"  # it is not looked at, and may count
    left = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        FailsInBackward.left -= 1
        if FailsInBackward.left == 0:
            out_of_memory(None)
        return gradient


def a_judge():
    torch.manual_seed(1)
    return torch.nn.Linear(1, 1), [torch.ones((), requires_grad=True)]


def sgd_of(outside):
    return torch.optim.SGD([*outside[0].parameters(), *outside[1]], 0.1)


@pytest.mark.parametrize("ooms_in", ((0,), (3,), (0, 1, 4)))
@pytest.mark.parametrize("optimizer_of", (lambda outside: None, sgd_of))
@pytest.mark.parametrize("is_helped", (False, True))
def test_gradients_of_what_no_optimizer_of_the_step_has_count_once(
    ooms_in, optimizer_of, is_helped
):
    """They are added up, or cleared by another optimizer, as in the plain loop. Also where a
    function that loss_fn calls names what they are of."""
    got = []
    assert said(lambda: got.extend(judged(ooms_in, optimizer_of, True, is_helped))) == []
    assert same_bits(got, judged(ooms_in, optimizer_of, False, is_helped))


def judged(ooms_in, optimizer_of, fails, is_helped):
    """What a judge beside the model, and a list of scales, hold after some steps, with OOMs, or at
    the sizes that these lead to."""
    model, micro = model_of(), 16
    judge, scales = outside = a_judge()

    def loss_fn(model, samples):
        return judgement(FailsInBackward.apply(model(samples[0]))) + plain(model, samples)

    def judgement(out):
        return judge(out).square().mean() * scales[0]

    def in_one(model, samples):
        out = FailsInBackward.apply(model(samples[0]))
        return judge(out).square().mean() * scales[0] + plain(model, samples)

    step = step_of(model, loss_fn if is_helped else in_one)
    optimizer = optimizer_of(outside)
    for i in range(5):
        FailsInBackward.left = int(fails and i in ooms_in)
        micro //= 2 if i in ooms_in else 1
        if not fails:
            step.load_state_dict({**step.state_dict(), "micro": micro})
        if optimizer:
            optimizer.zero_grad(set_to_none=i % 2 == 0)
        step(batch_of(i))
        if optimizer:
            optimizer.step()
    leaves = [*model.parameters(), *judge.parameters(), *scales]
    return leaves + [p.grad for p in leaves[-3:]]


def test_what_a_batch_that_fails_gave_others_is_gone():
    judge, scales = a_judge()
    calls = [0]

    def loss_fn(model, samples):
        calls[0] += 1
        if calls[0] == 2:
            raise KeyError("the second micro-batch")
        return judge(model(samples[0])).square().mean() * scales[0]

    step = step_of(model_of(), loss_fn, micro_start=8)
    earlier = scales[0].grad = torch.tensor(3.0)
    with pytest.raises(KeyError):
        step(batch_of(0))
    assert scales[0].grad is earlier and earlier == 3 and judge.weight.grad is None


def test_a_head_that_the_optimizer_of_the_step_owns_is_its_own():
    body, head = model_of(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1)
    step = rebatch.Step(
        body, optimizer, lambda m, s: head(m(s[0])).square().mean(), log_level="quiet"
    )

    def train():
        with fail_once(head):
            step(batch_of(0))

    assert said(train) == []


def test_an_optimizer_that_loss_fn_names_finds_the_gradients_of_several_calls():
    """They are not kept apart from it."""

    def run(call):
        torch.manual_seed(0)
        model, critic = model_of(), torch.nn.Linear(8, 1)
        optimizer, calls = torch.optim.SGD(critic.parameters(), 0.1), [0]

        def loss_fn(model, samples):
            calls[0] += 1
            critic(samples[0]).square().mean().backward()
            if calls[0] % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return plain(model, samples)

        step = step_of(model, loss_fn)
        for i in range(4):
            call(step, model, loss_fn, batch_of(i))
        return list(critic.parameters())

    def in_step(step, _model, _loss_fn, batch):
        step(batch)

    def by_hand(_step, model, loss_fn, batch):
        loss_fn(model, batch)

    assert same_bits(run(in_step), run(by_hand))
