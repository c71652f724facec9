"""What a Step costs where nothing fails, on several ranks: a step of DistributedDataParallel with
and without it, in turn. Prints one JSON object: milliseconds, medians of several rounds, and their
ratio.

    torchrun --nproc-per-node 2 bench/ddp.py [--width 256] [--layers 4] [--samples 16]

Needs the package rebatch. Trains on the GPU of each rank with NCCL, or on the CPU with gloo."""

import argparse
import copy
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rebatch.torch as rebatch
from pytorch import Gpt

ROUNDS, CALLS, LENGTH, WORDS = 9, 6, 64, 1024


def loss_fn(model, samples):
    tokens, targets = samples
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def plain_step(model, optimizer):
    def step(batch):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    return step


def milliseconds(step, batch, device):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CALLS):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1000 / CALLS


def main():
    parser = argparse.ArgumentParser()
    for name, value in (("width", 256), ("layers", 4), ("samples", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    dist.init_process_group()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = Gpt(given.width, given.layers, LENGTH, WORDS).to(device)
    models = [DistributedDataParallel(m) for m in (model, copy.deepcopy(model))]
    optimizers = [torch.optim.AdamW(m.parameters()) for m in models]
    tokens = torch.randint(0, WORDS, (given.samples, LENGTH), device=device)
    batch = tokens, tokens.roll(-1, 1)
    steps = {
        "ddp_ms": plain_step(models[0], optimizers[0]),
        "step_ms": rebatch.Step(models[1], optimizers[1], loss_fn),
    }
    times = {name: [] for name in steps}
    for number in range(ROUNDS + 1):
        for name, step in steps.items():
            taken = milliseconds(step, batch, device)
            if number:  # the first round makes buffers and the optimizer's state
                times[name].append(taken)
    ratio = statistics.median(b / a for a, b in zip(times["ddp_ms"], times["step_ms"]))
    if dist.get_rank() == 0:
        found = {name: round(statistics.median(values), 3) for name, values in times.items()}
        print(
            json.dumps(
                {
                    "ranks": dist.get_world_size(),
                    "device": device.type,
                    **vars(given),
                    **found,
                    "ratio": round(ratio, 4),
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
