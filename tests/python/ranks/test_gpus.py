"""A Step on GPUs of different sizes. Needs two GPUs, and RANKS_BACKEND=nccl."""

import os

import pytest

import pair

if "nccl" not in os.environ.get("RANKS_BACKEND", ""):
    pytest.skip("needs GPUs and RANKS_BACKEND=nccl", allow_module_level=True)


def test_a_small_and_a_large_gpu_have_the_gradient_of_one():
    gib = [8, 24]
    found = pair.run("capped", "caps", gib)
    for its, most in zip(found, gib):
        assert its["ranks"][0] < its["ranks"][1], found
        assert its["wrong"] < 1e-4, found
    assert found[0]["ooms"] > 0, found


def test_a_gpu_that_is_behind_the_host_changes_no_bit():
    assert pair.run("sharded", "behind") == [True, True]


@pytest.mark.parametrize("is_on_host", (False, True))
def test_an_update_with_half_a_sum_is_told(is_on_host):
    """Rank 1 dies when all have voted for the update, and NCCL has not had its gradients yet."""
    (errors, seconds), _ = pair.run("capped", "dies_before_its_sums", is_on_host, killed=(1,))
    assert len(errors) == 2 + is_on_host and seconds < 60
    kind, text, rank, is_torn = errors[0]
    assert kind == "PeerFailed" and rank == 1 and is_torn is not is_on_host
    assert ("restore a checkpoint" in text) is is_torn
