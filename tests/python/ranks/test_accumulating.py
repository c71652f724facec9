"""Several batches for an update, on several ranks: what is reduced, and when."""

import pytest

import pair


def run(function, *arguments, **options):
    return pair.run("accumulating", function, *arguments, **options)


@pytest.mark.parametrize(
    "kind, gradients, largest",
    [("mlp", "fresh", 99), ("conv", "fresh", 3), ("mlp", "inplace", 3)],
)
def test_gradients_are_local_within_no_sync_and_reduced_outside(kind, gradients, largest):
    for found in run("as_ddp", kind, gradients, largest):
        assert found["near"] == found["loss"] == [True] * 7, found
        assert found["same"] == [False, False, True, False, False, True, True]
        sizes = [8, 8 if largest > 8 else 2]
        assert found["ranks"] == [[], [], sizes, [], [], sizes, sizes]


def test_batches_that_run_whole_leave_the_bits_of_ddp():
    assert run("whole_bits") == [True] * 2


def test_a_rank_within_no_sync_waits_for_no_other():
    assert run("makes_no_collective") == [True] * 2


@pytest.mark.parametrize("is_on_all", (False, True))
@pytest.mark.parametrize(
    "gradients, stride", [pytest.param("fresh", 5, marks=pytest.mark.night), ("inplace", 9)]
)
def test_an_oom_at_every_operation_changes_no_bit(is_on_all, gradients, stride):
    for found in run("ooms_everywhere", is_on_all, gradients, stride):
        assert found["wrong"] == found["errors"] == [] and found["torn"] == 0
        assert found["count"] > 100 and (found["recovered"] > 0 or not is_on_all)


def test_a_failure_within_no_sync_is_that_of_its_rank():
    for rank, found in enumerate(run("failures")):
        assert found["local"] == ("ValueError" if rank == 1 else None)
        assert found["synced"] == ("ValueError" if rank == 1 else "PeerFailed")
        assert found["local as before"] == (rank == 1) and found["synced as before"]
        assert found["same"]


def test_a_step_within_no_sync_and_no_sync_of_some():
    for is_same, (kind, text, _) in run("other_calls"):
        assert is_same and kind == "ValueError"
        assert "no_sync() of 1 of 2 modules" in text and "expected no_sync() of all" in text


def test_a_normalizer_divides_by_the_weight_of_the_rank_or_of_all():
    assert run("with_normalizer") == [[True, True]] * 2


@pytest.mark.parametrize("window", (None, False))
def test_fully_shard_has_the_same_gradients_after_the_sync(window):
    sizes = [2, 2] if window is False else [8, 2]
    assert run("of_fully_shard", window) == [[[True, True], sizes]] * 2


@pytest.mark.parametrize(
    "is_sharded, window, sizes",
    [(False, None, [8, 2]), (True, None, [8, 2]), (True, False, [2, 2])],
)
def test_a_loop_of_accelerate_with_accumulate(is_sharded, window, sizes):
    pytest.importorskip("accelerate")
    for found in pair.run("accelerated", "as_accelerate", is_sharded, window):
        assert found["whole"] == found["cut"] == [True] * 5, found
        assert (found["whole in"], found["cut in"]) == ([8, 8], sizes)
        kind = "FSDPMlp" if is_sharded else "DistributedDataParallel"
        assert found["updates"] == 6 and found["kind"] == kind
