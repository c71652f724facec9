"""Lightning and transformers with two processes, where batches are accumulated. test_launchers.py
has them without accumulation."""

import pytest

import pair


@pytest.mark.parametrize("framework", ("lightning", "transformers"))
def test_a_framework_that_accumulates(framework):
    pytest.importorskip(framework)
    for found in pair.run("adapted", f"with_{framework}", 2):
        assert found == {"as_plain": True, "near": True, "same": True, "ranks": [16, 4]}
