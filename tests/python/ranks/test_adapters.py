"""Lightning and transformers under torchrun, with two processes."""

import pytest

import pair


@pytest.mark.parametrize("accumulated", (1, 2))
def test_lightning_with_ddp(accumulated):
    pytest.importorskip("lightning")
    for found in pair.run("adapted", "with_lightning", accumulated):
        assert found == {"as_plain": True, "near": True, "same": True, "ranks": [16, 4]}


@pytest.mark.parametrize("accumulated", (1, 2))
def test_transformers_with_torchrun(accumulated):
    pytest.importorskip("transformers")
    for found in pair.run("adapted", "with_transformers", accumulated):
        assert found == {"as_plain": True, "near": True, "same": True, "ranks": [16, 4]}
