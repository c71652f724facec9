"""What is no change outside of the model that a Step has to tell of."""

import functools
import logging
import random
import types
import warnings

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from rebatch.testing import fail_once
from test_told import batch_of, model_of, plain, said, step_of

pytestmark = pytest.mark.filterwarnings("ignore::rebatch.torch.CutWarning")


class Lit(torch.nn.Module):
    """Like Lightning's: loss_fn is a method of the model."""

    def __init__(self):
        super().__init__()
        self.net, self.seen, self.log = model_of(), 0, {}

    def training_step(self, _model, samples):
        self.seen += 1
        self.log["loss"] = loss = plain(self.net, samples)
        return loss

    def forward(self, x):
        return self.net(x)


class Trainer:
    """An object with the model, the optimizer and the Step."""

    def __init__(self):
        self.model, self.config = model_of(), {"scale": 2.0}
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.step = rebatch.Step(
            self.model,
            self.optimizer,
            self.loss,
            lr_scheduler=self.scheduler,
            scaler=self.scaler,
            log_level="quiet",
            growth=False,
        )

    def loss(self, model, samples):
        rate = self.scheduler.get_last_lr()[0] + self.scaler.get_scale()
        return plain(self.model, samples) * (self.config["scale"] + 0 * rate)


class Wrapper(torch.nn.Module):
    """Not the model, but has it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, _model, samples):
        return plain(self.model, samples)


def reads(model):
    """By name: loss_fns that change nothing, or what is put back."""
    logger, config, scale = logging.getLogger("told"), {"a": [1, 2]}, torch.ones(())
    table, names, target = numpy.ones(4), ["a", "b"], torch.nn.BatchNorm1d(8).eval()
    target.requires_grad_(False)
    criterion, draw, rows = torch.nn.MSELoss(), random.Random(0), iter(range(9))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    wrapper, compiled = Wrapper(model), torch.compile(model, backend="eager")
    first, given = model[0], types.SimpleNamespace(scale=2.0, model=model)
    weights, modules = list(model.parameters()), [model]

    def reading(model, samples):
        logger.info("%s %s %s %s", config["a"], names[0], rows, draw)
        x = target(samples[0]) * scale * table[0] * given.scale
        return criterion(model(x)[:, 0], samples[1])

    def rate(model, samples):
        return plain(model, samples) * (1 + optimizer.param_groups[0]["lr"])

    def penalty(model, samples):
        return plain(model, samples) + sum(w.square().sum() for w in weights)

    @functools.wraps(plain)
    def wrapped(*arguments):
        return plain(*arguments)

    return {
        "reading": reading,
        "rate": rate,
        "penalty": penalty,
        "wrapped": wrapped,
        "partial": functools.partial(lambda m, s, k: plain(m, s) * k, k=2.0),
        "part": lambda m, s: plain(m, s) + first.weight.square().sum(),
        "in a list": lambda m, s: plain(modules[0], s),
        "method of a module that has the model": wrapper.loss,
        "module that has the model": lambda m, s: wrapper.loss(m, s),
        "compiled": lambda m, s: plain(compiled, s),
    }


@pytest.mark.parametrize("name", reads(model_of()))
def test_what_is_only_read_is_not_told(name):
    model = model_of()
    step = step_of(model, reads(model)[name])
    assert said(lambda: fails_in_some(step, model)) == []


def fails_in_some(step, model):
    for i in range(6):
        step.load_state_dict({**step.state_dict(), "micro": 16})
        with fail_once(model) if i in (0, 1, 4) else warnings.catch_warnings():
            step(batch_of(i))
        assert step.report.ooms == (i in (0, 1, 4))


def test_what_a_lightning_module_changes_in_itself_is_not_told():
    model = Lit()
    step = step_of(model, model.training_step)
    assert said(lambda: fails_in_some(step, model.net)) == []
    assert model.seen == 3 + 3 * 2  # one or two micro-batches a step: each counts once


def test_what_belongs_to_the_step_is_not_told():
    trainer = Trainer()
    assert said(lambda: fails_in_some(trainer.step, trainer.model)) == []


def test_what_is_in_state_is_not_told():
    model, seen, teacher = model_of(), torch.zeros(()), torch.nn.BatchNorm1d(8)

    def loss_fn(model, samples):
        seen.add_(len(samples[0]))
        teacher(samples[0])
        return plain(model, samples)

    step = step_of(model, loss_fn, state=[seen, teacher])
    assert said(lambda: fails_in_some(step, model)) == []
    assert seen == 6 * 16


def test_a_step_that_an_exception_of_your_own_ended_is_no_oom():
    """What the next step changes is not told."""
    model, calls = model_of(), [0]

    def loss_fn(model, samples):
        calls[0] += 1
        if calls[0] == 2:
            raise KeyError("mine")
        return plain(model, samples)

    step = step_of(model, loss_fn)

    def train():
        for i in range(4):
            try:
                step(batch_of(i))
            except KeyError:
                pass

    assert said(train) == []
    assert calls == [4]


def test_an_object_that_answers_to_every_name_is_left_alone():
    class Remote:
        """As a client of a service is."""

        def __getattr__(self, name):
            raise ConnectionError(name)

    Remote.__module__ = "torch"  # of an installed package
    remote, model = Remote(), model_of()
    step = step_of(model, lambda m, s: plain(m, s) * (1 if remote is not None else 2))
    assert said(lambda: fails_in_some(step, model)) == []


def test_a_map_tells_too():
    model, seen = model_of(), [0]

    def counted(x):
        seen[0] += len(x)
        return model(x)

    predict = rebatch.Map(counted)
    with fail_once(model):
        (text,) = said(lambda: [predict(batch_of(0)[0]) for _ in range(3)])
    assert text.startswith("rebatch: the function of a map changes 'seen' outside of the model")
    assert text.endswith("return the value with the result") and predict.report.micro == 8


def test_a_check_says_nothing_beside_what_it_finds():
    """And leaves the Step its warning."""
    seen = []

    def loss_fn(model, samples):
        seen.append(0)
        return model(samples).square().mean()

    model = torch.nn.Linear(4, 2)
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = step.check(torch.randn(8, 4))
    assert [finding.kind for finding in found.mistakes] == ["after_oom"]
    with fail_once(model), pytest.warns(RuntimeWarning, match="loss_fn changes 'seen' outside"):
        step(torch.randn(8, 4))
