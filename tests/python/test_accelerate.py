"""A Step in a program of accelerate: what prepare() returns, and what is around a step."""

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
