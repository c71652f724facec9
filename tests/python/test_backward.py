"""Backward: the gradients of a batch without an update, for trainers that update by themselves."""

import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch.trainers.backward import Backward
from models import FailAt, Unseen, fails_above, make, out_of_memory, same_bits, state_of


def train_backward(limited=None, fail_at=0, where="forward", updates=2, **options):
    """A plain loop with two batches for each update, whose gradients are those of Backward."""
    model, batch, loss_fn = make("mlp")
    if limited is not None:
        loss_fn = fails_above(loss_fn, limited, where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backward = Backward(model, optimizer, loss_fn, log_level="quiet", growth=False, **options)
    torch.manual_seed(1)
    losses = []
    for i in range(updates):
        for part in (0, 1):
            samples = tuple(t.roll(part) for t in batch)
            with FailAt(fail_at if (i, part) == (1, 1) else 0):
                losses.append(backward(samples))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model), losses


def test_backward_adds_to_the_gradients_that_are_there():
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(2):
        for part in (0, 1):
            loss_fn(model, tuple(t.roll(part) for t in batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, _ = train_backward()
    assert same_bits(state, state_of(model))


def test_backward_has_what_a_trainer_calls_and_no_more():
    """What a Step does beside the passes of a batch is the trainer's, or has no meaning there."""
    public = {name for name in vars(Backward) if not name.startswith("_")}
    assert public == {
        *("model", "device", "parameters", "samples", "report", "outputs"),
        *("available_bytes", "kind_of_update", "state_dict", "load_state_dict", "numbers"),
        *("is_sharded", "knows_norm", "clip"),
    }
    assert not issubclass(Backward, rebatch.Step)
    model, _, loss_fn = make("mlp")
    with pytest.raises(TypeError, match="Step has no option micro_strat: did you mean micro_start"):
        Backward(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, micro_strat=4)


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_backward_adds_the_same_after_an_oom(where, gradients):
    state, losses = train_backward(limited=4, where=where, gradients=gradients)
    expected, expected_losses = train_backward(micro_start=4, gradients=gradients)
    assert same_bits(state, expected) and same_bits(losses, expected_losses)


@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_backward_changes_no_bit_when_any_operation_fails(gradients):
    options = dict(micro_start=4, micro_smallest=4, gradients=gradients, lighten=lambda on: None)
    expected, _ = train_backward(**options)
    # 27 operations in each of four micro-batches: of two that follow each other, all of them.
    for n in range(1, 105, 2):
        state, _ = train_backward(fail_at=n, **options)
        assert same_bits(state, expected), f"an OOM in operation {n} changed the result"


def test_backward_that_fails_leaves_the_gradients_as_they_were():
    model, batch, loss_fn = make("mlp")
    backward = Backward(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet", micro_start=4
    )
    backward(batch)
    before = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in before]
    backward._training.program.loss_fn = fails_above(loss_fn, 0, "backward")
    with pytest.raises(rebatch.Exhausted):
        backward(batch)
    assert all(p.grad is g for p, g in zip(model.parameters(), before))
    assert same_bits(before, copies)


def test_a_parameter_that_is_unfrozen_later_is_accumulated_once():
    model, batch, loss_fn = make("mlp")
    model.eval()
    last, fails = model.body[3], Unseen(True)

    def fail_once(gradient):
        if fails and fails.pop():
            out_of_memory(gradient)

    last.requires_grad_(False)
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.0), loss_fn, micro_start=4, log_level="quiet"
    )
    step(batch)
    last.requires_grad_(True)
    # The backward pass fails when it has been through the last layer.
    model.body[0].weight.register_hook(fail_once)
    step(batch)
    gradient = last.weight.grad
    model.zero_grad()
    loss_fn(model, batch).backward()
    assert step.report.ooms == 1
    assert torch.allclose(gradient, last.weight.grad, atol=1e-6)
