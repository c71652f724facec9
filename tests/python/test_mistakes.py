"""What programs leave in loss_fn, or in their loop, when they are converted: said in one sentence,
before any update, where the program can mend it."""

import functools
import inspect

import pytest
import torch

import rebatch.torch as rebatch
from rebatch._user_code import user_stacklevel
from models import make, regression_loss, same_bits, state_of


def a_step(loss_fn, **options):
    model, batch, _ = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False, **options)
    return step, model, batch


# ---- backward() within loss_fn ----


def two_backwards(model, samples):
    regression_loss(model, samples).backward()
    return regression_loss(model, samples)


def backward_of_the_loss(model, samples):
    loss = regression_loss(model, samples)
    loss.backward()
    return loss


def detached_after_backward(model, samples):
    return backward_of_the_loss(model, samples).detach()


def gradients_by_hand(model, samples):
    """As PCGrad does."""
    head = model.body[3].weight
    head.grad = torch.autograd.grad(regression_loss(model, samples), head)[0]
    return regression_loss(model, samples)


@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
@pytest.mark.parametrize("micro", (16, 4))
@pytest.mark.parametrize(
    "loss_fn, name",
    (
        (two_backwards, "body.0.weight"),
        (backward_of_the_loss, "body.0.weight"),
        (detached_after_backward, "body.0.weight"),
        (gradients_by_hand, "body.3.weight"),
    ),
)
def test_a_gradient_that_loss_fn_makes_is_refused_in_every_step(loss_fn, name, micro, gradients):
    step, model, batch = a_step(loss_fn, micro_start=micro, gradients=gradients)
    before = state_of(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"'{name}' got a gradient while loss_fn ran"):
            step(batch)
        assert same_bits(before, state_of(model))
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match=f"'{name}' got a gradient while loss_fn ran"):
        step.check(batch)


def test_a_gradient_that_begins_later_is_refused():
    """GradNorm after a warm-up."""

    def loss_fn(model, samples):
        if model.is_warm:
            model.body[0].weight.sum().backward()
        return regression_loss(model, samples)

    step, model, batch = a_step(loss_fn, micro_start=4)
    model.is_warm = False
    for _ in range(5):
        step(batch)
    model.is_warm = True
    with pytest.raises(ValueError, match="'body.0.weight' got a gradient while loss_fn ran"):
        step(batch)


def test_gradients_that_loss_fn_uses_itself_are_its_own():
    """A gradient penalty, and another network that loss_fn trains by its own optimizer."""
    critic = torch.nn.Linear(8, 1)
    own = torch.optim.SGD(critic.parameters(), 0.1)

    def loss_fn(model, samples):
        x = samples[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        own.zero_grad()
        critic(samples[0]).mean().backward()
        own.step()
        return regression_loss(model, samples) + slope.square().mean()

    step, _, batch = a_step(loss_fn)
    assert step(batch).isfinite()
    assert step(batch).isfinite()


# ---- what is no loss_fn ----


@pytest.mark.parametrize(
    "criterion, name",
    (
        (torch.nn.MSELoss(), r"MSELoss\(\)"),
        (torch.nn.functional.cross_entropy, "cross_entropy"),
        (functools.partial(torch.nn.functional.mse_loss, reduction="sum"), "mse_loss"),
    ),
)
def test_a_criterion_is_no_loss_fn(criterion, name):
    expected = f"loss_fn is {name}, which does not run the model: expected a function"
    with pytest.raises(TypeError, match=expected):
        a_step(criterion)
    step, _, _ = a_step(regression_loss)
    with pytest.raises(TypeError, match=expected):
        step.loss_fn = criterion


def test_a_loss_of_the_programs_own_class_may_be_one():
    class Loss(torch.nn.MSELoss):
        def forward(self, model, samples):
            return super().forward(model(samples[0]), samples[1])

    step, _, batch = a_step(Loss())
    assert step(batch).isfinite()


# ---- a GradScaler within loss_fn ----


class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu")

    def loss(self, model, samples):
        return self.scaler.scale(regression_loss(model, samples))

    def half_the_loss(self, model, samples):
        return self.scaler.scale(regression_loss(model, samples)) / 2


GLOBAL = torch.amp.GradScaler("cpu")


def scaled_by_a_global(model, samples):
    return GLOBAL.scale(regression_loss(model, samples))


def scaled_by_a_cell():
    scaler = torch.amp.GradScaler("cpu")
    return lambda model, samples: scaler.scale(regression_loss(model, samples))


@pytest.mark.parametrize(
    "loss_fn", (Trainer().loss, Trainer().half_the_loss, scaled_by_a_global, scaled_by_a_cell())
)
def test_a_loss_that_is_scaled_already_is_refused(loss_fn):
    step, model, batch = a_step(loss_fn)
    before = state_of(model)
    with pytest.raises(ValueError, match="loss_fn returned a loss that a GradScaler has scaled"):
        step(batch)
    assert same_bits(before, state_of(model))


def test_so_is_one_that_the_steps_own_scaler_has_scaled():
    trainer = Trainer()
    step, _, batch = a_step(trainer.loss, scaler=trainer.scaler)
    with pytest.raises(ValueError, match="loss_fn returned a loss that a GradScaler has scaled"):
        step(batch)


def test_another_factor_is_no_scaler():
    factor, trainer = torch.tensor(65536.0), Trainer()

    def loss_fn(model, samples):
        assert trainer.scaler.is_enabled()
        return regression_loss(model, samples) * factor

    step, _, batch = a_step(loss_fn, scaler=torch.amp.GradScaler("cpu"))
    assert step(batch).isfinite()


# ---- where warnings point ----


def test_a_warning_points_at_the_programs_line():
    step, model, batch = a_step(regression_loss)
    optimizer = step._training.program.update.optimizers[0]
    step(batch)
    with pytest.warns(RuntimeWarning, match="update happens twice") as caught:
        optimizer.step()
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_so_does_that_of_a_scheduler():
    model, batch, _ = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step = rebatch.Step(model, optimizer, regression_loss, lr_scheduler=scheduler)
    step(batch)
    scheduler.step()
    with pytest.warns(RuntimeWarning, match="moves twice") as caught:
        step(batch)
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_a_line_of_a_known_package_is_not_the_programs():
    """One within torch, which calls back into this package."""
    inside = {"__name__": "torch.optim.of_a_test", "user_stacklevel": user_stacklevel}
    exec("def level():\n    return user_stacklevel()\n", inside)
    assert inside["level"]() == 2


# ---- no GPU ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_no_pool():
    with pytest.warns(UserWarning, match="there is no GPU, so install"):
        rebatch.install()
    for of_the_pool in (rebatch.stats, rebatch.summary, rebatch.snapshot):
        with pytest.raises(RuntimeError, match="^rebatch: there is no GPU, so there is no pool$"):
            of_the_pool()
