"""Sequences over ranks and micro-batches: what balance() promises, for random lengths."""

import itertools
import random

import pytest

import rebatch.torch as rebatch


def drawn(seed):
    """Lengths as those of answers: many short ones, few long ones, and some that are cut off."""
    draw = random.Random(seed)
    count, cap = draw.randint(0, 60), draw.choice((1, 50, 4000))
    lengths = [min(cap, int(draw.lognormvariate(4, 1.5))) for _ in range(count)]
    return lengths, draw.randint(1, 6), cap * draw.randint(1, 5)


def sums_of(parts, lengths):
    return [sum(lengths[i] for i in part) for part in parts]


@pytest.mark.parametrize("seed", range(300))
def test_shares_keep_what_is_promised(seed):
    lengths, ranks, budget = drawn(seed)
    shares = rebatch.balance(lengths, ranks, budget)
    assert len(shares) == ranks and len({len(parts) for parts in shares}) == 1
    parts = [part for share in shares for part in share]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    largest = max(sums_of(parts, lengths))
    assert largest <= budget
    totals = [sum(sums_of(share, lengths)) for share in shares]
    assert max(totals) - min(totals) <= largest
    assert sum(not part for part in parts) == max(0, len(parts) - len(lengths))


@pytest.mark.parametrize("seed", range(12))
def test_the_largest_micro_batch_is_at_most_four_thirds_of_the_best(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 30) for _ in range(6)]
    shares = rebatch.balance(lengths, draw.randint(1, 3), budget=draw.randint(30, 60))
    parts = [part for share in shares for part in share]

    def largest(places):
        sums = [0] * len(parts)
        for place, length in zip(places, lengths):
            sums[place] += length
        return max(sums)

    best = min(map(largest, itertools.product(range(len(parts)), repeat=len(lengths))))
    assert 3 * max(sums_of(parts, lengths)) <= 4 * best


def test_micro_batches_of_one_place_are_alike():
    """Ranks that wait for each other in each micro-batch lose less than 2 % of their time."""
    draw = random.Random(1)
    lengths = [min(16384, int(draw.lognormvariate(7, 1))) for _ in range(1024)]
    shares = rebatch.balance(lengths, 8, 32768)
    places = zip(*(sums_of(share, lengths) for share in shares))
    assert sum(lengths) / (8 * sum(map(max, places))) > 0.98


def test_a_sequence_above_the_budget_is_named():
    with pytest.raises(ValueError, match=r"of 12 tokens, lengths\[1\]: expected 0 to 10"):
        rebatch.balance([3, 12], 2, 10)
    with pytest.raises(ValueError, match="ranks=0: expected 1 or more"):
        rebatch.balance([3], 0, 10)
