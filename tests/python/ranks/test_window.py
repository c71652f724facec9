"""A Step with a model of fully_shard() (FSDP2), on two ranks."""

import pytest

import pair


def run(function, *arguments, **options):
    return pair.run("sharded", function, *arguments, **options)


def test_micro_batches_make_no_collectives():
    found = run("collectives")
    assert [its["runs"] for its in found] == [8, 1]
    for its in found:
        assert its["first"] == its["last"] == {"all_gather": 3}
        assert its["all"] == {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 1}


def test_a_step_that_nobody_has_is_gone_without_a_collection():
    assert run("let_go", None) == [[True] * 5] * 2


@pytest.mark.parametrize("is_low", (False, True))
def test_a_step_is_that_of_one_process(is_low):
    for found in run("as_one_process", is_low):
        assert [its["ranks"] for its in found] == [[8, 8], [2, 8]]
        assert all(its["near"] and its["is_sharded"] for its in found), found


def test_two_modules_may_be_one_group():
    assert run("two_modules_of_one_group") == [True, True]


def test_parts_may_be_columns():
    for found in run("as_one_process", False, 0, True):
        assert all(its["near"] and its["is_sharded"] for its in found), found


@pytest.mark.skipif("pair.lacks(4)", reason="needs four GPUs")
@pytest.mark.parametrize("is_low", (False, True))
def test_replicas_of_sharded_models(is_low):
    for found in run("as_one_process", is_low, 2, size=4):
        assert [its["ranks"] for its in found] == [[8, 8, 8, 8], [2, 8, 8, 8]]
        assert all(its["near"] and its["is_sharded"] for its in found), found


@pytest.mark.parametrize("is_on_all", (False, True))
@pytest.mark.parametrize("is_low", (False, pytest.param(True, marks=pytest.mark.night)))
def test_an_oom_at_every_operation_changes_no_bit(is_on_all, is_low):
    for found in run("ooms_everywhere", is_on_all, is_low, 5):
        assert found["wrong"] == found["errors"] == []
        assert found["count"] > 50
        assert 0 < found["torn"] < found["count"] / 4


@pytest.mark.night
@pytest.mark.skipif("pair.lacks(4)", reason="needs four GPUs")
@pytest.mark.parametrize("is_on_all, is_low", [(False, False), (True, True)])
def test_an_oom_at_every_operation_with_replicas_changes_no_bit(is_on_all, is_low):
    for found in run("ooms_everywhere", is_on_all, is_low, 23, 2, size=4):
        assert found["wrong"] == found["errors"] == []
        assert found["count"] > 50
        assert found["torn"] < found["count"] / 4


def test_a_rank_with_less_memory_has_smaller_micro_batches():
    for found in run("less_memory"):
        assert found == [{"same": True, "ranks": [8, 2]}] * 2


@pytest.mark.parametrize("clip", (None, 0.1))
def test_all_ranks_skip_an_update_for_the_inf_of_one(clip):
    for found in run("scaled", clip):
        assert found == {"skipped": True, "scale": 8.0, "near": True, "moved": True}


def test_parameters_that_are_unused_on_a_rank_or_on_all():
    assert run("unused") == [[True] * 4 + [False] * 2] * 2


def test_a_failure_on_one_rank_ends_the_step_on_all():
    zero, one = run("failures")
    for name, its, why in (
        ("loss_fn", "ValueError", "the sample is bad"),
        ("Exhausted", "Exhausted", "out of memory"),
        ("batch", "ValueError", "has no tensor"),
        ("gather", "Exhausted", "rank 1 has no memory for the whole parameters"),
    ):
        assert zero[name][0] == "PeerFailed" and zero[name][2] == 1 and why in zero[name][1]
        assert one[name][0] == its
    for found in (zero, one):
        assert found["loss_fn"][3] and found["Exhausted"][3] and found["moved"]
        kind, text, _ = found["mixed"]
        assert kind == "ValueError" and "the same call of the Step" in text


@pytest.mark.parametrize("where", ("between", "backward", "reduce"))
def test_a_rank_that_is_killed_is_named(where):
    errors, _ = run("killed", where, killed=(1,))
    for kind, text, rank in errors:
        assert kind == "PeerFailed" and rank == 1, text


@pytest.mark.skipif("pair.lacks(4) or not pair.has_nccl()", reason="needs four GPUs")
def test_a_rank_of_replicas_that_is_killed_is_named():
    """With gloo the others wait in the reduction, until the timeout of its process group."""
    zero, _, *others = run("killed", "backward", None, 2, size=4, killed=(1,))
    for errors in (zero, *others):
        for kind, text, rank in errors:
            assert kind == "PeerFailed" and rank == 1, text


def test_what_cannot_be_trained_is_refused_by_name():
    for found in run("refused"):
        assert "fully_shard() was called for parts of the model" in found["parts"]
        assert "fully_shard() was called for parts of the model" in found["two"]
        assert (
            "has 10 parameters that require a gradient, and the optimizer has 4 of them"
            in (found["optimizer"])
        )
        assert "as tensor parallelism makes them: expected plain" in found["parallel"]
        assert "has gradient_divide_factor: expected none" in found["factor"]
        assert "parameters of fully_shard() are float16: expected float32" in found["scaler"]
        assert "expected 'fresh'" in found["inplace"]
        assert "expected no group" in found["group"]
        assert "before fully_shard()" in found["check"]
        assert "'2.bias' requires a gradient, and no fully_shard()" in found["ignored"]


@pytest.mark.parametrize("window", (True, False))
def test_ranks_that_disagree_are_refused_with_both_values(window):
    for found in run("disagreeing", window):
        assert "rank 0 has clip 2.0, and rank 1 has clip 1.0: expected" in found["clip"]
        said = "the batch of rank 0 is {'x': ...}, and that of rank 1 is {'x': ..., 'y': ...}"
        assert said in found["keys"]
        assert not found["then"]  # it trains
