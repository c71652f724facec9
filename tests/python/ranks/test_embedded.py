"""Losses over the samples of several ranks: each embeds its own, and all have the whole loss."""

import pytest

import pair
from test_embed import LOSSES


def run(function, *arguments, **options):
    return pair.run("embedded", function, *arguments, **options)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    "caps, options, wraps, passes",
    [
        ((99, 99), {}, True, "both"),
        ((5, 3), {}, True, "both"),
        ((5, 3), {}, True, "second"),
        ((14, 4), {"gradients": "inplace"}, False, "second"),
    ],
)
def test_gradients_are_those_of_one_process(kind, caps, options, wraps, passes):
    sizes = [min(cap, 14 - 4 * rank) for rank, cap in enumerate(caps)]
    for found in run("gradients", kind, caps, options, wraps, passes):
        assert all(0 < ran <= size for ran, size in zip(found, sizes, strict=True))


def test_ranks_grow_back_to_whole_batches():
    for sizes in run("grown_back", 8):
        assert sizes[0] == [3, 5] and sizes[-1] == [14, 10], sizes


def test_an_oom_of_one_rank_leaves_the_bits_of_a_run_at_that_size():
    for found in run("swept", 13):
        assert found["wrong"] == [] and found["count"] > 100 and found["torn"] < 5
        assert [5, 5] in found["sizes"] and len(found["sizes"]) == 2


@pytest.mark.parametrize("where", ("first", "loss", "second"))
def test_a_rank_that_fails_is_named_and_nobody_waits(where):
    other, own = run("failing", where)
    assert other[0] == "PeerFailed" and "rank 1" in other[1] and "a mistake" in other[1]
    assert own[0] == "RuntimeError"


def test_ranks_with_rows_of_other_shapes_are_told_and_so_is_no_sync():
    for kind, text, *_ in run("refused", "shapes"):
        assert kind == "ValueError" and "on rank 1: expected the same on all ranks" in text
    for kind, text, *_ in run("refused", "no_sync"):
        assert kind == "ValueError" and "outside of no_sync()" in text


def test_fully_shard_has_whole_parameters():
    assert run("sharded", None) == [[7, 5], [7, 5]]
    for text in run("sharded", False):
        assert "embed is given, and window is False" in text
