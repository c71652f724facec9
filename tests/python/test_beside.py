"""State that a training holds beside its modules' tables: attributes of parameters, what an
optimizer or a scheduler keeps, objects without a __dict__, generators. An attempt that failed
leaves none of it changed."""

import random
import warnings

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from models import same_bits
from rebatch.testing import fail_once

pytestmark = pytest.mark.filterwarnings("ignore::rebatch.torch.CutWarning")


class FailsInBackward(torch.autograd.Function):
    """Runs out of memory in one backward pass, counted from 1."""

    __module__ = "torch"  # it is not looked at, and may count
    at = 0

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        FailsInBackward.at -= 1
        if FailsInBackward.at == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(FailsInBackward.apply(self.first(x).tanh()))[:, 0]


def plain(model, samples):
    return (model(samples[0]) - samples[1]).square().mean()


# ---- gradients that hooks keep elsewhere ----


class FromMain(torch.optim.SGD):
    """Steps with the gradients that `main_of(p)` has, in float64."""

    def __init__(self, parameters, main_of):
        super().__init__(parameters, 0.3)
        self.main_of = main_of

    def zero_grad(self, set_to_none=True):
        for p in self.param_groups[0]["params"]:
            if self.main_of(p) is not None:
                self.main_of(p).zero_()
        super().zero_grad(set_to_none)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = self.main_of(p).to(p.dtype)
        super().step(closure)


def kept_by(add):
    """Moves each gradient out of .grad as soon as it is there."""

    def hook(p):
        add(p, p.grad.double())
        p.grad = None

    return hook


def of_parameters(model):
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float64)
    hook = kept_by(lambda p, gradient: p.main_grad.add_(gradient))
    return hook, FromMain(model.parameters(), lambda p: p.main_grad)


def made_in_the_first_pass(model):
    def add(p, gradient):
        p.main_grad = gradient + getattr(p, "main_grad", 0)

    return kept_by(add), FromMain(model.parameters(), lambda p: getattr(p, "main_grad", None))


def in_a_dict_of_the_parameter(model):
    for p in model.parameters():
        p.kept = {"gradients": [torch.zeros_like(p, dtype=torch.float64)], "count": 0}

    def add(p, gradient):
        p.kept["gradients"][0] += gradient
        p.kept["count"] += 1

    return kept_by(add), FromMain(model.parameters(), lambda p: p.kept["gradients"][0])


def of_the_optimizer(model):
    optimizer = FromMain(model.parameters(), lambda p: optimizer.main[names[id(p)]])
    names = {id(p): name for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    optimizer.main = {name: torch.zeros(shapes[name], dtype=torch.float64) for name in shapes}
    return kept_by(lambda p, gradient: optimizer.main[names[id(p)]].add_(gradient)), optimizer


KEPT = [of_parameters, made_in_the_first_pass, in_a_dict_of_the_parameter, of_the_optimizer]


def batch_of(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(16, 8, generator=generator), torch.randn(16, generator=generator)


def said(body):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        body()
    texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
    return [text for text in texts if "attempt" in text]


def train(step, steps, in_step, fails):
    """With an OOM in a step; else that step runs at the size that would follow."""
    for i in range(steps):
        if i == in_step and not fails:
            step.load_state_dict({**step.state_dict(), "micro": 8})
        FailsInBackward.at = int(i == in_step and fails)
        step(batch_of(i))
        assert step.report.ooms == (i == in_step and fails)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("in_step", (0, 1, 4))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_gradients_that_hooks_keep_elsewhere_count_once(kept, in_step, gradients):
    states = []
    for fails in (True, False):
        torch.manual_seed(0)
        model = Net()
        hook, optimizer = kept(model)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        step = rebatch.Step(
            model, optimizer, plain, gradients=gradients, growth=False, log_level="quiet"
        )
        assert said(lambda: train(step, in_step + 2, in_step, fails)) == []
        states.append(list(model.parameters()))
    assert same_bits(*states)


def test_gradients_that_are_kept_elsewhere_need_no_room_on_the_host(monkeypatch):
    monkeypatch.setattr("rebatch.torch.undo.undo._FIRST_BYTES", 0)
    test_gradients_that_hooks_keep_elsewhere_count_once(of_parameters, 0, "fresh")


@pytest.mark.parametrize("registers", ("register_post_accumulate_grad_hook", "register_hook"))
@pytest.mark.parametrize("in_step", (0, 1, 4))
def test_gradients_that_hooks_keep_outside_of_the_model_are_told(registers, in_step):
    model, main = Net(), {}
    for name, p in model.named_parameters():
        main[name] = torch.zeros_like(p, dtype=torch.float64)

        def add(gradient, name=name):
            main[name] += 1.0

        getattr(p, registers)(add)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, plain, growth=False, log_level="quiet")
    (text,) = said(lambda: train(step, in_step + 2, in_step, True))
    assert "changes 'main' outside of the model" in text


def test_an_attribute_of_a_parameter_that_changes_late_is_an_error():
    """What it was has no copy."""
    model = Net()
    model.first.weight.ema = torch.zeros(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model, samples):
        if step.report.step == 3:
            model.first.weight.ema.add_(1)
        return plain(model, samples)

    step = rebatch.Step(model, optimizer, loss_fn, growth=False, log_level="quiet")
    with pytest.raises(rebatch.Error, match="'first.weight.ema' changed in place in an attempt"):
        train(step, 6, 4, True)


# ---- optimizers and schedulers of the Step ----


class Own(torch.optim.SGD):
    """Has numbers and lists of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.calls, self.history, self.by_name = 0, [], {"seen": 0}


def moves_the_rate(optimizer, scheduler):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def adds_to_the_groups(optimizer, scheduler):
    optimizer.param_groups[0]["calls"] = optimizer.param_groups[0].get("calls", 0) + 1


def counts_in_the_optimizer(optimizer, scheduler):
    optimizer.calls += 1
    optimizer.history.append(optimizer.calls)
    optimizer.by_name["seen"] += 1


def steps_the_scheduler(optimizer, scheduler):
    scheduler.step()


CHANGES = [moves_the_rate, adds_to_the_groups, counts_in_the_optimizer, steps_the_scheduler]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("in_step", (0, 1, 4))
@pytest.mark.parametrize("is_chained", (False, True))
def test_what_loss_fn_changes_in_the_optimizer_is_put_back(change, in_step, is_chained):
    states = []
    for fails in (True, False):
        torch.manual_seed(0)
        model = Net()
        optimizer = Own(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if is_chained:
            warm = torch.optim.lr_scheduler.LinearLR(optimizer)
            scheduler = torch.optim.lr_scheduler.ChainedScheduler([warm, scheduler])

        def loss_fn(model, samples):
            change(optimizer, scheduler)
            return plain(model, samples)

        step = rebatch.Step(
            model, optimizer, loss_fn, lr_scheduler=scheduler, growth=False, log_level="quiet"
        )
        assert said(lambda: train(step, in_step + 2, in_step, fails)) == []
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        held = [optimizer.calls, optimizer.history, optimizer.by_name, scheduler.state_dict()]
        states.append(([*model.parameters()], [group, *held]))
    assert same_bits(states[0][0], states[1][0]) and states[0][1] == states[1][1]


# ---- what modules hold ----


class Slotted:
    __slots__ = ("count", "later", "inner")

    def __init__(self, inner=None):
        self.count, self.inner = 0, inner


class Holder:
    def __init__(self):
        self.inner = {"a": [Slotted(Slotted())]}


class Holding(Net):
    def __init__(self):
        super().__init__()
        self.own, self.deep = Slotted(), Holder()
        self.draws = [random.Random(0), numpy.random.default_rng(0), torch.Generator()]
        self.old = numpy.random.RandomState(0)

    def forward(self, x):
        inner = self.deep.inner["a"][0].inner
        self.own.count += 1
        self.own.later = inner.later = inner.count
        inner.count += 2
        scale = self.draws[0].random() + self.draws[1].random() + self.old.rand()
        scale += torch.rand((), generator=self.draws[2])
        return super().forward(x) * (scale + self.own.count / 10 + inner.count / 7)


@pytest.mark.parametrize("in_step", (0, 1, 4))
def test_slots_and_generators_that_modules_hold_are_put_back(in_step):
    states = []
    for fails in (True, False):
        torch.manual_seed(0)
        model = Holding()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = rebatch.Step(model, optimizer, plain, growth=False, log_level="quiet")
        assert said(lambda: train(step, in_step + 2, in_step, fails)) == []
        states.append(list(model.parameters()))
        assert model.own.count == model.deep.inner["a"][0].inner.count / 2 == in_step + 4
    assert same_bits(*states)


def test_a_generator_of_a_module_that_is_first_used_late_is_named():
    class Late(Net):
        draw, step = None, 0

        def forward(self, x):
            late = self.draw.random() if self.step >= 4 else 0.0
            return super().forward(x) + late

    model = Late()
    model.draw = random.Random(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, plain, growth=False, log_level="quiet")

    def run():
        for i in range(6):
            model.step = i
            FailsInBackward.at = int(i == 4)
            step(batch_of(i))

    (text,) = said(run)
    assert text.startswith("rebatch: 'draw' of the model changed in an attempt that failed")


def test_a_check_compares_generators_and_slots_that_modules_hold():
    torch.manual_seed(0)
    model = Holding()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, plain, growth=False, log_level="quiet")
    before = model.draws[0].getstate(), model.own.count
    step.check(batch_of(0))
    assert (model.draws[0].getstate(), model.own.count) == before
    with fail_once(model.last):
        step(batch_of(0))


# ---- what a pair of hooks moves up and down ----


def a_number(model):
    model.depth = 0
    model.register_forward_pre_hook(lambda m, _: setattr(m, "depth", m.depth + 1))
    model.register_forward_hook(lambda m, *_: setattr(m, "depth", m.depth - 1))
    return lambda: model.depth


def a_list_in_a_module(model):
    model.first.stack = []
    model.register_forward_pre_hook(lambda m, _: m.first.stack.append(1))
    model.register_forward_hook(lambda m, *_: m.first.stack.pop() and None)
    return lambda: len(model.first.stack)


def an_object(model):
    model.own = Slotted()
    model.register_forward_pre_hook(lambda m, _: setattr(m.own, "count", m.own.count + 1))
    model.register_forward_hook(lambda m, *_: setattr(m.own, "count", m.own.count - 1))
    return lambda: model.own.count


@pytest.mark.parametrize("pair", (a_number, a_list_in_a_module, an_object))
@pytest.mark.parametrize("in_step", (0, 1, 4))
def test_what_a_pair_of_hooks_moves_in_a_module_is_put_back(pair, in_step):
    states = []
    for fails in (True, False):
        torch.manual_seed(0)
        model = Net()
        depth = pair(model)
        model.last.register_forward_hook(lambda _m, _i, y, depth=depth: y / depth())
        step = rebatch.Step(
            model, torch.optim.SGD(model.parameters(), 0.1), plain, growth=False, log_level="quiet"
        )

        def run():
            for i in range(in_step + 2):
                if i == in_step and not fails:
                    step.load_state_dict({**step.state_dict(), "micro": 8})
                with fail_once(model.last) if i == in_step and fails else warnings.catch_warnings():
                    step(batch_of(i))
                assert depth() == 0

        assert said(run) == []
        states.append(list(model.parameters()))
    assert same_bits(*states)
