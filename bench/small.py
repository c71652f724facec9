"""What a Step costs a training that the host bounds, when nothing goes wrong, and what graphs=True
gives back: seven trainings, as a plain loop, in a Step, and on a GPU in one with graphs and in a
loop whose micro-batches replay a graph made by hand, in turn in one process. Prints one JSON object
a training.

    python3 bench/small.py               # times, on a GPU if there is one
    python3 bench/small.py --waits       # where the program reads the loss of each step
    python3 bench/small.py --install     # with rebatch's pool
    python3 bench/small.py --reserved    # memory that PyTorch reserves, with graphs and without
    python3 bench/small.py --calls       # a step beyond plain: calls, microseconds of the host

The counts are those of Python and C functions, and do not depend on the machine. The microseconds
are CPU time of the process on one thread, with few samples of narrow models, so that kernels take
little; `goal_us` is 100 a step, 40 a micro-batch and 0.2 a parameter or buffer. Needs the package
rebatch; docs/benchmarks.md has the results."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import rebatch.torch as rebatch
from pytorch import Gpt

ROUNDS, STEPS, SETTLED = 7, 20, 6
ROUND_MS = 400  # in which fewer steps than STEPS run where they take longer


class Conv(nn.Sequential):
    def __init__(self, inner, outer, size=3, stride=1):
        conv = nn.Conv2d(inner, outer, size, stride, size // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outer))


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.first, self.second = Conv(inner, outer, stride=stride), Conv(outer, outer)
        is_same = inner == outer and stride == 1
        self.short = nn.Identity() if is_same else Conv(inner, outer, 1, stride)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.short(x))


def resnet18():
    widths = (64, 64, 128, 256, 512)
    blocks = [Conv(3, 64), nn.ReLU()]
    for i, (inner, outer) in enumerate(zip(widths, widths[1:])):
        blocks += [Residual(inner, outer, 1 + (i > 0)), Residual(outer, outer, 1)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Bert(nn.Module):
    def __init__(self, width=768, layers=12, words=30522):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.1, "gelu", 1e-12, True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.layers(x)[:, 0])


class UNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        w = width
        self.down = nn.ModuleList([Conv(3, w), Conv(w, 2 * w), Conv(2 * w, 4 * w)])
        self.up = nn.ModuleList([Conv(6 * w, 2 * w), Conv(3 * w, w)])
        self.head = nn.Conv2d(w, 2, 1)

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.down):
            x = F.relu(block(F.max_pool2d(x, 2) if i else x))
            kept.append(x)
        for block, beside in zip(self.up, reversed(kept[:-1])):
            x = F.relu(block(torch.cat((F.interpolate(x, scale_factor=2), beside), 1)))
        return self.head(x)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell = nn.Embedding(1000, 128), nn.LSTM(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens):
        return self.head(self.cell(self.words(tokens))[0]).flatten(0, 1)


def mlp(width=512):
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def images(count, size):
    return torch.randn(count, 3, size, size), torch.randint(0, 2, (count,))


def tokens(count, length, words):
    drawn = torch.randint(0, words, (count, length + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def labelled(count, length, words):
    return torch.randint(0, words, (count, length)), torch.randint(0, 2, (count,))


# name: model, batch of n samples, n, whether in bfloat16
TRAININGS = {
    "mlp": (mlp, lambda n: (torch.randn(n, 512), torch.randint(0, 10, (n,))), 256, False),
    "resnet18": (resnet18, lambda n: images(n, 32), 128, True),
    "gpt": (lambda: Gpt(384, 6, 256, 8192), lambda n: tokens(n, 256, 8192), 32, True),
    "bert": (Bert, lambda n: labelled(n, 128, 30522), 16, True),
    "unet": (
        UNet,
        lambda n: (torch.randn(n, 3, 64, 64), torch.randint(0, 2, (n, 64, 64))),
        32,
        True,
    ),
    "lstm": (Lstm, lambda n: tokens(n, 64, 1000), 64, False),
    "gpt2": (lambda: Gpt(768, 12, 1024, 50304), lambda n: tokens(n, 1024, 50304), 16, True),
}
# With as many calls and less work, for --calls.
NARROW = {
    "mlp": (lambda: mlp(16), lambda n: (torch.randn(n, 16), torch.randint(0, 10, (n,)))),
    "bert": (lambda: Bert(64, words=64), lambda n: labelled(n, 8, 64)),
}


class Graph:
    """A micro-batch whose pass is captured by hand: it adds to gradients of its own."""

    def __init__(self, training):
        self.parameters = list(training.model.parameters())
        self.samples = tuple(t.clone() for t in training.parts[0])
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                training.optimizer.zero_grad()
                self.one_pass(training)
        torch.cuda.current_stream().wait_stream(stream)
        training.optimizer.zero_grad(set_to_none=False)
        self.gradients = [p.grad for p in self.parameters]
        with torch.cuda.graph(self.graph):
            self.one_pass(training)

    def one_pass(self, training):
        self.loss = training.loss(training.model, self.samples) / training.micros
        self.loss.backward()
        self.loss = self.loss.detach()

    def run(self, training):
        torch._foreach_zero_(self.gradients)
        for p, gradient in zip(self.parameters, self.gradients):
            p.grad = gradient
        total = 0
        for part in training.parts:
            for own, tensor in zip(self.samples, part):
                own.copy_(tensor)
            self.graph.replay()
            total = total + self.loss
        training.optimizer.step()
        training.optimizer.zero_grad()
        return total


class Training:
    """One of the seven, as a plain loop and in a Step."""

    def __init__(self, name, micros, device, samples=0):
        make, make_batch, count, is_half = TRAININGS[name]
        make, make_batch = NARROW.get(name, (make, make_batch)) if samples else (make, make_batch)
        torch.manual_seed(0)
        self.micros, self.device, self.is_half = micros, device, is_half and device == "cuda"
        self.batch = tuple(t.to(device) for t in make_batch(samples or count))
        self.model = make().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=device == "cuda")
        micro = len(self.batch[0]) // micros
        self.parts = [tuple(t.split(micro)[i] for t in self.batch) for i in range(micros)]
        self.hand = None
        options = {"micro_start": micro, "growth": False}
        self.step, self.graphs = (
            rebatch.Step(self.model, self.optimizer, self.loss, graphs=graphs, **options)
            for graphs in (False, device == "cuda")
        )

    def loss(self, model, samples):
        x, y = samples
        with torch.autocast("cuda", torch.bfloat16, enabled=self.is_half):
            out = model(x)
            out = out.flatten(0, 1) if out.dim() == 3 else out  # of tokens
            return F.cross_entropy(out, y.flatten() if out.dim() == 2 else y)

    def run_plain(self):
        self.optimizer.zero_grad()
        total = 0
        for part in self.parts:
            loss = self.loss(self.model, part) / self.micros
            loss.backward()
            total = total + loss.detach()
        self.optimizer.step()
        return total

    def run_step(self):
        return self.step(self.batch)

    def run_graphs(self):
        return self.graphs(self.batch)

    def run_hand(self):
        self.hand = self.hand or Graph(self)
        return self.hand.run(self)


def milliseconds(run, waits, device, steps):
    begin = time.perf_counter()
    for _ in range(steps):
        loss = run()
        if waits:
            loss.item()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1000


def times(training, waits):
    ways = {"plain": training.run_plain, "step": training.run_step}
    if training.device == "cuda":
        ways |= {"graphs": training.run_graphs, "hand": training.run_hand}
    steps = {}
    for way, run in ways.items():
        for _ in range(SETTLED):
            run()
        settled = milliseconds(run, waits, training.device, 2)
        steps[way] = min(STEPS, max(2, round(ROUND_MS / settled)))
    found = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            found[way].append(milliseconds(run, waits, training.device, steps[way]))
    medians = {way: statistics.median(each) for way, each in found.items()}
    ratios = {f"{way}/plain": medians[way] / medians["plain"] for way in ways if way != "plain"}
    return {way: round(figure, 3) for way, figure in (medians | ratios).items()}


def reserved(name, micros, way):
    """The highest memory that PyTorch held, in MiB, of a training alone in its process."""
    training = Training(name, micros, "cuda")
    for _ in range(3 * SETTLED):
        getattr(training, "run_" + way)()
    return torch.cuda.max_memory_reserved() >> 20


def reserved_by_processes(name, micros, others):
    """That with graphs and without, each in a process of its own."""
    found = {}
    for way in ("step", "graphs"):
        command = [sys.executable, __file__, name, "--micros", str(micros), "--reserved", way]
        done = subprocess.run([*command, *others], stdout=subprocess.PIPE, text=True, check=True)
        found[way] = int(done.stdout)
    return found | {"ratio": round(found["graphs"] / found["step"], 3)}


def calls_of(run):
    """Calls of Python and C functions in a settled step."""
    seen = 0

    def count(_frame, event, _argument):
        nonlocal seen
        seen += event in ("call", "c_call")

    for _ in range(SETTLED):
        run()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def microseconds_beyond(training):
    """CPU time of the process in a step beyond a plain loop's, where nothing else ran."""
    found = {training.run_plain: [], training.run_step: []}
    for _ in range(ROUNDS * STEPS):
        for run, times in found.items():
            begin = time.process_time_ns()
            run()
            times.append((time.process_time_ns() - begin) / 1e3)
    plain, step = (sorted(times)[len(times) // 10] for times in found.values())
    return round(step - plain)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(TRAININGS), help="trainings")
    parser.add_argument("--micros", type=int, nargs="*", default=[1, 4], help="micro-batches")
    parser.add_argument("--waits", action="store_true", help="each step for the loss of the last")
    parser.add_argument("--calls", action="store_true", help="calls and CPU time, on the CPU")
    parser.add_argument("--install", action="store_true", help="with rebatch's pool")
    ways = ("step", "graphs", "both")
    parser.add_argument("--reserved", nargs="?", const="both", choices=ways, help="memory")
    given = parser.parse_args()
    device = "cpu" if given.calls or not torch.cuda.is_available() else "cuda"
    if given.calls:
        torch.set_num_threads(1)
    if given.install and given.reserved != "both":
        rebatch.install()
    for name in given.names:
        for micros in given.micros:
            if given.reserved == "both":
                found = reserved_by_processes(name, micros, ["--install"] * given.install)
                print(json.dumps({"training": name, "micros": micros, "MiB": found}), flush=True)
                continue
            if given.reserved:
                print(reserved(name, micros, given.reserved), flush=True)
                os._exit(0)  # a thread of autograd that ends later may abort the process
            training = Training(name, micros, device, samples=8 if given.calls else 0)
            found = {"training": name, "micros": micros, "device": device}
            found["tensors"] = sum(1 for p in training.model.state_dict().values())
            if given.calls:
                plain, step = calls_of(training.run_plain), calls_of(training.run_step)
                found |= {"plain_calls": plain, "calls_beyond": step - plain}
                goal = 100 + 40 * micros + 0.2 * found["tensors"]
                found |= {"us_beyond": microseconds_beyond(training), "goal_us": round(goal)}
            else:
                found["waits" if given.waits else "behind"] = times(training, given.waits)
                found["replayed"] = training.graphs.report.replayed
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
