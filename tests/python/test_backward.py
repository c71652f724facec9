"""Backward: the gradients of a batch without an update, which is the program's."""

import gc
import warnings

import pytest
import torch

import rebatch.torch as rebatch
from models import FailAt, Unseen, fails_above, make, out_of_memory, same_bits, state_of
from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.torch.update.first_memory import first_update_bytes


def train_backward(limited=None, fail_at=0, where="forward", updates=2, **options):
    """A plain loop with two batches for each update, whose gradients are those of Backward."""
    model, batch, loss_fn = make("mlp")
    if limited is not None:
        loss_fn = fails_above(loss_fn, limited, where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backward = rebatch.Backward(model, loss_fn, log_level="quiet", growth=False, **options)
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


def test_a_step_is_a_backward_and_an_update():
    def public(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert issubclass(rebatch.Step, rebatch.Backward) and issubclass(
        TrainerBackward, rebatch.Backward
    )
    assert public(rebatch.Step) == public(rebatch.Backward)
    assert public(TrainerBackward) - public(rebatch.Backward) == {
        *("parameters", "samples", "available_bytes", "kind_of_update"),
        *("is_sharded", "knows_norm", "clip"),
    }


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
    backward = rebatch.Backward(model, loss_fn, log_level="quiet", micro_start=4)
    backward(batch)
    before = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in before]
    for broken in (fails_above(loss_fn, 0, "backward"), lambda model, samples: 1 / 0):
        backward.loss_fn = broken
        with pytest.raises((rebatch.Exhausted, ZeroDivisionError)):
            backward(batch)
        assert all(p.grad is g for p, g in zip(model.parameters(), before))
        assert same_bits(before, copies)


def test_a_whole_batch_leaves_what_loss_backward_leaves():
    """A list of modules, a frozen parameter, and one that a loss does not reach."""
    body, batch, loss_fn = make("mlp")
    body.body[0].bias.requires_grad_(False)
    head = torch.nn.Linear(2, 2)

    def with_head(models, samples):
        return loss_fn(models[0], samples) + models[1].weight.square().sum()

    torch.manual_seed(1)
    with_head([body, head], batch).backward()
    expected = [p.grad for model in (body, head) for p in model.parameters()]
    for model in (body, head):
        model.zero_grad()
    torch.manual_seed(1)
    rebatch.Backward([body, head], with_head, log_level="quiet")(batch)
    found = [p.grad for model in (body, head) for p in model.parameters()]
    assert [g is None for g in found] == [g is None for g in expected]
    assert same_bits([g for g in found if g is not None], [g for g in expected if g is not None])


# ---- who goes backward ----


def scaled(limited, **options):
    model, batch, loss_fn = make("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward = rebatch.Backward(
        model, fails_above(loss_fn, limited), backward=scaler, log_level="quiet", **options
    )
    torch.manual_seed(1)
    loss = backward(batch)
    before = [p.grad.clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    after = [p.grad for p in model.parameters()]
    assert same_bits([g * 256 for g in after], before)
    scaler.step(optimizer)
    scaler.update()
    return loss, state_of(model)


def test_a_grad_scaler_scales_the_gradients_and_not_the_loss():
    model, batch, loss_fn = make("mlp")
    torch.manual_seed(1)
    plain = loss_fn(model, batch)
    plain.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    loss, state = scaled(16)
    assert torch.equal(loss, plain.detach()) and not loss.requires_grad
    assert same_bits(state, state_of(model))  # a power of two changes no bit


def test_a_grad_scaler_after_an_oom():
    loss, state = scaled(4)
    expected, expected_state = scaled(16, micro_start=4)
    assert torch.equal(loss, expected) and same_bits(state, expected_state)


def test_a_function_goes_backward_once_a_micro_batch():
    model, batch, loss_fn = make("mlp")
    calls = []

    def half(loss):
        calls.append(float(loss.detach()))
        (loss / 2).backward()

    backward = rebatch.Backward(model, loss_fn, backward=half, micro_start=4, log_level="quiet")
    torch.manual_seed(1)
    loss = backward(batch)
    halves = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    rebatch.Backward(model, loss_fn, micro_start=4, log_level="quiet")(batch)
    assert same_bits([2 * g for g in halves], [p.grad for p in model.parameters()])
    assert len(calls) == 4 and sum(calls) == pytest.approx(float(loss))


# ---- the program's optimizers ----


def found_by(backward):
    return backward._training.program.update.known_optimizers()


def test_the_optimizers_are_found_at_the_first_batch():
    model, batch, loss_fn = make("mlp")
    backward = rebatch.Backward(model, loss_fn, log_level="quiet")
    own = {
        "body": torch.optim.AdamW(model.body[0].parameters()),
        "head": [torch.optim.SGD(model.body[3].parameters(), 0.1)],
    }
    gone = torch.optim.AdamW(model.parameters())
    gone.itself = gone  # in a cycle
    del gone
    others = torch.optim.AdamW(torch.nn.Linear(4, 4).parameters())
    assert found_by(backward) == []
    backward(batch)
    assert set(map(id, found_by(backward))) == {id(own["body"]), id(own["head"][0])}
    assert backward._training.program.update.first_bytes() == first_update_bytes(own["body"]) + (
        first_update_bytes(own["head"][0])
    )
    assert others not in found_by(backward)
    del own
    gc.collect()
    assert found_by(backward) == []  # nothing holds them here


def test_an_optimizer_that_is_given_is_the_one():
    model, batch, loss_fn = make("mlp")
    given, _other = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    backward = rebatch.Backward(model, loss_fn, optimizer=given, log_level="quiet")
    backward(batch)
    assert found_by(backward) == [given]
    with pytest.raises(ValueError, match="no parameter of the optimizer SGD is in the model"):
        rebatch.Backward(torch.nn.Linear(1, 1), loss_fn, optimizer=given)
    with pytest.raises(TypeError, match="optimizer is of type Linear: expected a torch.optim"):
        rebatch.Backward(model, loss_fn, optimizer=torch.nn.Linear(1, 1))


# ---- a probe, a check, an evaluation ----


def test_a_check_and_an_evaluation_leave_gradients_that_are_there():
    model, batch, loss_fn = make("mlp")
    backward = rebatch.Backward(model, loss_fn, log_level="quiet")
    backward(batch)
    before = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in before]
    assert backward.check(batch)
    loss = backward.evaluate(batch)
    assert all(p.grad is g for p, g in zip(model.parameters(), before))
    assert same_bits(before, copies)
    model.eval()
    assert torch.allclose(loss, loss_fn(model, batch))


def test_a_check_finds_a_sum():
    model, batch, loss_fn = make("mlp")
    backward = rebatch.Backward(model, lambda m, s: loss_fn(m, s) * len(s[0]), log_level="quiet")
    found = backward.check(batch)
    assert [mistake.kind for mistake in found.mistakes] == ["sum"]


def test_a_state_is_loaded_by_another_one():
    model, batch, loss_fn = make("mlp")
    first = rebatch.Backward(model, fails_above(loss_fn, 4), log_level="quiet")
    first(batch)
    second = rebatch.Backward(model, loss_fn, log_level="quiet")
    second.load_state_dict(first.state_dict())
    second(batch)
    assert (second.report.step, second.report.micro, second.micro) == (1, 4, 4)


# ---- mistakes ----


def test_the_arguments_of_a_step_are_refused_with_the_line_to_write():
    model, _, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    right = (
        r"expected Backward\(model, loss_fn\), or Backward\(model, loss_fn, optimizer=optimizer\)"
    )
    for arguments in ((optimizer, loss_fn), (loss_fn, optimizer), (optimizer,)):
        with pytest.raises(TypeError, match=right):
            rebatch.Backward(model, *arguments)
    with pytest.raises(
        TypeError, match="Backward has no option micro_strat: did you mean micro_st"
    ):
        rebatch.Backward(model, loss_fn, micro_strat=4)
    for name, line in {
        "clip": r"clip_grad_norm_\(model.parameters\(\), 2.5\) after backward\(batch\)",
        "scaler": "backward=scaler here, and scaler.step",
        "lr_scheduler": r"scheduler.step\(\) after optimizer.step\(\)",
    }.items():
        with pytest.raises(TypeError, match=f"no option {name}, since the update is the .*{line}"):
            rebatch.Backward(model, loss_fn, **{name: 2.5})
    with pytest.raises(TypeError, match="backward is of type object: expected a function"):
        rebatch.Backward(model, loss_fn, backward=object())


def test_backward_of_the_loss_that_it_returns_is_refused():
    model, batch, loss_fn = make("mlp")
    backward = rebatch.Backward(model, loss_fn, log_level="quiet")
    with pytest.raises(
        ValueError, match="a Backward has done that: expected the loop without this"
    ):
        loss = backward(batch)
        loss.backward()
    with pytest.raises(TypeError, match=r"backward was called with the fields .* backward\(\(x, y"):
        backward(*batch)


def test_a_scaled_loss_is_refused_with_the_option():
    model, batch, loss_fn = make("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    backward = rebatch.Backward(model, lambda m, s: scaler.scale(loss_fn(m, s)), log_level="quiet")
    with pytest.raises(ValueError, match="the loss itself, and backward=scaler among the options"):
        backward(batch)


def test_clipping_after_a_backward_is_no_mistake():
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward = rebatch.Backward(model, loss_fn, log_level="quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            backward(batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


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
