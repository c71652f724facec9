"""A Step on several ranks: DistributedDataParallel, and plain modules with group=True."""

import threading

import pytest

import pair
from rebatch.torch.ranks.ranks import abort_all


def run(function, *arguments, **options):
    return pair.run("trained", function, *arguments, **options)


@pytest.mark.parametrize(
    "kind, options, step_options",
    [
        ("conv", {}, {}),
        ("gpt", {"gradient_as_bucket_view": True}, {"gradients": "inplace"}),
        ("mlp", {"static_graph": True}, {}),
        ("conv", {"find_unused_parameters": True}, {}),
    ],
)
def test_a_step_is_that_of_ddp(kind, options, step_options):
    for found in run("as_ddp", kind, options, step_options):
        assert found == {"bits": True, "near": True, "same": True, "loss": True, "ranks": [16, 16]}


@pytest.mark.parametrize("is_on_all", (False, True))
@pytest.mark.parametrize(
    "kind, gradients, stride",
    [
        pytest.param("mlp", "fresh", 3, marks=pytest.mark.night),
        ("mlp", "inplace", 7),
        pytest.param("conv", "fresh", 11, marks=pytest.mark.night),
        pytest.param("gpt", "fresh", 19, marks=pytest.mark.night),
    ],
)
def test_an_oom_at_every_operation_changes_no_bit(kind, is_on_all, gradients, stride):
    for found in run("ooms_everywhere", kind, is_on_all, gradients, stride):
        assert found["wrong"] == found["errors"] == [] and found["same"]
        assert found["count"] > 50 and (found["recovered"] > 0 or not is_on_all)
        assert 0 < found["torn"] < found["count"] / stride / 2


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_a_rank_with_less_memory_has_smaller_micro_batches(where, gradients):
    for found in run("less_memory", "conv", where, gradients):
        assert found == {"near": True, "same": True, "ranks": [16, 4]}


def test_gradients_with_a_graph_are_refused_by_name():
    for said in run("with_graphs"):
        assert "added to those of other ranks" in said and "within loss_fn" in said


@pytest.mark.parametrize(
    "kind, micro, how",
    [("mlp", 16, ""), ("conv", 4, ""), ("gpt", 8, "plain"), ("mlp", 4, "normalizer")],
)
def test_micro_batches_of_ranks_are_replayed_with_the_same_bits(kind, micro, how):
    """Without the wrapper's nodes of autograd, which belong to another stream than a capture."""
    for found in run("replayed", kind, micro, how):
        assert found["bits"] and found["same"]
        assert found["replays"] == [0, 16 // micro, 0]
        assert found["hooks"] == [False, how != "plain"]


def test_a_parameter_that_ranks_use_beside_its_module_is_in_no_graph():
    for found in run("replayed", "mlp", 8, "beside"):
        assert found["bits"] and found["same"] and found["replays"] == [0, 0, 0]


def test_a_sample_that_is_left_for_batch_norm_joins_its_neighbour():
    assert run("pairs") == [{"sizes": [2, 2, 2, 3], "near": True, "same": True}] * 2


def test_what_a_failed_backward_pass_has_launched_is_not_launched_again():
    found = run("struck_in_backward")
    for its in found:
        assert its["near"] and its["same"]
        assert its["launched"] == its["buckets"] > 5
        assert its["within"] == its["buckets"]  # in the backward pass that succeeded, at the latest
    assert [its["ooms"] for its in found] == [0, 1]


@pytest.mark.parametrize("is_plain", (False, True))
@pytest.mark.parametrize("has_normalizer", (False, True))
def test_weights_are_over_the_samples_of_all_ranks(has_normalizer, is_plain):
    for found in run("uneven", has_normalizer, is_plain):
        assert found == {"near": True, "loss": True, "same": True, "ranks": [4, 4]}


def test_a_before_update_without_memory_ends_the_step_on_all_ranks():
    fine, short = run("short_before_update")
    assert short["error"][0] == "NotPutBackError" and fine["error"][0] == "PeerFailed"
    assert "before_update failed for lack of memory" in short["error"][1]
    for found in (fine, short):
        assert found["unchanged"] and found["same"]


def test_each_rank_has_a_list_of_batches_of_its_own():
    for found in run("several"):
        assert found == {"near": True, "loss": True, "same": True, "microbatches": True}


@pytest.mark.parametrize("is_find_unused", (False, True))
def test_parameters_that_are_unused_on_a_rank_or_on_all(is_find_unused):
    for found in run("unused", is_find_unused):
        assert found == {"grads": [True] * 4 + [False] * 2, "same": True}


def test_all_ranks_skip_an_update_for_the_inf_of_one():
    for found in run("scaled"):
        assert found == {"skipped": True, "scale": 8.0, "moved": True, "same": True}


def test_an_exception_on_one_rank_ends_the_step_on_all():
    zero, one = run("exceptions")
    for name, its, why in (
        ("loss_fn", "ValueError", "ValueError: the sample is bad"),
        ("Exhausted", "OutOfMemoryError", "out of memory"),
        ("batch", "ValueError", "ValueError: rebatch: the batch, a dict, has no tensor"),
    ):
        kind, text, rank, is_as_before = zero[name]
        assert (kind, rank, is_as_before) == ("PeerFailed", 1, True)
        assert "rank 1 ended step 1" in text and why in text
        kind, _, _, is_as_before = one[name]
        assert kind in (its, "Exhausted") and is_as_before
    for found in (zero, one):
        assert found["same"] and found["moved"] and found["step"] == 2


def test_a_torn_update_is_heard_of_in_the_next_step():
    (first, second), (its_first, its_second) = run("torn")
    assert first is None and its_first[0] == "Torn"
    assert second[0] == "PeerFailed" and second[2] == 1 and "restore a checkpoint" in second[1]
    assert "restore a checkpoint" in its_second[1]


def test_one_rank_evaluates_and_checks_alone():
    assert run("alone") == [True, True]


def test_each_rank_compares_its_gradients_at_two_cuts():
    for found in run("compared"):
        (text,) = found["said"]
        assert "sums over its samples" in text and "in micro-batches of 2" in text
        assert found["same"]


@pytest.mark.parametrize("kind", ("ddp", "plain"))
def test_a_step_that_nobody_has_is_gone_without_a_collection(kind):
    assert run("let_go", kind) == [[True] * 5] * 2


def test_a_step_does_not_keep_process_groups_that_are_destroyed():
    for are_gone, (kind, text) in run("destroyed"):
        assert are_gone == [True] * 2
        assert kind == "RuntimeError" and "destroyed its process groups: expected" in text


@pytest.mark.parametrize("where", ("between", "forward", "backward", "reduce", "update"))
def test_a_rank_that_is_killed_is_named(where):
    (errors, _), _ = run("killed", where, False, killed=(1,))
    assert len(errors) >= 2  # a rank that dies in its update has voted for it
    for kind, text, rank in errors:
        assert kind == "PeerFailed" and rank == 1, text


def test_a_rank_that_is_killed_is_named_where_its_gradients_are_read():
    (errors, seconds), _ = run("killed", "backward", False, True, killed=(1,))
    assert len(errors) == 3 and seconds < 60
    assert all(kind == "PeerFailed" and rank == 1 for kind, _, rank in errors), errors


@pytest.mark.skipif("pair.lacks(4)", reason="needs four GPUs")
@pytest.mark.parametrize("where, timeout", [("between", 100.0), ("backward", 20.0)])
def test_three_ranks_name_the_fourth_and_what_waits_in_a_vote_sees_its_end_at_once(where, timeout):
    zero, _, *others = run("killed", where, False, False, timeout, size=4, killed=(1,))
    for errors, seconds in (zero, *others):
        print(f"killed {where}: told after {seconds:.1f} s")
        assert len(errors) >= 2 and seconds < 60
        assert all(kind == "PeerFailed" and rank == 1 for kind, _, rank in errors), errors


@pytest.mark.parametrize("backend", ("gloo", ""))
def test_a_rank_that_stands_still_is_named(backend):
    (errors, seconds), answer = run(
        "killed", "forward", True, False, 20.0, killed=(1,), backend=backend
    )
    assert answer is None and seconds < 60
    for kind, text, rank in errors:
        assert kind == "PeerFailed" and rank == 1, text


def test_what_cannot_be_trained_is_refused_by_name():
    for found in run("refused"):
        assert "FullyShardedDataParallel (FSDP1): expected DistributedData" in found["FSDP1"]
        assert "DeepSpeed's DeepSpeedEngine" in found["DeepSpeed"]
        assert "'0.1' is a SyncBatchNorm" in found["SyncBatchNorm"]
        assert "the communication hook '<lambda>': expected fp16_compress_hook" in found["hook"]
        assert "expected the plain model, or no group" in found["group=False"]
        assert "group is 3: expected True or a ProcessGroup" in found["group=3"]
        assert "group_timeout is 0: expected seconds above 0" in found["group_timeout"]
        assert "expected the same model, version and options" in found["sizes"]
        assert len(found["alone"]) == 1 and "pass group=True" in found["alone"][0]
        assert "sparse gradient" in found["sparse"]
        assert "3 on one rank, 4 on another" in found["key"]


def test_ranks_that_disagree_are_refused_with_both_values():
    sentences = {
        "clip": "rank 0 has clip 1.0, and rank 1 has clip 2.0: expected the same",
        "clip on one": "rank 0 has clip None, and rank 1 has clip 0.5: expected the same",
        "scaler": "rank 0 has scaler NoneType, and rank 1 has scaler GradScaler: expected",
        "normalizer": "rank 0 has normalizer None, and rank 1 has normalizer given: expected",
        "buckets": "rank 0 has buckets of bytes (1048576, 1048576), and rank 1 has buckets of "
        "bytes (1048576, 2097152): expected",
        "optimizer": "rank 0 has an optimizer of 2 parameters",
    }
    for found in run("disagreeing"):
        for name, sentence in sentences.items():
            kind, text = found[name]
            assert kind == "ValueError" and sentence in text, (name, text)
        for name, sentence in (
            ("a wrong clip on one", "clip is -1.0: expected"),
            ("a wrong option on one", "micro_start is -1: expected"),
        ):
            assert sentence in found[name][1], found[name]
        assert found["fine"] is None
        for kind, text in found["keys"]:
            assert kind == "ValueError"
            assert "rank 0 is {'x': ...}, and that of rank 1 is {'mask': {'m': ...}, 'x': ...}" in (
                text
            )
        assert found["unchanged"] and found["same"]


def test_groups_of_nccl_are_aborted_at_once():
    both = threading.Barrier(2)  # an abort waits for kernels of the other group

    class Backend:
        is_over = False

        def abort(self):
            both.wait(timeout=60)
            self.is_over = True

    backends = [Backend(), Backend()]
    abort_all(backends)
    assert all(backend.is_over for backend in backends)
