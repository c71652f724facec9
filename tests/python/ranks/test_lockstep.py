"""A Step in lockstep with a model of fully_shard() (FSDP2), on two ranks."""

import pytest

import pair

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp.FSDPModule, "set_custom_all_gather"):
    pytest.skip("lockstep needs PyTorch 2.11", allow_module_level=True)

four_ranks = pytest.mark.skipif("pair.lacks(4)", reason="needs four GPUs")


def run(function, *arguments, **options):
    return pair.run("in_lockstep", function, *arguments, **options)


def test_a_micro_batch_has_pytorchs_collectives_and_one_vote():
    for found in run("collectives"):
        assert found["step"] == {**found["plain"], "all_reduce": 1}
        assert found["plain"]["reduce_scatter"] == 12
        assert found["votes"] == 4 + 4


@four_ranks
def test_with_replicas_that_has_an_all_reduce_of_each_group_too():
    for found in run("collectives", 2, size=4):
        plain = found["plain"]
        assert found["step"] == {**plain, "all_reduce": plain["all_reduce"] + 1}
        assert plain["reduce_scatter"] == plain["all_reduce"] == 12
        assert found["votes"] == 4 + 4


def test_a_step_that_nobody_has_is_gone_without_a_collection():
    assert pair.run("sharded", "let_go", False) == [[True] * 5] * 2


@pytest.mark.parametrize("is_low", (False, True))
def test_a_step_is_that_of_one_process(is_low):
    assert run("as_one_process", is_low) == [{"near": True, "ranks": [2, 2]}] * 2


@four_ranks
@pytest.mark.parametrize("is_low", (False, True))
def test_a_step_with_replicas_is_that_of_one_process(is_low):
    assert run("as_one_process", is_low, 2, size=4) == [{"near": True, "ranks": [2] * 4}] * 4


@pytest.mark.parametrize("is_on_all, is_low", [(False, False), (True, True)])
@pytest.mark.parametrize("failing_step", (pytest.param(0, marks=pytest.mark.night), 1))
def test_an_oom_at_every_operation_changes_no_bit(is_on_all, is_low, failing_step):
    found = run("ooms_everywhere", is_on_all, is_low, failing_step, 1 + failing_step, 19)
    for its in found:
        assert its["wrong"] == its["errors"] == []
        assert its["count"] > 50
        assert its["torn"] < its["count"] / 4
    assert found[1]["recovered"] > 0
    assert (found[0]["recovered"] > 0) == is_on_all


@pytest.mark.night
@four_ranks
@pytest.mark.parametrize("is_on_all, is_low, failing_step", [(False, False, 1), (True, True, 0)])
def test_an_oom_at_every_operation_with_replicas_changes_no_bit(is_on_all, is_low, failing_step):
    found = run("ooms_everywhere", is_on_all, is_low, failing_step, 1, 41, 2, size=4)
    for its in found:
        assert its["wrong"] == its["errors"] == []
        assert its["count"] > 50
        assert its["torn"] < its["count"] / 4
    assert [its["recovered"] > 0 for its in found] == [is_on_all, True, is_on_all, is_on_all]


@pytest.mark.night
def test_an_oom_where_a_sample_joins_its_neighbour_for_batch_norm_changes_no_bit():
    for its in run("pairs", 31):
        assert its["wrong"] == its["errors"] == []
        assert its["count"] > 50


@pytest.mark.parametrize("where", ("forward", "backward"))
def test_all_ranks_have_the_size_of_the_one_with_the_least_memory(where):
    zero, one = run("less_memory", where)
    assert zero == {"same": True, "ranks": [2, 2], "ooms": 0}
    assert one["same"] and one["ranks"] == [2, 2]


def test_a_failure_on_one_rank_ends_the_step_on_all():
    zero, one = run("failures")
    for name, its, why in (
        ("loss_fn", "ValueError", "the sample is bad"),
        ("Exhausted", "Exhausted", "out of memory"),
        ("batch", "ValueError", "has no tensor"),
    ):
        assert zero[name][0] == "PeerFailed" and zero[name][2] == 1 and why in zero[name][1]
        assert one[name][0] == its
    for found in (zero, one):
        assert found["loss_fn"][3] and found["Exhausted"][3] and found["moved"]
        kind, text, _ = found["samples"]
        assert kind == "PeerFailed" and "the number of samples of a rank" in text
        assert "6 on one rank, 8 on another" in text
        assert found["evaluate"][0] == "ValueError" and "window is False" in found["evaluate"][1]


def test_parameters_that_do_not_fit_whole_are_trained_in_lockstep_from_then_on():
    for found in run("no_room"):
        assert found["same"]
        assert len(found["said"]) == 1
        assert "rank 1 has no memory for the whole parameters" in found["said"][0]


def test_what_fits_no_sample_beside_whole_parameters_goes_on_in_lockstep_in_the_same_step():
    found = run("fails_in_window")
    for one in found:
        assert one["same"]
        assert len(one["said"]) == 1
        assert "rank 1 ran out of memory beside the whole parameters" in one["said"][0]
        assert one["was_in_lockstep"]
    # Of eight samples in fours: three steps; rank 0 repeats its part of the second one, after a
    # rehearsal.
    assert found[0]["calls"] == 2 + 2 + 1 + 2 + 2


def test_and_returns_to_whole_parameters_when_there_is_room_again():
    assert all(found["is_back"] for found in run("fails_in_window"))


def test_what_fits_no_sample_in_lockstep_sums_gradients_in_host_memory():
    for found in run("sums_on_the_host"):
        assert found["same"] and found["was_on_host"] == [True, False]
        assert len(found["said"]) == 1
        assert "gradients are summed in host memory" in found["said"][0]


@pytest.mark.parametrize("is_local", (False, True))
def test_sharded_parameters_that_loss_fn_changes_are_named_and_then_put_back(is_local):
    for untold, told in run("changed_in_place", is_local):
        assert untold["errors"] == [["NotPutBackError"]] * 2
        assert told["errors"] == [[], []]
        assert untold["same"] and untold["has_repeated"]
        assert told["same"] and told["has_repeated"]


@pytest.mark.parametrize(
    "is_on_all, failing_step", [(False, 1), pytest.param(True, 3, marks=pytest.mark.night)]
)
def test_an_oom_at_every_operation_of_a_change_changes_no_bit(is_on_all, failing_step):
    for its in run("ooms_at_changes", is_on_all, failing_step, 19):
        assert its["wrong"] == its["errors"] == []
        assert its["count"] > 50


@four_ranks
def test_and_so_with_replicas():
    for one in run("fails_in_window", 2, size=4):
        assert one["same"] and one["was_in_lockstep"] and one["is_back"]
        assert "rank 1 ran out of memory beside the whole parameters" in one["said"][0]


@pytest.mark.night
@four_ranks
@pytest.mark.parametrize("is_on_all, failing_step", [(False, 1), (True, 3)])
def test_an_oom_at_every_operation_of_a_change_with_replicas_changes_no_bit(
    is_on_all, failing_step
):
    for its in run("ooms_at_changes", is_on_all, failing_step, 61, 2, size=4):
        assert its["wrong"] == its["errors"] == []
        assert its["count"] > 50


def test_a_rank_that_fails_otherwise_ends_the_step_though_another_lacks_memory():
    (zero, zero_left), (one, one_left) = run("fails_otherwise_too")
    assert zero[0] == "ValueError" and one[0] == "Exhausted", (zero, one)
    assert not zero_left and not one_left


@pytest.mark.parametrize("kind, seen", [("ValueError", 2), ("OutOfMemoryError", 10)])
def test_a_rank_that_fails_in_the_first_micro_batch_of_all_ends_the_step_without_a_wait(kind, seen):
    zero, one = run("first_fails", kind)
    own = "Exhausted" if kind == "OutOfMemoryError" else kind
    for (errors, sizes, collectives, same), name in ((zero, "PeerFailed"), (one, own)):
        assert [error[0] for error in errors] == [name] * 2
        assert collectives == 0
        assert same
    assert [error[2] for error in zero[0]] == [1, 1]
    assert zero[1] == one[1] == [2] * seen  # rehearsals: micro_smallest


def test_the_rehearsal_of_the_first_micro_batch_leaves_no_trace():
    for found in run("rehearsed"):
        assert found == {"same": True, "calls": 2, "said": [], "redone": 0, "sizes": [2, 4, 4]}


@pytest.mark.parametrize("where", ("between", "forward", "backward"))
def test_a_rank_that_is_killed_is_named(where):
    errors, _ = run("killed", where, killed=(1,))
    for kind, text, rank in errors:
        assert kind == "PeerFailed" and rank == 1, text


@four_ranks
def test_a_rank_of_replicas_that_is_killed_is_named():
    zero, _, *others = run("killed", "backward", 2, size=4, killed=(1,))
    for errors in (zero, *others):
        for kind, text, rank in errors:
            assert kind == "PeerFailed" and rank == 1, text


def test_what_cannot_be_trained_is_refused_by_name():
    for found in run("refused"):
        assert "cost is given, and window is False" in found["cost"]
        assert "learn is given, and window is False" in found["learn"]
