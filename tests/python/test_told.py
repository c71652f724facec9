"""What loss_fn changes outside of the model is told, once, and is not put back."""

import argparse
import collections
import functools
import itertools
import random
import types
import warnings

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from models import Unseen, out_of_memory, same_bits
from rebatch.testing import fail_once

# Some change what an update depends on, and so does the cut then.
pytestmark = pytest.mark.filterwarnings("ignore::rebatch.torch.CutWarning")


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))


def batch_of(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(16, 8, generator=generator), torch.randn(16, generator=generator)


def plain(model, samples):
    return (model(samples[0])[:, 0] - samples[1]).square().mean()


def step_of(model, loss_fn, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False, **options)


def said(body):
    """The RuntimeWarnings of this package."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        body()
    texts = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    return [text for text in texts if text.startswith("rebatch")]


# ---- flags, which a newcomer makes a loss_fn fail with ----


def fail_at(count, number):
    if count == number:
        out_of_memory(None)


def in_a_list(number):
    flag = [0]

    def loss_fn(model, samples):
        flag[0] += 1
        fail_at(flag[0], number)
        return plain(model, samples)

    return loss_fn, "flag"


def of_a_global(number):
    global calls_of_it
    calls_of_it = 0

    def loss_fn(model, samples):
        global calls_of_it
        calls_of_it += 1
        fail_at(calls_of_it, number)
        return plain(model, samples)

    return loss_fn, "calls_of_it"


def of_the_function(number):
    def loss_fn(model, samples):
        loss_fn.calls += 1
        fail_at(loss_fn.calls, number)
        return plain(model, samples)

    loss_fn.calls = 0
    return loss_fn, "loss_fn.calls"


def of_a_variable_around_it(number):
    calls = 0

    def loss_fn(model, samples):
        nonlocal calls
        calls += 1
        fail_at(calls, number)
        return plain(model, samples)

    return loss_fn, "calls"


class Counter:
    def __init__(self, number):
        self.calls, self.number = 0, number

    def count(self):
        self.calls += 1
        fail_at(self.calls, self.number)

    def __call__(self, model, samples):
        self.count()
        return plain(model, samples)

    def loss(self, model, samples):
        return self(model, samples)


def of_a_callable_object(number):
    return Counter(number), "self.calls"


def of_an_object_whose_method_it_is(number):
    return Counter(number).loss, "self.calls"


def of_an_object(number):
    counter = Counter(number)

    def loss_fn(model, samples):
        counter.count()
        return plain(model, samples)

    return loss_fn, "counter.calls"


def of_a_namespace(number):
    given = argparse.Namespace(calls=0)

    def loss_fn(model, samples):
        given.calls += 1
        fail_at(given.calls, number)
        return plain(model, samples)

    return loss_fn, "given.calls"


def of_itertools(number):
    calls = itertools.count(1)

    def loss_fn(model, samples):
        fail_at(next(calls), number)
        return plain(model, samples)

    return loss_fn, "calls"


def in_a_dict(number):
    calls = collections.Counter()

    def loss_fn(model, samples):
        calls["all"] += 1
        fail_at(calls["all"], number)
        return plain(model, samples)

    return loss_fn, "calls"


def in_a_set(number):
    calls = set()

    def loss_fn(model, samples):
        calls.add(len(calls))
        fail_at(len(calls), number)
        return plain(model, samples)

    return loss_fn, "calls"


def in_a_deque(number):
    calls = collections.deque([0], maxlen=1)

    def loss_fn(model, samples):
        calls.append(calls[0] + 1)
        fail_at(calls[0], number)
        return plain(model, samples)

    return loss_fn, "calls"


def in_a_default(number):
    def loss_fn(model, samples, calls=[0]):  # noqa: B006
        calls[0] += 1
        fail_at(calls[0], number)
        return plain(model, samples)

    return loss_fn, "a default of loss_fn()"


def in_a_partial(number):
    def loss_fn(model, samples, calls):
        calls[0] += 1
        fail_at(calls[0], number)
        return plain(model, samples)

    return functools.partial(loss_fn, calls=[0]), "calls"


def in_a_tensor(number):
    calls = torch.zeros(())

    def loss_fn(model, samples):
        fail_at(calls.add_(1).item(), number)
        return plain(model, samples)

    return loss_fn, "calls"


def in_an_array(number):
    calls = numpy.zeros(1)

    def loss_fn(model, samples):
        calls[0] += 1
        fail_at(calls[0], number)
        return plain(model, samples)

    return loss_fn, "calls"


def in_a_buffer_of_another_module(number):
    teacher = torch.nn.BatchNorm1d(8)

    def loss_fn(model, samples):
        teacher(samples[0])
        fail_at(teacher.num_batches_tracked.item(), number)
        return plain(model, samples)

    return loss_fn, "teacher"


class Metric(torch.nn.Module):
    """As torchmetrics has them: the states are attributes."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def update(self):
        self.total = self.total + 1


def in_an_attribute_of_another_module(number):
    metric = Metric()

    def loss_fn(model, samples):
        metric.update()
        fail_at(metric.total.item(), number)
        return plain(model, samples)

    return loss_fn, "metric.total"


class Agent(torch.nn.Module):
    """The program's trainer is a module, as in Lightning, and the Step's model is a part of it."""

    def __init__(self, number):
        super().__init__()
        self.number, self.critic, self.seen = number, torch.nn.Linear(8, 1), {"calls": 0}

    def loss(self, model, samples):
        self.seen["calls"] += 1
        fail_at(self.seen["calls"], self.number)
        return plain(model, samples)


def in_an_attribute_of_the_module_whose_method_it_is(number):
    return Agent(number).loss, "self.seen"


def in_an_iterator_of_a_list(number):
    left = iter(range(1, 99))

    def loss_fn(model, samples):
        fail_at(next(left), number)
        return plain(model, samples)

    return loss_fn, "left"


def in_a_generator_function(number):
    def counted():
        for i in range(1, 99):
            yield i

    calls = counted()

    def loss_fn(model, samples):
        fail_at(next(calls), number)
        return plain(model, samples)

    return loss_fn, "calls"


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class OfTheClass:
    calls = 0

    @classmethod
    def count(cls):
        cls.calls += 1
        return cls.calls


class Inherits(OfTheClass):
    """Has no calls of its own."""


def in_an_object_in_a_dict(number):
    counters = {"loss": Counter(number)}

    def loss_fn(model, samples):
        counters["loss"].count()
        return plain(model, samples)

    return loss_fn, "counters['loss'].calls"


def in_slots(number):
    counter = Slotted()

    def loss_fn(model, samples):
        counter.calls += 1
        fail_at(counter.calls, number)
        return plain(model, samples)

    return loss_fn, "counter.calls"


def in_a_class(number):
    OfTheClass.calls = 0

    def loss_fn(model, samples):
        OfTheClass.calls += 1
        fail_at(OfTheClass.calls, number)
        return plain(model, samples)

    return loss_fn, "OfTheClass.calls"


def in_a_base_of_a_class(number):
    OfTheClass.calls = 0
    count = types.MethodType(OfTheClass.count.__func__, OfTheClass)
    other = Inherits()

    def loss_fn(model, samples):
        fail_at(count() if other else 0, number)
        return plain(model, samples)

    return loss_fn, "OfTheClass.calls"


def two_dicts_deep(number):
    deep = {"a": {"calls": 0}}

    def loss_fn(model, samples):
        deep["a"]["calls"] += 1
        fail_at(deep["a"]["calls"], number)
        return plain(model, samples)

    return loss_fn, "deep['a']"


class Holder:
    def __init__(self, number):
        self.parts = [Counter(number)]

    def loss(self, model, samples):
        return self.parts[0](model, samples)


def three_objects_deep(number):
    return Holder(number).loss, "self.parts[0].calls"


def by_a_bound_method(number):
    count = Counter(number).count

    def loss_fn(model, samples):
        count()
        return plain(model, samples)

    return loss_fn, "count.__self__.calls"


def by_a_function_that_it_calls(number):
    global calls_of_it
    calls_of_it = 0

    def loss_fn(model, samples):
        fail_at(count_it(), number)
        return plain(model, samples)

    return loss_fn, "calls_of_it"


def count_it():
    global calls_of_it
    calls_of_it += 1
    return calls_of_it


def in_a_scheduler(number):
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1), lambda step: 1.0
    )
    steps = {"rate": [scheduler]}

    def loss_fn(model, samples):
        steps["rate"][0].step()
        fail_at(scheduler.last_epoch, number)
        return plain(model, samples)

    return loss_fn, "scheduler.last_epoch"


def at_the_end_of_a_long_list(number):
    calls = [0.0] * 1000 + [0]

    def loss_fn(model, samples):
        calls[-1] += 1
        fail_at(calls[-1], number)
        return plain(model, samples)

    return loss_fn, "calls"


FLAGS = [
    in_an_object_in_a_dict,
    in_slots,
    in_a_class,
    in_a_base_of_a_class,
    two_dicts_deep,
    three_objects_deep,
    by_a_bound_method,
    by_a_function_that_it_calls,
    in_a_scheduler,
    at_the_end_of_a_long_list,
    in_a_list,
    of_a_global,
    of_the_function,
    of_a_variable_around_it,
    of_a_callable_object,
    of_an_object_whose_method_it_is,
    of_an_object,
    of_a_namespace,
    of_itertools,
    in_a_dict,
    in_a_set,
    in_a_deque,
    in_a_default,
    in_a_partial,
    in_a_tensor,
    in_an_array,
    in_a_buffer_of_another_module,
    in_an_attribute_of_another_module,
    in_an_attribute_of_the_module_whose_method_it_is,
    in_an_iterator_of_a_list,
    in_a_generator_function,
]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("in_step", (0, 1, 4))
def test_a_flag_that_fails_once_does_so_and_is_told_once(flag, in_step):
    loss_fn, name = flag(in_step + 1)
    model, ooms = model_of(), []
    step = step_of(model, loss_fn)

    def train():
        for i in range(in_step + 3):
            with fail_once(model) if i == in_step + 2 else warnings.catch_warnings():
                step(batch_of(i))
            ooms.append(step.report.ooms)

    (text,) = said(train)
    assert ooms == [*[0] * in_step, 1, 0, 1]
    assert text.startswith("rebatch: loss_fn changes ") and repr(name) in text
    assert "state=[...]" in text and "beside the loss" in text


@pytest.mark.parametrize("flag", FLAGS)
def test_without_an_oom_nothing_is_told(flag):
    step = step_of(model_of(), flag(0)[0], micro_start=8)
    assert said(lambda: [step(batch_of(i)) for i in range(5)]) == []


# ---- what only the attempt that failed changes ----


def popped(number):
    left = [1]

    def loss_fn(model, samples):
        if len(ran) == number and left:
            left.pop()
            out_of_memory(None)
        return plain(model, samples)

    ran = Unseen()
    return loss_fn, "left", ran


def flipped(number):
    given = types.SimpleNamespace(is_first=True)

    def loss_fn(model, samples):
        if len(ran) == number and given.is_first:
            given.is_first = False
            out_of_memory(None)
        return plain(model, samples)

    ran = Unseen()
    return loss_fn, "given.is_first", ran


def noted(number):
    failed = []

    def loss_fn(model, samples):
        if len(ran) == number and not failed:
            failed.append(True)
            out_of_memory(None)
        return plain(model, samples)

    ran = Unseen()
    return loss_fn, "failed", ran


def removed(number):
    left = {"once": Counter(0), "always": Counter(0)}

    def loss_fn(model, samples):
        if len(ran) == number and "once" in left:
            del left["once"]
            out_of_memory(None)
        return plain(model, samples)

    ran = Unseen()
    return loss_fn, "left", ran


@pytest.mark.parametrize("once", (popped, flipped, noted, removed))
@pytest.mark.parametrize("in_step", (0, 2))
def test_what_the_attempt_that_failed_alone_changes_is_told_in_the_first_steps(once, in_step):
    loss_fn, name, ran = once(in_step)
    step = step_of(model_of(), loss_fn)

    def train():
        for i in range(in_step + 2):
            step(batch_of(i))
            ran.append(i)

    (text,) = said(train)
    assert text.startswith(f"rebatch: loss_fn changes '{name}' outside of the model")


def test_a_cache_that_the_attempt_that_failed_filled_is_not_told():
    masks, given, made = {}, types.SimpleNamespace(mask=None), Counter(0)

    def loss_fn(model, samples):
        if given.mask is None:
            given.mask = torch.ones(8)
            made.scale = torch.ones(())
        mask = masks.setdefault("ones", torch.ones(8))
        return plain(model, (samples[0] * mask * given.mask * made.scale, samples[1]))

    model = model_of()
    with fail_once(model):
        assert said(lambda: step_of(model, loss_fn)(batch_of(0))) == []


# ---- what moves up and down within an attempt ----

DEPTH = [0]


def up(*_):
    DEPTH[0] += 1


def down(*_):
    DEPTH[0] -= 1


def of_the_file(model):
    model.register_forward_pre_hook(up)
    model.register_forward_hook(down)
    return "DEPTH"


def around_the_hooks(model):
    depth = 0

    def move(by):
        def hook(*_):
            nonlocal depth
            depth += by

        return hook

    model.register_forward_pre_hook(move(1))
    model.register_forward_hook(move(-1))
    return "depth"


class Deep(torch.nn.Linear):
    """A class of this file: what its functions name is looked at."""

    def forward(self, x):
        up()
        x = super().forward(self.inner(x))
        down()
        return x


def by_the_models_module(model):
    model[0] = Deep(8, 4)
    model[0].inner = torch.nn.Identity()
    return "DEPTH"


@pytest.mark.parametrize("pair", (of_the_file, around_the_hooks, by_the_models_module))
@pytest.mark.parametrize("in_step", (0, 2, 5))
def test_a_counter_that_a_pair_of_functions_moves_is_told(pair, in_step):
    DEPTH[0] = 0
    model = model_of()
    name = pair(model)
    step = step_of(model, plain)
    failing = getattr(model[0], "inner", model[1])

    def train():
        for i in range(in_step + 2):
            with fail_once(failing) if i == in_step else warnings.catch_warnings():
                step(batch_of(i))

    (text,) = said(train)
    assert text.startswith(f"rebatch: loss_fn changes '{name}' outside of the model")


@pytest.mark.parametrize("in_step", (0, 5))
def test_a_counter_that_is_taken_back_whatever_happens_is_not_told(in_step):
    DEPTH[0] = 0
    model = model_of()

    def loss_fn(model, samples):
        up()
        try:
            return plain(model, samples)
        finally:
            down()

    step = step_of(model, loss_fn)
    epoch = [0]  # moved by the loop, between two steps

    def train():
        for i in range(in_step + 2):
            epoch[0] = i // 4
            with fail_once(model[1]) if i == in_step else warnings.catch_warnings():
                step(batch_of(i))

    assert said(train) == []


# ---- what changes by being used ----


def a_generator_of_python():
    draw = random.Random(0)
    return draw, lambda model, samples: plain(model, samples) * (1 + draw.random())


def a_generator_of_numpy():
    draw = numpy.random.default_rng(0)
    return draw, lambda model, samples: plain(model, samples) * (1 + draw.random())


def an_old_generator_of_numpy():
    draw = numpy.random.RandomState(0)
    return draw, lambda model, samples: plain(model, samples) * (1 + draw.rand())


def a_generator_of_pytorch():
    draw = torch.Generator()
    return draw, lambda model, samples: plain(model, samples) * torch.rand((), generator=draw)


GENERATORS = [
    a_generator_of_python,
    a_generator_of_numpy,
    an_old_generator_of_numpy,
    a_generator_of_pytorch,
]


@pytest.mark.parametrize("made", GENERATORS)
@pytest.mark.parametrize("is_given", (False, True))
def test_a_generator_is_told_unless_it_is_given(made, is_given):
    draw, loss_fn = made()
    model = model_of()
    step = step_of(model, loss_fn, generators=[draw] if is_given else [])
    with fail_once(model, call=3):
        texts = said(lambda: [step(batch_of(i)) for i in range(4)])
    assert step.report.micro == 8
    assert [text.split(" outside")[0] for text in texts] == (
        [] if is_given else ["rebatch: loss_fn changes 'draw'"]
    )


def critic_of():
    torch.manual_seed(1)
    critic = torch.nn.Linear(8, 1)
    return critic, torch.optim.Adam(critic.parameters(), 0.01)


def with_a_critic(critic, optimizer):
    """A loss_fn that trains another network by itself."""

    def loss_fn(model, samples):
        optimizer.zero_grad()
        critic(samples[0]).square().mean().backward()
        optimizer.step()
        return plain(model, samples) + critic(samples[0]).detach().mean()

    return loss_fn


@pytest.mark.parametrize("in_step", (0, 1, 3))
def test_an_optimizer_that_loss_fn_steps_is_told(in_step):
    model, (critic, optimizer) = model_of(), critic_of()
    step = step_of(model, with_a_critic(critic, optimizer))

    def train():
        for i in range(in_step + 2):
            with fail_once(model) if i >= in_step else warnings.catch_warnings():
                step(batch_of(i))

    (text,) = said(train)
    assert "'critic'" in text and "'optimizer'" in text


@pytest.mark.parametrize("in_step", (0, 1, 3, 5))
@pytest.mark.parametrize("more", (False, True))
def test_an_optimizer_in_state_is_put_back_to_the_bit(in_step, more):
    """With its parameters, which it names, whether the module is given too or not."""
    states = []
    for fails in (True, False):
        model, (critic, optimizer) = model_of(), critic_of()
        state = [optimizer, critic] if more else [optimizer]
        step = step_of(model, with_a_critic(critic, optimizer), state=state)

        def train():
            for i in range(in_step + 2):
                if i == in_step and not fails:
                    step.load_state_dict({**step.state_dict(), "micro": 8})
                with fail_once(model) if fails and i == in_step else warnings.catch_warnings():
                    step(batch_of(i))

        texts = said(train)
        assert [text for text in texts if "'optimizer'" in text or "'critic'" in text] == []
        held = [s["exp_avg"] for s in optimizer.state.values()]
        held += [s["step"] for s in optimizer.state.values()]
        states.append([*model.parameters(), *critic.parameters(), *held])
        assert step.report.micro == 8
    assert same_bits(*states)
