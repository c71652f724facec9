"""GPT-2 124M in PyTorch: rebatch beside the native allocator, expandable segments, and a loop that
halves and begins the batch again, as Composer's does. Prints one JSON object a scenario and way.
The libraries' kernels are loaded before, on the native allocator, which then gives all back.

    python3 bench/pytorch.py                      # all, each in a process of its own
    python3 bench/pytorch.py speed install+Step   # one

Needs the package rebatch and a GPU with 40 GiB. docs/benchmarks.md has the results."""

import argparse
import ctypes
import gc
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

WAYS = ("native", "expandable", "install", "native+Step", "install+Step", "halving")
SCENARIOS = {
    "speed": WAYS[:5],
    "lengths": ("native", "expandable", "install", "native+Step", "install+Step"),
    "oom": ("native+Step", "install+Step", "halving"),
    "taken": ("native+Step", "install+Step", "halving"),
    "learn": ("native+Step", "install+Step"),
    "limits": ("install+Step",),
}
EXPANDABLE = "expandable_segments:True"
GIB = 1 << 30


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        parts = self.attention(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, width, layers, context, words):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def features(self, tokens):
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens):
        return self.head(self.features(tokens))


def loss_fn(model, samples):
    tokens, targets = samples
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens_of(size, samples, length):
    tokens = torch.randint(0, size["model"][3], (samples, length + 1), device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load_kernels(size, cuts, lengths):
    """Runs each shape once, in micro-batches of these sizes, and a rest of a batch."""
    model = Gpt(*size["model"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for samples in {size["batch"] % cut for cut in cuts} | set(cuts):
        for length in lengths if samples else []:
            loss_fn(model, tokens_of(size, samples, length)).backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # which keep the segment that they lie in
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


class Training:
    """A model that trains in one of the ways."""

    def __init__(self, way, size, limit=0, micro=0, cuts=(16,), lengths=(), **options):
        self.way, self.size, self.micro = way, size, micro or cuts[0]
        load_kernels(size, cuts, lengths or [size["model"][2]])
        if way.startswith("install"):
            import rebatch.torch as rebatch

            rebatch.install(limit=limit or None)
        elif limit:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(limit / total)
        torch.manual_seed(0)
        self.model = Gpt(*size["model"]).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if way.endswith("Step"):
            import rebatch.torch as rebatch

            if not options.get("learn"):
                options = {"micro_start": self.micro, "growth": False, **options}
            self.step = rebatch.Step(self.model, self.optimizer, loss_fn, **options)
        self.redone = self.ooms = 0

    def batch(self, length=0):
        return tokens_of(self.size, self.size["batch"], length or self.size["model"][2])

    def run(self, batch, updates=1):
        """Seconds of an update; of several, the GPU may be behind from one to the next."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(updates):
            self._update(batch)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / updates

    def begin_with(self, micro):
        """The next update begins with micro-batches of so many samples."""
        self.micro = micro
        if self.way.endswith("Step"):
            self.step.load_state_dict({**self.step.state_dict(), "micro": micro})

    def _update(self, batch):
        if self.way.endswith("Step"):
            self.step(batch)
            self.redone = self.step.report.redone_samples
            self.ooms = self.step.report.ooms
            self.micro = self.step.report.micro
        elif self.way == "halving":
            self._halve(batch)
        else:
            self._accumulate(batch)
            self.optimizer.step()

    def _accumulate(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        samples = len(batch[0])
        for first in range(0, samples, self.micro):
            part = tuple(t[first : first + self.micro] for t in batch)
            (loss_fn(self.model, part) * (len(part[0]) / samples)).backward()

    def _halve(self, batch):
        """On an OOM: half the micro-batch, and the whole batch again."""
        self.redone = self.ooms = 0
        while True:
            try:
                self._accumulate(batch)
                break
            except torch.OutOfMemoryError:
                self.redone += len(batch[0])
                self.ooms += 1
            gc.collect()
            torch.cuda.empty_cache()
            self.micro //= 2
        self.optimizer.step()


def memory():
    """Peaks since the last call: allocated and reserved, in GiB."""
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return {"allocated": round(peak / GIB, 2), "reserved": round(held / GIB, 2)}


def median_ms(seconds):
    return round(1e3 * statistics.median(seconds), 1)


def each_ms(seconds):
    return [round(1e3 * s) for s in seconds]


WARM = 3  # steps
COMPARED = 10  # steps within which a Step compares two cuts


def speed(way, size):
    training = Training(way, size)
    batch = training.batch()
    seconds = [training.run(batch) for _ in range(COMPARED)]
    first = memory()
    clean = [training.run(batch) for _ in range(size["steps"])]
    memory()
    clean += [training.run(batch) for _ in range(size["steps"])]
    behind = [training.run(batch, size["steps"]) for _ in range(3)]
    return {
        "tokens_per_s": round(batch[0].numel() / statistics.median(clean)),
        "tokens_per_s_behind": round(batch[0].numel() / statistics.median(behind)),
        "step_ms": median_ms(clean),
        "first_ms": each_ms(seconds),
        "first_reserved": first["reserved"],
        **memory(),
    }


def lengths(way, size):
    """Every batch has another length."""
    draw, longest = random.Random(1), size["model"][2]
    every = [draw.randint(longest // 16, longest) for _ in range(size["steps"] * 4)]
    training = Training(way, size, lengths=every)
    spent, measured = [], []
    for half in every[: len(every) // 2], every[len(every) // 2 :]:
        tokens, seconds = 0, 0.0
        for length in half:
            batch = training.batch(length)
            seconds += training.run(batch)
            tokens += batch[0].numel()
        spent.append(round(tokens / seconds))
        measured.append(memory())
    return {
        "tokens_per_s": spent[1],
        "first_tokens_per_s": spent[0],
        "first_reserved": measured[0]["reserved"],
        **measured[1],
    }


def oom(way, size):
    """The first step is cut too large for the cap; and a later one, with the memory of the steps
    before it."""
    begun = size["begun"]
    training = Training(way, size, limit=size["cap"], cuts=(begun, begun // 2, begun // 4))
    batch = training.batch()
    first = training.run(batch)
    lost = training.step.report.lost_ms if way.endswith("Step") else None
    redone, ooms = training.redone, training.ooms
    after = [training.run(batch) for _ in range(COMPARED + size["steps"])]
    clean, micro = after[COMPARED:], training.micro
    training.begin_with(begun)
    warm = training.run(batch)
    return {
        "warm_ms": round(1e3 * warm, 1),
        "warm_lost_ms": round(training.step.report.lost_ms, 1) if way.endswith("Step") else None,
        "first_ms": round(1e3 * first, 1),
        "next_ms": each_ms(after[:COMPARED]),
        "clean_ms": median_ms(clean),
        "ratio": round(first / statistics.median(clean), 2),
        "lost_ms": lost and round(lost, 1),
        "redone": redone,
        "ooms": ooms,
        "micro": micro,
    }


def taken(way, size):
    """Somebody else takes memory in mid-run; this process may keep so much."""
    training = Training(way, size, cuts=(32, 16, 8, 4))
    batch = training.batch()
    before = [training.run(batch) for _ in range(COMPARED + size["steps"] // 2)]
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    left = size["left"] - torch.cuda.memory_reserved()
    take(cuda_of_process(), torch.cuda.mem_get_info()[0] - left)
    struck = training.run(batch)
    redone, ooms = training.redone, training.ooms
    after = [training.run(batch) for _ in range(size["steps"] // 2)]
    return {
        "before_ms": median_ms(before[COMPARED:]),
        "struck_ms": round(1e3 * struck, 1),
        "next_ms": each_ms(after[:2]),
        "after_ms": median_ms(after),
        "ratio": round(struck / statistics.median(after), 2),
        "redone": redone,
        "ooms": ooms,
        "micro": training.micro,
        "held_gib": round(held / GIB, 1),
    }


def cuda_of_process():
    if hasattr(ctypes.CDLL(None), "cudaMalloc"):
        return ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libcudart" in line)
    return ctypes.CDLL(path)


PIECE = 64 << 20


def take(cuda, wanted):
    """Takes memory outside of every allocator, in pieces. Another process would leave no error in
    this one when there is no more."""
    pointer = ctypes.c_void_p()
    for _ in range(wanted // PIECE):
        if cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(PIECE)):
            cuda.cudaGetLastError()
            break


def learn(way, size):
    """The size is learned under a cap."""
    every = range(1, size["batch"] + 1)
    training = Training(way, size, limit=size["cap"], cuts=every, learn=True)
    batch = training.batch()
    ooms, seconds = 0, []
    for _ in range(size["steps"]):
        seconds.append(training.run(batch))
        ooms += training.ooms
    clean = statistics.median(seconds[WARM:])
    return {
        "micro": training.micro,
        "ooms": ooms,
        "first_ms": each_ms(seconds[:WARM]),
        "clean_ms": round(1e3 * clean, 1),
        "ratio": round(seconds[0] / clean, 2),
    }


ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pytorch.svg"


def limits(way, size):
    """The limit falls, and comes back: draws docs/pytorch.svg."""
    import rebatch.torch as rebatch

    sys.path.append(str(ROOT / "examples" / "python"))
    import plot

    options = dict(growth=True, grow_after=6)
    training = Training(way, size, limit=32 * GIB, cuts=(size["batch"],), **options)
    batch, points = training.batch(), []
    for i in range(40):
        limit = (12 if 10 <= i < 22 else 32) * GIB
        if i in (10, 22):
            rebatch.install(limit=limit)
        training.run(batch)
        report = training.step.report
        held = dict(peak_bytes=report.peak_bytes, reserved_bytes=report.reserved_bytes)
        if points:
            points[-1] = points[-1]._replace(next_size=report.micro)
        points.append(
            plot.Point(
                i,
                report.micro,
                report.micro,
                size["batch"],
                ooms=report.ooms,
                limit_bytes=limit,
                **held,
            )
        )
    if size["picture"]:
        plot.write(points, size["picture"])
    return {"micro": [point.size for point in points]}


def use_expandable_segments():
    """PyTorch reads this when it is loaded, so the program begins again where it is not set."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if EXPANDABLE not in settings:
        settings = f"{settings},{EXPANDABLE}".lstrip(",")
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", nargs="?", choices=SCENARIOS)
    parser.add_argument("way", nargs="?", choices=WAYS)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--batch", type=int, default=32, help="samples a step")
    parser.add_argument("--begun", type=int, help="micro-batch with which `oom` begins: the batch")
    parser.add_argument("--left", type=int, default=12, help="GiB that are left in `taken`")
    arguments = parser.parse_args()
    size = dict(model=(768, 12, 1024, 50304), batch=arguments.batch, steps=12, picture=PICTURE)
    size.update(cap=20 * GIB, left=arguments.left * GIB, begun=arguments.begun or arguments.batch)
    if arguments.small:
        size = dict(model=(128, 2, 64, 512), batch=32, steps=6, picture=None)
        size.update(cap=GIB // 2, left=GIB // 4, begun=32)
    if arguments.way:
        if arguments.way == "expandable":
            use_expandable_segments()
        result = globals()[arguments.scenario](arguments.way, size)
        print(json.dumps({"scenario": arguments.scenario, "way": arguments.way, **result}))
        return 0
    failed = 0
    for scenario in [arguments.scenario] if arguments.scenario else SCENARIOS:
        for way in SCENARIOS[scenario]:
            command = [sys.executable, __file__, scenario, way]
            command += ["--batch", str(arguments.batch), "--left", str(arguments.left)]
            command += ["--begun", str(size["begun"])]
            command += ["--small"] if arguments.small else []
            failed += subprocess.run(command).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
