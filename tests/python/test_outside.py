"""What a loop does beside its Step: updates that happen twice, and arguments that do not match."""

import gc
import warnings
import weakref

import pytest
import torch

import rebatch.torch as rebatch
from models import make, regression_loss, same_bits, state_of


def made(optimizer=None, **options):
    model, batch, loss_fn = make("mlp")
    optimizer = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False, **options)
    return step, model, optimizer, batch


def said(body):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        body()
    return [str(w.message) for w in caught if "rebatch" in str(w.message)]


@pytest.mark.parametrize("scales", (False, True))
def test_a_second_update_with_the_same_gradients_is_one_warning(scales):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if scales else None
    step, model, optimizer, batch = made(scaler=scaler)

    def loop():
        for _ in range(3):
            step(batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    text, clipped = said(loop)  # the second of what is clipped after the step
    assert "SGD.step()" in text and "twice" in text and "clip" in clipped


def test_the_warning_as_an_error_keeps_the_parameters():
    step, model, optimizer, batch = made()
    step(batch)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_updates_with_gradients_of_their_own_are_none():
    step, model, optimizer, batch = made()
    other = rebatch.Step(model, optimizer, regression_loss, log_level="quiet", growth=False)

    def closure():
        optimizer.zero_grad()
        loss = regression_loss(model, batch)
        loss.backward()
        return loss

    def loop():
        for _ in range(2):
            step(batch)
            other(batch)  # two Steps share an optimizer
            closure()
            optimizer.step()
            step(batch)
            optimizer.step(closure)
            optimizer.zero_grad()
            optimizer.step()

    assert said(loop) == []


def test_a_watched_optimizer_is_freed():
    step, _, optimizer, batch = made()
    step(batch)
    is_there = weakref.ref(optimizer)
    del step, optimizer
    gc.collect()
    assert is_there() is None


def test_a_scheduler_that_the_loop_steps_too_is_one_warning():
    step, model, optimizer, batch = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    step = rebatch.Step(model, optimizer, regression_loss, lr_scheduler=scheduler)

    def loop():
        for _ in range(4):
            step(batch)
            scheduler.step()

    (text,) = said(loop)
    assert "StepLR.step()" in text
    assert scheduler.last_epoch == 8


def test_a_scheduler_of_two_steps_and_one_that_is_loaded_are_none():
    _, model, optimizer, batch = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    steps = [
        rebatch.Step(model, optimizer, regression_loss, lr_scheduler=scheduler) for _ in range(2)
    ]

    def loop():
        saved = scheduler.state_dict()
        for step in steps * 2:
            step(batch)
        scheduler.load_state_dict(saved)
        steps[0](batch)

    assert said(loop) == []


@pytest.mark.parametrize("name", ("optimizer", "model", "clip", "micro_start", "lr_schedular"))
def test_what_a_step_was_made_with_cannot_be_assigned(name):
    step, _, _, batch = made()
    with pytest.raises(AttributeError, match=f"Step.{name} cannot be assigned: make a new Step"):
        setattr(step, name, None)
    step.loss_fn = regression_loss
    step(batch)


def test_an_optimizer_of_another_model_is_refused():
    model, _, loss_fn = make("mlp")
    other, _, _ = make("mlp", seed=1)
    right, wrong = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    for optimizer in (wrong, [right, wrong]):
        with pytest.raises(ValueError, match="no parameter of the optimizer AdamW is in the model"):
            rebatch.Step(model, optimizer, loss_fn)
    rebatch.Step([model, other], [right, wrong], loss_fn)
    scale = torch.nn.Parameter(torch.ones(()))
    rebatch.Step(model, [right, torch.optim.SGD([scale])], loss_fn, state=[scale])
    rebatch.Step(model, [right, wrong], loss_fn, state=[other])


def test_ddp_of_one_rank_trains_with_and_without_a_static_graph(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        states = []
        for options in ({}, {"static_graph": False}, {"static_graph": True}):
            model, batch, loss_fn = make("mlp")
            if options:
                model = torch.nn.parallel.DistributedDataParallel(model, **options)
            step = rebatch.Step(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                loss_fn,
                log_level="quiet",
                micro_start=4,
            )
            step(batch)
            states.append(state_of(model))
        assert same_bits(states[0], states[1]) and same_bits(states[0], states[2])
    finally:
        torch.distributed.destroy_process_group()
