"""What `rebatch fit --ranks` answers, beside two ranks on GPUs.

    rebatch fit --gpu h100 --memory 4GiB,8GiB --ranks 2 -- python3 bench/fit_ranks.py gpt2 ddp
    torchrun --nproc-per-node 2 bench/fit_ranks.py gpt2 ddp --gib 4 --sizes 10,11,12

Trains a model of fit_models.py in a Step, with DistributedDataParallel ("ddp") or fully_shard()
("fsdp"). With --sizes each of them is tried for three updates, in ascending order; the allocator
may have --gib less what the process holds beside it and NCCL. Prints an object for each size:
`outside` is all that the process holds beside the allocator, of which `nccl` is that of NCCL."""

import argparse
import contextlib
import gc
import json
import os

import torch
import torch.distributed as dist
from fit_models import MODELS
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rebatch.torch as rebatch

GIB = 1 << 30
STEPS = 3
LARGEST = 64  # samples of the batch that `rebatch fit` sees


def wrapped(model, kind, device):
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index])
    for blocks in (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        for block in blocks:
            fully_shard(block)
    return fully_shard(model)


class Training:
    def __init__(self, given):
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        self.free_before = torch.cuda.mem_get_info()[0]
        torch.cuda.init()
        torch.zeros(1, device=self.device)
        without = self.outside()
        dist.init_process_group(os.environ.get("RANKS_BACKEND", "cpu:gloo,cuda:nccl"))
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.nccl = self.outside() - without
        torch.manual_seed(0)
        self.made = MODELS[given.model](str(self.device))
        model = wrapped(self.made.model, given.kind, self.device)
        group = self.made.optimizer.param_groups[0]
        kept = {name: group[name] for name in ("lr", "fused") if group.get(name) is not None}
        self.optimizer = type(self.made.optimizer)(model.parameters(), **kept)
        self.model = model

    def outside(self):
        torch.cuda.synchronize()
        return self.free_before - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()

    def step(self, **options):
        return rebatch.Step(
            self.model, self.optimizer, self.made.loss, log_level="quiet", **options
        )

    def limit(self, memory):
        total = torch.cuda.get_device_properties(self.device).total_memory
        allowed = max(memory - self.outside() + self.nccl, 0) if memory else total
        torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0))

    def tried(self, samples, memory):
        """Whether three updates ran on all ranks."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.limit(memory)
        step = self.step(micro_start=samples, on_oom="stop", growth=False, admission=False)
        fits = True
        with contextlib.suppress(rebatch.Exhausted, rebatch.PeerFailed):
            fits = False
            batch = self.made.batch(samples)
            for _ in range(STEPS):
                step(batch)
            fits = True
        return {
            "samples": samples,
            "fits": fits,
            "reserved": torch.cuda.max_memory_reserved(),
            "allocated": torch.cuda.max_memory_allocated(),
            "outside": self.outside(),
            "nccl": self.nccl,
        }


def main():
    parser = argparse.ArgumentParser(description="fit --ranks beside ranks on GPUs")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("kind", choices=("ddp", "fsdp"))
    parser.add_argument("--gib", type=float, default=0, help="memory of each rank")
    parser.add_argument("--sizes", default="", help="of micro-batches, in ascending order")
    given = parser.parse_args()
    training = Training(given)
    if not given.sizes:
        training.step()(training.made.batch(LARGEST))
        return
    training.tried(1, 0)  # loads kernels
    for size in map(int, given.sizes.split(",")):
        found = training.tried(size, int(given.gib * GIB))
        if not dist.get_rank():
            print(json.dumps({"model": given.model, "kind": given.kind, **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
