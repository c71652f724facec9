"""What a Step does with gradients before its update: before_update, and the norm for the log."""

import copy
import pickle

import pytest
import torch

import rebatch.torch as rebatch
from models import FailAt, Unseen, fails_above, make, out_of_memory, same_bits, state_of


def by_value(model, most=0.01):
    return lambda: torch.nn.utils.clip_grad_value_(model.parameters(), most)


def train(limited=16, fail_at=0, scale=None, clip=None, before=by_value, **options):
    """Two updates with a clipping of the program's own."""
    model, batch, loss_fn = make("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        fails_above(loss_fn, limited),
        before_update=before(model),
        clip=clip,
        scaler=scaler,
        log_level="quiet",
        growth=False,
        **options,
    )
    torch.manual_seed(1)
    step(batch)
    with FailAt(fail_at):
        step(batch)
    return state_of(model), step


@pytest.mark.parametrize("scale", (None, 256.0))
@pytest.mark.parametrize("clip", (None, 0.02))
def test_before_update_is_called_unscaled_and_before_clip(scale, clip):
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        by_value(model)()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    state, step = train(scale=scale, clip=clip)
    assert same_bits(state, state_of(model))  # a power of two changes no bit
    assert step.report.grad_norm == pytest.approx(float(norm))


def test_before_update_after_ooms_in_any_operation():
    expected, _ = train(micro_start=4, micro_smallest=4, clip=0.02, lighten=lambda on: None)
    for n in range(1, 130, 3):
        state, _ = train(
            fail_at=n, micro_start=4, micro_smallest=4, clip=0.02, lighten=lambda on: None
        )
        assert same_bits(state, expected), f"an OOM in operation {n} changed the result"


def test_an_oom_in_before_update_runs_the_batch_again():
    calls = Unseen()

    def fails_once(model):
        def halve():
            calls.append(1)
            for p in model.parameters():
                p.grad.mul_(0.5)
            if len(calls) == 1:
                out_of_memory(None)

        return halve

    state, step = train(micro_start=4, before=fails_once)
    assert len(calls) == 3
    expected, _ = train(micro_start=step.report.micro, before=fails_once)
    assert same_bits(state, expected)


def test_an_exception_of_before_update_comes_out_and_nothing_is_updated():
    model, batch, loss_fn = make("mlp")
    before = state_of(model)
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn,
        before_update=lambda: 1 / 0,
        log_level="quiet",
    )
    with pytest.raises(ZeroDivisionError):
        step(batch)
    assert same_bits(before, state_of(model))
    with pytest.raises(TypeError, match="before_update is 1: expected a function"):
        rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, before_update=1)


# ---- the norm ----


def step_of(**options):
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", **options)
    return step, model, batch


@pytest.mark.parametrize("options", ({}, {"micro_start": 4}, {"clip": 0.1}, {"clip": 100.0}))
def test_the_norm_is_that_of_the_gradients_of_the_last_update(options):
    step, model, batch = step_of(**options)
    plain, samples, loss_fn = make("mlp")
    for _ in range(2):
        plain.load_state_dict(model.state_dict())
        plain.eval(), model.eval()
        plain.zero_grad()
        loss_fn(plain, samples).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        step(batch)
        assert step.report.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_a_norm_that_is_read_late_says_so():
    step, model, batch = step_of()
    step(batch)
    read, late = step.report, None
    norm = read.grad_norm
    step(batch)
    assert read.grad_norm == norm  # it was read
    late = step.report
    step(batch)
    with pytest.raises(ValueError, match="are gone, and report.grad_norm is computed when it is"):
        late.grad_norm
    next(model.parameters()).grad.mul_(2)
    with pytest.raises(ValueError, match="are changed, and report.grad_norm"):
        step.report.grad_norm
    model.zero_grad()
    with pytest.raises(ValueError, match="are gone"):
        step.report.grad_norm


def test_a_norm_of_clip_is_known_for_ever():
    step, model, batch = step_of(clip=0.1)
    step(batch)
    first = step.report
    step(batch)
    model.zero_grad()
    for report in (first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert report.grad_norm == first.grad_norm > 0.1


def test_a_report_without_an_update_has_no_norm():
    model, batch, loss_fn = make("mlp")
    backward = rebatch.Backward(model, loss_fn, log_level="quiet")
    backward(batch)
    with pytest.raises(ValueError, match="this report has none: expected that of a Step"):
        backward.report.grad_norm


def test_a_norm_of_sparse_gradients():
    model = torch.nn.EmbeddingBag(4, 2, sparse=True)
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda model, samples: model(samples).square().sum(1).mean(),
        micro_start=2,
        log_level="quiet",
    )
    step(torch.tensor([[0, 1], [1, 1], [2, 3], [3, 0]]))
    assert step.report.grad_norm == pytest.approx(float(model.weight.grad.to_dense().norm()))
