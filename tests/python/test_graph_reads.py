"""What a captured pass has read on the host is seen to change, by name. The device is "meta" where
a tensor of the CPU is to be told from one of the device."""

import argparse
import collections
import dataclasses
import functools
import types

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch.graphs.reads import Reads
from rebatch.torch.session.modes import Modes

nn = torch.nn
scale = 1.0
counter_of_the_loop = 0
settings = types.SimpleNamespace(scale=1.0, step=0)


class Block(nn.Module):
    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(4))
        self.gain, self.sizes, self.mask = 1.0, [1, 2], None

    def forward(self, x):
        return self.dropout(self.linear(x - self.mean)) * self.gain * self.helped()

    def helped(self):
        return self.temperature * scale_of_the_file


scale_of_the_file = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def mean(model, x):
    return model(x).square().mean()


@dataclasses.dataclass
class Config:
    kl_weight: float = 1.0
    step: int = 0


class Trainer:
    share = 0.5

    def __init__(self):
        self.config, self.step, self.weights = Config(), 0, {"kl": 1.0}

    @property
    def warmth(self):
        return self.config.kl_weight * 2

    def loss(self, model, x):
        return mean(model, x) * self.config.kl_weight + self.rest(x)

    def rest(self, x):
        return self.weights["kl"] * self.share

    def warm_loss(self, model, x):
        return mean(model, x) * self.warmth


# ---- of modules: what is changed, and the name ----


def set_at(owner, name, value):
    setattr(owner, name, value)


def data_of(net):
    net.blocks[0].linear.weight.data = torch.zeros(4, 4)


def parameter_of(net):
    net.blocks[1].linear.bias = nn.Parameter(torch.zeros(4))


def buffer_of(net):
    net.blocks[0].mean = torch.zeros(4)


def module_of(net):
    net.blocks[0].dropout = nn.Dropout(0.2)


def module_more(net):
    net.blocks.append(Block())


def parameter_more(net):
    net.register_parameter("more", nn.Parameter(torch.zeros(1)))


OF_MODULES = {
    "train and eval": (lambda net: net.eval(), "model.training"),
    "eval of one": (lambda net: net.blocks[1].dropout.eval(), "model.blocks.1.dropout.training"),
    "requires_grad": (
        lambda net: net.blocks[0].linear.bias.requires_grad_(False),
        "model.blocks.0.linear.bias",
    ),
    "data": (data_of, "model.blocks.0.linear.weight"),
    "parameter": (parameter_of, "model.blocks.1.linear.bias"),
    "buffer": (buffer_of, "model.blocks.0.mean"),
    "no bias": (
        lambda net: set_at(net.blocks[0].linear, "bias", None),
        "model.blocks.0.linear.bias",
    ),
    "a number": (lambda net: set_at(net.blocks[1], "gain", 2.0), "model.blocks.1.gain"),
    "a rate": (lambda net: set_at(net.blocks[1].dropout, "p", 0.2), "model.blocks.1.dropout.p"),
    "a list": (lambda net: net.blocks[0].sizes.append(3), "model.blocks.0.sizes"),
    "a new attribute": (lambda net: set_at(net, "more", 3), "model.more"),
    "no attribute": (lambda net: delattr(net.blocks[0], "gain"), "model.blocks.0.gain"),
    "a tensor": (lambda net: set_at(net.blocks[0], "mask", torch.ones(1)), "model.blocks.0.mask"),
    "a module": (module_of, "model.blocks.0.dropout"),
    "a module more": (module_more, "model.blocks.2"),
    "a parameter more": (parameter_more, "model.more"),
    "a first hook": (
        lambda net: net.blocks[0].register_forward_hook(lambda *_: None),
        "model.blocks.0._forward_hooks",
    ),
}


def step_of(net, loss_fn, **options):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return rebatch.Step(net, optimizer, loss_fn, log_level="quiet", **options)


def reads_of(net, loss_fn, **options):
    step = step_of(net, loss_fn, **options)
    running, program = step._training.running, step._training.program
    modules = [module for _, module in running.undo.tree.named_modules()]
    return Reads(program.functions_that_run(), modules, program.update)


def check(reads, change, expected):
    """It holds until the change, whose name is then said."""
    assert reads.holds() and reads.changed() == ""
    change()
    assert reads.holds() is (not expected)
    assert reads.changed() == expected


@pytest.mark.parametrize("name", OF_MODULES)
def test_what_a_module_holds(name):
    change, expected = OF_MODULES[name]
    net = Net()
    check(reads_of(net, mean), lambda: change(net), expected)


# ---- of what functions name: each gives loss_fn, a function that changes something, and the name


def variable_around_it():
    beta = 1.0

    def loss_fn(model, x):
        return mean(model, x) * beta

    def change():
        nonlocal beta
        beta = 2.0

    return loss_fn, change, "beta"


def global_variable():
    return lambda m, x: mean(m, x) * scale, lambda: globals().update(scale=scale + 1), "scale"


def flag_that_is_text():
    mode = ["sum"]
    return (
        lambda model, x: mean(model, x) if mode[0] == "mean" else mean(model, x),
        lambda: mode.__setitem__(0, "mean"),
        "mode",
    )


def entry_of_a_dict():
    weights = {"kl": 1.0}
    return lambda m, x: mean(m, x) * weights["kl"], lambda: weights.update(kl=2.0), "weights"


def entry_of_an_inner_dict():
    weights = {"kl": {"low": 1.0}}
    return (
        lambda model, x: mean(model, x) * weights["kl"]["low"],
        lambda: weights["kl"].update(low=2.0),
        "weights['kl']",
    )


def set_of_names():
    frozen = {"a"}
    return lambda m, x: mean(m, x) * len(frozen), lambda: frozen.add("b"), "frozen"


def tensor_in_a_dict():
    tables = {4: torch.ones(())}
    return (
        lambda model, x: mean(model, x) * tables[4],
        lambda: tables.update({4: torch.ones(())}),
        "tables",
    )


def tensor_of_a_variable():
    """Another one, of the same value."""
    weights = [torch.ones(1)]
    weight = weights[0]

    def loss_fn(model, x):
        return mean(model, x) * weight

    def change():
        nonlocal weight
        weight = torch.ones(1)

    return loss_fn, change, "weight"


def tensor_that_lies_elsewhere():
    weight = torch.ones(1)

    def change():
        weight.data = torch.ones(1)

    return lambda m, x: mean(m, x) * weight, change, "weight"


def default_argument():
    def loss_fn(model, x, weights=[1.0]):  # noqa: B006
        return mean(model, x) * weights[0]

    return loss_fn, lambda: loss_fn.__defaults__[0].append(2.0), "a default of loss_fn()"


def argument_of_a_partial():
    def weighted(model, x, beta):
        return mean(model, x) * beta

    loss_fn = functools.partial(weighted, beta=1.0)
    return loss_fn, lambda: loss_fn.keywords.update(beta=2.0), "beta"


def attribute_of_an_object():
    config = Config()
    return (
        lambda model, x: mean(model, x) * config.kl_weight,
        lambda: set_at(config, "kl_weight", 2.0),
        "config.kl_weight",
    )


def attribute_of_a_global():
    return (
        lambda model, x: mean(model, x) * settings.scale,
        lambda: set_at(settings, "scale", settings.scale + 1),
        "settings.scale",
    )


def attribute_of_a_namespace():
    given = argparse.Namespace(loss=types.SimpleNamespace(beta=1.0))
    return (
        lambda model, x: mean(model, x) * given.loss.beta,
        lambda: set_at(given.loss, "beta", 2.0),
        "given.loss.beta",
    )


def attribute_without_its_name():
    config = Config()
    return (
        lambda model, x: mean(model, x) * getattr(config, "kl_" + "weight"),
        lambda: set_at(config, "kl_weight", 2.0),
        "config.kl_weight",
    )


def object_of_a_variable():
    config = Config()

    def loss_fn(model, x):
        return mean(model, x) * config.kl_weight

    def change():
        nonlocal config
        config = Config(2.0)

    return loss_fn, change, "config"


def object_whose_method_it_is():
    trainer = Trainer()
    return trainer.loss, lambda: set_at(trainer.config, "kl_weight", 2), "self.config.kl_weight"


def what_another_method_reads():
    trainer = Trainer()
    return trainer.loss, lambda: trainer.weights.update(kl=2.0), "self.weights"


def what_a_property_gives():
    trainer = Trainer()
    return (
        trainer.warm_loss,
        lambda: set_at(trainer, "config", Config(2.0)),
        "self.warmth",
    )


def variable_of_a_class():
    trainer = Trainer()
    return trainer.loss, lambda: set_at(Trainer, "share", Trainer.share + 1), "Trainer.share"


def what_a_function_that_is_called_reads():
    def inner(loss):
        return loss * scale

    return (
        lambda model, x: inner(mean(model, x)),
        lambda: globals().update(scale=scale + 1),
        "scale",
    )


def what_forward_of_a_module_reads():
    return (
        mean,
        lambda: globals().update(scale_of_the_file=scale_of_the_file + 1),
        "scale_of_the_file",
    )


def variable_of_the_class_of_a_module():
    return mean, lambda: set_at(Block, "temperature", Block.temperature + 1), "Block.temperature"


def another_network():
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    return lambda model, x: mean(model, teacher(x)), lambda: teacher[1].eval(), "teacher.1.training"


def array():
    weights = numpy.ones(3)
    return lambda m, x: mean(m, x) * weights[0], lambda: weights.fill(2.0), "weights"


def another_function():
    def loss_fn(model, x):
        return criterion(model, x)

    criterion = mean

    def change():
        nonlocal criterion
        criterion = functools.partial(mean)

    return loss_fn, change, "criterion"


def grad_mode():
    return mean, lambda: torch.set_grad_enabled(False), "a mode of PyTorch, such as autocast"


def deterministic_algorithms():
    return (
        mean,
        lambda: torch.use_deterministic_algorithms(False),
        "a mode of PyTorch, such as autocast",
    )


def autocast():
    return (
        mean,
        lambda: torch.set_autocast_enabled("cpu", True),
        "a mode of PyTorch, such as autocast",
    )


def precision_of_products():
    return (
        mean,
        lambda: torch.set_float32_matmul_precision("medium"),
        "torch.get_float32_matmul_precision",
    )


def attention_kernels():
    return (
        mean,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        "torch.backends.cuda.flash_sdp_enabled",
    )


NAMED = [
    *(variable_around_it, global_variable, flag_that_is_text, entry_of_a_dict),
    *(entry_of_an_inner_dict, set_of_names, tensor_in_a_dict, tensor_of_a_variable),
    *(tensor_that_lies_elsewhere, default_argument, argument_of_a_partial),
    *(attribute_of_an_object, attribute_of_a_global, attribute_of_a_namespace),
    *(attribute_without_its_name, object_of_a_variable, object_whose_method_it_is),
    *(what_another_method_reads, what_a_property_gives, variable_of_a_class),
    *(what_a_function_that_is_called_reads, what_forward_of_a_module_reads),
    *(variable_of_the_class_of_a_module, another_network, array, another_function),
    *(grad_mode, deterministic_algorithms, autocast, precision_of_products, attention_kernels),
]


# ---- and what is not named ----


def nothing():
    return mean, lambda: None


def global_of_an_attributes_name():
    """counter_of_the_loop is a variable of the loop, and loss_fn reads an attribute of the same
    name."""
    given = types.SimpleNamespace(counter_of_the_loop=0)

    def loss_fn(model, x):
        return mean(model, x) + given.counter_of_the_loop

    return loss_fn, lambda: globals().update(counter_of_the_loop=counter_of_the_loop + 1)


def attribute_that_is_not_read():
    return (
        lambda model, x: mean(model, x) * settings.scale,
        lambda: set_at(settings, "step", settings.step + 1),
    )


def counter_of_the_trainer():
    trainer = Trainer()
    return trainer.loss, lambda: (set_at(trainer, "step", 1), set_at(trainer.config, "step", 1))


def number_that_is_alike():
    config = Config(kl_weight=float("1.5"))
    return (
        lambda model, x: mean(model, x) * config.kl_weight,
        lambda: set_at(config, "kl_weight", float("1.5")),
    )


def list_that_is_alike():
    weights = [1.0, 2.0]
    return lambda m, x: mean(m, x) * weights[0], lambda: weights.__setitem__(0, float("1"))


def contents_of_a_tensor():
    weight = torch.ones(1)
    return lambda m, x: mean(m, x) * weight, lambda: weight.mul_(2)


def variable_that_is_not_named():
    history = []

    def loss_fn(model, x):
        return mean(model, x)

    return loss_fn, lambda: history.append(1)


def object_of_an_installed_package():
    numbers = collections.Counter()
    return lambda m, x: mean(m, x) * (numbers is not None), lambda: set_at(numbers, "more", 1)


def local_of_the_same_name():
    def loss_fn(model, x):
        scale = 0.5
        return mean(model, x) * scale

    return loss_fn, lambda: globals().update(scale=scale + 1)


NOT_NAMED = [
    *(nothing, global_of_an_attributes_name, attribute_that_is_not_read, counter_of_the_trainer),
    *(number_that_is_alike, list_that_is_alike, contents_of_a_tensor),
    *(variable_that_is_not_named, object_of_an_installed_package, local_of_the_same_name),
]


@pytest.fixture(autouse=True)
def modes():
    """Are as they were after a test."""
    precision = torch.get_float32_matmul_precision()
    with Modes(("cpu",)).kept():
        yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("make", NAMED)
def test_what_the_program_names(make):
    loss_fn, change, expected = make()
    check(reads_of(Net(), loss_fn), change, expected)


@pytest.mark.parametrize("make", NOT_NAMED)
def test_what_a_pass_does_not_read(make):
    loss_fn, change = make()
    check(reads_of(Net(), loss_fn), change, "")


def test_steps_change_nothing_that_is_read():
    net = Net()
    net.register_buffer("calls", torch.zeros(()))
    step = step_of(net, mean)
    step(torch.ones(8, 4))
    running = step._training.running
    reads = Reads([mean], running.undo.tree.modules, running.program.update)
    for _ in range(3):
        step(torch.ones(8, 4))
        net.calls += 1
        assert reads.holds(), reads.changed()
    net.eval()
    assert not reads.holds()
    net.train()
    assert reads.holds()


@pytest.mark.parametrize(
    "change", (lambda t: t.fill_(2), lambda t: t.numpy().fill(2), lambda t: t.data.fill_(2))
)
def test_a_tensor_of_the_cpu_is_read_on_the_host(change):
    net, temperature = Net().to("meta"), torch.full((), float("nan"))
    net.threshold = torch.ones(3)
    reads = reads_of(net, lambda model, x: mean(model, x) * temperature)
    check(reads, lambda: change(net.threshold), "model.threshold")
    reads = reads_of(net, lambda model, x: mean(model, x) * temperature)
    check(reads, lambda: change(temperature), "temperature")


def test_the_scale_of_a_scaler_is_to_stay_where_it_is():
    net, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0)
    step = step_of(net, mean, scaler=scaler)
    step(torch.ones(8, 4))
    running = step._training.running
    reads = Reads([mean], running.undo.tree.modules, running.program.update)
    step(torch.ones(8, 4))
    check(reads, lambda: scaler._scale.fill_(4.0), "")
    check(reads, lambda: scaler.update(8.0), "")  # in place
    check(reads, lambda: set_at(scaler, "_scale", torch.full((1,), 8.0)), "scaler._scale")


def test_modules_in_a_list_are_modules_of_the_model():
    net = Net()
    net.hidden = [Block()]
    check(reads_of(net, mean), lambda: net.hidden[0].eval(), "model.hidden[0].training")


def test_of_several_models_the_number_is_in_the_name():
    first, second = Net(), Net()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    step = rebatch.Step([first, second], optimizer, mean, log_level="quiet")
    program, undo = step._training.program, step._training.running.undo
    reads = Reads(program.functions_that_run(), undo.tree.modules, program.update)
    check(reads, lambda: second.eval(), "model[1].training")
