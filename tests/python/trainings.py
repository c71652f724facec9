"""Trainings whose loss_fn changes more than gradients. Each function returns (modules, loss_fn,
options of the Step); batches are 16 samples of 8 numbers, and classes below 4."""

import copy
import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F


def _head(width=8):
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


def _classify(model, samples):
    return F.cross_entropy(model(samples[0]), samples[1])


class _Distilled(nn.Module):
    """BYOL: forward moves a target, whose parameters have no gradients."""

    def __init__(self, move):
        super().__init__()
        self.net, self.move = _head(), move
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.net.parameters()):
                self.move(old, new)
            target = self.target(x).softmax(1)
        return self.net(x) - target


def byol():
    model = _Distilled(lambda old, new: old.lerp_(new, 0.1))
    return model, _classify, {}


def byol_through_data():
    model = _Distilled(lambda old, new: old.data.mul_(0.9).add_(new.data, alpha=0.1))
    return model, _classify, {}


def moco_replaces_data():
    def move(old, new):
        old.data = old.data * 0.9 + new.data * 0.1

    return _Distilled(move), _classify, {}


def byol_replaces_parameters():
    model = _Distilled(None)

    def loss_fn(model, samples):
        for target, net in zip(model.target, model.net):
            if isinstance(net, nn.Linear):
                target.weight = nn.Parameter(0.9 * target.weight + 0.1 * net.weight.detach(), False)
        model.move = lambda old, new: None
        return _classify(model, samples)

    return model, loss_fn, {}


class _Queue(nn.Module):
    """MoCo's queue: one buffer is written in place, the other is assigned."""

    def __init__(self):
        super().__init__()
        self.head = _head()
        self.register_buffer("queue", torch.randn(4, 32))
        self.register_buffer("at", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        y = self.head(x)
        bias = self.queue.mean(1)
        at = int(self.at)
        self.queue[:, at : at + len(x)] = y.detach().t()[:, : 32 - at]
        self.at = (self.at + len(x)) % 32
        return y + bias


def moco_queue():
    return _Queue(), _classify, {}


class _Codebook(nn.Module):
    """VQ-VAE with moving averages."""

    def __init__(self):
        super().__init__()
        self.head = _head()
        self.register_buffer("code", torch.randn(5, 8))
        self.register_buffer("size", torch.zeros(5))
        self.register_buffer("total", torch.randn(5, 8))

    def forward(self, x):
        nearest = torch.cdist(x, self.code).argmin(1)
        hot = F.one_hot(nearest, 5).float()
        self.size.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.total = self.total * 0.9 + hot.t() @ x * 0.1
        self.code.data.copy_(self.total / (self.size[:, None] + 1e-3))
        return self.head(x + (self.code[nearest] - x).detach())


def vq_vae():
    return _Codebook(), _classify, {}


class _Recurrent(nn.Module):
    """A hidden state is carried on, as a tuple."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.state = nn.LSTMCell(8, 8), _head(), None

    def forward(self, x):
        if self.state is None:
            self.state = (torch.zeros(1, 8), torch.zeros(1, 8))
        h, c = (part.expand(len(x), 8) for part in self.state)
        h, c = self.cell(x, (h, c))
        self.state = (h[-1:].detach(), c[-1:].detach())
        return self.head(h)


def rnn_carries_its_state():
    return _Recurrent(), _classify, {}


class _InPlace(nn.Module):
    """Plain tensors that are written in place: as an attribute, in a list, and in a dict."""

    def __init__(self):
        super().__init__()
        self.head, self.mean = _head(), torch.zeros(8)
        self.each, self.named = [torch.zeros(8)], {"most": torch.zeros(8)}

    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        self.each[0].add_(x.sum(0))
        torch.maximum(self.named["most"], x.amax(0), out=self.named["most"])
        return self.head(x - self.mean - self.each[0] / 100 - self.named["most"] / 10)


def plain_tensors_in_place():
    return _InPlace(), _classify, {}


class _Nested(nn.Module):
    """Tensors and numbers deep in containers, written in place, assigned and added."""

    def __init__(self):
        super().__init__()
        self.head = _head()
        self.layers = [{"mean": torch.zeros(8), "seen": [0]} for _ in range(2)]
        self.cache = {"kv": ([torch.zeros(8)], {"at": torch.zeros(())}), "free": set()}
        self.cache["itself"] = self.cache
        self.history = [0.0] * 2000

    def forward(self, x):
        for layer in self.layers:
            layer["mean"].lerp_(x.mean(0), 0.1)
            layer["seen"][0] += len(x)
        keys, values = self.cache["kv"]
        keys.append(x[-1].clone())
        values["at"] += 1
        self.cache["free"].add(len(keys))
        self.history.append(x[0, 0].item())
        scale = 1 + values["at"] / 10 + len(self.cache["free"]) / 7 + self.layers[1]["seen"][0] / 99
        return self.head(x * scale + self.layers[0]["mean"] + sum(keys) + sum(self.history[-3:]))


def tensors_deep_in_containers():
    return _Nested(), _classify, {}


class _Teacher(nn.Module):
    """A teacher that is hidden from parameters() and state_dict(), in a list and in a __dict__."""

    def __init__(self):
        super().__init__()
        self.head = _head()
        self.hidden = [nn.Sequential(nn.BatchNorm1d(8), copy.deepcopy(self.head))]
        self.__dict__["other"] = nn.BatchNorm1d(8)

    def forward(self, x):
        with torch.no_grad():
            for old, new in zip(self.hidden[0][1].parameters(), self.head.parameters()):
                old.lerp_(new, 0.1)
            target = self.hidden[0](x).softmax(1)
        return self.head(self.other(x)) - target


def modules_that_are_hidden():
    return _Teacher(), _classify, {}


class _Counting(nn.Module):
    """Numbers, lists, lazy buffers and lazy attributes."""

    def __init__(self):
        super().__init__()
        self.head, self.calls, self.losses = _head(), 0, []

    def forward(self, x):
        self.calls += 1
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.rand(8) + 1)
            self.shift = torch.rand(8)
        self.losses.append(x.abs().mean().item())
        return self.head(x * self.scale + self.shift) * (1 + self.calls / 10 + sum(self.losses))


def counters_and_lazy_buffers():
    return _Counting(), _classify, {}


def weight_and_spectral_norm():
    model = _head()
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[3])
    return model, _classify, {}


def old_weight_and_spectral_norm():
    model = _head()
    return nn.Sequential(nn.utils.spectral_norm(model[0]), *model[1:]), _classify, {}


def batch_norm():
    return nn.Sequential(nn.BatchNorm1d(8, momentum=None), _head()), _classify, {}


def samples_normalized_in_place():
    def loss_fn(model, samples):
        x, y = samples
        x.sub_(0.5).div_(0.25)
        return _classify(model, (x, y))

    return _head(), loss_fn, {}


def augmented_by_python_and_numpy():
    own, own_python = numpy.random.default_rng(3), random.Random(4)

    def loss_fn(model, samples):
        x, y = samples
        scale = random.uniform(0.5, 1) + numpy.random.rand() + own.random() + own_python.random()
        noise = torch.from_numpy(numpy.random.randn(*x.shape)).float()
        return _classify(model, (x * scale + 0.1 * noise, y))

    return _head(), loss_fn, {"generators": [own, own_python]}


def modes_and_gradients_switched():
    """What loss_fn switches for a while stays switched where memory runs out in between."""
    model = nn.ModuleDict({"teacher": _head(), "student": _head()})

    def loss_fn(model, samples):
        is_odd = not model["teacher"].training or not model["teacher"][0].weight.requires_grad
        model["teacher"].eval().requires_grad_(False)
        target = model["teacher"](samples[0]).softmax(1)
        loss = F.cross_entropy(model["student"](samples[0]), target) * (1 + is_odd)
        out_of_room(loss, samples)
        model["teacher"].train().requires_grad_(True)
        return loss + 0 * model["teacher"](samples[0]).sum()

    return model, loss_fn, {}


def lora_on_a_frozen_base():
    model = nn.ModuleDict({"base": _head().requires_grad_(False), "lora": nn.Linear(8, 4)})
    return model, lambda m, s: F.cross_entropy(m["base"](s[0]) + m["lora"](s[0]), s[1]), {}


def embedding_with_a_largest_norm():
    model = nn.ModuleDict({"words": nn.Embedding(4, 8, max_norm=1.0), "head": _head()})

    def loss_fn(model, samples):
        return F.cross_entropy(model["head"](model["words"](samples[1]) + samples[0]), samples[1])

    return model, loss_fn, {"state": model["words"]}


def complex_and_half():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.phase = _head(), nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.low = nn.Parameter(torch.randn(8, dtype=torch.bfloat16), requires_grad=False)
            self.spin = nn.Parameter(torch.randn(8, dtype=torch.complex64), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.low.data.mul_(0.5)
                self.spin.mul_(1j)
            return self.head(x * (self.phase * self.spin).real + self.low.float())

    return Mixed(), _classify, {}


def average_outside_of_the_model():
    model = _head()
    average = torch.optim.swa_utils.AveragedModel(model)
    model_and_average = nn.ModuleList([model, average])  # both are compared

    def loss_fn(_, samples):
        average.update_parameters(model)
        target = average(samples[0]).softmax(1).detach()
        return F.cross_entropy(model(samples[0]), target)

    return model_and_average, loss_fn, {"model": model, "state": [average]}


def tensors_and_objects_outside_of_the_model():
    model, seen = _head(), torch.zeros(4)

    class Schedule:
        value = 1.0

        def state_dict(self):
            return {"value": self.value, "seen": seen}

        def load_state_dict(self, state):
            self.value = state["value"]

    schedule = Schedule()

    def loss_fn(model, samples):
        seen.add_(F.one_hot(samples[1], 4).sum(0))
        schedule.value *= 0.9
        return _classify(model, samples) * schedule.value + (model(samples[0]) * seen).mean() / 100

    return model, loss_fn, {"state": [seen, schedule]}


def two_modules():
    models = [nn.BatchNorm1d(8), _head()]
    return models, lambda ms, s: F.cross_entropy(ms[1](ms[0](s[0])), s[1]), {}


TRAININGS = {
    f.__name__: f
    for f in (
        byol,
        byol_through_data,
        moco_replaces_data,
        byol_replaces_parameters,
        moco_queue,
        vq_vae,
        rnn_carries_its_state,
        plain_tensors_in_place,
        tensors_deep_in_containers,
        modules_that_are_hidden,
        counters_and_lazy_buffers,
        weight_and_spectral_norm,
        old_weight_and_spectral_norm,
        batch_norm,
        samples_normalized_in_place,
        augmented_by_python_and_numpy,
        modes_and_gradients_switched,
        lora_on_a_frozen_base,
        embedding_with_a_largest_norm,
        complex_and_half,
        average_outside_of_the_model,
        tensors_and_objects_outside_of_the_model,
        two_modules,
    )
}

# ---- memory ----

room = {"samples": 99, "where": "end"}  # of a forward pass, its middle, or a backward pass


def _strike(_gradient):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def out_of_room(loss, samples, where="middle"):
    if len(samples[0]) > room["samples"] and room["where"] == where:
        _strike(None)


def in_little_room(loss_fn):
    """A loss_fn that runs out of memory for more samples than room["samples"]."""

    def limited(model, samples):
        loss = loss_fn(model, samples)
        out_of_room(loss, samples, "end")
        if len(samples[0]) > room["samples"] and room["where"] == "backward":
            loss.register_hook(_strike)
        return loss

    return limited
