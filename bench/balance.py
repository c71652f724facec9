"""Long answers over ranks that wait for each other in each micro-batch: a fixed count of padded
samples, packed samples in their order up to a budget of tokens, and rebatch.balance() of packed
ones, with as many tokens in a micro-batch. Counted: time
is the tokens of the rank that has the most in each micro-batch. Prints one JSON object a way.

    python3 bench/balance.py

Needs the package rebatch; docs/benchmarks.md has the results."""

import json
import random
import time

import rebatch.torch as rebatch

SAMPLES, RANKS, CAP, BUDGET, STEPS = 1024, 8, 16384, 32768, 20


def lengths_of(step):
    """Of answers: log-normal, with a median of 1,097 tokens, cut off at CAP."""
    draw = random.Random(step)
    return [max(1, min(CAP, int(draw.lognormvariate(7, 1)))) for _ in range(SAMPLES)]


def fixed(lengths):
    """Each rank has its samples in their order, as many at a time as fit if all are as long as
    CAP, padded to the longest of them."""
    count, share = BUDGET // CAP, SAMPLES // RANKS
    shares = [lengths[first : first + share] for first in range(0, SAMPLES, share)]
    return [
        [count * max(own[first : first + count]) for first in range(0, share, count)]
        for own in shares
    ]


def greedy(lengths):
    """Each rank packs its samples in their order while they stay within the budget. All ranks run
    as many micro-batches as the one that has the most."""
    share = SAMPLES // RANKS
    shares = []
    for first in range(0, SAMPLES, share):
        parts = [0]
        for length in lengths[first : first + share]:
            if parts[-1] + length > BUDGET:
                parts.append(0)
            parts[-1] += length
        shares.append(parts)
    most = max(map(len, shares))
    return [parts + [0] * (most - len(parts)) for parts in shares]


def balanced(lengths):
    shares = rebatch.balance(lengths, RANKS, BUDGET)
    return [[sum(lengths[i] for i in part) for part in parts] for parts in shares]


def main():
    for way in (fixed, greedy, balanced):
        real = ran = waited = places = seconds = 0
        for step in range(STEPS):
            lengths = lengths_of(step)
            begin = time.perf_counter()
            shares = way(lengths)
            seconds += time.perf_counter() - begin
            real += sum(lengths)
            ran += sum(map(sum, shares))
            waited += RANKS * sum(map(max, zip(*shares)))
            places += len(shares[0])
        print(
            json.dumps(
                {
                    "way": way.__name__,
                    "micro-batches a rank": places / STEPS,
                    "padding": round(1 - real / ran, 3),
                    "tokens a unit of time": round(real / waited, 3),
                    "ms a step": round(1e3 * seconds / STEPS, 1),
                }
            )
        )


if __name__ == "__main__":
    main()
