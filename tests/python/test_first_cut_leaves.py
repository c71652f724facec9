"""What the comparison of two cuts, and a check, leave as it was: they run samples once more."""

import gc

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from models import make


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05)


def test_a_comparison_leaves_what_lies_deep_in_containers():
    """Sets stay sets, and tensors at any depth, in variables of the program too, as they were."""
    model, batch, its_loss = make("mlp")
    model.deep = {"a": [{"b": ({"sum": torch.zeros(())}, {1})}]}
    outside = {"rows": [[{"sum": torch.zeros(())}]], "seen": [{0}]}

    def loss_fn(model, samples):
        sums, seen = model.deep["a"][0]["b"]
        sums["sum"] += 1
        seen.add(len(seen) + 1)
        outside["rows"][0][0]["sum"] += 1
        outside["seen"][0].add(len(outside["seen"][0]))
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, log_level="quiet")
    for _ in range(3):
        step(batch)
    sums, seen = model.deep["a"][0]["b"]
    assert sums["sum"] == 12 and seen == set(range(1, 14))
    assert outside["rows"][0][0]["sum"] == 12 and outside["seen"][0] == set(range(13))


class Slotted:
    __slots__ = ("seen",)

    def __init__(self):
        self.seen = 0


class Meters:
    total = 0

    def __init__(self):
        self.own, self.parts = Slotted(), {"loss": [Slotted()]}

    def loss(self, model, samples):
        count = len(samples[0])
        self.own.seen += count
        self.parts["loss"][0].seen += count
        Meters.total += count
        return ((model(samples[0]) - samples[1]) ** 2).mean()


def test_a_comparison_leaves_slots_classes_and_objects_deep_in_objects():
    """Also of the object whose method loss_fn is."""
    model, batch, _ = make("mlp")
    meters, slotted, Meters.total = Meters(), Slotted(), 0

    def loss_fn(model, samples):
        slotted.seen += len(samples[0])
        Meters.total += 0
        return meters.loss(model, samples)

    for function in (loss_fn, meters.loss):
        options = {"micro_start": 8, "growth": False, "log_level": "quiet"}
        step = rebatch.Step(model, sgd(model), function, **options)
        for _ in range(3):
            step(batch)
    assert slotted.seen == 3 * 16 and Meters.total == 6 * 16
    assert [meters.own.seen, meters.parts["loss"][0].seen] == [6 * 16, 6 * 16]


# Each makes a function that is called with some samples of a micro-batch, and what it has counted.


def in_an_array(model):
    seen = numpy.zeros((2, 2))

    def count(x):
        seen[0, 1] += len(x)

    return count, lambda: seen.sum()


def of_a_function(model):
    def count(x):
        count.seen += len(x)

    count.seen = 0
    return count, lambda: count.seen


def in_a_forward_hook(model):
    seen = {"sum": torch.zeros(2), "calls": []}

    def hook(module, inputs, output):
        seen["sum"] += len(inputs[0])
        seen["calls"].append(len(inputs[0]))

    next(model.children()).register_forward_hook(hook)
    return lambda x: None, lambda: (int(seen["sum"][0]) + sum(seen["calls"])) / 2


def in_a_hook_of_a_parameter(model):
    seen = [0]

    def hook(gradient):
        seen[0] += 8

    next(model.parameters()).register_hook(hook)
    return lambda x: None, lambda: seen[0]


def in_a_global_of_another_function(model):
    COUNTED["seen"] = 0
    return count_globally, lambda: COUNTED["seen"]


COUNTED = {"seen": 0}


def count_globally(x):
    COUNTED["seen"] += len(x)


def in_statistics_of_another_network(model):
    norm = torch.nn.BatchNorm1d(8)

    def network(x):
        norm(x[:, :1].expand(len(x), 8))

    return network, lambda: 8 * int(norm.num_batches_tracked)


COUNTS = [
    in_an_array,
    of_a_function,
    in_a_forward_hook,
    in_a_hook_of_a_parameter,
    in_a_global_of_another_function,
    in_statistics_of_another_network,
]


@pytest.mark.parametrize("made", COUNTS)
def test_a_comparison_and_a_check_leave_what_functions_and_hooks_count(made):
    model, batch, its_loss = make("mlp")
    count, counted = made(model)

    def loss_fn(model, samples):
        count(samples[0])
        return its_loss(model, samples)

    options = {"micro_start": 8, "growth": False, "log_level": "quiet"}
    step = rebatch.Step(model, sgd(model), loss_fn, **options)
    assert step.check(batch) is not None and counted() == 0
    for _ in range(5):
        step(batch)
    assert counted() == 5 * 16


def test_a_comparison_leaves_no_graph_of_autograd():
    """A result that the backward pass does not come to, as what is logged, keeps itself."""

    def nodes(model):
        return [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]

    def loss_fn(model, samples):
        predicted = model(samples[0])
        predicted.max()
        for node in nodes(model):
            node.metadata["of a pass"] = True
        return ((predicted - samples[1]) ** 2).mean()

    model, batch, _ = make("mlp")
    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=8, growth=False)
    for _ in range(5):
        step(batch)
    gc.collect()
    assert not any("of a pass" in node.metadata for node in nodes(model))
