"""What programs leave in loss_fn, or in their loop, when they are converted: said in one sentence,
before any update, where the program can mend it."""

import functools
import inspect
import linecache
import re
import types
import warnings

import pytest
import torch

import rebatch.torch as rebatch
from rebatch._user_code import user_stacklevel
from rebatch.testing import fail_once
from rebatch.torch.program.left_backward import add_sentence
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


@pytest.mark.parametrize(
    "loss_fn, takes",
    (
        (lambda samples: None, r"\(samples\)"),
        (lambda model, x, y: None, r"\(model, x, y\)"),
        (functools.partial(lambda model, samples, scale: None, scale=1, samples=2), "model"),
    ),
)
def test_a_loss_fn_of_other_arguments_is_said_when_the_step_is_made(loss_fn, takes):
    expected = rf"loss_fn takes .*{takes}.*: expected loss_fn\(model, samples\)"
    with pytest.raises(TypeError, match=expected):
        a_step(loss_fn)
    step, _, _ = a_step(regression_loss)
    with pytest.raises(TypeError, match=expected):
        step.loss_fn = loss_fn


@pytest.mark.parametrize(
    "loss_fn",
    (
        lambda *arguments: regression_loss(*arguments),
        lambda model, samples, scale=1.0: regression_loss(model, samples) * scale,
        functools.partial(lambda scale, m, s: regression_loss(m, s) * scale, 1.0),
        torch.compile(regression_loss, backend="eager"),
    ),
)
def test_other_functions_of_two_arguments_are_one(loss_fn):
    step, _, batch = a_step(loss_fn)
    assert step(batch).isfinite()


def test_a_loss_of_the_programs_own_class_may_be_one():
    class Loss(torch.nn.MSELoss):
        def forward(self, model, samples):
            return super().forward(model(samples[0]), samples[1])

    step, _, batch = a_step(Loss())
    assert step(batch).isfinite()


# ---- lines that stay in the loop ----


def test_the_fields_of_a_batch_are_one_argument():
    step, model, (x, y) = a_step(regression_loss)
    before = state_of(model)
    for call in (lambda: step(x, y), lambda: step(x=x, y=y), lambda: step(x, y=y)):
        with pytest.raises(TypeError, match=r"fields of a batch: expected .* step\(\(x, y\)\)"):
            call()
    assert same_bits(before, state_of(model))


class Accelerator:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu")

    def backward(self, loss):
        self.scaler.scale(loss).backward()


def backward_of_its_loss(step, batch, _):
    loss = step(batch)
    loss.backward()


def backward_by_a_scaler(step, batch, accelerator):
    for _ in range(2):
        loss = step(batch)
        accelerator.scaler.scale(loss).backward()


def backward_by_an_accelerator(step, batch, accelerator):
    with torch.enable_grad():
        loss = step(batch)
        accelerator.backward(loss)


def backward_of_a_part(step, batch, _):
    part = step(batch)
    number = 4
    (part / number).backward()


def backward_at_once(step, batch, _):
    step(batch).backward()


@pytest.mark.parametrize(
    "loop",
    (
        backward_of_its_loss,
        backward_by_a_scaler,
        backward_by_an_accelerator,
        backward_of_a_part,
        backward_at_once,
    ),
)
def test_a_backward_of_the_loss_is_said_before_the_update(loop):
    step, model, batch = a_step(regression_loss)
    before = state_of(model)
    with pytest.raises(ValueError, match=r"test_mistakes.py:\d+ calls backward\(\) on the loss of"):
        loop(step, batch, Accelerator())
    assert same_bits(before, state_of(model))


def test_a_backward_of_another_loss_is_the_loops_own():
    step, _, batch = a_step(regression_loss)
    critic = torch.nn.Linear(8, 1)
    for _ in range(2):
        loss = step(batch)
        other = critic(batch[0]).mean()
        other.backward()
        loss = critic(batch[0]).mean() + loss
        loss.backward()
        if not loss.requires_grad:
            loss.backward()


def in_a_branch(loss, is_first):
    if is_first:
        loss.backward()


def in_a_scaler(loss, _):
    Accelerator().backward(loss)


def of_a_part(loss, number):
    torch.autograd.backward(loss / (number + 4))


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes are of Python 3.11")
@pytest.mark.parametrize("left", (in_a_branch, in_a_scaler, of_a_part))
def test_a_backward_that_is_left_elsewhere_is_named(left):
    step, _, batch = a_step(regression_loss)
    loss = step(batch)
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        left(loss, True)
    said = re.search(r"rebatch: (.*):(\d+) calls backward\(\)", caught.value.__notes__[0])
    assert "backward(" in linecache.getline(said[1], int(said[2]))
    assert said[1].endswith("test_mistakes.py") and "without this line" in said.string


def test_an_error_within_loss_fn_is_no_backward_that_is_left():
    def of_a_constant(model, samples):
        torch.ones(()).backward()

    step, _, batch = a_step(regression_loss)
    step(batch)
    step.loss_fn = of_a_constant
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        step(batch)
    assert not any("calls backward()" in note for note in getattr(caught.value, "__notes__", ()))


def test_without_notes_an_exception_has_the_sentence_in_its_text():
    error = types.SimpleNamespace(args=("what PyTorch says", 1))  # as of Python 3.10
    add_sentence(error, "rebatch: a sentence")
    assert error.args == ("what PyTorch says\nrebatch: a sentence", 1)


def clip_norm(model, scaler, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_norm_that_is_small(model, scaler, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)


def clip_value(model, scaler, optimizer):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def unscale(model, scaler, optimizer):
    scaler.unscale_(optimizer)


def by_hand(model, scaler, optimizer):
    for p in model.parameters():
        p.grad.mul_(0.5)


@pytest.mark.parametrize("line", (clip_norm, clip_norm_that_is_small, clip_value, unscale, by_hand))
@pytest.mark.parametrize("micro", (16, 4))
def test_clipping_that_stays_in_the_loop_is_told_once(line, micro):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    step, model, batch = a_step(regression_loss, scaler=scaler, micro_start=micro)
    optimizer = step._training.program.update.optimizers[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            step(batch)
            line(model, scaler, optimizer)
    (told,) = caught
    assert "scaled or clipped after a Step had applied them" in str(told.message)
    assert told.filename == __file__


def nothing(model, step, batch):
    pass


def zeros(model, step, batch):
    model.zero_grad(set_to_none=False)


def no_gradients(model, step, batch):
    model.zero_grad()


def gradients_of_another_loss(model, step, batch):
    """As a generator's, which flow through a discriminator."""
    regression_loss(model, batch).backward()


def clipped_gradients_of_its_own(model, step, batch):
    model.zero_grad()
    regression_loss(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def another_step(model, step, batch):
    step(batch)


@pytest.mark.parametrize(
    "line",
    (
        nothing,
        zeros,
        no_gradients,
        gradients_of_another_loss,
        clipped_gradients_of_its_own,
        another_step,
    ),
)
def test_what_else_the_loop_does_with_gradients_is_not(line):
    step, model, batch = a_step(regression_loss, clip=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            step(batch)
            line(model, step, batch)


# ---- a GradScaler within loss_fn ----


class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu")

    def loss(self, model, samples):
        return self.scaler.scale(regression_loss(model, samples))

    def half_the_loss(self, model, samples):
        return self.scaler.scale(regression_loss(model, samples)) / 2


def scaled_by_a_global():
    global GLOBAL
    GLOBAL = torch.amp.GradScaler("cpu")
    return lambda model, samples: GLOBAL.scale(regression_loss(model, samples))


def scaled_by_a_cell():
    scaler = torch.amp.GradScaler("cpu")
    return lambda model, samples: scaler.scale(regression_loss(model, samples))


@pytest.mark.parametrize(
    "make_loss_fn",
    (
        lambda: Trainer().loss,
        lambda: Trainer().half_the_loss,
        scaled_by_a_global,
        scaled_by_a_cell,
    ),
)
def test_a_loss_that_is_scaled_already_is_refused(make_loss_fn):
    loss_fn = make_loss_fn()
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


# ---- what PyTorch says of a part of the batch ----


def masked(model, samples):
    """The mask is (time, time), of as many steps as there are samples."""
    x, mask = samples
    return model((mask / mask.sum(1, keepdim=True)) @ x.transpose(0, 1)).square().mean()


def of_features(model, samples):
    return model(samples[0]).square().mean()


def of_all(model, samples):
    assert len(samples[0]) == 16, "of the whole batch"
    return model(samples[0]).square().mean()


def features():
    return torch.tanh(torch.nn.Linear(8, 8)(torch.randn(16, 8)))


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes are of Python 3.11")
@pytest.mark.parametrize(
    "loss_fn, make_batch, expected",
    (
        (
            masked,
            lambda: (torch.randn(16, 16, 8), torch.ones(16, 16).tril()),
            r"samples 0-7 of 16, which is cut in dimension 0 of batch\[0\], of shape "
            r"\(16, 16, 8\), "
            r"dimension 0 of batch\[1\], of shape \(16, 16\): expected samples in each tensor",
        ),
        (
            of_features,
            lambda: (features(), torch.randn(16)),
            r"samples 8-15 of 16, .*: expected batch\[0\] without its graph, which the first",
        ),
        (of_all, lambda: (torch.randn(16, 8), torch.ones(16)), "samples 0-7 of 16, which is cut"),
    ),
)
def test_an_error_in_a_part_says_how_the_batch_was_cut(loss_fn, make_batch, expected):
    model = torch.nn.Linear(8, 1)
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet")
    step(make_batch())
    with fail_once(model), pytest.raises(Exception) as caught:
        step(make_batch())
    assert not str(caught.value).startswith("rebatch")
    assert re.search(expected, caught.value.__notes__[0])


def of_five_steps(model, samples):
    assert len(samples[0]) == 5
    return model(torch.stack(samples)).square().mean()


def of_two_views(model, samples):
    first, second = samples
    return (model(first) - model(second)).square().mean()


@pytest.mark.parametrize(
    "loss_fn, batch, samples, expected",
    (
        (of_five_steps, [torch.randn(5, 8) for _ in range(4)], 4, "length=len for samples"),
        (of_two_views, [torch.randn(4, 8, 8) for _ in range(2)], 4, "a tuple for fields"),
        (of_two_views, [torch.randn(3, 6, 8) for _ in range(2)], 3, "a tuple for fields"),
    ),
)
def test_lists_that_fail_in_a_part_are_cut_otherwise(loss_fn, batch, samples, expected):
    model = torch.nn.Linear(8, 1)
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet")
    whole = loss_fn(model, batch).detach()
    with pytest.warns(RuntimeWarning, match=f"whose lists are cut otherwise .* {expected}") as told:
        with fail_once(model):
            loss = step(batch)
        step(batch)
    assert torch.isclose(loss, whole)
    assert step.report.samples == samples and step.report.microbatches > 1
    assert [w.filename for w in told] == [__file__]


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes are of Python 3.11")
def test_an_error_in_a_part_of_lists_says_what_to_write():
    model = torch.nn.Linear(8, 1)

    def whole(model, samples):
        assert (len(samples), len(samples[0])) == (4, 5)
        return model(torch.stack(samples)).square().mean()

    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), whole, micro_start=2)
    for _ in range(2):
        with pytest.raises(AssertionError) as caught:
            step([torch.randn(5, 8) for _ in range(4)])
        (note,) = caught.value.__notes__
        assert "dimension 0 of batch[0], of shape (5, 8)" in note
        assert "length=len if each entry of the list is a sample" in note


def test_an_error_in_the_whole_batch_is_pytorchs_alone():
    step, _, batch = a_step(lambda model, samples: model(samples[1]))
    with pytest.raises(RuntimeError) as caught:
        step(batch)
    assert not getattr(caught.value, "__notes__", [])
