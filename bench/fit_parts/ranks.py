"""What `rebatch fit --ranks` answers, beside ranks that exchange what they compute.

    rebatch fit --json --gpu h100 --memory 4GiB --ranks 2 -- python3 bench/fit.py ranks gpt2 ddp
    torchrun --nproc-per-node 2 bench/fit.py ranks gpt2 ddp --room 3487563776 --sizes 10,11

Trains a model in a Step, with DistributedDataParallel ("ddp") or fully_shard()
("fsdp"). With --sizes each of them is tried for three updates, while the allocator may have --room
bytes: room_bytes of the answer. Prints an object for each size. Ranks may share a GPU, with
RANKS_BACKEND=cpu:gloo,cuda:gloo."""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rebatch.torch as rebatch
from fit_parts.models import MODELS
from fit_parts.truth import STEPS, forget

LARGEST = 64  # samples of a batch


def wrapped(model, kind, device):
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index])
    for blocks in (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        for block in blocks:
            fully_shard(block)
    return fully_shard(model)


class Training:
    def __init__(self, name, kind):
        count = torch.cuda.device_count()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % count)
        torch.cuda.set_device(self.device)
        dist.init_process_group(os.environ.get("RANKS_BACKEND", "cpu:gloo,cuda:nccl"))
        torch.manual_seed(0)
        self.made = MODELS[name](str(self.device))
        self.model = wrapped(self.made.model, kind, self.device)
        group = self.made.optimizer.param_groups[0]
        kept = {name: group[name] for name in ("lr", "fused") if group.get(name) is not None}
        self.optimizer = type(self.made.optimizer)(self.model.parameters(), **kept)

    def step(self, **options):
        # Where whole parameters do not fit, a window is to fail.
        options = {"window": True, "log_level": "quiet", **options}
        return rebatch.Step(self.model, self.optimizer, self.made.loss, **options)

    def tried(self, samples):
        """Whether three updates run on all ranks without an OOM, and their peaks."""
        forget(self.made._replace(optimizer=self.optimizer))
        kept = {"on_oom": "stop", "growth": False, "admission": False}
        step = self.step(micro_start=samples, micro_largest=samples, **kept)
        batch, fits = self.made.batch(LARGEST), True
        try:
            for _ in range(STEPS):
                step(batch)
                fits = fits and not step.report.ooms
        except (rebatch.Exhausted, rebatch.PeerFailed):
            fits = False
        return {
            "samples": samples,
            "fits": fits,
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
        }


def ranks(arguments):
    parser = argparse.ArgumentParser(
        prog="fit.py ranks", description="fit --ranks beside ranks that train"
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("kind", choices=("ddp", "fsdp"))
    parser.add_argument("--room", type=int, default=0, help="bytes of the allocator; 0: all")
    parser.add_argument("--sizes", default="", help="of micro-batches")
    given = parser.parse_args(arguments)
    training = Training(given.model, given.kind)
    if not given.sizes:
        training.step()(training.made.batch(LARGEST))
        return
    if given.room:
        total = torch.cuda.get_device_properties(training.device).total_memory
        torch.cuda.set_per_process_memory_fraction(given.room / total)
    for size in map(int, given.sizes.split(",")):
        found = training.tried(size)
        if not dist.get_rank():
            print(json.dumps({"model": given.model, "kind": given.kind, **found}), flush=True)
    dist.destroy_process_group()
