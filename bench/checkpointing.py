"""What saves memory before a batch is cut, and what it costs: checkpointing of a GPT's blocks, the
same with their inputs in host memory, and a loss that does not make all logits at once. Prints
one JSON object a way: milliseconds of a step and the peak of memory, medians.

    python3 bench/checkpointing.py                    # GPT-2 124M, 16 x 1,024 tokens, bf16
    python3 bench/checkpointing.py offloaded fused    # some of the ways
    python3 bench/checkpointing.py --model 256 12 512 1024 --batch 16   # a small one

It runs on a GPU, and on the stand-in for CUDA, where no kernel runs and only memory counts."""

import argparse
import functools
import gc
import json
import pathlib
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rebatch.torch as rebatch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import pytorch  # noqa: E402

CHUNK = 2048  # tokens whose logits are made at once


def chunk_loss(model, features, targets):
    return F.cross_entropy(model.head(features), targets, reduction="sum")


def chunked_loss_fn(model, samples):
    """The mean over all tokens, by PyTorch's plain operations: the logits of a chunk are made
    again in the backward pass."""
    tokens, targets = samples
    with torch.autocast("cuda", torch.bfloat16):
        features = model.features(tokens).flatten(0, 1)
        parts = zip(features.split(CHUNK), targets.flatten().split(CHUNK))
        run = functools.partial(checkpoint, chunk_loss, model, use_reentrant=False)
        return sum(run(f, t) for f, t in parts) / targets.numel()


def fused_loss_fn(model, samples):
    """The same by linear_cross_entropy(), which PyTorch 2.15 has: gradients are made in the
    forward pass, chunk by chunk."""
    tokens, targets = samples
    with torch.autocast("cuda", torch.bfloat16):
        features = model.features(tokens).flatten(0, 1)
    weight, options = model.head.weight, nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        features.bfloat16(), weight.bfloat16(), targets.flatten(), options=options
    )


LOSSES = {"chunked": chunked_loss_fn, "fused": fused_loss_fn}
WAYS = ("plain", "checkpointed", "offloaded", "chunked", "fused")
WAYS += ("chunked+checkpointed", "chunked+offloaded")


def measure(way, size, steps):
    torch.manual_seed(0)
    model = pytorch.Gpt(*size["model"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    blocks = way.split("+")[-1]
    if blocks in ("checkpointed", "offloaded"):
        rebatch.checkpointing(*model.blocks, offload=blocks == "offloaded")(True)
    loss_fn = LOSSES.get(way.split("+")[0], pytorch.loss_fn)
    batch = pytorch.tokens_of(size, size["batch"], size["model"][2])
    seconds, peaks = [], []
    for _ in range(steps + pytorch.WARM):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        peaks.append(torch.cuda.max_memory_allocated())
    return {
        "way": way,
        "step_ms": pytorch.median_ms(seconds[pytorch.WARM :]),
        "peak_gib": round(statistics.median(peaks[pytorch.WARM :]) / pytorch.GIB, 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", default=WAYS, metavar="way", help=", ".join(WAYS))
    parser.add_argument("--model", type=int, nargs=4, default=(768, 12, 1024, 50304))
    parser.add_argument("--batch", type=int, default=16, help="samples of a micro-batch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--install", action="store_true", help="on rebatch's pool")
    arguments = parser.parse_args()
    if arguments.install:
        rebatch.install()
    size = dict(model=tuple(arguments.model), batch=arguments.batch)
    for way in arguments.ways:
        if way not in WAYS:
            parser.error(f"the way is {way}: expected one of {', '.join(WAYS)}")
        if way == "fused" and not hasattr(F, "linear_cross_entropy"):
            print(f"this PyTorch, {torch.__version__}, has no linear_cross_entropy()")
            continue
        print(json.dumps(measure(way, size, arguments.steps)), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
