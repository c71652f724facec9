"""Lightning and transformers with two processes, where batches are accumulated. test_launchers.py
has them without accumulation."""

import pytest

import pair


@pytest.mark.parametrize("framework", ("lightning", "transformers"))
def test_a_framework_that_accumulates(framework):
    pytest.importorskip(framework)
    for found in pair.run("adapted", f"with_{framework}", 2):
        assert found == {"as_plain": True, "near": True, "same": True, "ranks": [16, 4]}


@pytest.mark.parametrize("framework", ("lightning", "transformers"))
def test_ranks_that_disagree_are_refused_with_both_values(framework):
    pytest.importorskip(framework)
    name = {"lightning": "gradient_clip_val", "transformers": "max_grad_norm"}[framework]
    for kind, text, _ in pair.run("adapted", "disagreeing", framework):
        assert kind == "ValueError"
        assert f"rank 0 has {name} 1.0, and rank 1 has {name} 2.0: expected the same" in text
