"""Lightning and transformers with two processes, where batches are accumulated. test_launchers.py
has them without accumulation."""

import re

import pytest

import pair


@pytest.mark.parametrize("graphs", (False, True))
@pytest.mark.parametrize("framework", ("lightning", "transformers"))
def test_a_framework_that_accumulates(framework, graphs):
    pytest.importorskip(framework)
    for found in pair.run("adapted", f"with_{framework}", 2, graphs):
        assert found.pop("replays") == [graphs, graphs]
        assert found == {"as_plain": True, "near": True, "same": True, "ranks": [16, 4]}


@pytest.mark.parametrize("framework", ("lightning", "transformers"))
def test_ranks_that_disagree_are_refused_with_both_values(framework):
    pytest.importorskip(framework)
    name = {"lightning": "gradient_clip_val", "transformers": "max_grad_norm"}[framework]
    for kind, text, _ in pair.run("adapted", "disagreeing", framework):
        assert kind == "ValueError"
        assert f"rank 0 has {name} 1.0, and rank 1 has {name} 2.0: expected the same" in text


@pytest.mark.parametrize(
    "name, config, largest",
    (
        ("grpo", {"loss_type": "grpo"}, 3),
        ("grpo", {"loss_type": "dapo"}, 3),
        ("dpo", {"gradient_accumulation_steps": 2}, 6),
        ("sft", {"gradient_accumulation_steps": 2}, 3),
    ),
    ids=str,
)
def test_trl_makes_its_metrics_once_where_ranks_cut_unequally(name, config, largest):
    pytest.importorskip("trl", reason="trl is not installed")
    for found in pair.run("adapted_trl", "with_trl", name, config, largest):
        assert found["gradients"] < 1e-5 and found["metrics"] < 1e-5
        assert found["same"] and found["micro"] == [8, 2]


@pytest.mark.parametrize("loss, columns", (("ranking", 2), ("ranking", 4), ("matryoshka", 3)))
def test_sentences_of_all_ranks_are_compared(loss, columns):
    pytest.importorskip("sentence_transformers")
    for found in pair.run("adapted_sentences", "with_sentences", loss, columns):
        assert found["gap"] < 1e-5 and found["same"]
        assert found["ranks"] == [8, 4] and found["gathers"] == [True]


@pytest.mark.parametrize(
    "gathers, accumulated, said",
    (
        (False, 1, "2 ranks train, so the loss is that of all ranks' samples: expected one with"),
        (True, 2, "gradient_accumulation_steps is 2: expected 1, and a batch that has all samples"),
    ),
)
def test_what_cannot_be_a_loss_of_all_ranks_sentences_is_refused(gathers, accumulated, said):
    pytest.importorskip("sentence_transformers")
    for kind, text, _ in pair.run("adapted_sentences", "refused", gathers, accumulated):
        assert kind == "ValueError" and re.search(said, text)
