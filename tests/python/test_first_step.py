"""Owns the tests of an optimizer's first step after a Backward: gradients that are gone by then,
and what is asked for it."""

import gc
import re
import time
import warnings

import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch.update.first_memory import first_update_bytes


def training(make=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = make(model.parameters(), 0.1)
    backward = rebatch.Backward(model, lambda m, s: m(s).square().mean(), **options)
    return model, optimizer, backward, torch.ones(8, 4)


GONE = "SGD.step\\(\\) has trained nothing.*expected zero_grad\\(\\) before backward\\(batch\\)"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_before_the_step_are_told_once(set_to_none):
    model, optimizer, backward, batch = training()
    before = model.weight.clone()

    def iteration():
        backward(batch)
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()

    with pytest.warns(RuntimeWarning, match=GONE):
        iteration()
    assert torch.equal(before, model.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iteration()


def test_hooks_of_others_are_called_after_the_first_step_too():
    _, optimizer, backward, batch = training()
    called = []
    backward(batch)
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.step()
    backward(batch)
    optimizer.step()
    assert called == [1, 1]
    assert len(optimizer._optimizer_step_post_hooks) == 1


def accumulates(backward, optimizer, batch):
    backward(batch)
    backward(batch)
    optimizer.step()
    optimizer.zero_grad()


def clips(backward, optimizer, batch):
    optimizer.zero_grad()
    backward(batch)
    torch.nn.utils.clip_grad_norm_(backward.model.parameters(), 1e-3)
    optimizer.step()


def scales(backward, optimizer, batch):
    """Its first scale is too large, so that the step is skipped and the gradients are cleared."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    scaler.scale(torch.zeros(()))
    for _ in range(3):
        scaled = rebatch.Backward(backward.model, backward.loss_fn, backward=scaler)
        scaled(batch * 100)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() < 1e38, "no step was skipped"


def looks_only(backward, optimizer, batch):
    """The gradients are read, and the optimizer does not step."""
    for _ in range(3):
        backward(batch)
        optimizer.zero_grad()


def has_closure(backward, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        return backward(batch)

    backward(batch)
    optimizer.zero_grad()
    optimizer.step(closure)


def steps_before(backward, optimizer, batch):
    optimizer.step()
    backward(batch)
    optimizer.step()
    optimizer.zero_grad()


def decays(backward, optimizer, batch):
    """A momentum that is kept in the gradients themselves."""
    backward(batch)
    optimizer.step()
    for p in backward.model.parameters():
        p.grad.mul_(0.9)


def zeros(backward, optimizer, batch):
    backward(batch)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "loop", [accumulates, clips, scales, looks_only, has_closure, steps_before, decays, zeros]
)
def test_loops_that_train_are_not_told(loop):
    model, optimizer, backward, batch = training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loop(backward, optimizer, batch)


KEPT = "gradients that SGD.step\\(\\) has applied are still there.*expected zero_grad\\(\\) before"


def in_the_block(backward, optimizer, batch):
    for part in backward.parts(batch):
        with part as samples:
            optimizer.zero_grad()
            part.backward(backward.loss_fn(backward.model, samples))


def before_the_block(backward, optimizer, batch):
    for part in backward.parts(batch):
        optimizer.zero_grad()
        with part as samples:
            part.backward(backward.loss_fn(backward.model, samples))


def nowhere(backward, optimizer, batch):
    backward(batch)


@pytest.mark.parametrize("micro", (4, 8))
@pytest.mark.parametrize("clears", (in_the_block, before_the_block, nowhere))
def test_gradients_that_no_line_clears_are_told_once(clears, micro):
    """zero_grad() within a batch finds none: those of before it are kept apart."""
    model, optimizer, backward, batch = training(micro_start=micro, log_level="quiet")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            clears(backward, optimizer, batch)
            optimizer.step()
    (text,) = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert re.search(KEPT, text)


@pytest.mark.parametrize("micro", (4, 8))
@pytest.mark.parametrize("uses_parts", (False, True))
def test_a_step_in_the_midst_of_a_batch_is_refused_before_it_changes_anything(uses_parts, micro):
    """Of an optimizer of the model; that of another network is the program's."""
    model, optimizer, backward, batch = training(micro_start=micro, log_level="quiet")
    other = torch.nn.Linear(4, 1)
    others = torch.optim.SGD(other.parameters(), 0.1)
    plain, before = backward.loss_fn, model.weight.clone()

    def loss_fn(model, samples):
        others.step()
        loss = plain(model, samples)
        optimizer.step()
        return loss

    backward.loss_fn = loss_fn
    with pytest.raises(ValueError, match=r"SGD.step\(\) was called within a loss_fn or a block"):
        if uses_parts:
            for part in backward.parts(batch):
                with part as samples:
                    part.backward(plain(model, samples))
                    others.step()
                    optimizer.step()
        else:
            backward(batch)
    assert torch.equal(before, model.weight) and model.weight.grad is None
    backward.loss_fn = plain
    backward(batch)
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_a_step_that_trains_a_part_of_its_model_clears_its_own_gradients():
    """Those of the other parameters stay, and are no sign of a loop that clears none."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    step = rebatch.Step(model, optimizer, lambda m, s: m(s).square().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(torch.ones(8, 4))


def test_two_optimizers_of_a_model_are_told_apart():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    good, bad = (torch.optim.SGD(part.parameters(), 0.1) for part in model)
    backward = rebatch.Backward(model, lambda m, s: m(s).square().mean())
    backward(torch.ones(8, 4))
    good.step()
    bad.zero_grad()
    with pytest.warns(RuntimeWarning, match=GONE):
        bad.step()


def test_sgd_asks_for_nothing_after_its_first_step(monkeypatch):
    model, optimizer, backward, batch = training(optimizer=None)
    asked = []
    module = "rebatch.torch.update.passes.first_update_bytes"
    monkeypatch.setattr(module, lambda o: asked.append(o) or first_update_bytes(o))
    for _ in range(3):
        backward(batch)
        backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    assert asked == [optimizer] * 2


def test_a_step_that_fails_is_not_the_first(monkeypatch):
    model, optimizer, backward, batch = training()
    backward(batch)
    with pytest.raises(TypeError):
        optimizer.step(5)
    assert backward._training.program.update.first_bytes() == first_update_bytes(optimizer) > 0


def test_one_made_anew_each_epoch_looks_for_optimizers_once(monkeypatch):
    looked = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: looked.append(time.monotonic()) or collect())
    model, optimizer, backward, batch = training()
    for _ in range(3):
        rebatch.Backward(model, backward.loss_fn)(batch)
        optimizer.step()
        optimizer.zero_grad()
    assert len(looked) == 1
    optimizer = torch.optim.Adam(model.parameters())  # the first one is gone
    anew = rebatch.Backward(model, backward.loss_fn)
    anew(batch)
    assert len(looked) == 2
    assert anew._training.program.update.known_optimizers() == [optimizer]
