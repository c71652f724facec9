"""What a model of fully_shard() needs: 0.9 billion parameters, fp32 with bf16 passes, 16 samples of
1,024 tokens a GPU, AdamW. Prints a JSON object for each rank and way: GiB in use between two steps,
the peak, milliseconds a step, and the way in which the last step ran.

"plain" is PyTorch's own loop, which reduces gradients in each micro-batch; "step" is a Step;
"window" and "lockstep" are a Step that stays in one of the two. Several ways take turns in one
training, since the speed of processes differs by more than that of the ways; "speed" is then the
median of the first way's time over this way's.

    torchrun --nproc-per-node 2 bench/shards.py WAY... [--micro 1] [--cap GIB] [--steps 3]

`cap` bounds the allocator of each rank but the first, which has 6 GiB more. Needs the package
rebatch. `--small`, with any device and backend, tries the program."""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist

import rebatch.torch as rebatch
from pytorch import GIB, Gpt
from ranks import shard

WINDOWS = {"step": None, "window": True, "lockstep": False}


def loss_fn(model, samples):
    tokens, targets = samples
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def plain_step(model, optimizer, batch, micro):
    optimizer.zero_grad()
    parts = len(batch[0]) // micro
    for part in zip(*(t.split(micro) for t in batch)):
        (loss_fn(model, part) / parts).backward()
    optimizer.step()


def step_of(way, model, optimizer, micro):
    """What runs one step of a batch, and the Step that does, if one does."""
    if way == "plain":
        return (lambda batch: plain_step(model, optimizer, batch, micro)), None
    options = {"micro_start": micro, "micro_largest": micro, "window": WINDOWS[way]}
    step = rebatch.Step(model, optimizer, loss_fn, group_timeout=60.0, **options)
    return step, step


def timed(run, batch, is_gpu):
    """Milliseconds and the peak in GiB."""
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    began = time.perf_counter()
    run(batch)
    if is_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / GIB if is_gpu else 0
    return 1000 * (time.perf_counter() - began), peak


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", choices=("plain", *WINDOWS))
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cap", type=float, default=0)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    sizes = (64, 2, 32, 256) if given.small else (2048, 16, 1024, 50304)
    torch.manual_seed(0)
    model = shard(Gpt(*sizes).to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_gpu)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, sizes[3], (given.samples, sizes[2] + 1), generator=generator)
    batch = tuple(t.contiguous().to(device) for t in (tokens[:, :-1], tokens[:, 1:]))
    if is_gpu:
        torch.cuda.empty_cache()
    if given.cap and is_gpu:
        room = given.cap + (6 if dist.get_rank() == 0 else 0)
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(room * GIB / total)
    ways = {way: step_of(way, model, optimizer, given.micro) for way in given.ways}
    ran = {way: [] for way in ways}
    for _ in range(given.steps):
        for way, (run, _) in ways.items():
            ran[way].append(timed(run, batch, is_gpu))
    for way, (_, step) in ways.items():
        times = [ms for ms, _ in ran[way]]
        first = [ms for ms, _ in ran[given.ways[0]]]
        found = {"way": way, "cap": given.cap, "micro": given.micro, "ms": times}
        found["median_ms"] = statistics.median(times[1:])
        found["speed"] = statistics.median(a / b for a, b in zip(first[1:], times[1:]))
        found["live"] = torch.cuda.memory_allocated() / GIB if is_gpu else 0
        found["peak"] = max(peak for _, peak in ran[way])
        if step:
            found["ran"] = "lockstep" if step._training.ranks.lockstep else "window"
            found["micros"] = step.report.ranks
        print(json.dumps({"rank": dist.get_rank(), **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
