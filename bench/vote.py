"""What a vote of a Step costs several ranks: three words, each made the smallest of all, beside
gloo's own all-reduce of as many. Prints one line: microseconds, medians.

    torchrun --nproc-per-node 4 bench/vote.py

Needs the package rebatch, and no GPU: votes are on the host."""

import ctypes as C
import statistics
import time

import torch
import torch.distributed as dist

from rebatch.torch.ranks.votes import Votes

RUNS, CALLS, VALUES = 11, 200, 4  # a Step's votes carry so many numbers of each rank


def microseconds(call):
    times = []
    for run in range(RUNS + 1):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        if run:  # the first one warms
            times.append((time.perf_counter() - began) * 1e6 / CALLS)
    return statistics.median(times)


def main():
    dist.init_process_group("gloo")
    votes = Votes(dist.group.WORLD, 60.0, VALUES)
    words, bare = (C.c_uint64 * 3)(), torch.zeros(3 + VALUES * dist.get_world_size())
    bare_us = microseconds(lambda: dist.all_reduce(bare, group=votes.group))
    vote_us = microseconds(lambda: votes.smallest(words))
    if dist.get_rank() == 0:
        size = dist.get_world_size()
        print(f"vote: ranks={size} gloo_us={bare_us:.1f} vote_us={vote_us:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
