"""Step: the update is that of a run that never ran out of memory, whatever happens."""

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import random
import warnings
import weakref

import pytest
import torch

import rebatch.torch as rebatch
from rebatch import _library as c
from rebatch.torch.session.options import PassOptions
from rebatch.torch.session.weak_methods import weakly
from models import (
    FailAt,
    HalfStep,
    Unseen,
    fails_above,
    make,
    out_of_memory,
    regression_loss,
    same_bits,
    state_of,
    train,
)

KINDS = ("mlp", "conv", "gpt")


def plain(kind, micro, steps=3):
    """The same training without rebatch, at a fixed micro-batch."""
    model, batch, loss_fn = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        for first in range(0, 16, micro):
            part = tuple(t[first : first + micro] for t in batch)
            (loss_fn(model, part) * (len(part[0]) / 16)).backward()
        optimizer.step()
    return state_of(model)


# ---- the same bits ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro", (16, 4, 6))
def test_a_step_is_a_plain_loop_at_its_size(kind, micro):
    state, _, step = train(kind, micro_start=micro)
    assert same_bits(state, plain(kind, micro))
    assert step.report.micro == micro


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_an_oom_leads_to_the_bits_of_a_run_that_started_smaller(kind, where, gradients):
    state, losses, step = train(kind, limited=4, where=where, gradients=gradients)
    expected, expected_losses, _ = train(kind, micro_start=4)
    assert same_bits(state, expected)
    assert same_bits(losses, expected_losses)
    assert step.micro == 4


def operations(kind):
    """How many operations a step has in which it could fail."""
    counter = FailAt(1 << 30)
    model, batch, loss_fn = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", micro_start=4)
    step(batch)
    with counter:
        step(batch)
    return counter.seen


@pytest.mark.parametrize(
    "kind",
    (
        pytest.param("mlp", marks=pytest.mark.night),
        "conv",
        pytest.param("gpt", marks=pytest.mark.night),
    ),
)
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_an_oom_at_every_operation_changes_no_bit(kind, gradients):
    """The failure is gone when it is tried again; the allowed sizes keep the cut at 4."""
    options = dict(micro_start=4, micro_smallest=4, micro_largest=4, gradients=gradients)
    expected, _, _ = train(kind, **options)
    torn = 0
    count = operations(kind)
    assert count > 50
    for n in range(1, count + 1, 1 if kind == "mlp" else 11):
        try:
            state, _, step = train(kind, fail_at=n, lighten=[lambda on: None], **options)
        except rebatch.Torn:
            torn += 1  # within the update
            continue
        assert same_bits(state, expected), f"{kind}: an OOM in operation {n} changed the result"
    assert 0 < torn < count / 2


def test_losses_are_those_of_the_whole_batch():
    _, whole, _ = train("mlp", steps=1)
    _, cut, _ = train("conv", steps=1)
    model, batch, loss_fn = make("mlp")
    model.eval()
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn, micro_start=3)
    assert torch.allclose(step(batch), loss_fn(model, batch))


def test_gradients_that_are_sparse_or_missing_are_accumulated():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"used": torch.nn.Embedding(5, 3, sparse=True), "unused": torch.nn.Linear(2, 2)}
    )
    tokens = torch.arange(5)
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda m, part: m["used"](part).square().mean(),
        micro_start=2,
    )
    step(tokens)
    whole = torch.autograd.grad(model["used"](tokens).square().mean(), model["used"].weight)[0]
    assert torch.allclose(model["used"].weight.grad.to_dense(), whole.to_dense())
    assert model["unused"].weight.grad is None


# ---- what is undone ----


def test_buffers_and_generators_are_put_back():
    own = torch.Generator().manual_seed(5)
    draws = []

    def run(limited):
        model, batch, loss_fn = make("conv")
        own.manual_seed(5)

        def noisy(m, part):
            noise = torch.randn(len(part[1]), generator=own)
            return fails_above(loss_fn, limited)(m, (part[0], part[1] + noise))

        step = rebatch.Step(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            noisy,
            generators=[own],
            log_level="quiet",
            growth=False,
            micro_start=0 if limited == 4 else 4,
        )
        torch.manual_seed(2)
        for _ in range(2):
            step(batch)
        draws.append(torch.rand(1, generator=own))
        return state_of(model)

    assert same_bits(run(4), run(99))
    assert draws[0] == draws[1]


@pytest.mark.parametrize("largest, groups", ((4, 2), (0, 1)))
def test_a_group_that_a_failed_attempt_added_to_the_optimizer_is_gone(largest, groups):
    """A head that forward() makes for a new task."""
    model, batch, _ = make("mlp")
    optimizer = torch.optim.Adam(model.body.parameters())

    def loss_fn(model, samples):
        if not hasattr(model, "head"):
            model.head = torch.nn.Linear(8, 1)
            optimizer.add_param_group(dict(params=list(model.head.parameters())))
        loss = (model(samples[0]) + model.head(samples[0])[:, 0] - samples[1]).square().mean()
        if len(samples[0]) > largest:
            out_of_memory(None)
        return loss

    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False)
    try:
        step(batch)
    except rebatch.Exhausted:
        assert largest == 0
    assert len(optimizer.param_groups) == groups
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(model.parameters())
    )


def test_a_failed_step_leaves_parameters_buffers_and_generators_as_they_were():
    model, batch, loss_fn = make("conv")
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet")
    before, random = state_of(model), torch.get_rng_state()
    step.loss_fn = fails_above(loss_fn, 0, "backward")
    with pytest.raises(rebatch.Exhausted):
        step(batch)
    assert same_bits(state_of(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    step.loss_fn = loss_fn
    step(batch)


def test_nothing_of_a_failed_attempt_is_kept_alive():
    model, batch, loss_fn = make("mlp")
    alive = Unseen()

    def watched(m, part):
        activations = m(part[0])
        if len(part[0]) > 4:
            alive.append(weakref.ref(activations))
            out_of_memory(None)
        return ((activations - part[1]) ** 2).mean()

    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), watched, log_level="quiet")
    gc.disable()
    try:
        step(batch)
    finally:
        gc.enable()
    assert len(alive) == 2 and not any(reference() for reference in alive)


def all_of_a_step(**options):
    """Weak references to a Step that has run, evaluated and been checked, and to its session. The
    collector of cycles is off."""
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    step = rebatch.Step(
        model,
        optimizer,
        fails_above(loss_fn, 5),
        cost=lambda batch, first, count: count,
        lighten=[lambda on: None],
        on_event=lambda text, event: None,
        growth=False,
        **options,
    )
    step(batch)
    step.evaluate(batch)
    step.check(batch)
    assert step.report.ooms > 0
    return weakref.ref(step), weakref.ref(step._training.session)


def test_a_step_that_nobody_has_is_gone_without_a_collection():
    gc.collect()
    gc.disable()
    try:
        assert [found() for found in all_of_a_step()] == [None, None]
    finally:
        gc.enable()


def test_backward_that_nobody_has_is_gone_without_a_collection():
    gc.collect()
    gc.disable()
    try:
        model, batch, loss_fn = make("mlp")
        optimizer = torch.optim.AdamW(model.parameters())
        backward = rebatch.Backward(model, loss_fn, optimizer=optimizer, log_level="quiet")
        backward(batch)
        training = weakref.ref(backward._training)
        del backward
        assert training() is None
    finally:
        gc.enable()


def test_callbacks_of_a_step_that_is_gone_fail():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn,
        lighten=[lambda is_on: None],
        log_level="quiet",
    )
    step(batch)
    ops, guards = step._training.callbacks.ops, step._training.session._guard_ops
    del step
    gc.collect()
    calls = {
        "zero_grad": ops.zero_grad(None),
        "forward_backward": ops.forward_backward(c.Microbatch(count=4), None),
        "optimizer_step": ops.optimizer_step(None),
        "lighten": ops.lighten(1, None),
        "save": guards.save(c.GuardPoint.STEP, None),
        "restore": guards.restore(c.GuardPoint.STEP, None),
    }
    assert calls == dict.fromkeys(calls, c.Status.E_USER)


def test_a_weak_method_says_that_its_object_is_gone():
    class Owner:
        def double(self, value):
            return 2 * value

    owner = Owner()
    for_python, for_c = weakly(owner.double), weakly(owner.double, gone=c.Status.E_USER)
    assert for_python(3) == for_c(3) == 6
    del owner
    assert for_c(3) == c.Status.E_USER
    with pytest.raises(ReferenceError, match=r"double\(\) was called when its object was gone"):
        for_python(3)


def test_only_the_samples_that_failed_run_again():
    ran, fails = Unseen(), Unseen(True)
    model, batch, loss_fn = make("mlp")

    def once(m, part):
        ran.append(len(part[0]))
        if len(ran) == 3 and fails.pop():
            out_of_memory(None)
        return loss_fn(m, part)

    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), once, micro_start=4, log_level="quiet"
    )
    step(batch)
    assert ran[:7] == [4, 4, 4, 2, 2, 2, 2]  # and then those that are compared
    assert step.report.redone_samples == 4


# ---- failures that are not OOMs ----


def test_an_exception_comes_out_unchanged_with_its_traceback():
    model, batch, loss_fn = make("mlp")

    def broken(m, part):
        raise KeyError("mine")

    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), broken)
    with pytest.raises(KeyError, match="mine") as caught:
        step(batch)
    assert any(entry.name == "broken" for entry in caught.traceback)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    step.loss_fn = loss_fn
    step(batch)
    assert step.report.step == 0


def test_an_interrupt_comes_out():
    model, batch, _ = make("mlp")

    def interrupted(m, part):
        raise KeyboardInterrupt

    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(batch)


def test_exhausted_says_what_was_tried():
    with pytest.raises(rebatch.Exhausted) as caught:
        train("mlp", limited=0)
    assert "forward_backward of 1 sample" in str(caught.value)
    assert "Tried to allocate 2.00 GiB" in str(caught.value)
    assert isinstance(caught.value, torch.OutOfMemoryError)


def test_exceptions_have_the_names_that_programs_use():
    public = (rebatch.Error, rebatch.Exhausted, rebatch.Torn)
    names = [f"{error.__module__}.{error.__name__}" for error in public]
    assert names == ["rebatch.Error", "rebatch.torch.Exhausted", "rebatch.torch.Torn"]


def test_an_oom_within_the_update_is_torn():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(model, HalfStep(model.parameters(), 0.1), loss_fn, log_level="quiet")
    with pytest.raises(rebatch.Torn, match="restore a checkpoint"):
        step(batch)
    assert step.report.torn


class Raises(torch.optim.SGD):
    """Runs out of memory once it has changed some parameters."""

    def __init__(self, parameters, number):
        super().__init__(parameters, 0.1)
        self.number = number

    def step(self, closure=None):
        for p in self.param_groups[0]["params"][: self.number]:
            with torch.no_grad():
                p.add_(1)
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "number, sentence",
    (
        (0, "before it changed a parameter: they are as they were, unless it writes through .data"),
        (1, "which had changed 1 of {} parameters: restore a checkpoint"),
        (99, "which had changed {0} of {0} parameters: restore a checkpoint"),
    ),
)
def test_torn_says_what_has_changed(number, sentence):
    model, batch, loss_fn = make("mlp")
    parameters = list(model.parameters())
    step = rebatch.Step(model, Raises(parameters, number), loss_fn, log_level="quiet")
    with pytest.raises(rebatch.Torn) as caught:
        step(batch)
    text = str(caught.value)
    assert text.startswith("step 0: out of memory in the optimizer's step, ")
    assert sentence.format(len(parameters)) in text
    assert "rebatch_mutating" not in text and "reserve" not in text


@pytest.mark.parametrize("draw", (random.random, lambda: float(torch.rand(()))))
def test_an_oom_by_chance_is_said_to_be_drawn_again(draw):
    model, batch, _ = make("mlp")

    def loss_fn(model, samples):
        if draw() < 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(samples[0]).square().mean()

    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet")
    with pytest.raises(rebatch.Exhausted, match="generators of random numbers.*is drawn again"):
        step(batch)


# ---- losses, scalers, clipping, several optimizers ----


def masked_sum(model, samples):
    x, mask = samples
    return ((model(x) ** 2) * mask).sum()


def test_with_a_normalizer_the_gradient_does_not_depend_on_the_cut():
    gradients = []
    for micro in (16, 3):
        model, (x, _), _ = make("mlp")
        model.eval()
        mask = (torch.arange(16) % 3 == 0).float()
        step = rebatch.Step(
            model,
            torch.optim.SGD(model.parameters(), 0.0),
            masked_sum,
            normalizer=lambda batch: batch[1].sum(),
            micro_start=micro,
        )
        step((x, mask))
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))


def train_scaled(limited, clip=None, fail_at=0, fail_in=1):
    model, batch, loss_fn = make("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = rebatch.Step(
        model,
        optimizer,
        fails_above(loss_fn, limited) if limited else loss_fn,
        scaler=scaler,
        clip=clip,
        autocast=torch.bfloat16,
        log_level="quiet",
        growth=False,
        micro_start=0 if limited else 4,
    )
    torch.manual_seed(1)
    for i in range(4):
        with FailAt(fail_at if i == fail_in else 0):
            step(batch)
    return state_of(model), scaler.get_scale()


@pytest.mark.parametrize("clip", (None, 0.1))
def test_a_scaler_and_clipping_are_unchanged_by_ooms(clip):
    state, scale = train_scaled(4, clip)
    expected, expected_scale = train_scaled(None, clip)
    assert same_bits(state, expected) and scale == expected_scale == 4096.0


@pytest.mark.parametrize("clip", (None, 0.1))
@pytest.mark.parametrize(
    "scaler",
    (torch.amp.GradScaler("cpu", enabled=False), torch.cuda.amp.GradScaler(enabled=False)),
)
def test_a_disabled_scaler_is_none(clip, scaler):
    def train(scaler):
        model, batch, loss_fn = make("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        step = rebatch.Step(
            model,
            optimizer,
            lambda model, samples: scaler.scale(loss_fn(model, samples)) if scaler else None,
            scaler=scaler,
            clip=clip,
            autocast=torch.bfloat16,
            micro_start=4,
        )
        if not scaler:
            step.loss_fn = loss_fn
        for _ in range(3):
            step(batch)
        return state_of(model), step.check(batch)

    (state, found), (expected, _) = train(scaler), train(None)
    assert same_bits(state, expected) and "after_oom" not in str(found)


def test_a_scaler_that_pytorch_disables_is_none():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.warns(UserWarning, match="not available"):
        scaler = torch.amp.GradScaler("cuda")
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, scaler=scaler, clip=1.0
    )
    assert step(batch).isfinite() and not scaler.state_dict()


class Bf16:
    """A class, which is called to enter it."""

    def __enter__(self):
        self.inner = torch.autocast("cpu", torch.bfloat16)
        self.inner.__enter__()

    def __exit__(self, *arguments):
        self.inner.__exit__(*arguments)


@contextlib.contextmanager
def bf16():
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize(
    "autocast",
    (
        torch.bfloat16,
        torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.bfloat16),
        functools.partial(torch.autocast, device_type="cpu", dtype=torch.bfloat16),
        Bf16,
        bf16,
    ),
)
def test_autocast_may_be_what_makes_a_context_manager(autocast):
    seen = []

    def loss_fn(model, samples):
        seen.append(model[0](samples).dtype)
        return model(samples).float().square().mean()

    model = torch.nn.Sequential(torch.nn.Linear(8, 1))
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, autocast=autocast, micro_start=2
    )
    step(torch.randn(8, 8))
    assert seen[:4] == [torch.bfloat16] * 4
    assert not torch.is_autocast_enabled("cpu")


def test_an_autocast_that_makes_none_is_said():
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, autocast=lambda: None)
    with pytest.raises(TypeError, match=r"autocast\(\) returned None: expected a context manager"):
        step(batch)
    with pytest.raises(TypeError, match="entered once, .*: expected the function that makes it"):
        rebatch.Step(model, optimizer, loss_fn, autocast=bf16())


@pytest.mark.night
def test_a_scaler_survives_an_oom_at_every_operation():
    expected, _ = train_scaled(None, 0.1)
    survived = 0
    for n in range(1, 200, 3):
        try:
            state, scale = train_scaled(None, 0.1, fail_at=n)
        except rebatch.Torn:
            continue
        survived += 1
        # After an OOM the micro-batch is halved, so the sums are those of another cut.
        assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(state, expected))
        assert scale == 4096.0
    assert survived > 30


def test_a_scaler_survives_an_oom_in_each_operation_of_its_first_micro_batch():
    """Also in the second of the tensors that its first scale() makes."""
    for n in range(1, 40):
        _, scale = train_scaled(None, 0.1, fail_at=n, fail_in=0)
        assert scale == 4096.0


def test_several_optimizers_and_schedulers_step_once_a_batch():
    model, batch, loss_fn = make("mlp")
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.SGD(first, lr=0.1), torch.optim.Adam(second, lr=0.1)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    step = rebatch.Step(model, optimizers, loss_fn, lr_scheduler=schedulers, micro_start=4)
    step(batch)
    step(batch)
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.025, 0.025]


# ---- reports and events ----


@pytest.mark.parametrize(
    "samples, micro, text",
    ((16, 8, "2 x 8 samples"), (16, 15, "15 + 1 samples"), (16, 7, "3 x up to 7 of 16 samples")),
)
def test_the_report_says_how_many_samples_each_micro_batch_has(samples, micro, text):
    model, batch, loss_fn = make("mlp", samples)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, micro_start=micro)
    step(batch)
    assert str(step.report) == f"step 0: {text}"


def test_the_report_is_plain_numbers():
    _, _, step = train("mlp", limited=4)
    assert (step.report.micro, step.report.samples) == (4, 16)
    assert str(step.report).startswith("step 2: 4 x 4 samples")


def test_events_go_to_a_function():
    model, batch, loss_fn = make("mlp")
    said = []
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        fails_above(loss_fn, 4),
        on_event=lambda text, event: said.append(text),
    )
    step(batch)
    assert any("micro-batch 16 -> 8" in text for text in said)


def test_two_steps_in_one_process_are_apart():
    model, batch, loss_fn = make("mlp")
    first = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), fails_above(loss_fn, 4), log_level="quiet"
    )
    second = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    for _ in range(2):
        first(batch), second(batch)
    assert first.report.micro == 4 and second.report.micro == 16


# ---- bad input ----


@pytest.mark.parametrize(
    "loss_fn, sentence",
    (
        (lambda m, b: m(b[0]), "loss_fn returned a tensor of shape (16,): expected a scalar"),
        (lambda m, b: 1.0, "loss_fn returned a float: expected a scalar"),
        (lambda m, b: regression_loss(m, b).detach(), "needs no gradient"),
    ),
)
def test_a_wrong_loss_is_said(loss_fn, sentence):
    model, batch, _ = make("mlp")
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    with pytest.raises(ValueError) as caught:
        step(batch)
    assert sentence in str(caught.value)


NEAR = {
    "scheduler": "lr_scheduler",
    "grad_scaler": "scaler",
    "normaliser": "normalizer",
    "micro_starts": "micro_start",
    "batch_dims": "batch_dim",
    "states": "state",
    "auto_cast": "autocast",
}


def test_wrong_options_are_said_when_the_step_is_made():
    model, _, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="no option micro_strat: did you mean micro_start"):
        rebatch.Step(model, optimizer, loss_fn, micro_strat=4)
    for wrong, right in NEAR.items():
        with pytest.raises(TypeError, match=f"{wrong}: did you mean {right}. The others are .*, "):
            rebatch.Step(model, optimizer, loss_fn, **{wrong: 1})
    with pytest.raises(TypeError, match="no option amp: expected one of .*, autocast, ") as caught:
        rebatch.Step(model, optimizer, loss_fn, amp=True)
    arguments = inspect.signature(rebatch.Step.__init__).parameters.values()
    own = {p.name for p in arguments if p.kind is p.KEYWORD_ONLY}
    listed = set(str(caught.value).split("one of ")[1].split(", "))
    assert listed == own | set(PassOptions.__annotations__)
    with pytest.raises(ValueError, match="on_oom is 'half': expected one of default, halve"):
        rebatch.Step(model, optimizer, loss_fn, on_oom="half")
    with pytest.raises(ValueError, match="whose step runs the model again"):
        rebatch.Step(model, torch.optim.LBFGS(model.parameters()), loss_fn)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="which needs a metric"):
        rebatch.Step(model, optimizer, loss_fn, lr_scheduler=plateau)
    with pytest.raises(ValueError, match="gradients is 'new'"):
        rebatch.Step(model, optimizer, loss_fn, gradients="new")
    with pytest.raises(rebatch.Error, match="micro_smallest"):
        rebatch.Step(model, optimizer, loss_fn, micro_smallest=8, micro_largest=4)(make("mlp")[1])


@pytest.mark.parametrize(
    "options, sentence",
    (
        ({"micro_start": -1}, "micro_start is -1: expected 0 to 2^63 - 1"),
        ({"micro_start": "4"}, "micro_start is '4': expected an int"),
        ({"grow_after": 1 << 32}, "grow_after is 4294967296: expected 0 to 2^32 - 1"),
        ({"micro_allowed": 4}, "micro_allowed is 4: expected a list of sizes"),
        ({"micro_allowed": [8, 0]}, "micro_allowed[1] is 0: expected 1 to 2^63 - 1"),
        ({"autocast": "bf16"}, "autocast is 'bf16': expected a dtype"),
        ({"normalizer": 64}, "normalizer is 64: expected a function"),
        ({"lighten": [True]}, "lighten is True: expected a function"),
        ({"scaler": True}, "scaler is of type bool: expected a torch.amp.GradScaler"),
        ({"lr_scheduler": 3}, "lr_scheduler is of type int: expected a scheduler"),
        ({"clip": -1.0}, "clip is -1.0: expected a norm above 0"),
        ({"clip": "1"}, "clip is '1': expected a norm above 0"),
        ({"group_timeout": "1", "group": False}, "group_timeout is '1': expected seconds above 0"),
        ({"cost": 3}, "cost is 3: expected a function"),
        ({"slice": 3}, "slice is 3: expected a function"),
        ({"length": 3}, "length is 3: expected a function"),
        ({"on_event": "log"}, "on_event is 'log': expected a function"),
        ({"learn": "yes"}, "learn is 'yes': expected True or False"),
        ({"admission": "off"}, "admission is 'off': expected True or False"),
        ({"growth": 3}, "growth is 3: expected True or False"),
        ({"loss_fn": None}, "loss_fn is None: expected a function"),
        ({"model": regression_loss}, "model is of type function: expected a torch.nn.Module"),
        ({"optimizer": make("mlp")[0]}, "optimizer is of type Mlp: expected a torch.optim"),
    ),
)
def test_a_wrong_argument_is_said_when_the_step_is_made(options, sentence):
    model, _, loss_fn = make("mlp")
    given = {"model": model, "loss_fn": loss_fn, **options}
    given.setdefault("optimizer", torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises((TypeError, ValueError)) as caught:
        rebatch.Step(**given)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("copied", (copy.copy, copy.deepcopy, pickle.dumps))
def test_a_step_is_not_copied(copied):
    model, _, loss_fn = make("mlp")
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    with pytest.raises(TypeError, match="cannot be copied or pickled: expected state_dict()"):
        copied(step)


def test_a_level_of_the_wrong_kind_is_said_at_once():
    model = make("mlp")[0]
    with pytest.raises(TypeError, match="of checkpointing.. is of type list"):
        rebatch.checkpointing([model])
    with pytest.raises(TypeError, match="of offload.. is of type Mlp: expected a torch.optim"):
        rebatch.offload(model)


@pytest.mark.parametrize("value, told", (("1", True), ("/tmp/a.sock", True), ("0", False)))
def test_without_the_pool_nobody_can_ask_for_memory_and_that_is_told(monkeypatch, value, told):
    monkeypatch.setenv("REBATCH_YIELD", value)
    model = torch.nn.Linear(4, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        rebatch.Step(model, optimizer, lambda m, x: m(x).mean())(torch.randn(4, 4))
    assert [w.filename == __file__ for w in caught if "REBATCH_YIELD" in str(w.message)] == (
        [True] if told else []
    )
