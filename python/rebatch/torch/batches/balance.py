"""Sequences of different lengths over ranks and micro-batches. Must not know tensors or memory."""

from __future__ import annotations

import heapq
import operator
from typing import List, Sequence


def balance(lengths: Sequence[int], ranks: int, budget: int) -> List[List[List[int]]]:
    """Share sequences out among ranks, in micro-batches of `budget` tokens at the most.

    Each rank has the same number of micro-batches, so ranks that call collectives in each of them
    stay together. Micro-batches of one place have similar sums of tokens on all ranks.

    - Each sequence is in one micro-batch.
    - The largest sum of a micro-batch is at most 4/3 of the best for that number of them.
    - The sums of two ranks differ by the largest micro-batch at the most.
    - A micro-batch is empty only where there are more of them than sequences.

    Args:
        lengths: tokens of each sequence
        ranks: that train together
        budget: tokens of a micro-batch, the sum of its lengths

    Returns, for each rank, its micro-batches: lists of indices into `lengths`.

    Raises ValueError for a sequence that alone exceeds the budget."""
    if operator.index(ranks) < 1:
        raise ValueError(f"rebatch: balance() has ranks={ranks}: expected 1 or more")
    tokens = [operator.index(length) for length in lengths]
    for i, length in enumerate(tokens):
        if not 0 <= length <= budget:
            raise ValueError(
                f"rebatch: balance() has a sequence of {length} tokens, lengths[{i}]: expected 0 "
                f"to {budget}, the budget of a micro-batch"
            )
    descending = sorted(range(len(tokens)), key=lambda i: -tokens[i])
    rounds = max(1, -(-sum(tokens) // max(1, ranks * budget)))
    while True:
        parts = _parts(tokens, descending, rounds * ranks)
        if _largest(parts, tokens) <= budget:
            return _dealt(parts, tokens, ranks)
        rounds += 1


def _largest(parts: List[List[int]], tokens: List[int]) -> int:
    return max(sum(tokens[i] for i in part) for part in parts)


def _parts(tokens: List[int], descending: List[int], number: int) -> List[List[int]]:
    """So many parts: each sequence, the longest first, goes to the part with the smallest sum
    (Graham 1969: its largest sum is at most 4/3 of the best)."""
    parts: List[List[int]] = [[] for _ in range(number)]
    sums = [(0, 0, part) for part in range(number)]  # tokens, sequences, part
    for i in descending:
        total, count, part = sums[0]
        parts[part].append(i)
        heapq.heapreplace(sums, (total + tokens[i], count + 1, part))
    return parts


def _dealt(parts: List[List[int]], tokens: List[int], ranks: int) -> List[List[List[int]]]:
    """The parts, the largest first, one to each rank in turn. So a rank has at each place no less
    than the next one, and no more than that one has at the place before."""
    sums = [sum(tokens[i] for i in part) for part in parts]
    order = sorted(range(len(parts)), key=lambda part: -sums[part])
    return [[parts[part] for part in order[rank::ranks]] for rank in range(ranks)]
