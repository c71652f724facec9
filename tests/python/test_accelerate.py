"""A Step and a Backward in a program of accelerate: what prepare() returns, and what is around."""

import warnings

import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch.update.first_memory import first_update_bytes
from rebatch.torch.update.update import Update
from models import fails_above, make, regression_loss, same_bits, state_of

accelerate = pytest.importorskip("accelerate")
AcceleratedOptimizer = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer


@pytest.fixture(autouse=True)
def fresh_state():
    """Of accelerate, which has one for the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def prepared(**options):
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model, batch, _ = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return (accelerator, batch, *accelerator.prepare(model, optimizer, scheduler))


def test_prepared_objects_train_as_their_own():
    states = []
    for is_prepared in (False, True):
        model, batch, _ = make("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if is_prepared:
            _, batch, model, optimizer, scheduler = prepared()
        loss_fn = fails_above(regression_loss, 4)
        step = rebatch.Step(
            model, optimizer, loss_fn, lr_scheduler=scheduler, clip=1.0, log_level="quiet"
        )
        torch.manual_seed(1)
        for _ in range(3):
            step(batch)
        states.append(state_of(model))
    assert same_bits(*states)


@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize("clip", (None, 0.1))
def test_a_gradscaler_of_a_prepared_optimizer_is_used_once(given, clip):
    states = []
    for is_wrapped in (False, True):
        accelerate.Accelerator(cpu=True)
        model, batch, _ = make("mlp")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if is_wrapped:
            optimizer = AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)
        options = {"scaler": scaler} if given or not is_wrapped else {}
        step = rebatch.Step(model, optimizer, regression_loss, clip=clip, **options)
        torch.manual_seed(1)
        for _ in range(3):
            step(batch)
        states.append(state_of(model))
    assert same_bits(*states) and scaler.get_scale() == 1024.0


def test_a_step_within_accumulate_is_refused_before_it_changes_anything():
    accelerator, batch, model, optimizer, _ = prepared(gradient_accumulation_steps=4)
    step = rebatch.Step(model, optimizer, regression_loss)
    before = state_of(model)
    for _ in range(3):
        with accelerator.accumulate(model):
            with pytest.raises(ValueError, match="accumulate.., which keeps .* 4 iterations"):
                step(batch)
    assert same_bits(before, state_of(model)) and step.report.microbatches == 0


def test_accumulate_over_one_iteration_changes_nothing():
    accelerator, batch, model, optimizer, _ = prepared()
    step = rebatch.Step(model, optimizer, regression_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            with accelerator.accumulate(model):
                before = state_of(model)
                step(batch)
                assert not same_bits(before, state_of(model)) and step.report.step == i


def test_a_step_of_the_prepared_optimizer_that_stays_in_the_loop_is_told():
    _, batch, model, optimizer, _ = prepared()
    step = rebatch.Step(model, optimizer, regression_loss)
    step(batch)
    with pytest.warns(RuntimeWarning, match="AdamW.step.. was called with gradients that a Step"):
        optimizer.step()


def test_the_memory_of_its_first_update_is_known():
    """As for the optimizer within: else memory that runs short in it is Torn."""
    _, _, _, optimizer, _ = prepared()
    update = Update([optimizer], [], None, None)
    assert update.first_bytes() == first_update_bytes(optimizer.optimizer) > 0
    assert update.kept_bytes() > 0


# ---- a loop with accumulate() ----


def large_loss(model, samples):
    """Whose gradients overflow with the first scale of as_in_fp16()."""
    return 100 * regression_loss(model, samples)


def accumulate(is_wrapped, largest=99, scaler=None, mixed_precision="no", **options):
    """(parameters, losses, learning rates) of two epochs of five batches, three for an update."""
    accelerator, batch, model, optimizer, scheduler = prepared(
        gradient_accumulation_steps=3, mixed_precision=mixed_precision
    )
    accelerator.scaler = optimizer.scaler = scaler
    if scaler is not None:  # as AcceleratedOptimizer has it where it is made with one
        optimizer.__setstate__(optimizer.__dict__)
    model.eval()
    data = torch.utils.data.TensorDataset(*(t.repeat(3, *[1] * (t.dim() - 1)) for t in batch))
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, 10))
    backward = rebatch.Backward(
        model,
        fails_above(large_loss, largest),
        backward=accelerator.backward,
        log_level="quiet",
        growth=False,
        **options,
    )
    losses, rates = [], []
    for _ in range(2):
        for samples in loader:
            with accelerator.accumulate(model):
                if is_wrapped:
                    loss = backward(samples)
                else:
                    loss = large_loss(model, samples)
                    accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            rates += scheduler.get_last_lr()
    return state_of(model), losses, rates


def as_in_fp16():
    """A GradScaler whose first updates are infs, which it skips."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)


@pytest.mark.parametrize("options", ({}, {"mixed_precision": "bf16"}, {"scaler": as_in_fp16}))
def test_a_backward_within_accumulate_is_the_plain_loop(options):
    def run(*arguments, **more):
        made = {name: value() if callable(value) else value for name, value in options.items()}
        return accumulate(*arguments, **made, **more)

    state, losses, rates = run(False)
    found, its_losses, its_rates = run(True)
    assert len(losses) == 10 and len(set(rates)) == 5 - ("scaler" in options)
    assert same_bits(found, state) and same_bits(its_losses, losses) and its_rates == rates
    cut, _, _ = run(True, largest=3)
    begun_small, _, _ = run(True, micro_start=2)
    assert same_bits(cut, begun_small)


@pytest.mark.parametrize("uses_parts", (False, True))
@pytest.mark.parametrize("iterations", (1, 2))
def test_a_backward_within_accumulate_that_nothing_divides_is_told_once(uses_parts, iterations):
    """It would add gradients that are twice as large."""
    accelerator, batch, model, optimizer, _ = prepared(gradient_accumulation_steps=iterations)
    backward = rebatch.Backward(model, regression_loss, log_level="quiet")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            with accelerator.accumulate(model):
                if uses_parts:
                    for part in backward.parts(batch):
                        with part as samples:
                            part.backward(regression_loss(model, samples))
                else:
                    backward(batch)
                optimizer.step()
                optimizer.zero_grad()
    texts = [str(w.message) for w in caught if "backward=accelerator.backward" in str(w.message)]
    assert len(texts) == iterations - 1


# ---- an optimizer that skips, whoever wraps it ----


class Skipping:
    """Steps and clears in every second call."""

    def __init__(self, optimizer, clears=False):
        self.optimizer, self.calls, self.clears = optimizer, 0, clears
        self.param_groups = optimizer.param_groups

    def step(self):
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step()

    def zero_grad(self, set_to_none=True):
        if self.clears or self.calls % 2 == 0:
            self.optimizer.zero_grad(set_to_none)


class ThroughData(torch.optim.SGD):
    """Changes parameters by a way that PyTorch does not count."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("clears", (False, True))
def test_a_wrapper_that_skips_is_named(clears):
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(model, Skipping(torch.optim.SGD(model.parameters(), 0.1), clears), loss_fn)
    before = state_of(model)
    with pytest.warns(RuntimeWarning, match=r"step\(\) of test_accelerate.Skipping changed no par"):
        step(batch)
    assert same_bits(before, state_of(model))
    if not clears:
        with pytest.raises(ValueError, match=r"zero_grad\(\) of test_accelerate.Skipping left its"):
            step(batch)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):  # it is told once
                step(batch)
        assert not same_bits(before, state_of(model))


@pytest.mark.parametrize("is_wrapped", (False, True))
@pytest.mark.parametrize("kind", (torch.optim.SGD, ThroughData))
def test_an_optimizer_that_steps_is_not(kind, is_wrapped):
    model, batch, loss_fn = make("mlp")
    optimizer = kind(model.parameters(), 0.1)
    if is_wrapped:
        optimizer = Skipping(optimizer, clears=True)
        optimizer.calls = 1
    step, before = rebatch.Step(model, optimizer, loss_fn), state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch)
        if not is_wrapped:
            step(batch)
    assert not same_bits(before, state_of(model))


def test_a_step_that_is_skipped_for_an_inf_is_not_told():
    model, batch, loss_fn = make("mlp")
    optimizer = Skipping(torch.optim.SGD(model.parameters(), 0.1), clears=True)
    step = rebatch.Step(model, optimizer, lambda m, s: loss_fn(m, s) * float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    step = rebatch.Step(model, optimizer.optimizer, step.loss_fn, scaler=scaler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch)
    assert scaler.get_scale() == 1.0


def test_a_prepared_scheduler_waits_for_an_update_that_its_scaler_skips():
    accelerator = accelerate.Accelerator(cpu=True)
    model, batch, loss_fn = make("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    accelerator._optimizers.append(optimizer)
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(inner, 1, 0.5))
    factors = [float("inf"), 1.0, 1.0]
    step = rebatch.Step(
        model, optimizer, lambda m, s: loss_fn(m, s) * factors[0], lr_scheduler=scheduler
    )
    rates = []
    while factors:
        step(batch)
        rates += scheduler.get_last_lr()
        factors.pop(0)
    assert rates == [0.1, 0.05, 0.025]
