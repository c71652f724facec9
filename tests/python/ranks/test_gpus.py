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
