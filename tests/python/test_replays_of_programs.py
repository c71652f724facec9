"""graphs=True in trainings for which a graph may be wrong: with it and without, weights, losses and
what the program keeps are the same, and what no graph can have is named. Here a replay runs
operations, and no Python (tape.py)."""

import collections
import contextvars
import copy
import ctypes
import functools
import itertools
import multiprocessing
import random
import sys
import types
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import rebatch.torch as rebatch
from models import same_bits
from rebatch.torch.graphs import graphs as graphs_module
from rebatch.torch.graphs.changes import Changes
from tape import Recorder

KIT = """
class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n


class Average:
    def __init__(self, parameters):
        self.shadow = [p.detach().clone() for p in parameters]

    def update(self, parameters):
        for own, p in zip(self.shadow, parameters):
            own.sub_(0.1 * (own - p.detach()))


class Config:
    def __init__(self, **values):
        self.__dict__["_content"] = values

    def __getattr__(self, key):
        return self.__dict__["_content"][key]

    def __setattr__(self, key, value):
        self.__dict__["_content"][key] = value


class Schedule:
    _value = 1.0

    def __init__(self):
        self._value = 1.0

    def value(self):
        return max(self._value, 0.0)

    __call__ = value


class State:
    def __init__(self):
        self.history = []


class Log:
    def __init__(self):
        self.state = State()

    def log(self, value):
        self.state.history.append(value)


class Trainer:
    def __init__(self, optimizer, scheduler):
        self.state, self._optimizers, self._scheduler = Schedule(), [optimizer], scheduler

    def optimizers(self):
        return self._optimizers

    def rate(self):
        return self._scheduler.get_last_lr()[0]

    def is_training(self):
        return self.state is not None
"""


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    monkeypatch.setattr(graphs_module, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs_module, "recorder_of", lambda *_: Recorder())
    # Dropout draws from it here, and a replay does too.
    names = Changes.names
    of_cpu = lambda self: [n for n in names(self) if n != "torch.default_generator"]  # noqa: E731
    monkeypatch.setattr(Changes, "names", of_cpu)


@pytest.fixture(autouse=True)
def kit(monkeypatch):
    """A package that is installed."""
    made = types.ModuleType("kit")
    made.__file__ = "/usr/lib/python3/site-packages/kit.py"
    monkeypatch.setitem(sys.modules, "kit", made)
    exec(KIT, vars(made))


@pytest.fixture(autouse=True)
def own_file(monkeypatch):
    """One of the program, which functions import where they run."""
    made = types.ModuleType("own_file")
    made.weight, made.calls = 1.0, 0
    monkeypatch.setitem(sys.modules, "own_file", made)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def own(self):
        return [*self.first.parameters(), *self.last.parameters()]


def mean(model, samples):
    return mse_loss(model(samples[0]), samples[1])


class Program:
    """A training: `touch` runs in each pass, and gives a factor of the loss, or nothing."""

    def __init__(self, touch=None, state=list, before=lambda i: None, **options):
        self.touch, self.state, self.before = touch, state, before
        self.loss_fn, self.model = options.get("loss_fn"), options.get("model", Net)
        self.batch_of, self.steps = options.get("batch_of"), options.get("steps", 24)


class Run:
    def __init__(self, make, graphs):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        self.model = model = make_model()
        program = make(model)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
        batches = [(x.roll(i, 0), x.roll(i, 0).sum(1, keepdim=True)) for i in range(program.steps)]

        def loss_fn(model, samples):
            factor = program.touch(samples) if program.touch else None
            loss = mean(model, samples)
            return loss if factor is None else loss * factor

        options = {"micro_start": 16, "growth": False, "log_level": "quiet"}
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        step = rebatch.Step(model, optimizer, program.loss_fn or loss_fn, graphs=graphs, **options)
        self.replayed, losses = [], []
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for i, batch in enumerate(batches):
                program.before(i)
                losses.append(step(program.batch_of(i, batch) if program.batch_of else batch))
                self.replayed.append(step.report.replayed)
        self.told = [str(w.message) for w in found if "graphs=True" in str(w.message)]
        self.tensors, self.values = [*model.state_dict().values(), *losses], []
        for value in program.state():
            is_tensor = isinstance(value, torch.Tensor)
            (self.tensors if is_tensor else self.values).append(value)


def make_model():
    return Net()


def both(make):
    run, plain = (Run(make, graphs) for graphs in (True, False))
    assert not plain.told and same_bits(run.tensors, plain.tensors)
    assert run.values == plain.values
    return run


# ---- what is replayed: each gives a Program for a model ----


def teacher_outside(model):
    """An average of the weights, which a pass moves."""
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model, samples):
        with torch.no_grad():
            for own, p in zip(teacher.own(), model.own()):
                own.mul_(0.9).add_(p, alpha=0.1)
        return mean(model, samples) + mse_loss(model(samples[0]), teacher(samples[0]))

    return Program(loss_fn=loss_fn, state=teacher.own)


def teacher_in_the_model(model):
    """By .data, which has no version."""
    model.teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model, samples):
        for own, p in zip(model.teacher.own(), model.own()):
            own.data.mul_(0.9).add_(p.data, alpha=0.1)
        return mean(model, samples) + mse_loss(model(samples[0]), model.teacher(samples[0]))

    return Program(loss_fn=loss_fn)


def average_of_the_loss(model):
    average = torch.zeros(())

    def loss_fn(model, samples):
        loss = mean(model, samples)
        average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss

    return Program(loss_fn=loss_fn, state=lambda: [average])


def average_of_an_installed_package(model):
    from kit import Average

    average = Average(model.parameters())
    touch = lambda _: average.update(model.parameters())  # noqa: E731
    return Program(touch, lambda: average.shadow)


def sums_of_an_object(model):
    meter = types.SimpleNamespace(sum=torch.zeros(()), count=torch.zeros(()))

    def touch(samples):
        meter.sum += samples[1].sum()
        meter.count += len(samples[1])

    return Program(touch, lambda: [meter.sum, meter.count])


def gradient_of_a_gradient(model):
    def loss_fn(model, samples):
        x, part = samples[0].clone().requires_grad_(), torch.rand(len(samples[0]), 1)
        (gradient,) = torch.autograd.grad(model(x * part).sum(), x, create_graph=True)
        return mean(model, samples) + (gradient.norm(dim=1) - 1).square().mean()

    return Program(loss_fn=loss_fn)


def spectral_norm(model):
    nn.utils.parametrizations.spectral_norm(model.first)
    return Program()


REPLAYED = [
    *(teacher_outside, teacher_in_the_model, average_of_the_loss, average_of_an_installed_package),
    *(sums_of_an_object, gradient_of_a_gradient, spectral_norm),
]


@pytest.mark.parametrize("make", REPLAYED)
def test_what_a_pass_changes_in_place_is_as_without_graphs(make):
    run = both(make)
    assert not run.told and run.replayed[-1] == 1


def test_a_tensor_beside_the_model_is_proved_too(monkeypatch):
    """A replay that leaves another one is not used."""
    average = torch.zeros(())
    record = Recorder.record

    def forgetting(self, body):
        recording = record(self, body)

        def replay():
            was = average.clone()
            recording.replay()
            average.copy_(was)

        return types.SimpleNamespace(result=recording.result, replay=replay)

    monkeypatch.setattr(Recorder, "record", forgetting)
    run = Run(lambda model: Program(lambda _: (average.add_(1), None)[1]), True)
    assert "in a tensor that a pass changes in place" in run.told[0] and not any(run.replayed)


# ---- what is named ----


def weights_that_lie_elsewhere(model):
    model.teacher = copy.deepcopy(model).requires_grad_(False)

    def touch(_):
        for own, p in zip(model.teacher.own(), model.own()):
            own.data = own.data * 0.9 + p.data * 0.1

    return Program(touch), "model.teacher.first.weight"


def counter_of_a_decorator(model):
    calls = 0

    def counted(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            nonlocal calls
            calls += 1
            return function(*arguments)

        return wrapper

    return Program(loss_fn=counted(mean), state=lambda: [calls]), "calls"


class Counted:
    def counted(function):
        @functools.wraps(function)
        def wrapper(self, *arguments):
            self.calls += 1
            return function(self, *arguments)

        return wrapper

    def __init__(self):
        self.calls = 0

    @counted
    def loss(self, model, samples):
        return mean(model, samples)


def decorated_method(model):
    counted = Counted()
    return Program(loss_fn=counted.loss, state=lambda: [counted.calls]), "self.calls"


def hook_of_a_parameter(model):
    norms = []
    model.first.weight.register_hook(lambda gradient: norms.append(gradient.norm()))
    return Program(state=lambda: norms), "norms"


class Noting:
    def __init__(self):
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1


def object_as_a_hook(model):
    noting = Noting()
    model.first.register_forward_hook(noting)
    return Program(state=lambda: [noting.calls]), "Noting.calls"


def cycle(model):
    weights = itertools.cycle([0.5, 1.0, 1.5])
    return Program(lambda _: next(weights), lambda: [next(weights)]), "weights"


def zip_of_ranges(model):
    pairs = zip(range(99), range(99))
    return Program(lambda _: next(pairs) and None, lambda: [next(pairs)]), "pairs"


def generator_that_hands_on(model):
    def without_end():
        while True:
            yield from [0.5, 1.0, 1.5]

    weights = without_end()
    return Program(lambda _: next(weights), lambda: [next(weights)]), "weights"


def meter_of_an_installed_package(model):
    from kit import AverageMeter

    meter = AverageMeter()
    touch = lambda samples: meter.update(samples[1].mean(), len(samples[1]))  # noqa: E731
    return Program(touch, lambda: [meter.sum, meter.count]), "AverageMeter.count"


def attribute_of_an_installed_package(model):
    from kit import AverageMeter

    meter = AverageMeter()

    def touch(_):
        meter.count += 1

    return Program(touch, lambda: [meter.count]), "meter.count"


def config_of_an_installed_package(model):
    from kit import Config

    config = Config(calls=0)

    def touch(_):
        config.calls = config.calls + 1

    return Program(touch, lambda: [config.calls]), "Config._content"


def number_shared_with_processes(model):
    calls = multiprocessing.Value("i", 0)

    def touch(_):
        calls.value += 1

    return Program(touch, lambda: [calls.value]), "calls.value"


def dict_of_the_user(model):
    counts = collections.UserDict(calls=0)

    def touch(_):
        counts["calls"] += 1

    return Program(touch, lambda: [counts["calls"]]), "UserDict.data"


def file_that_is_imported_in_the_pass(model):
    sys.modules["own_file"].calls = 0

    def touch(_):
        import own_file

        own_file.calls += 1

    return Program(touch, lambda: [sys.modules["own_file"].calls]), "own_file.calls"


def long_list(model):
    counts = [0] * 5000

    def touch(_):
        counts[4000] += 1

    return Program(touch, lambda: counts), "counts"


def history_of_an_installed_package(model):
    """That a method changes in an object that is no more than it keeps."""
    from kit import Log

    log = Log()
    return Program(lambda _: log.log(1.0), lambda: log.state.history), "Log.state.history"


def two_variables_of_one_name(model):
    def counter(is_counting):
        n = 0

        def count(_):
            nonlocal n
            n += is_counting

        return count

    first, second = counter(1), counter(0)
    return Program(lambda _: first(_) or second(_)), "n"


NAMED = [
    *(weights_that_lie_elsewhere, counter_of_a_decorator, decorated_method, hook_of_a_parameter),
    *(object_as_a_hook, cycle, zip_of_ranges, generator_that_hands_on),
    *(meter_of_an_installed_package, attribute_of_an_installed_package),
    *(config_of_an_installed_package, number_shared_with_processes, dict_of_the_user),
    *(
        history_of_an_installed_package,
        file_that_is_imported_in_the_pass,
        long_list,
        two_variables_of_one_name,
    ),
]


@pytest.mark.parametrize("make", NAMED)
def test_what_a_replay_would_leave_out_is_named(make):
    run = both(lambda model: make(model)[0])
    (said,) = run.told
    assert repr(make(Net())[1]) in said and not any(run.replayed)


@pytest.mark.parametrize("is_cleared", (False, True))
def test_gradients_that_a_step_does_not_find_are_named(is_cleared):
    def make(model):
        critic, sums = nn.Linear(1, 1), []
        trainer = types.SimpleNamespace(nets=types.SimpleNamespace(critics=[[critic]]))

        def loss_fn(model, samples):
            return mean(model, samples) - trainer.nets.critics[0][0](model(samples[0])).mean()

        def before(_):
            sums.append(None if critic.weight.grad is None else critic.weight.grad.item())
            if is_cleared:
                critic.zero_grad()

        return Program(loss_fn=loss_fn, before=before, state=lambda: sums)

    run = both(make)
    (said,) = run.told
    assert "gives gradients to 'trainer.nets.critics[0][0].weight'" in said
    assert not any(run.replayed)


def test_a_generator_of_the_host_is_named_as_one():
    generator = torch.Generator().manual_seed(3)
    draw = lambda _: torch.rand((), generator=generator)  # noqa: E731
    (said,) = Run(lambda model: Program(draw), True).told
    assert "expected random numbers of a generator on the GPU" in said


# ---- what other samples or a later part of the training change ----


def in_a_later_phase(model):
    phase, seen = [0], []
    touch = lambda _: seen.append(1) if phase[0] else None  # noqa: E731
    return Program(touch, lambda: seen, lambda i: phase.__setitem__(0, i // 9), steps=36)


def of_a_kind_of_batch(model):
    counts = {"a": 0, "b": 0}

    def loss_fn(model, samples):
        if samples["kind"] == "b":
            counts["b"] += 1
        return mean(model, samples["xy"])

    kind = lambda i, batch: {"xy": list(batch), "kind": "ab"[i > 7]}  # noqa: E731
    return Program(loss_fn=loss_fn, batch_of=kind, state=counts.values)


def of_smaller_batches(model):
    seen = []
    touch = lambda samples: seen.append(1) if len(samples[0]) < 8 else None  # noqa: E731
    part = lambda i, batch: tuple(t[: 16 if i < 8 else 6] for t in batch)  # noqa: E731
    return Program(touch, lambda: seen, batch_of=part)


@pytest.mark.parametrize("make", (in_a_later_phase, of_a_kind_of_batch, of_smaller_batches))
def test_what_only_later_passes_change_is_named_then(make):
    run = both(make)
    assert len(run.told) == 1 and run.replayed[6] and not any(run.replayed[16:])


def test_what_only_later_passes_change_in_place_is_as_without_graphs():
    def make(model):
        epoch, model.teacher = [0], copy.deepcopy(model).requires_grad_(False)

        def loss_fn(model, samples):
            with torch.no_grad():
                for own, p in zip(model.teacher.own(), model.own()) if epoch[0] else ():
                    own.mul_(0.9).add_(p, alpha=0.1)
            return mean(model, samples) + mse_loss(model(samples[0]), model.teacher(samples[0]))

        return Program(loss_fn=loss_fn, before=lambda i: epoch.__setitem__(0, i // 12), steps=23)

    run = both(make)
    assert not run.told and run.replayed[11] == run.replayed[-1] == 1


# ---- what a pass reads ----


def hook_of_a_parameter_that_reads(model):
    given = {"scale": 1.0}
    model.first.weight.register_hook(lambda gradient: gradient * given["scale"])
    return None, lambda value: given.update(scale=value)


def config_with_getattr(model):
    from kit import Config

    config = Config(weight=1.0)
    return lambda: config.weight, lambda value: setattr(config, "weight", value)


def method_of_an_installed_package(model):
    from kit import Schedule

    schedule = Schedule()
    return schedule.value, lambda value: setattr(schedule, "_value", value)


def object_that_is_called(model):
    from kit import Schedule

    schedule = Schedule()
    return lambda: schedule(), lambda value: setattr(schedule, "_value", value)


def rate_of_a_scheduler(model):
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    change = lambda value: setattr(scheduler, "_last_lr", [value])  # noqa: E731
    return lambda: scheduler.get_last_lr()[0], change


def trainer_of(model):
    from kit import Trainer

    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return Trainer(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))


def rate_that_a_trainer_asks(model):
    trainer = trainer_of(model)
    return lambda: trainer.rate(), lambda value: setattr(trainer._scheduler, "_last_lr", [value])


def rate_of_an_optimizer_of_a_trainer(model):
    trainer = trainer_of(model)
    groups = trainer._optimizers[0].param_groups
    return (
        lambda: trainer.optimizers()[0].param_groups[0]["lr"],
        lambda value: groups[0].update(lr=value),
    )


def state_of_a_trainer(model):
    """What its own method reads is read no deeper, and what the program names is."""
    trainer = trainer_of(model)
    return (
        lambda: trainer.is_training() * trainer.state._value,
        lambda value: setattr(trainer.state, "_value", value),
    )


class Weight:
    def __init__(self):
        self.value = 1.0

    def __float__(self):
        return self.value

    def __getitem__(self, _):
        return self.value

    def __getattr__(self, _):
        return self.value


def object_as_a_number(model):
    weight = Weight()
    return lambda: float(weight), lambda value: setattr(weight, "value", value)


def entry_of_an_object(model):
    weight = Weight()
    return lambda: weight["kl"], lambda value: setattr(weight, "value", value)


def attribute_that_is_not_there(model):
    weight = Weight()
    return lambda: weight.kl, lambda value: setattr(weight, "value", value)


def what_a_decorator_reads(model):
    given = {"weight": 1.0}

    def weighted(function):
        @functools.wraps(function)
        def wrapper():
            return function() * given["weight"]

        return wrapper

    return weighted(lambda: 1.0), lambda value: given.update(weight=value)


def what_is_cached(model):
    given = {"weight": 1.0}
    cached = functools.lru_cache(lambda: given["weight"])

    def change(value):
        if given["weight"] != value:
            given["weight"] = value
            cached.cache_clear()

    return lambda: cached(), change


def file_that_is_imported(model):
    def weight():
        import own_file

        return own_file.weight

    return weight, lambda value: setattr(sys.modules["own_file"], "weight", value)


def number_of_c(model):
    weight = ctypes.c_double(1.0)
    return lambda: weight.value, lambda value: setattr(weight, "value", value)


def chain_of_dicts(model):
    own = {"weight": 1.0}
    every = collections.ChainMap({}, own)
    return lambda: every["weight"], lambda value: own.update(weight=value)


def view_of_a_dict(model):
    own = {"weight": 1.0}
    view = types.MappingProxyType(own)
    return lambda: view["weight"], lambda value: own.update(weight=value)


def variable_of_a_context(model):
    weight = contextvars.ContextVar("weight", default=1.0)
    return weight.get, weight.set


def namespace_without_names(model):
    given = types.SimpleNamespace(weight=1.0)
    return lambda: vars(given)["wei" + "ght"], lambda value: setattr(given, "weight", value)


READ = [
    *(hook_of_a_parameter_that_reads, config_with_getattr, method_of_an_installed_package),
    *(object_that_is_called, rate_of_a_scheduler, object_as_a_number, entry_of_an_object),
    *(attribute_that_is_not_there, what_a_decorator_reads, what_is_cached, file_that_is_imported),
    *(rate_that_a_trainer_asks, rate_of_an_optimizer_of_a_trainer, state_of_a_trainer),
    *(number_of_c, chain_of_dicts, view_of_a_dict, variable_of_a_context),
    *(namespace_without_names,),
]


@pytest.mark.parametrize("make", READ)
def test_what_a_pass_reads_is_seen_where_it_changes(make):
    def program(model):
        weight, change = make(model)
        touch = (lambda _: weight()) if weight else None
        return Program(touch, before=lambda i: change(1.0 if i < 8 else 0.5))

    run = both(program)
    assert not run.told and run.replayed[7] == run.replayed[-1] == 1 and run.replayed[8] == 0
