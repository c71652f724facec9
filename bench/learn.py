"""The size that `learn` finds, beside the largest that fits, under caps: GPT of bench/pytorch.py on
PyTorch's own allocator or rebatch's. Prints one JSON object a cap.

    python3 bench/learn.py --caps 10 14 20 30 50             # GPT-2 124M, GiB
    python3 bench/learn.py --model 256 4 256 8192 --batch 64 --caps 0.4 0.9   # a small one

What fits is the largest size at which steps of a new training meet no OOM, with the cache as it
came or emptied after the first step. It runs on a GPU, and on the stand-in for CUDA, where no
kernel runs and memory is all that counts."""

import argparse
import gc
import json
import os
import pathlib
import subprocess
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import pytorch  # noqa: E402


def let_go():
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def retries():
    return torch.cuda.memory_stats().get("num_alloc_retries", 0)


def learned(way, size):
    """Sizes and OOMs of each step; at the end the cached memory that steps gave back."""
    training = pytorch.Training(way, size, size["cap"], cuts=(1,), learn=True, log_level="quiet")
    batch, micros, ooms = training.batch(), [], []
    for _ in range(size["steps"]):
        before = retries()
        training.run(batch)
        micros.append(training.micro)
        ooms.append(training.ooms)
    return {"found": micros[-1], "ooms": ooms, "micros": micros, "retries": retries() - before}


def holds_as(way, size, micro, is_emptied):
    let_go()
    try:
        training = pytorch.Training(way, size, size["cap"], micro, cuts=(1,), log_level="quiet")
        batch = training.batch()
        for i in range(6):
            if i == 1 and is_emptied:
                torch.cuda.empty_cache()
            training.run(batch)
            if training.ooms or training.micro != micro:
                return False
        return True
    except torch.OutOfMemoryError:
        return False


def holds(way, size, micro):
    return holds_as(way, size, micro, False) or holds_as(way, size, micro, True)


def largest(way, size):
    """By bisection, and then a few above: what fits need not end at once."""
    fits, most = 0, size["batch"]
    while fits < most:
        middle = (fits + most + 1) // 2
        if holds(way, size, middle):
            fits = middle
        else:
            most = middle - 1
    above = range(fits + 1, min(fits + 3, size["batch"]) + 1)
    return max([fits, *(micro for micro in above if holds(way, size, micro))])


def measure(arguments):
    size = dict(model=tuple(arguments.model), batch=arguments.batch, steps=arguments.steps)
    size["cap"] = int(arguments.caps[0] * pytorch.GIB)
    result = {"way": arguments.way, "cap_gib": arguments.caps[0], **learned(arguments.way, size)}
    let_go()
    true = largest(arguments.way, size)
    print(json.dumps({**result, "true": true, "ratio": round(result["found"] / max(true, 1), 2)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=("native+Step", "install+Step"), default="native+Step")
    parser.add_argument("--model", type=int, nargs=4, default=(768, 12, 1024, 50304))
    parser.add_argument("--batch", type=int, default=64, help="samples a step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--caps", type=float, nargs="+", required=True, help="GiB")
    arguments = parser.parse_args()
    if len(arguments.caps) == 1:
        measure(arguments)
        return 0
    at = sys.argv.index("--caps")
    others = sys.argv[1:at] + sys.argv[at + 1 + len(arguments.caps) :]
    failed = 0
    for cap in arguments.caps:  # each in a process of its own
        command = [sys.executable, __file__, *others, "--caps", str(cap)]
        failed += subprocess.run(command, env=os.environ).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
