"""The comparison of losses by itself when a batch is first cut: it warns of a loss that depends on
the cut, is silent for one that does not, and leaves the training as it was."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

import rebatch.torch as rebatch
from rebatch._library import EventKind, LogLevel
from models import Unseen, fails_above, make, same_bits, state_of


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05)


def warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, rebatch.CutWarning)]


def warnings_of(kind, loss_fn=None, steps=5, where="forward", **options):
    model, batch, its_loss = make(kind)
    limited = fails_above(loss_fn or its_loss, 8, where)
    step = rebatch.Step(model, sgd(model), limited, log_level="quiet", growth=False, **options)

    def run():
        for _ in range(steps):
            step(batch)

    return warned(run)


def summed(model, samples):
    return ((model(samples[0]) - samples[1]) ** 2).sum()


def test_a_sum_is_named_with_both_losses_once():
    (text,) = warnings_of("mlp", summed)
    assert text.startswith("rebatch: step 1: the loss of samples 0-7 is ")
    whole, parts = (float(text.split(word)[1].split()[0]) for word in (" 0-7 is ", "batch and "))
    assert whole == pytest.approx(4 * parts, rel=2e-3)
    assert "4 times as large" in text and "return the mean, or pass a normalizer" in text


def test_a_step_with_on_event_is_told_there():
    told = []
    assert warnings_of("mlp", summed, on_event=lambda *said: told.append(said)) == []
    ((text, event),) = [(t, e) for t, e in told if e.kind == EventKind.CUT]
    assert text.startswith("rebatch: step 1: the loss of samples 0-7 is ")
    assert (event.level, event.step, event.batch, event.micro_after) == (LogLevel.WARN, 1, 16, 8)
    assert event.text.decode() == text


def test_nothing_is_said_where_nothing_is_cut():
    model, batch, _ = make("mlp")
    step = rebatch.Step(model, sgd(model), summed)
    assert warned(lambda: step(batch)) == []


def test_one_allowed_size_is_no_cut_of_memory():
    model, batch, _ = make("mlp")
    step = rebatch.Step(model, sgd(model), summed, micro_allowed=[4])
    assert warned(lambda: step(batch)) == []


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("kind", ("mlp", "gpt"))
def test_correct_losses_with_dropout_are_silent(kind, where):
    assert warnings_of(kind, where=where) == []


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", ("mlp", "gpt"))
def test_rounding_to_16_bits_is_silent(kind, dtype):
    for seed in range(5):
        torch.manual_seed(seed)
        assert warnings_of(kind, autocast=dtype) == []


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_models_in_another_precision_are_silent(dtype):
    model, (x, y), loss_fn = make("mlp")
    step = rebatch.Step(model.to(dtype), sgd(model), loss_fn, micro_start=4, log_level="quiet")
    assert warned(lambda: [step((x.to(dtype), y.to(dtype))) for _ in range(5)]) == []


def test_a_wrong_loss_in_16_bits_is_named():
    def mean_over_tokens(model, samples):
        x, y = samples
        mask = (y > 0).float()
        return ((model(x) - y) ** 2 * mask).sum() / mask.sum()

    (text,) = warnings_of("mlp", mean_over_tokens, autocast=torch.bfloat16)
    assert "class weights" in text and "pass a normalizer" in text


def test_batch_norm_is_named_with_its_module():
    (text,) = warnings_of("conv")
    assert "BatchNorm ('body.1') normalizes by the statistics of a micro-batch" in text


def test_batch_norm_in_evaluation_mode_is_silent():
    model, batch, loss_fn = make("conv")
    step = rebatch.Step(model.eval(), sgd(model), fails_above(loss_fn, 8), log_level="quiet")
    assert warned(lambda: step(batch)) == []


def test_a_sum_beside_batch_norm_is_the_sum():
    (text,) = warnings_of("conv", summed)
    assert "sums over its samples" in text


def test_a_sum_with_a_normalizer_is_silent_and_a_mean_is_named():
    normalizer = lambda batch: float(len(batch[1]))
    assert warnings_of("mlp", summed, normalizer=normalizer) == []
    (text,) = warnings_of("mlp", normalizer=normalizer)
    assert "although there is a normalizer" in text


def test_a_loss_over_pairs_says_what_works():
    def contrastive(model, samples):
        z = F.normalize(model.body[0](samples[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    (text,) = warnings_of("mlp", contrastive)
    assert "a loss over pairs of samples needs micro_smallest=<the batch's size>" in text


def test_a_loss_over_pairs_kept_whole_is_exact():
    """micro_smallest is the batch, so memory makes the step lighter, and no bit changes."""

    def contrastive(model, samples):
        z = F.normalize(model[2](model[1](model[0](samples))), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    def run(fails):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        rungs = [rebatch.checkpointing(model[0], model[2])]
        is_light = []
        rungs.append(is_light.append)

        def limited(model, samples):
            loss = contrastive(model, samples)
            if fails and not is_light:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss

        step = rebatch.Step(
            model, sgd(model), limited, micro_smallest=16, lighten=rungs, log_level="quiet"
        )
        losses = []
        said = warned(lambda: losses.extend(float(step(torch.randn(16, 8))) for _ in range(3)))
        assert said == [] and step.report.micro == 16
        return losses, state_of(model), step.report.lighten_level

    plain, light = run(False), run(True)
    assert light[2] == 2 and plain[2] == 0
    assert plain[0] == light[0] and same_bits(plain[1], light[1])


def class_weights(model, samples):
    weight = torch.tensor([1.0, 20.0])
    return F.cross_entropy(model(samples[0]), samples[1], weight=weight)


def count_without_gradients(loss_fn, lengths):
    """`lengths[0]` gets the samples of each run of a comparison."""

    def counted(model, samples):
        if not torch.is_grad_enabled():
            lengths[0].append(len(samples[0]))
        return loss_fn(model, samples)

    return counted


def run_after_an_oom_in_backward(loss_fn, steps=3):
    """(what was said, how often loss_fn ran) with a batch whose last samples alone differ."""
    torch.manual_seed(0)
    model, calls = torch.nn.Linear(4, 2), Unseen([])
    batch = torch.randn(16, 4), torch.tensor([0] * 12 + [1, 0, 0, 0])

    def counted(model, samples):
        calls[0].append(len(samples[0]))
        return loss_fn(model, samples)

    limited = fails_above(counted, 4, "backward")
    step = rebatch.Step(model, sgd(model), limited, growth=False, log_level="quiet")
    return warned(lambda: [step(batch) for _ in range(steps)]), calls[0]


def test_the_loss_of_a_failed_attempt_is_compared_and_nothing_runs_for_it():
    plain = lambda model, samples: F.cross_entropy(model(samples[0]), samples[1])
    assert run_after_an_oom_in_backward(plain, steps=1) == ([], [16, 8] + [4] * 4)


def test_where_the_loss_of_a_failed_attempt_is_another_the_whole_batch_is_compared():
    """All of the first samples are of one class."""
    (text,), _ = run_after_an_oom_in_backward(class_weights, steps=1)
    assert text.startswith("rebatch: step 0: the loss of samples 0-15 is ")
    assert "in micro-batches of 4" in text and "class weights" in text


def test_a_failed_attempt_that_drew_random_numbers_tells_nothing():
    """Its loss differs from that of the micro-batches, as they draw others."""

    def drops(model, samples):
        return F.cross_entropy(model(F.dropout(samples[0], 0.9)), samples[1])

    texts, calls = run_after_an_oom_in_backward(drops)
    assert texts == [] and len(calls) > 14


def test_a_step_in_which_memory_ran_out_does_not_wait_for_a_comparison():
    model, batch, _ = make("mlp")
    lengths = Unseen([])
    limited = fails_above(count_without_gradients(summed, lengths), 8)
    step = rebatch.Step(model, sgd(model), limited, growth=False, log_level="quiet")
    assert warned(lambda: step(batch)) == [] and step.report.ooms and lengths[0] == []
    assert len(warned(lambda: step(batch))) == 1 and lengths[0][:5] == [2, 2, 2, 2, 8]


def test_where_memory_runs_out_in_each_step_they_are_compared_all_the_same():
    model, batch, _ = make("mlp")
    left = Unseen(0)

    def loss_fn(model, samples):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return summed(model, samples)

    step = rebatch.Step(
        model,
        sgd(model),
        loss_fn,
        micro_start=8,
        growth=False,
        log_level="quiet",
        micro_smallest=2,
        lighten=[lambda on: None] * 2,
    )

    def run():
        left[0] = 1
        step(batch)
        return step.report.ooms

    said = [warned(lambda: ooms.append(run())) for ooms in [[]] for _ in range(3)]
    assert [len(texts) for texts in said] == [0, 0, 1]


def test_a_much_smaller_size_is_compared_again():
    model, batch, its_loss = make("mlp")
    lengths, largest = Unseen([]), [8]

    def limited(model, samples):
        return fails_above(its_loss, largest[0])(model, samples)

    step = rebatch.Step(
        model,
        sgd(model),
        count_without_gradients(limited, lengths),
        growth=False,
        log_level="quiet",
    )

    def compared_after(steps):
        for _ in range(steps):
            step(batch)
        found = lengths[0].copy()
        lengths[0].clear()
        return found

    # In the first batch without an OOM, then after 1, 2 and 4 more.
    assert compared_after(1 + 1 + 1 + 2 + 4) == [2, 2, 2, 2, 8] * 4
    largest[0] = 4
    assert compared_after(2) == [1, 1, 1, 1, 4]
    assert compared_after(15) == [] and compared_after(1) == [1, 1, 1, 1, 4]


def test_where_no_numbers_are_drawn_operations_are_not_watched(monkeypatch):
    def watched():
        raise AssertionError("FixedDraws was made")

    monkeypatch.setattr("rebatch.torch._first_cut.FixedDraws", watched)
    assert warnings_of("mlp") == []  # its dropout is off


def test_the_training_goes_on_as_if_nothing_had_been_compared():
    """Parameters, buffers, generators, mode, variables and the batch of a comparison."""
    counts = []

    def run(compares):
        model, batch, _ = make("conv")
        model.body.insert(0, torch.nn.Dropout(0.2))
        counts.clear()

        def loss_fn(model, samples):
            counts.append(len(samples[1]))
            samples[0].mul_(1.1)
            return ((model(samples[0]) + torch.rand(()) - samples[1]) ** 2).mean()

        step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
        step._training.callbacks.cuts.is_done = not compares
        texts = warned(lambda: [step(batch) for _ in range(3)])
        assert bool(texts) is compares
        return state_of(model), copy.copy(counts), batch[0].clone(), torch.rand(3)

    plain, compared = run(False), run(True)
    assert same_bits(plain[0], compared[0]) and plain[1] == compared[1] == [4] * 12
    assert torch.equal(plain[2], compared[2]) and torch.equal(plain[3], compared[3])


def test_an_oom_in_a_comparison_is_dropped_and_it_is_tried_again():
    model, batch, _ = make("mlp")
    calls = itertools.count()

    def loss_fn(model, samples):
        if not torch.is_grad_enabled():
            if next(calls) < 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return summed(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    assert warned(lambda: [step(batch) for _ in range(2)]) == []
    assert len(warned(lambda: step(batch))) == 1
    assert warned(lambda: [step(batch) for _ in range(9)]) == []


def test_what_cannot_be_compared_is_said():
    model, batch, its_loss = make("mlp")

    def loss_fn(model, samples):
        if len(samples[1]) == 1:
            raise KeyError("one sample")
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    (text,) = warned(lambda: step(batch))
    assert "could not be compared at two cuts (KeyError: 'one sample')" in text


def test_a_gradient_penalty_is_compared():
    def penalty(model, samples):
        x = samples[0].clone().requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return ((out - samples[1]) ** 2).mean() + gradient.square().sum(1).mean()

    assert warnings_of("mlp", penalty) == []
    (text,) = warnings_of("mlp", lambda m, s: penalty(m, s) * len(s[1]))
    assert "sums over its samples" in text


def test_multiples_hold_in_a_comparison():
    model, batch, its_loss = make("mlp")
    seen = []

    def loss_fn(model, samples):
        seen.append(len(samples[1]))
        return its_loss(model, samples)

    options = {"micro_start": 8, "micro_multiple_of": 4, "growth": False}
    step = rebatch.Step(model, sgd(model), loss_fn, **options)
    assert warned(lambda: step(batch)) == []
    assert set(seen) == {8}  # what a comparison has appended is taken back


def test_beside_other_ranks_a_step_of_one_rank_compares_nothing(monkeypatch):
    """Its model may wait for the others in a forward pass."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    model, batch, _ = make("mlp")
    counts = itertools.count()

    def loss_fn(model, samples):
        next(counts)
        return summed(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    assert warned(lambda: step(batch)) == [] and next(counts) == 4


@pytest.mark.parametrize("micro", (2, 4, 8, 16))
def test_comparisons_run_few_samples_and_none_backward(micro):
    """From 16 samples on no more than one micro-batch runs forward. Of 64 batches 1st, 2nd, 4th,
    8th ... are compared."""
    model, batch, its_loss = make("mlp", samples=32)
    lengths = Unseen([])
    counted = count_without_gradients(its_loss, lengths)
    step = rebatch.Step(model, sgd(model), counted, micro_start=micro, growth=False)
    size = min(micro, 8)
    assert warned(lambda: [step(batch) for _ in range(64)]) == []
    part = -(-size // 4)
    assert lengths[0] == ([part] * (size // part) + [size]) * 7


def with_rare(seed, loss_fn, samples=16, share=0.15):
    """The texts of warnings in 12 steps in micro-batches of 4, with a rare class, lengths that
    differ, and a loss of samples, classes and lengths."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)

    def run():
        for _ in range(12):
            lengths = torch.randint(5, 9, (samples, 1))
            mask = (torch.arange(8) < lengths).float()
            step((torch.randn(samples, 8), (torch.rand(samples) < share).long(), mask))

    return warned(run)


def mean_over_padding(model, samples):
    error = (model(samples[0]).sum(1, keepdim=True) - samples[0]) ** 2
    return (error * samples[2]).sum() / samples[2].sum()


def contrastive(model, samples):
    z = F.normalize(model(samples[0]), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


@pytest.mark.parametrize("loss_fn", (class_weights, mean_over_padding, contrastive))
def test_whatever_the_seed_a_loss_that_depends_on_the_cut_is_named_once(loss_fn):
    assert [len(with_rare(seed, loss_fn)) for seed in range(20)] == [1] * 20


def test_whatever_the_seed_a_mean_is_silent():
    plain = lambda model, samples: F.cross_entropy(model(samples[0]), samples[1])
    assert [with_rare(seed, plain) for seed in range(10)] == [[]] * 10


def test_the_samples_of_a_batch_that_differ_most_are_compared():
    """All samples are of one class, but for one among the last ones."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    batch = torch.randn(64, 8), torch.tensor([0] * 58 + [1] + [0] * 5)
    step = rebatch.Step(model, sgd(model), class_weights, micro_start=8, growth=False)
    (text,) = warned(lambda: step(batch))
    assert text.startswith("rebatch: step 0: the loss of samples 56-63 is ")


def test_a_comparison_leaves_what_lies_deep_in_containers():
    """Sets stay sets, and tensors at any depth, in variables of the program too, as they were."""
    model, batch, its_loss = make("mlp")
    model.deep = {"a": [{"b": ({"sum": torch.zeros(())}, {1})}]}
    outside = {"rows": [[{"sum": torch.zeros(())}]], "seen": [{0}]}

    def loss_fn(model, samples):
        sums, seen = model.deep["a"][0]["b"]
        sums["sum"] += 1
        seen.add(len(seen) + 1)
        outside["rows"][0][0]["sum"] += 1
        outside["seen"][0].add(len(outside["seen"][0]))
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, log_level="quiet")
    step(batch)
    sums, seen = model.deep["a"][0]["b"]
    assert sums["sum"] == 4 and seen == {1, 2, 3, 4, 5}
    assert outside["rows"][0][0]["sum"] == 4 and outside["seen"][0] == {0, 1, 2, 3, 4}
