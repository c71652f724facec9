"""Lightning and transformers with fully_shard() (FSDP2), on two ranks: CPUs, or with
RANKS_BACKEND=cpu:gloo,cuda:nccl GPUs."""

import pytest

import pair


def run(function, *arguments, **options):
    return pair.run("adapted_sharded", function, *arguments, **options)


@pytest.mark.parametrize("window", (None, False))
def test_a_trainer_trains_as_with_fully_shard_alone(window):
    assert run("as_fully_shard", window) == [{"near": True, "clips": True}] * 2


def test_a_norm_is_that_of_all_batches_unless_gradients_were_changed():
    for found, error in zip(run("clipped"), ("PeerFailed", "ValueError")):
        assert found["error"] == error
        assert found["kept"] and found["sums"]
        assert found["tries"] == [1, 1]
        assert len(found["after ooms"]) > 5
        assert set(found["after ooms"]) == {0.1}


@pytest.mark.night
@pytest.mark.parametrize("window, failing_update", [(None, 1), (False, 0)])
def test_an_oom_of_one_rank_at_many_operations_changes_no_bit(window, failing_update):
    found = run("ooms_everywhere", window, failing_update, 29)
    for its in found:
        assert its["wrong"] == its["errors"] == []
        assert its["count"] > 50
        assert its["torn"] < its["count"] / 4
    assert found[1]["recovered"] > found[0]["recovered"] == 0


def is_right(found, window, is_on_all):
    sizes = [4, 4] if is_on_all or window is False else [16, 4]
    for its in found:
        assert its == {"near": True, "bits": True, "same": True, "moved": True, "ranks": sizes}


@pytest.mark.parametrize(
    "window, is_on_all, where", [(None, True, "backward"), (False, False, "forward")]
)
def test_lightning(window, is_on_all, where):
    pytest.importorskip("lightning")
    is_right(run("with_lightning", window, is_on_all, where), window, is_on_all)


@pytest.mark.parametrize(
    "window, is_on_all, where, is_divided",
    [(None, False, "forward", True), (False, True, "backward", False)],
)
def test_transformers(window, is_on_all, where, is_divided):
    pytest.importorskip("transformers")
    found = run("with_transformers", window, is_on_all, where, is_divided)
    is_right(found, window, is_on_all)


def test_lightning_refuses_what_cannot_be_sharded():
    pytest.importorskip("lightning")
    for found in run("refused_by_lightning"):
        assert "has a tensor_parallel_size of 2: expected" in found["tensors"]
        assert "calls no fully_shard(): expected" in found["nothing"]
        assert "fully_shard() was called for parts of the model" in found["outside"]


def test_transformers_refuses_what_cannot_be_sharded():
    pytest.importorskip("transformers")
    for found in run("refused_by_transformers"):
        assert "FSDP with parameters in host memory: expected" in found["on host"]
        assert "with twice the num_items_in_batch, the loss" in found["squared"]
