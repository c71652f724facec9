"""What an attempt changed is put back, whatever it was, or named before an update uses it."""

import contextlib
import gc
import random
import warnings
import weakref

import numpy
import pytest
import torch

import rebatch.torch as rebatch
import trainings
from models import Unseen, same_bits
from rebatch.testing import fail_once
from rebatch.torch.undo import undo
from rebatch.torch.undo.generators import is_same_state
from trainings import TRAININGS, in_little_room, room


# What forward moves depends on the cut, of course.
pytestmark = pytest.mark.filterwarnings("ignore::rebatch.torch.CutWarning")


@pytest.fixture(autouse=True)
def roomy():
    yield
    room.update(samples=99, where="end")


def seed_all():
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def batch_of(i):
    generator = torch.Generator().manual_seed(i)
    return (
        torch.rand(16, 8, generator=generator),
        torch.randint(0, 4, (16,), generator=generator),
    )


def flat(value, seen=()):
    """All tensors and numbers that a module's attributes hold."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, (int, float, bool)):
        return [torch.tensor(value)]
    if isinstance(value, torch.nn.Module):
        return all_state(value)
    if isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
        parts = value.values() if isinstance(value, dict) else value
        return [part for v in parts for part in flat(v, (*seen, id(value)))]
    return []


def all_state(modules):
    """Parameters, buffers, attributes, modes, and which parameters have gradients."""
    modules = torch.nn.ModuleList(modules if isinstance(modules, list) else [modules])
    state = [torch.tensor(p.requires_grad) for p in modules.parameters()]
    for module in modules.modules():
        for name in ("_parameters", "_buffers"):
            state += flat(vars(module)[name])
        state += flat({k: v for k, v in vars(module).items() if not k.startswith("_")})
    return state


def make(name, **options):
    seed_all()
    modules, loss_fn, own = TRAININGS[name]()
    model = own.pop("model", modules)
    parameters = model if isinstance(model, list) else [model]
    parameters = [p for m in parameters for p in m.parameters() if p.requires_grad]
    step = rebatch.Step(
        model,
        torch.optim.AdamW(parameters, lr=0.01),
        in_little_room(loss_fn),
        log_level="quiet",
        growth=False,
        **own,
        **options,
    )
    return modules, step


def train(name, ooms_in=(), where="end", steps=4, **options):
    """(state after each step, losses) with OOMs at more than 4 samples in some of the steps."""
    modules, step = make(name, **options)
    states, losses = [], []
    for i in range(steps):
        room.update(samples=4 if i in ooms_in else 99, where=where)
        losses.append(step(batch_of(i)).item())
        states.append(all_state(modules))
    return states, losses, step


def run_plainly(name, micro, steps=4):
    """The same without rebatch."""
    seed_all()
    modules, loss_fn, own = TRAININGS[name]()
    model = own.pop("model", modules)
    parameters = model if isinstance(model, list) else [model]
    optimizer = torch.optim.AdamW(
        [p for m in parameters for p in m.parameters() if p.requires_grad], lr=0.01
    )
    states = []
    for i in range(steps):
        optimizer.zero_grad()
        batch = batch_of(i)
        for first in range(0, 16, micro):
            part = tuple(t[first : first + micro] for t in batch)
            (loss_fn(model, part) * (micro / 16)).backward()
        optimizer.step()
        states.append(all_state(modules))
    return states


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("micro", (16, 4))
def test_without_an_oom_it_is_a_plain_loop(name, micro):
    states, _, _ = train(name, micro_start=micro)
    for state, expected in zip(states, run_plainly(name, micro)):
        assert same_bits(state, expected)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("where", ("middle", "end", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_ooms_in_the_first_step_lead_to_the_bits_of_a_run_that_began_smaller(
    name, where, gradients
):
    states, losses, step = train(name, (0, 1, 2, 3), where, gradients=gradients)
    room.update(samples=99)
    expected, expected_losses, _ = train(name, micro_start=4, gradients=gradients)
    assert step.report.micro == 4 or where == "middle"
    if step.report.micro == 4:
        assert losses == expected_losses
        assert all(same_bits(a, b) for a, b in zip(states, expected))


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
@pytest.mark.parametrize("call", (2, 5, 6, 8))
def test_an_oom_in_a_later_micro_batch_changes_no_bit(name, where, gradients, call):
    """Micro-batches of 4, and the size stays: the n-th call fails, in the first or second step."""
    options = dict(micro_start=4, micro_smallest=4, gradients=gradients)
    expected, expected_losses, _ = train(name, steps=3, **options)
    # The failed attempt is tried again at its size, since a level seems to help.
    modules, step = make(name, lighten=[lambda on: None], **options)
    loss_fn, calls = step.loss_fn, Unseen(0)

    def fails_once(model, samples):
        calls[0] += 1
        loss = loss_fn(model, samples)
        if calls[0] == call:
            if where == "forward":
                trainings._strike(None)
            loss.register_hook(trainings._strike)
        return loss

    step.loss_fn = fails_once
    for i in range(3):
        loss = step(batch_of(i)).item()
        assert loss == expected_losses[i]
        assert same_bits(all_state(modules), expected[i]), f"step {i}"
    assert calls[0] > 12


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("where", ("end", "backward"))
@pytest.mark.parametrize("steps_before", (0, 2))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_exhausted_leaves_everything_as_before_the_step(name, where, steps_before, gradients):
    modules, step = make(name, micro_start=8, micro_smallest=2, gradients=gradients)
    for i in range(steps_before):
        step(batch_of(i))
    before, random_state = all_state(modules), torch.get_rng_state()
    python, batch = random.getstate(), batch_of(7)
    copies = [t.clone() for t in batch]
    loss_fn, calls = step.loss_fn, Unseen(0)

    def fails_from_the_second_on(model, samples):
        calls[0] += 1
        loss = loss_fn(model, samples)
        if calls[0] > 1:
            if where == "end":
                trainings._strike(None)
            loss.register_hook(trainings._strike)
        return loss

    step.loss_fn = fails_from_the_second_on
    with pytest.raises(rebatch.Exhausted):
        step(batch)
    assert same_bits(all_state(modules), before)
    assert same_bits(batch, copies)
    assert torch.equal(torch.get_rng_state(), random_state) and random.getstate() == python


# ---- what cannot be put back, and what the user names ----


def large(make_change):
    """A model whose frozen parameter is larger than what is copied in the first step."""
    model = torch.nn.ModuleDict({"net": torch.nn.Linear(8, 4), "target": torch.nn.Linear(8, 4)})
    model["target"].requires_grad_(False)

    def loss_fn(model, samples):
        make_change(model)
        if len(samples[0]) > 4:
            trainings._strike(None)
        return (model["net"](samples[0]) - model["target"](samples[0])).square().mean()

    return model, loss_fn


def make_large(make_change, **options):
    model, loss_fn = large(make_change)
    return model, rebatch.Step(
        model,
        torch.optim.SGD(model["net"].parameters(), 0.1),
        loss_fn,
        log_level="quiet",
        **options,
    )


def halve(name):
    @torch.no_grad()
    def change(model):
        for p in model[name].parameters():
            p.mul_(0.5)

    return change


def test_what_has_no_copy_is_named_before_an_update_uses_it(monkeypatch):
    monkeypatch.setattr("rebatch.torch.undo.undo._FIRST_BYTES", 20)  # the bias, not the weight
    model, step = make_large(halve("target"))
    bias, weights = model["target"].bias.clone(), model["net"].weight.clone()
    with pytest.raises(rebatch.Error) as caught:
        step(batch_of(0))
    assert "rebatch: 'target.weight' changed in place in an attempt that failed" in str(
        caught.value
    )
    assert "state=[...]" in str(caught.value) and "target.bias" not in str(caught.value)
    assert torch.equal(bias, model["target"].bias) and torch.equal(weights, model["net"].weight)
    step(batch_of(0))  # it is known now
    assert step.report.micro == 4


def test_with_state_it_is_put_back(monkeypatch):
    monkeypatch.setattr("rebatch.torch.undo.undo._FIRST_BYTES", 0)
    for state in (lambda m: list(m["target"].parameters()), lambda m: m["target"], lambda m: m):
        states = []
        for start in (16, 4):
            torch.manual_seed(0)
            model, loss_fn = large(halve("target"))
            step = rebatch.Step(
                model,
                torch.optim.SGD(model["net"].parameters(), 0.1),
                loss_fn,
                log_level="quiet",
                growth=False,
                micro_start=start,
                state=state(model),
            )
            step(batch_of(0))
            states.append(all_state(model))
        assert same_bits(*states)


def test_a_trained_parameter_that_loss_fn_changes_is_named():
    model, step = make_large(halve("net"))
    with pytest.raises(rebatch.Error, match="'net.weight', 'net.bias' changed in place"):
        step(batch_of(0))


def test_an_exception_of_your_own_comes_out_and_a_warning_names_what_is_left(monkeypatch):
    monkeypatch.setattr("rebatch.torch.undo.undo._FIRST_BYTES", 0)

    def change(model):
        halve("target")(model)
        raise KeyError("mine")

    model, step = make_large(change)
    with pytest.warns(RuntimeWarning, match="'target.weight', 'target.bias' changed in place"):
        with pytest.raises(KeyError, match="mine"):
            step(batch_of(0))


def test_a_batch_without_a_copy_is_named(monkeypatch):
    monkeypatch.setattr("rebatch.torch.undo.undo._FIRST_BYTES", 0)
    model, step = make_large(lambda model: None)
    plain = step.loss_fn

    def loss_fn(model, samples):
        samples[0].mul_(2)
        return plain(model, samples)

    step.loss_fn = loss_fn
    with pytest.raises(rebatch.Error, match=r"'batch\[0\]' changed in place .* or change a copy"):
        step(batch_of(0))


@pytest.mark.parametrize("part", (3, "model", object()))
def test_state_of_the_wrong_kind_is_said_at_once(part):
    model = torch.nn.Linear(8, 4)
    with pytest.raises(TypeError, match=r"state\[1\] is of type .*: expected a tensor, a module"):
        rebatch.Step(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            fgm,
            state=[torch.zeros(1), part],
        )
    with pytest.raises(TypeError, match="generators has a int: expected generators of PyTorch"):
        rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), fgm, generators=[3])


def late(change_of, begins=3):
    """Changes through .data begin after some steps, in which they would have been learned."""
    model, calls = (
        torch.nn.ModuleDict(
            {"net": torch.nn.Linear(8, 4), "target": torch.nn.Linear(8, 4).requires_grad_(False)}
        ),
        Unseen(0),
    )
    model.mean = torch.zeros(4)

    def loss_fn(model, samples):
        calls[0] += 1
        if calls[0] > begins:
            change_of(model).data.mul_(0.5).add_(0.1)
        out = model["net"](samples[0]) - model["target"](samples[0]) - model.mean
        loss = out.square().mean()
        trainings.out_of_room(loss, samples, "end")
        return loss

    step = rebatch.Step(
        model,
        torch.optim.SGD(model["net"].parameters(), 0.1),
        loss_fn,
        log_level="quiet",
        growth=False,
    )
    for i in range(begins):
        step(batch_of(i))
    return model, step


@pytest.mark.parametrize(
    "name, change_of",
    (
        ("target.weight", lambda m: m["target"].weight),
        ("net.bias", lambda m: m["net"].bias),
        ("mean", lambda m: m.mean),
    ),
)
def test_a_change_through_data_that_begins_later_is_named_before_an_update(name, change_of):
    model, step = late(change_of)
    room.update(samples=4, where="end")
    net = [p.detach().clone() for p in model["net"].parameters() if p is not change_of(model)]
    with pytest.raises(rebatch.Error, match=f"'{name}' changed in place in an attempt that failed"):
        step(batch_of(7))
    after = [p for p in model["net"].parameters() if p is not change_of(model)]
    assert same_bits(net, after)
    states = []
    for micro in (2, 2):  # it is known now: an OOM changes nothing
        before = change_of(model).clone()
        room.update(samples=2, where="end")
        step.loss_fn = trainings.in_little_room(step.loss_fn)
        step(batch_of(8))
        states.append((before, change_of(model).clone()))
    assert step.report.micro == 2 and not torch.equal(*states[0])


def test_without_changes_nothing_is_named_after_an_oom():
    model, step = late(lambda m: torch.zeros(4))
    room.update(samples=4, where="end")
    for i in range(3):
        step(batch_of(i))
    assert step.report.micro == 4


def test_an_attribute_that_is_too_large_is_named_once():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    model[0].rows, model[0].few = [0] * ((1 << 16) + 1), [0] * (1 << 16)
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        in_little_room(trainings._classify),
        log_level="quiet",
        growth=False,
    )
    room.update(samples=8)
    with pytest.warns(RuntimeWarning, match="'0.rows' of the model has more than 65536") as w:
        step(batch_of(0))
        room.update(samples=4)
        step(batch_of(0))
    said = [str(each.message) for each in w if "entries" in str(each.message)]
    assert len(said) == 1 and "0.few" not in said[0]


def test_no_hidden_module_that_is_gone_is_kept():
    class Making(torch.nn.Linear):
        def forward(self, x):
            self.kept = [torch.nn.BatchNorm1d(8)]
            alive.append(weakref.ref(self.kept[0]))
            return super().forward(self.kept[0](x))

    alive, model = [], torch.nn.Sequential(Making(8, 4))
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        trainings._classify,
        log_level="quiet",
    )
    for i in range(9):
        step(batch_of(i))
    gc.collect()
    assert sum(module() is not None for module in alive) <= 2


# ---- levels, other modules, several Steps ----


def test_what_a_level_changes_stays_when_the_step_is_undone():
    """As Hugging Face's models do, a level sets a number of a module and wraps its forward."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    model[0].level = 0

    def level(on):
        model[0].level = int(on)
        model[0].forward = torch.nn.Linear.forward.__get__(model[0])
        model[1].register_buffer("note", torch.ones(1))

    left = Unseen(1)

    def loss_fn(model, samples):
        loss = model(samples[0]).square().mean()
        if left and left.pop():  # no smaller size is allowed, so the level is next
            loss.register_hook(trainings._strike)
        if len(left) == 0 and len(seen) < 3:
            seen.append(model[0].level)
        return loss

    seen = Unseen()
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn,
        micro_smallest=16,
        gradients="inplace",
        lighten=level,
        log_level="quiet",
        growth=False,
    )
    step(batch_of(0))
    assert model[0].level == 1 and "forward" in vars(model[0]) and "note" in model[1]._buffers
    step.loss_fn = lambda m, s: trainings._strike(None)
    with pytest.raises(rebatch.Exhausted):
        step(batch_of(1))
    assert model[0].level == 1 and "forward" in vars(model[0]) and "note" in model[1]._buffers


def test_modules_that_are_added_later_are_seen():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(
        model,
        optimizer,
        in_little_room(trainings._classify),
        log_level="quiet",
        micro_smallest=4,
        growth=False,
    )
    step(batch_of(0))
    model.append(torch.nn.BatchNorm1d(4))
    before = all_state(model)
    room.update(samples=2)
    with pytest.raises(rebatch.Exhausted):
        step(batch_of(1))
    assert same_bits(all_state(model), before)


def train_a_gan(ooms, where="end", **options):
    """Two optimizers and two Steps that share both networks."""
    seed_all()
    generator = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    critic = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 1))
    models = torch.nn.ModuleList([generator, critic])

    def critic_loss(models, samples):
        generator, critic = models
        made = generator(torch.randn_like(samples[0])).detach()
        return critic(made).mean() - critic(samples[0]).mean()

    def generator_loss(models, samples):
        generator, critic = models
        return -critic(generator(torch.randn_like(samples[0]))).mean()

    options = dict(log_level="quiet", growth=False, **options)
    steps = [
        rebatch.Step(
            models, torch.optim.Adam(part.parameters(), 0.01), in_little_room(loss_fn), **options
        )
        for part, loss_fn in ((critic, critic_loss), (generator, generator_loss))
    ]
    room.update(samples=4 if ooms else 99, where=where)
    losses = [step(batch_of(i)).item() for i in range(4) for step in steps]
    return all_state(models), losses


@pytest.mark.parametrize("where", ("end", "backward"))
def test_a_gan_with_two_steps(where):
    state, losses = train_a_gan(True, where)
    expected, expected_losses = train_a_gan(False, micro_start=4)
    assert losses == expected_losses and same_bits(state, expected)


def test_nothing_of_a_failed_attempt_is_held_by_modules():
    """A module keeps its activations in an attribute: the failed attempt's are let go."""
    alive = []

    class Keeps(torch.nn.Linear):
        def forward(self, x):
            self.kept = super().forward(x)
            alive.append(weakref.ref(self.kept))
            return self.kept

    model = torch.nn.Sequential(Keeps(8, 4))
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        in_little_room(trainings._classify),
        log_level="quiet",
    )
    room.update(samples=4)
    step(batch_of(0))
    assert sum(part() is not None for part in alive) == 1  # what the last one has left


def test_arrays_of_numpy_in_a_batch_are_as_before_when_samples_run_again():
    def loss_fn(model, samples):
        array, labels = samples
        array -= 0.5
        array /= 0.25
        x = torch.from_numpy(array)
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        trainings.out_of_room(loss, samples, room["where"])
        return loss

    states = []
    for start, most in ((16, 4), (4, 99)):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        step = rebatch.Step(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            loss_fn,
            log_level="quiet",
            growth=False,
            micro_start=start,
        )
        room.update(samples=most, where="end")
        x, labels = batch_of(0)
        step((x.numpy(), labels))
        assert torch.equal(x, batch_of(0)[0])
        states.append(all_state(model))
    assert same_bits(*states)


# ---- batches of the program's own classes ----


class Boxes:
    def __init__(self, y):
        self.y = y


class Graphs:
    """With tensors, in itself and in an object that it holds."""

    def __init__(self, x, boxes):
        self.x, self.boxes, self.itself = x, boxes, self

    def part(self, first, count):
        return Graphs(self.x[first : first + count], Boxes(self.boxes.y[first : first + count]))


def normalized(model, graphs):
    graphs.x.sub_(0.5).div_(2.0)
    graphs.boxes.y.mul_(0.5)
    return (model(graphs.x)[:, 0] - graphs.boxes.y).square().mean()


@pytest.mark.parametrize("fails_in", (0, 1))
def test_tensors_of_a_batch_of_an_own_class_are_normalized_once(fails_in):
    torch.manual_seed(0)
    model, fails = torch.nn.Linear(8, 1), Unseen(False)

    def strike(module, inputs):
        if fails[0]:
            fails[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory (on purpose)")

    model.register_forward_pre_hook(strike)
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        normalized,
        slice=Graphs.part,
        length=lambda graphs: len(graphs.x),
        log_level="quiet",
        growth=False,
    )
    for i in range(2):
        x, y = torch.randn(16, 8) + 3, torch.randn(16)
        expected = [(x - 0.5) / 2.0, y * 0.5]
        fails[0] = i == fails_in
        step(Graphs(x, Boxes(y)))
        assert same_bits([x, y], expected)
    assert step.report.micro == 8


# ---- optimizers that step within a backward pass ----


def steps_in_backward(**options):
    """(model, Step) whose parameters have a hook that steps an optimizer of their own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    step = rebatch.Step(
        model,
        list(optimizers.values()),
        in_little_room(trainings._classify),
        log_level="quiet",
        growth=False,
        **options,
    )
    return model, step


def test_an_optimizer_in_the_backward_pass_is_named_where_a_batch_is_cut():
    model, step = steps_in_backward(micro_start=8)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):  # each time, not the first alone
            with pytest.raises(rebatch.Error, match="'weight', 'bias' changed within a backward"):
                step(batch_of(i))
            assert same_bits(list(model.parameters()), before)


def test_an_optimizer_in_the_backward_pass_steps_as_without_rebatch_where_nothing_is_cut():
    model, step = steps_in_backward()
    step(batch_of(0))
    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 4)
    trainings._classify(plain, batch_of(0)).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    assert same_bits(list(model.parameters()), list(plain.parameters()))


def test_a_hook_that_only_looks_is_no_such_optimizer():
    model = torch.nn.Linear(8, 4)
    norms = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        in_little_room(trainings._classify),
        log_level="quiet",
        growth=False,
    )
    room.update(samples=4, where="end")
    step(batch_of(0))
    assert step.report.micro == 4 and len(norms) >= 8


# ---- what begins to change after the steps in which everything is looked at ----


class Count:
    """An object of the program that a module holds."""

    def __init__(self):
        self.n = 0


class Counting(torch.nn.Module):
    """Counts its calls from that step on, in `seen` or in an object."""

    def __init__(self, begins, is_in_object=False):
        super().__init__()
        self.net, self.norm = torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(8)
        self.begins, self.count, self.seen = begins, Count(), 0
        self.step, self.is_in_object = Unseen(0), is_in_object

    def forward(self, x):
        if self.step[0] >= self.begins:
            if self.is_in_object:
                self.count.n += 1
            else:
                self.seen += 1
        return self.net(self.norm(x))


def fail_in(model, module, steps, *, ooms_in=(), call=1, loss_fn=trainings._classify, is_run=True):
    """Train, with an OOM in that call of a module in some steps; without `is_run` one step runs at
    the size that would follow instead. Returns what was warned of."""
    torch.manual_seed(0)
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet", growth=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(steps):
            if hasattr(model, "step"):
                model.step[0] = i
            if i in ooms_in and not is_run:
                step.load_state_dict({**step.state_dict(), "micro": 8})
            with fail_once(module, call) if i in ooms_in and is_run else contextlib.nullcontext():
                step(batch_of(i))
            assert step.report.ooms == (i in ooms_in and is_run)
            assert step.report.micro == 16 >> sum(at <= i for at in ooms_in)
    return [str(w.message) for w in caught if w.category is RuntimeWarning]


MICROBATCHES = (1, 1, 1, 1, 1, 2, 2, 4)  # of each step, with OOMs in steps 5 and 7


@pytest.mark.parametrize("name", ("seen", "count"))
@pytest.mark.parametrize("begins", (0, 5))
def test_an_attribute_that_begins_to_change_late_is_named_and_from_then_on_put_back(name, begins):
    seed_all()
    model = Counting(begins, name == "count")
    said = fail_in(model, model.net, 8, ooms_in=(5, 7))
    late = begins == 5  # what failed first was not known, and stays
    assert (model.count.n if name == "count" else model.seen) == sum(MICROBATCHES[begins:]) + late
    assert [text.split(" changed")[0] for text in said] == late * [
        f"rebatch: '{name}' of the model"
    ]


@pytest.mark.parametrize("begins", (0, 5))
def test_a_global_generator_that_is_first_used_late_is_named_and_from_then_on_put_back(begins):
    drawn = []

    def loss_fn(model, samples):
        if model.step[0] >= begins:
            drawn.append(random.random())
        return trainings._classify(model, samples)

    seed_all()
    model = Counting(99)
    said = fail_in(model, model.net, 8, ooms_in=(5, 7), loss_fn=loss_fn)
    said = [text for text in said if "draws from" in text]
    assert [text.split(" for the first")[0] for text in said] == (begins == 5) * [
        "rebatch: loss_fn draws from random"
    ]
    # The numbers of a failed attempt are drawn again, unless nobody knew of them.
    lost = begins == 5
    assert len(set(drawn)) == sum(MICROBATCHES[begins:]) + lost
    assert drawn.count(drawn[-4]) == 2  # in the attempt of step 7 that failed, and after it


def fgm(model, samples):
    """Trains on a perturbed weight too: a change through .data, which is taken back."""
    loss = trainings._classify(model, samples)
    weight = model[0].weight
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    before = weight.data.clone()
    weight.data.add_(0.5 * gradient / gradient.norm())
    loss = loss + trainings._classify(model, samples)
    weight.data.copy_(before)
    return loss


@pytest.mark.parametrize("in_step", (0, 1, 2, 5))
def test_a_weight_that_loss_fn_perturbs_and_restores_is_put_back(in_step):
    """In the first attempt of all no copy of a trained parameter is made: that is an error."""
    states = []
    for is_run in (True, False):
        seed_all()
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        options = dict(ooms_in=(in_step,), call=2, loss_fn=fgm, is_run=is_run)
        if in_step == 0 and is_run:
            others = [p.clone() for p in list(model.parameters())[1:]]
            with pytest.raises(rebatch.Error, match="'0.weight' changed in place in an attempt"):
                fail_in(model, model[1], 1, **options)
            assert same_bits(list(model.parameters())[1:], others)
            return
        said = fail_in(model, model[1], in_step + 2, **options)
        assert said == []
        states.append(all_state(model))
    assert same_bits(*states)


def test_modes_and_flags_that_loss_fn_flips_and_flips_back_are_put_back():
    """An OOM between."""

    def loss_fn(model, samples):
        loss = trainings._classify(model, samples)
        model.norm.eval()
        model.net.weight.requires_grad_(False)
        loss = loss + trainings._classify(model, samples)
        model.norm.train()
        model.net.weight.requires_grad_(True)
        return loss

    states = []
    for is_run in (True, False):
        seed_all()
        model = Counting(99)
        said = fail_in(model, model.net, 7, ooms_in=(5,), call=2, loss_fn=loss_fn, is_run=is_run)
        assert said == [] and model.norm.training and model.net.weight.requires_grad
        states.append(all_state(model))
    assert same_bits(*states)


def test_buffers_of_batch_norm_are_put_back_in_a_settled_step():
    states = []
    for is_run in (True, False):
        seed_all()
        model = Counting(99)
        said = fail_in(model, model.net, 7, ooms_in=(5,), is_run=is_run)
        assert said == []
        states.append(all_state(model))
    assert same_bits(*states) and model.norm.num_batches_tracked == 5 + 2 * 2


def test_a_carried_state_of_another_size_is_named():
    class Carries(torch.nn.Linear):
        hidden = None

        def forward(self, x):
            y = super().forward(x) + (0 if self.hidden is None else self.hidden)
            self.hidden = y.detach()
            return y

    step = rebatch.Step(
        model := Carries(8, 4),
        torch.optim.SGD(model.parameters(), 0.1),
        in_little_room(trainings._classify),
        log_level="quiet",
        growth=False,
    )
    step(batch_of(0))
    room.update(samples=8)
    with pytest.raises(RuntimeError, match="must match the size of tensor") as caught:
        step(batch_of(1))
    (note,) = caught.value.__notes__
    assert "'hidden' of the model has a dimension of 16" in note and "this one has 8" in note
    assert "micro_allowed=[N]" in note


@pytest.mark.parametrize("is_legacy", (True, False))
def test_states_of_numpys_generator_differ_where_one_word_does(is_legacy):
    """However its arrays are printed: most of their numbers may be left out."""
    with numpy.printoptions(threshold=5):
        before, after = (numpy.random.RandomState(1).get_state(legacy=is_legacy) for _ in "12")
        assert is_same_state(before, after)
        (after[1] if is_legacy else after["state"]["key"])[300] ^= 1
        assert not is_same_state(before, after)


def test_in_a_struck_step_what_changed_nothing_is_looked_at_once(monkeypatch):
    """Before the step, after each failed attempt, and after each micro-batch that succeeds; sums of
    contents until the first one has."""
    looks = []
    made = undo.Look.__init__

    def counted(look, held, batch, compares):
        looks.append(compares)
        made(look, held, batch, compares)

    monkeypatch.setattr(undo.Look, "__init__", counted)
    train("lora_on_a_frozen_base", ooms_in=(0,), steps=1)
    assert looks[:5] == [True, True] + [False] * 3
