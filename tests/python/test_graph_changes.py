"""What a pass changes in Python, which a replay of its graph would leave out, is found by name. The
device is "meta" where a tensor of the CPU is to be told from one of the device."""

import argparse
import collections
import dataclasses
import itertools
import random
import types

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch.graphs.changes import Changes

nn = torch.nn


class Net(nn.Module):
    calls_of_all = 0

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.calls, self.width, self.cache = 0, 4, None
        self.sizes, self.seen, self.on_cpu = [], {}, torch.zeros(3, device="cpu")

    def forward(self, x):
        return self.body(x)


def mean(model, x):
    return model(x).square().mean()


@dataclasses.dataclass
class Meter:
    total: float = 0.0
    count: int = 0

    def add(self, value):
        self.count += 1


class Slotted:
    __slots__ = ("calls",)


# ---- what is named: a function that makes loss_fn of a model, and the names ----


def counter_of_the_model(net):
    def loss_fn(model, x):
        model.calls += 1
        return mean(model, x)

    return loss_fn, ["model.calls"]


def counter_of_an_inner_module(net):
    net.body[0].calls = 0

    def loss_fn(model, x):
        model.body[0].calls += 1
        return mean(model, x)

    return loss_fn, ["model.body.0.calls"]


def counter_of_the_class(net):
    def loss_fn(model, x):
        Net.calls_of_all += 1
        return mean(model, x)

    return loss_fn, ["Net.calls_of_all"]


def list_of_the_model(net):
    def loss_fn(model, x):
        model.sizes.append(len(x))
        return mean(model, x)

    return loss_fn, ["model.sizes"]


def dict_of_the_model(net):
    def loss_fn(model, x):
        model.seen["calls"] = model.seen.get("calls", 0) + 1
        return mean(model, x)

    return loss_fn, ["model.seen"]


def tensor_that_is_another(net):
    def loss_fn(model, x):
        model.last_hidden = model(x).detach()
        return mean(model, x)

    return loss_fn, ["model.last_hidden"]


def tensor_that_is_gone_in_between(net):
    """Another one may get the address of the one before."""

    def loss_fn(model, x):
        model.cache = None
        model.cache = model(x).detach()
        return mean(model, x)

    return loss_fn, ["model.cache"]


def buffer_that_is_another(net):
    net.register_buffer("mean", torch.zeros(4, device="meta"))

    def loss_fn(model, x):
        model.mean = 0.9 * model.mean + x.mean(0)
        return mean(model, x)

    return loss_fn, ["model.mean"]


def switch_of_the_model(net):
    def loss_fn(model, x):
        model.train(not model.training)
        return mean(model, x)

    return loss_fn, [
        "model.training",
        "model.body.training",
        "model.body.0.training",
        "model.body.1.training",
    ]


def hook_in_each_pass(net):
    def loss_fn(model, x):
        model.register_forward_hook(lambda *_: None)
        return mean(model, x)

    return loss_fn, ["model._forward_hooks"]


def tensor_of_the_cpu(net):
    def loss_fn(model, x):
        model.on_cpu[0] += 1
        return mean(model, x)

    return loss_fn, ["model.on_cpu (a tensor on the CPU)"]


def tensor_of_the_cpu_without_a_version(net):
    def loss_fn(model, x):
        model.on_cpu.numpy()[0] += 1
        return mean(model, x)

    return loss_fn, ["model.on_cpu (a tensor on the CPU)"]


def tensor_of_the_cpu_outside(net):
    seen = torch.zeros(2, dtype=torch.int64)

    def loss_fn(model, x):
        seen.add_(1)
        return mean(model, x)

    return loss_fn, ["seen (a tensor on the CPU)"]


def list_outside(net):
    history = []

    def loss_fn(model, x):
        loss = mean(model, x)
        history.append(loss.detach())
        return loss

    return loss_fn, ["history"]


def variable_outside(net):
    calls = 0

    def loss_fn(model, x):
        nonlocal calls
        calls += 1
        return mean(model, x)

    return loss_fn, ["calls"]


calls_here = 0


def global_variable(net):
    def loss_fn(model, x):
        global calls_here
        calls_here += 1
        return mean(model, x)

    return loss_fn, ["calls_here"]


def loss_of_the_last_pass(net):
    last = {"loss": None}

    def loss_fn(model, x):
        last["loss"] = mean(model, x)
        return last["loss"]

    return loss_fn, ["last"]


def deque_of_a_few(net):
    last = collections.deque(maxlen=2)

    def loss_fn(model, x):
        last.append(mean(model, x).detach())
        return mean(model, x)

    return loss_fn, ["last"]


def meter(net):
    meter = Meter()

    def loss_fn(model, x):
        meter.add(0.0)
        return mean(model, x)

    return loss_fn, ["meter.count"]


def namespace(net):
    state = types.SimpleNamespace(step=0)

    def loss_fn(model, x):
        state.step += 1
        return mean(model, x)

    return loss_fn, ["state.step"]


def slots(net):
    slotted = Slotted()
    slotted.calls = 0

    def loss_fn(model, x):
        slotted.calls += 1
        return mean(model, x)

    return loss_fn, ["slotted.calls"]


def attribute_of_the_function(net):
    def loss_fn(model, x):
        loss_fn.calls += 1
        return mean(model, x)

    loss_fn.calls = 0
    return loss_fn, ["loss_fn.calls"]


class Trainer:
    def __init__(self):
        self.passes = 0

    def loss(self, model, x):
        self.passes += 1
        return mean(model, x)


def object_whose_method_it_is(net):
    return Trainer().loss, ["self.passes"]


def iterator(net):
    numbers = itertools.count()

    def loss_fn(model, x):
        return mean(model, x) * (1 + next(numbers))

    return loss_fn, ["numbers"]


def array_of_numpy(net):
    counts = numpy.zeros(3)

    def loss_fn(model, x):
        counts[0] += 1
        return mean(model, x)

    return loss_fn, ["counts"]


def another_network(net):
    """What another module counts, whose tensors are on the CPU."""
    norm = nn.BatchNorm1d(2)

    def loss_fn(model, x):
        norm(torch.ones(3, 2))
        return mean(model, x)

    return loss_fn, [
        "norm.running_mean (a tensor on the CPU)",
        "norm.running_var (a tensor on the CPU)",
        "norm.num_batches_tracked (a tensor on the CPU)",
    ]


def numbers_of_python(net):
    return lambda model, x: mean(model, x) * random.random(), ["random"]


def numbers_of_numpy(net):
    return lambda model, x: mean(model, x) * numpy.random.rand(), ["numpy.random"]


def numbers_of_pytorch_on_the_cpu(net):
    def loss_fn(model, x):
        return mean(model, x + torch.randn(4).to("meta"))

    return loss_fn, ["torch.default_generator"]


def generator_of_numpy(net):
    generator = numpy.random.default_rng(0)

    def loss_fn(model, x):
        return mean(model, x) * generator.random()

    return loss_fn, ["generator"]


def now_and_then(net):
    def loss_fn(model, x):
        model.calls = 0 if model.calls == 3 else model.calls + 1
        model.seen = {} if model.calls == 0 else model.seen  # in the fourth pass alone
        return mean(model, x)

    return loss_fn, ["model.calls", "model.seen"]


NAMED = [
    *(counter_of_the_model, counter_of_an_inner_module, counter_of_the_class, list_of_the_model),
    *(dict_of_the_model, tensor_that_is_another, tensor_that_is_gone_in_between),
    *(buffer_that_is_another, switch_of_the_model, hook_in_each_pass, tensor_of_the_cpu),
    *(tensor_of_the_cpu_without_a_version, tensor_of_the_cpu_outside, list_outside),
    *(variable_outside, global_variable, loss_of_the_last_pass, deque_of_a_few, meter, namespace),
    *(slots, attribute_of_the_function, object_whose_method_it_is, iterator, array_of_numpy),
    *(another_network, numbers_of_python, numbers_of_numpy, numbers_of_pytorch_on_the_cpu),
    *(generator_of_numpy, now_and_then),
]


# ---- what is not ----


def nothing(net):
    return mean


def dropout(net):
    net.body.append(nn.Dropout(0.5))
    return mean


def cache_that_is_filled_once(net):
    def loss_fn(model, x):
        if model.cache is None:
            model.cache = torch.ones(4, device="meta")
        return mean(model, x * model.cache)

    return loss_fn


def table_by_length(net):
    tables = {}

    def loss_fn(model, x):
        if len(x) not in tables:
            tables[len(x)] = torch.ones(4, device="meta")
        return mean(model, x * tables[len(x)])

    return loss_fn


def numbers_that_are_alike(net):
    """Another object each time, of the same value."""

    def loss_fn(model, x):
        model.width = int("1024")
        model.seen["scale"] = float("0.25")
        return mean(model, x)

    return loss_fn


def tensor_of_the_device(net):
    average = torch.zeros((), device="meta")

    def loss_fn(model, x):
        loss = mean(model, x)
        average.mul_(0.9).add_(loss.detach())
        return loss

    return loss_fn


def buffer_of_the_device(net):
    net.register_buffer("mean", torch.zeros(4, device="meta"))

    def loss_fn(model, x):
        model.mean.mul_(0.9).add_(x.mean(0))
        return mean(model, x)

    return loss_fn


def attribute_that_is_put_back(net):
    def loss_fn(model, x):
        model.cache = x
        loss = mean(model, model.cache)
        model.cache = None
        return loss

    return loss_fn


def tensor_of_the_cpu_that_stays(net):
    def loss_fn(model, x):
        return mean(model, x) * float(model.on_cpu[0])

    return loss_fn


def gradients_of_another_network(net):
    other = nn.Linear(4, 4, device="meta")

    def loss_fn(model, x):
        return mean(model, other(x))

    return loss_fn


def local_variables(net):
    def loss_fn(model, x):
        history = [mean(model, x) for _ in range(2)]
        return sum(history)

    return loss_fn


def seeded_numbers(net):
    def loss_fn(model, x):
        generator = random.Random(0)
        return mean(model, x) * generator.random()

    return loss_fn


def a_named_optimizer(net):
    """What the Step steps is no change of a pass."""
    return lambda model, x: mean(model, x) * net.optimizer_of_it[0].param_groups[0]["lr"]


def settings(net):
    given = argparse.Namespace(scale=0.5)
    return lambda model, x: mean(model, x) * given.scale


NOT_NAMED = [
    *(nothing, dropout, cache_that_is_filled_once, table_by_length, numbers_that_are_alike),
    *(tensor_of_the_device, buffer_of_the_device, attribute_that_is_put_back),
    *(tensor_of_the_cpu_that_stays, gradients_of_another_network, local_variables),
    *(seeded_numbers, a_named_optimizer, settings),
]


def changes_of(net, loss_fn, passes=4, **options):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net.optimizer_of_it = [optimizer]
    step = rebatch.Step(net, optimizer, loss_fn, log_level="quiet", **options)
    changes = Changes(step._training.running)
    for _ in range(passes):
        changes.before(())
        step.loss_fn(net, torch.ones(8, 4, device="meta")).backward()
        changes.after()
    return changes.names()


def net_of():
    torch.manual_seed(0)
    net = Net()
    net.body.to("meta")
    return net


@pytest.mark.parametrize("make", NAMED)
def test_what_a_pass_changes_in_python_is_named(make):
    net = net_of()
    loss_fn, names = make(net)
    assert changes_of(net, loss_fn) == names


@pytest.mark.parametrize("make", NOT_NAMED)
def test_what_a_replay_does_too_or_that_stays_is_not(make):
    net = net_of()
    assert changes_of(net, make(net)) == []


def test_nothing_is_named_before_the_third_pass():
    net = net_of()
    loss_fn, _ = counter_of_the_model(net)
    assert changes_of(net, loss_fn, passes=2) == []


def test_a_pass_that_failed_is_none():
    net = net_of()
    step = rebatch.Step(net, torch.optim.SGD(net.parameters(), 0.1), mean, log_level="quiet")
    changes = Changes(step._training.running)
    for _ in range(4):
        changes.before(())
        net.calls += 1  # of an attempt that failed, and after which nothing was put back
        changes.before(())
        changes.after()
    assert changes.names() == []


def test_of_several_models_the_number_is_in_the_name():
    first, second = net_of(), net_of()

    def loss_fn(models, x):
        models[1].calls += 1
        return mean(models[0], x) + mean(models[1], x)

    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    step = rebatch.Step([first, second], optimizer, loss_fn, log_level="quiet")
    changes = Changes(step._training.running)
    for _ in range(3):
        changes.before(())
        loss_fn([first, second], torch.ones(8, 4, device="meta")).backward()
        changes.after()
    assert changes.names() == ["model[1].calls"]


class Counting:
    """An object that is given as state=, so a failed attempt is undone: its change is one still."""

    def __init__(self):
        self.calls = 0

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_what_is_given_as_state_or_generators_is_looked_at():
    net, counting, generator = net_of(), Counting(), torch.Generator()

    def loss_fn(model, x):
        counting.calls += 1
        return mean(model, x + torch.rand(4, generator=generator).to("meta"))

    names = changes_of(net, loss_fn, state=[counting], generators=[generator])
    assert sorted(names) == ["generators[0]", "state[0].calls"]
