"""How fast a CLIP-like pair of towers trains with a loss over 4,096 samples where 512 fit whole: by
a Step with embed, which finds its size, and by GradCache by hand at each size, of which the best
counts. Both are in one process, under one cap on memory, and take turns. Prints a JSON object for
each way: milliseconds a step (median of the rounds), size, OOMs; then the Step's time ÷ that of
the best by hand, and how far the gradients of both are from those in float64, relative to their
norm.

    python3 bench/contrastive.py [--samples 4096] [--fits 512] [--install]

The cap is what a pass of the samples that fit needs, and a twentieth more. `--small` tries the
program, on a CPU too, where a pass of more samples fails on purpose."""

import argparse
import copy
import functools
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

import rebatch.torch as rebatch


class Tower(nn.Module):
    """A transformer over `length` tokens of an input of so many features: its mean, projected."""

    def __init__(self, width, layers, length, features):
        super().__init__()
        self.inward = nn.Linear(features, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, width // 64 or 1, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.outward = nn.Linear(width, width)

    def forward(self, x):
        return F.normalize(self.outward(self.blocks(self.inward(x) + self.places).mean(1)), dim=1)


class Pair(nn.Module):
    def __init__(self, width, layers, lengths, features):
        super().__init__()
        towers = [Tower(width, layers, length, features) for length in lengths]
        self.images, self.texts = towers
        self.temperature = nn.Parameter(torch.tensor(2.6593))


def embed(model, samples):
    return model.images(samples[0]), model.texts(samples[1])


def loss_fn(model, embeddings, batch):
    images, texts = embeddings
    logits = images @ texts.T * model.temperature.exp()
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def by_hand(model, batch, size, autocast=None):
    """GradCache."""
    device = batch[0].device.type
    parts = list(zip(*(t.split(size) for t in batch)))
    with torch.autocast(device, autocast, enabled=autocast is not None):
        with torch.no_grad():
            rows = [torch.cat(each) for each in zip(*(embed(model, part) for part in parts))]
        rows = [each.requires_grad_() for each in rows]
        loss = loss_fn(model, rows, batch)
    loss.backward()
    gradients = zip(*(each.grad.split(size) for each in rows))
    for part, its in zip(parts, gradients):
        with torch.autocast(device, autocast, enabled=autocast is not None):
            found = embed(model, part)
        torch.autograd.backward(found, its)
    return loss.detach()


def limited(fits):
    """On a CPU, where there is no cap: passes with a graph of so many samples fit."""

    def short(model, samples):
        if torch.is_grad_enabled() and len(samples[0]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return embed(model, samples)

    return short


def timed(run, rounds, device):
    times = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def cap(model, batch, fits, autocast):
    """The memory of one pass of the samples that fit, and a twentieth more."""
    torch.cuda.reset_peak_memory_stats()
    part = tuple(t[:fits] for t in batch)
    for _ in range(2):
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            loss = loss_fn(model, embed(model, part), part)
        loss.backward()
    most = int(1.05 * torch.cuda.max_memory_reserved())
    model.zero_grad()
    del loss
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(most / torch.cuda.mem_get_info()[1])
    return most


def distances(model, batch, size, function):
    """Of the gradients of both ways from those in float64, of a model in float32."""
    exact = copy.deepcopy(model).double()
    by_hand(exact, tuple(t.double() for t in batch), max(1, size // 4))
    expected = [p.grad for p in exact.parameters()]
    whole = sum(float(g.square().sum()) for g in expected) ** 0.5
    found = {}
    for way in ("by hand", "step"):
        model.zero_grad()
        if way == "step":
            rebatch.Backward(model, loss_fn, embed=function, log_level="quiet")(batch)
        else:
            by_hand(model, batch, size)
        pairs = zip(model.parameters(), expected)
        squares = sum(float((p.grad.double() - g).square().sum()) for p, g in pairs)
        found[way] = squares**0.5 / whole
    model.zero_grad()
    return found


def best_by_hand(model, optimizer, batch, given, autocast, device):
    """(milliseconds, size) of each size that runs."""

    def train(size):
        optimizer.zero_grad()
        by_hand(model, batch, size, autocast)
        optimizer.step()

    found, size = [], given.fits // 4 or 1
    while size <= given.samples and (device == "cuda" or size <= given.fits):
        try:
            train(size)
            found.append((timed(functools.partial(train, size), 2, device), size))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        size += max(1, given.fits // 8)
    return found, train


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--fits", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--float32", action="store_true", help="without autocast to bfloat16")
    parser.add_argument("--install", action="store_true", help="rebatch's allocator")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (768, 12, (50, 77), 768)
    if given.small:
        given.samples, given.fits, shape = 48, 12, (32, 1, (5, 7), 16)
    if given.install:
        rebatch.install()
    torch.manual_seed(0)
    model = Pair(*shape).to(device)
    batch = tuple(torch.randn(given.samples, n, shape[3], device=device) for n in shape[2])
    autocast = None if given.float32 or given.small else torch.bfloat16
    function = embed if device == "cuda" else limited(given.fits)
    if device == "cuda":
        most = cap(model, batch, given.fits, autocast)
        print(json.dumps({"cap_gib": most / 2**30, "card": torch.cuda.get_device_name()}))
    print(json.dumps({"distance": distances(model, batch, given.fits // 4 or 1, function)}))

    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=device == "cuda")
    sizes, train = best_by_hand(model, optimizer, batch, given, autocast, device)
    for milliseconds, size in sizes:
        print(json.dumps({"way": "by hand", "size": size, "ms": milliseconds}))
    best = min(sizes)[1]
    step = rebatch.Step(model, optimizer, loss_fn, embed=function, autocast=autocast)
    ooms = 0
    for _ in range(20):
        step(batch)
        ooms += step.report.ooms
    ratios = []
    for _ in range(given.rounds):
        ours = timed(lambda: step(batch), 1, device)
        ratios.append((ours / timed(lambda: train(best), 1, device), ours))
    milliseconds = statistics.median(ours for _, ours in ratios)
    print(json.dumps({"way": "step", "size": step.report.micro, "ms": milliseconds, "ooms": ooms}))
    print(json.dumps({"step_to_by_hand": statistics.median(ratio for ratio, _ in ratios)}))


if __name__ == "__main__":
    main()
