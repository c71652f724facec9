"""Backward: the gradients of a batch without an update, which is the program's."""

import gc
import re
import types
import warnings
import weakref

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


@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
@pytest.mark.parametrize("largest", (16, 4))  # samples that fit
@pytest.mark.parametrize("where", ("forward", "backward"))
def test_backward_adds_in_the_tensors_that_are_there(largest, where, gradients):
    """As autograd does: gradients may be views of one buffer, or be held by others."""
    model, batch, loss_fn = make("mlp")
    parameters = list(model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters))
    views = buffer.split([p.numel() for p in parameters])
    for p, view in zip(parameters, views):
        p.grad = view.view_as(p)
    held = [p.grad for p in parameters]
    run = fails_above(loss_fn, largest, where)
    backward = rebatch.Backward(model, run, gradients=gradients, log_level="quiet", growth=False)
    torch.manual_seed(1)
    for _ in range(2):
        backward(batch)
    assert all(p.grad is gradient for p, gradient in zip(parameters, held))
    expected, _, _ = make("mlp")
    micro = rebatch.Backward(expected, loss_fn, micro_start=largest, gradients=gradients)
    torch.manual_seed(1)
    for _ in range(2):
        micro(batch)
    flat = torch.cat([p.grad.flatten() for p in expected.parameters()])
    assert same_bits(flat, buffer) and bool(buffer.any())


@pytest.mark.parametrize("micro", (16, 4))
@pytest.mark.parametrize("way", ("Backward", "Step"))
def test_gradients_that_the_program_clears_are_free(way, micro):
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arguments = (model, optimizer) if way == "Step" else (model,)
    train = getattr(rebatch, way)(*arguments, loss_fn, log_level="quiet", micro_start=micro)
    for _ in range(3):
        train(batch)
        gradients = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.zero_grad()
        assert {gradient() for gradient in gradients} == {None}


def test_a_step_is_a_backward_and_an_update():
    def public(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert issubclass(rebatch.Step, rebatch.Backward) and issubclass(
        TrainerBackward, rebatch.Backward
    )
    assert public(rebatch.Step) == public(rebatch.Backward)
    assert public(TrainerBackward) - public(rebatch.Backward) == {
        *("parameters", "samples", "available_bytes", "kind_of_update"),
        *("is_sharded", "knows_norm", "clip", "has_graphs", "is_captured", "ran_out"),
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


# ---- several batches of a loader ----


def lists(*lengths, width=8):
    """Batches of a loader, of so many samples each."""
    torch.manual_seed(2)
    return [(torch.randn(n, width), torch.randn(n)) for n in lengths]


def noting(loss_fn, ran):
    def run(model, samples):
        loss = loss_fn(model, samples)
        ran.append((samples[0].data_ptr(), len(samples[0])))
        return loss

    return run


def gradients_by_hand(model, batches, loss_fn):
    """Of one effective batch, in a plain loop."""
    total = sum(len(batch[0]) for batch in batches)
    model.zero_grad()
    for batch in batches:
        (loss_fn(model, batch) * (len(batch[0]) / total)).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_a_list_that_fits_runs_as_the_batches_are(gradients):
    model, _, loss_fn = make("mlp")
    batches, ran = lists(5, 8, 3), Unseen()
    torch.manual_seed(1)
    expected = gradients_by_hand(model, batches, loss_fn)
    model.zero_grad()
    backward = rebatch.Backward(model, noting(loss_fn, ran), log_level="quiet", gradients=gradients)
    torch.manual_seed(1)
    loss = backward(batches=batches)
    assert same_bits([p.grad for p in model.parameters()], expected)
    assert list(ran) == [(batch[0].data_ptr(), len(batch[0])) for batch in batches]
    report = backward.report
    assert (report.samples, report.micro, report.microbatches) == (16, 8, 3)
    torch.manual_seed(1)
    losses = [loss_fn(model, batch).detach() * len(batch[0]) / 16 for batch in batches]
    assert torch.allclose(loss, sum(losses))


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_a_list_is_cut_only_within_its_batches(where, gradients):
    model, _, loss_fn = make("mlp")
    batches, starts_again = lists(5, 8, 3), (gradients, where) == ("inplace", "backward")
    sizes = [[4, 1], [4, 4], [3]] if starts_again else [[5], [4, 4], [3]]
    parts = [
        part
        for batch, cuts in zip(batches, sizes)
        for part in zip(batch[0].split(cuts), batch[1].split(cuts))
    ]
    torch.manual_seed(1)
    expected = gradients_by_hand(model, parts, loss_fn)
    model.zero_grad()
    backward = rebatch.Backward(
        model, fails_above(loss_fn, 6, where), log_level="quiet", gradients=gradients
    )
    torch.manual_seed(1)
    backward(batches=batches)
    assert same_bits([p.grad for p in model.parameters()], expected)
    assert (backward.report.ooms, backward.micro) == (1, 4)
    assert backward.report.redone_samples == (13 if starts_again else 8)


def test_a_list_has_the_same_bits_when_any_operation_fails():
    def train(fail_at):
        model, _, loss_fn = make("mlp")
        backward = rebatch.Backward(
            model,
            loss_fn,
            log_level="quiet",
            micro_start=4,
            micro_smallest=4,
            growth=False,
            lighten=lambda on: None,
        )
        batches = lists(5, 8, 3)
        torch.manual_seed(1)
        with FailAt(fail_at):
            backward(batches=batches)
        return [p.grad for p in model.parameters()]

    expected = train(0)
    for n in range(1, 140, 3):
        assert same_bits(train(n), expected), f"an OOM in operation {n} changed the result"


def test_a_list_that_fails_leaves_the_gradients_as_they_were():
    model, batch, loss_fn = make("mlp")
    backward = rebatch.Backward(model, loss_fn, log_level="quiet")
    backward(batch)
    before = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in before]
    seen = Unseen(2)

    def fails_in_the_last(model, samples):
        seen[0] -= 1
        return 1 / 0 if seen[0] < 0 else loss_fn(model, samples)

    backward.loss_fn = fails_in_the_last
    with pytest.raises(ZeroDivisionError):
        backward(batches=lists(5, 8, 3))
    assert all(p.grad is g for p, g in zip(model.parameters(), before))
    assert same_bits(before, copies)


def test_a_normalizer_gets_the_list_and_a_cost_one_batch():
    model, _, loss_fn = make("mlp")
    batches, asked = lists(5, 8, 3), Unseen()

    def summed(model, samples):
        return loss_fn(model, samples) * len(samples[0])

    def cost(batch, first, count):
        assert first + count <= len(batch[0])
        asked.append(len(batch[0]))
        return count * (2 if len(batch[0]) == 8 else 1)

    model.eval()
    expected = gradients_by_hand(model, batches, loss_fn)
    model.zero_grad()
    sizes = Unseen()
    backward = rebatch.Backward(
        model,
        noting(summed, sizes),
        normalizer=lambda batches: sum(len(batch[0]) for batch in batches),
        cost=cost,
        micro_start=4,
        growth=False,
        log_level="quiet",
    )
    loss = backward(batches=batches)
    assert [n for _, n in sizes] == [4, 1, 2, 2, 2, 2, 3] and set(asked) == {5, 8, 3}
    found = [p.grad for p in model.parameters()]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected))
    assert torch.allclose(loss, sum(loss_fn(model, b) * len(b[0]) for b in batches) / 16)


def test_batches_without_a_common_form():
    """Tensors, dicts, and sequences of another width each; outputs are joined."""
    model = torch.nn.Linear(1, 1)
    batches = [
        torch.ones(4, 7),
        {"x": torch.ones(3, 2), "y": torch.zeros(3)},
        [torch.ones(3, 5), torch.ones(3)],
    ]

    def loss_fn(model, samples):
        x = samples["x"] if isinstance(samples, dict) else samples
        x = x[0] if isinstance(x, list) else x
        out = model(x.sum(1, keepdim=True))
        return out.square().mean(), {"out": out[:, 0], "n": rebatch.Sum(len(x))}

    backward = rebatch.Backward(model, loss_fn, micro_start=2, log_level="quiet")
    backward(batches=batches)
    assert backward.outputs["out"].shape == (10,) and backward.outputs["n"] == 10
    backward.loss_fn = lambda model, samples: (
        loss_fn(model, samples)[0],
        samples["x"] if isinstance(samples, dict) else samples,
    )
    with pytest.raises(ValueError, match=r"shapes \(2, 7\) and \(2, 5\) .* such as list\(tensor\)"):
        backward(batches=[torch.ones(4, 7), torch.ones(4, 5)])


def test_a_step_takes_several_batches_for_one_update():
    def train(limit, **options):
        model, _, loss_fn = make("mlp")
        step = rebatch.Step(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            fails_above(loss_fn, limit),
            clip=0.5,
            log_level="quiet",
            growth=False,
            **options,
        )
        torch.manual_seed(1)
        for _ in range(3):
            step(batches=lists(8, 8))
            step(lists(8)[0])
        return state_of(model)

    assert same_bits(train(4), train(8, micro_start=4))


def test_a_list_of_batches_of_batch_norm_keeps_pairs():
    torch.manual_seed(0)
    model, sizes = torch.nn.BatchNorm1d(2), Unseen()
    backward = rebatch.Backward(
        model,
        lambda m, x: (sizes.append(len(x)), m(x).square().mean())[1],
        micro_start=2,
        log_level="quiet",
    )
    backward(batches=[torch.randn(5, 2), torch.randn(4, 2)])
    assert list(sizes) == [2, 3, 2, 2]


def test_mistakes_in_a_list_of_batches():
    model, batch, loss_fn = make("mlp")
    backward = rebatch.Backward(model, loss_fn, log_level="quiet")
    for wrong in ([], batch[0]):
        with pytest.raises(ValueError, match="batches is .*: expected a list of batches, at least"):
            backward(batches=wrong)
    with pytest.raises(TypeError, match="backward was called with the fields of a batch"):
        backward(batch, batches=[batch])
    backward(batches=[batch])
    assert backward.report.samples == 16


# ---- a loop that divides what is returned ----


CONFIG = types.SimpleNamespace(training={"parts": 4})


def divides(backward, batch, parts):
    loss = backward(batch) / 4
    return loss


def divides_by_an_attribute(backward, batch, parts):
    loss = backward(batch) / CONFIG.training["parts"]
    return loss


def divides_then(backward, batch, parts):
    loss = backward(batch)
    loss = loss / parts
    return loss


def divides_in_place(backward, batch, parts):
    loss = backward(batch)
    loss /= parts
    return loss


def logs_its_share(backward, batch, parts):
    total = 0.0
    total += backward(batch) / parts
    return total


def logs_a_number(backward, batch, parts):
    loss = backward(batch).item() / parts
    return loss


def keeps_both(backward, batch, parts):
    loss = backward(batch)
    mean = loss / parts
    return loss, mean


def calls_more(backward, batch, parts):
    loss = min(backward(batch), 4) / parts
    return loss


DIVIDED = "divides the loss of backward\\(batch\\), which has gone backward undivided"


def told_of(loop, clear=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    backward = rebatch.Backward(model, lambda m, s: m(s).square().mean())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(6):
            if clear is not None:
                model.zero_grad(set_to_none=clear)
            loop(backward, torch.ones(8, 4), 4)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("loop", (divides, divides_by_an_attribute, divides_then, divides_in_place))
def test_a_loss_that_is_divided_where_gradients_accumulate_is_told_once(loop):
    (text,) = told_of(loop)
    assert re.search(DIVIDED, text) and "batches=[...]" in text
    line = loop.__code__.co_firstlineno + (2 if loop in (divides_then, divides_in_place) else 1)
    assert text.startswith(f"rebatch: {__file__}:{line} ")


@pytest.mark.parametrize("loop", (logs_its_share, logs_a_number, keeps_both, calls_more))
def test_a_loss_that_is_divided_for_a_log_is_not_told(loop):
    assert told_of(loop) == []


@pytest.mark.parametrize("set_to_none", (True, False))
def test_a_loss_that_is_divided_where_none_accumulate_is_not_told(set_to_none):
    assert told_of(divides, set_to_none) == []
