"""How fast GPT-2 124M trains on several GPUs (bf16, T = 1024, fused AdamW): on one, and on all with
DistributedDataParallel or fully_shard(), each alone and with a Step. All ways are in one process a
GPU and take turns. Prints one JSON object for each way: thousand tokens a second, median of
the rounds, milliseconds a step and those until its call returned, and the most memory that the way
had; and then ratios of ways in the same round.

"fsdp" reduces gradients in a batch's last micro-batch, and holds whole ones until then; "fsdp-each"
reduces them in each micro-batch, as a Step in lockstep does, and holds a rank's part of them.

    torchrun --nproc-per-node 2 bench/ranks.py [--samples 64] [--micro 16] [WAY...]

`samples` are those of each GPU; `--model` has other sizes. Needs the package rebatch. `--small`,
with any device and backend, tries the program. docs/benchmarks.md has results."""

import argparse
import contextlib
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rebatch.torch as rebatch
from pytorch import GIB, Gpt

RATIOS = (
    ("ddp+Step", "ddp"),
    ("ddp", "one"),
    ("ddp+Step", "one"),
    ("fsdp+Step", "fsdp"),
    ("fsdp-lockstep+Step", "fsdp"),
    ("fsdp-lockstep+Step", "fsdp-each"),
)
WAYS = ("one", "ddp", "ddp+Step", "fsdp", "fsdp+Step", "fsdp-each", "fsdp-lockstep+Step")


class Setting:
    """What all ways share."""

    def __init__(self, given):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if is_gpu else 0)
        if is_gpu:
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        self.model = (64, 2, 32, 256) if given.small else tuple(given.model)
        self.is_half = not given.float32
        self.samples, self.micro = given.samples, given.micro
        torch.manual_seed(1 + self.rank)
        tokens = torch.randint(0, self.model[3], (self.samples, self.model[2] + 1))
        tokens = tokens.to(self.device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss_fn(self, model, samples):
        tokens, targets = samples
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_half):
            logits = model(tokens)
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def allocated(self):
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def peak(self):
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def reset_peak(self):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()


def shard(model, device):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class Way:
    """A training. `held` are the bytes that it has between two turns."""

    def __init__(self, name, setting):
        before = setting.allocated()
        self.name, self.setting = name, setting
        torch.manual_seed(0)
        self.model = Gpt(*setting.model).to(setting.device)
        if name.startswith("ddp"):
            self.model = DistributedDataParallel(self.model)
        elif name.startswith("fsdp"):
            self.model = shard(self.model, setting.device)
        is_fused = setting.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=is_fused)
        self.run = self._accumulate
        if name.endswith("Step"):
            self.run = rebatch.Step(
                self.model,
                self.optimizer,
                setting.loss_fn,
                micro_start=setting.micro,
                micro_largest=setting.micro,
                growth=False,
                window=False if "lockstep" in name else None,
            )
        for _ in range(3):  # a Step compares its loss at two cuts in the first ones
            self.run(setting.batch)
        setting.wait()
        self.held = setting.allocated() - before

    def _accumulate(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        micro = self.setting.micro
        for first in range(0, len(batch[0]), micro):
            part = tuple(t[first : first + micro] for t in batch)
            with self._synced(is_last=first + micro >= len(batch[0])):
                loss = self.setting.loss_fn(self.model, part)
                (loss * (len(part[0]) / len(batch[0]))).backward()
        self.optimizer.step()

    def _synced(self, is_last):
        if self.name == "ddp" and not is_last:
            return self.model.no_sync()
        if self.name.startswith("fsdp"):
            is_reduced = is_last or self.name == "fsdp-each"
            self.model.set_is_last_backward(is_reduced)
            self.model.set_requires_gradient_sync(is_reduced)
        return contextlib.nullcontext()

    def turn(self, steps):
        """(seconds a step, seconds of them until its call returned, most bytes that this way had).
        The host runs ahead of the GPU where the second is clearly below the first."""
        setting = self.setting
        others = setting.allocated() - self.held
        setting.reset_peak()
        dist.barrier()
        setting.wait()
        began = time.perf_counter()
        if self.name != "one" or setting.rank == 0:
            for _ in range(steps):
                self.run(setting.batch)
        returned = time.perf_counter()
        setting.wait()
        ended = time.perf_counter()
        return (ended - began) / steps, (returned - began) / steps, setting.peak() - others


def measure(ways, rounds, steps):
    seconds, hosts, peaks = {way.name: [] for way in ways}, {way.name: [] for way in ways}, {}
    for number in range(rounds):
        for way in ways[:: -1 if number % 2 else 1]:
            taken, host, peaks[way.name] = way.turn(steps)
            seconds[way.name].append(taken)
            hosts[way.name].append(host)
    return seconds, hosts, peaks


def report(setting, seconds, hosts, peaks):
    tokens = setting.batch[0].numel()
    rates = {
        name: [tokens * (1 if name == "one" else setting.size) / s for s in its]
        for name, its in seconds.items()
    }
    for name, its in rates.items():
        found = {
            "way": name,
            "ktokens_per_s": round(statistics.median(its) / 1e3, 1),
            "step_ms": round(1e3 * statistics.median(seconds[name]), 2),
            "host_ms": round(1e3 * statistics.median(hosts[name]), 2),
            "peak_gib": round(peaks[name] / GIB, 2),
        }
        print(json.dumps(found), flush=True)
    for above, below in RATIOS:
        if above in rates and below in rates:
            ratio = statistics.median(a / b for a, b in zip(rates[above], rates[below]))
            print(json.dumps({"ratio": f"{above} / {below}", "median": round(ratio, 4)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", choices=(*WAYS, []), metavar="WAY")
    for name, value in (("samples", 64), ("micro", 16), ("rounds", 7), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes, names = (768, 12, 1024, 50304), ("WIDTH", "LAYERS", "LENGTH", "WORDS")
    parser.add_argument("--model", type=int, nargs=4, default=sizes, metavar=names)
    parser.add_argument("--float32", action="store_true", help="without bf16")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    given = parser.parse_args()
    dist.init_process_group()
    setting = Setting(given)
    names = given.ways or WAYS
    if setting.rank == 0:
        print(json.dumps({"ranks": setting.size, "device": str(setting.device), **vars(given)}))
    ways = []
    for name in names:
        try:
            ways.append(Way(name, setting))
        except (ValueError, AttributeError) as error:  # what this PyTorch cannot do; on all ranks
            if setting.rank == 0:
                print(json.dumps({"way": name, "error": str(error)}), flush=True)
    measured = measure(ways, given.rounds, given.steps)
    if setting.rank == 0:
        report(setting, *measured)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
