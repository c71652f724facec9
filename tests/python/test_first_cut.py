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
    assert text.startswith("rebatch: step 0: the loss of samples 0-3 and 8-11 is ")
    whole, parts = (float(text.split(word)[1].split()[0]) for word in (" 8-11 is ", "batch and "))
    assert whole == pytest.approx(2 * parts, rel=2e-3)
    assert "2 times as large" in text and "return the mean, or pass a normalizer" in text


def test_a_step_with_on_event_is_told_there():
    told = []
    assert warnings_of("mlp", summed, on_event=lambda *said: told.append(said)) == []
    ((text, event),) = [(t, e) for t, e in told if e.kind == EventKind.CUT]
    assert text.startswith("rebatch: step 0: the loss of samples 0-3 and 8-11 is ")
    assert (event.level, event.step, event.batch, event.micro_after) == (LogLevel.WARN, 0, 16, 8)
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


def counting(loss_fn, lengths):
    """`lengths` gets the samples of each run of loss_fn."""

    def counted(model, samples):
        lengths.append(len(samples[0]))
        return loss_fn(model, samples)

    return counted


def test_dropout_that_is_no_module_is_the_same_for_each_sample():
    def drops(model, samples):
        return ((model(F.dropout(samples[0], 0.9)) - samples[1]) ** 2).mean()

    assert warnings_of("mlp", drops) == []


@pytest.mark.parametrize("micro, compared", ((2, [4, 2, 2]), (4, [8, 4, 4]), (16, [8, 4, 4])))
def test_few_samples_run_forward_twice_and_once_in_a_training(micro, compared):
    """In one micro-batch, and in two: of 32 samples 8, and no more than two micro-batches have."""
    model, batch, its_loss = make("mlp", samples=32)
    lengths = Unseen()
    counted = counting(its_loss, lengths)
    limited = fails_above(counted, micro)

    def loss_fn(model, samples):
        return (limited if torch.is_grad_enabled() else counted)(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, growth=False, log_level="quiet")
    assert warned(lambda: step(batch)) == [] and step.report.ooms
    assert lengths[:] == [micro] * (32 // micro) + compared
    lengths.clear()
    assert warned(lambda: [step(batch) for _ in range(20)]) == []
    assert lengths[:] == [micro] * (32 // micro) * 20


def test_of_a_large_batch_an_eighth_is_compared_and_at_most_16():
    for samples, half in ((96, 6), (128, 8), (512, 8)):
        model, batch, its_loss = make("mlp", samples=samples)
        lengths = Unseen()
        step = rebatch.Step(model, sgd(model), counting(its_loss, lengths), micro_start=32)
        assert warned(lambda: step(batch)) == []
        assert lengths[samples // 32 :] == [2 * half, half, half]


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


def test_after_an_oom_in_a_comparison_fewer_samples_of_the_next_batch_are_compared():
    model, batch, _ = make("mlp")
    lengths = Unseen()
    limited = counting(fails_above(summed, 4), lengths)
    step = rebatch.Step(model, sgd(model), limited, micro_start=4, growth=False, log_level="quiet")
    assert warned(lambda: step(batch)) == [] and lengths[:] == [4] * 4 + [8]
    lengths.clear()
    (text,) = warned(lambda: step(batch))
    assert lengths[:] == [4] * 4 + [4, 2, 2] and "in micro-batches of 2" in text


def test_where_memory_runs_out_in_two_comparisons_there_is_no_third():
    model, batch, its_loss = make("mlp")
    lengths = Unseen()
    limited = fails_above(its_loss, 4)

    def loss_fn(model, samples):
        lengths.append(len(samples[1]))
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return limited(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    assert warned(lambda: [step(batch) for _ in range(4)]) == []
    assert lengths[:] == [4] * 4 + [8] + [4] * 4 + [4] + [4] * 8


def test_where_the_samples_are_alike_those_of_the_next_batch_are_compared():
    """Both halves have samples of one class only, so class weights make no difference."""
    torch.manual_seed(0)
    model, lengths = torch.nn.Linear(8, 2), Unseen()
    counted = counting(class_weights, lengths)
    step = rebatch.Step(model, sgd(model), counted, micro_start=8, growth=False)
    alike = torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
    other = torch.randn(16, 8), torch.tensor([0] * 12 + [1, 0, 1, 0])
    assert warned(lambda: step(alike)) == []
    (text,) = warned(lambda: step(other))
    assert text.startswith("rebatch: step 1: ") and "class weights" in text
    assert len(lengths) == 2 * (2 + 3)


def test_a_loss_that_is_no_number_tells_nothing():
    model, batch, _ = make("mlp")
    has_failed = Unseen(False)

    def loss_fn(model, samples):
        loss = summed(model, samples)
        return loss * float("nan") if len(samples[1]) == 8 and not has_failed[0] else loss

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    assert warned(lambda: step(batch)) == []
    has_failed[0] = True
    (text,) = warned(lambda: step(batch))
    assert text.startswith("rebatch: step 1: ") and "sums over its samples" in text


def test_what_cannot_be_compared_is_said():
    model, batch, its_loss = make("mlp")

    def loss_fn(model, samples):
        if len(samples[1]) == 8:
            raise KeyError("eight samples")
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    (text,) = warned(lambda: step(batch))
    assert "could not be compared at two cuts (KeyError: 'eight samples')" in text


# ---- a loss near 0 ----


def policy_gradient(model, samples):
    """Its value is 0 but for rounding, at any cut; its gradient is not."""
    log_p = F.log_softmax(model(samples[0]), 1)[:, 0]
    advantage = samples[1] - samples[1].view(-1, 4).mean(1).repeat_interleave(4)
    return -((log_p - log_p.detach()).exp() * advantage).mean()


def warnings_near_0(loss_fn, **options):
    """Of 20 trainings."""
    texts = []
    for seed in range(20):
        torch.manual_seed(seed)
        model = torch.nn.Linear(6, 4)
        step = rebatch.Step(model, sgd(model), loss_fn, micro_start=8, growth=False, **options)
        texts += warned(lambda: [step((torch.randn(32, 6), torch.randn(32))) for _ in range(3)])
    return texts


@pytest.mark.parametrize("scale", (1, 1e4))
def test_rounding_around_0_is_no_difference(scale):
    """Of what is large, too."""
    scaled = lambda model, s: policy_gradient(model, (s[0], s[1] * scale))
    assert warnings_near_0(scaled, micro_multiple_of=4) == []


def test_of_a_loss_that_is_0_at_each_cut_the_gradients_are_compared():
    texts = warnings_near_0(lambda m, s: policy_gradient(m, s) * len(s[1]), micro_multiple_of=4)
    assert len(texts) == 20
    assert all(": the norm of the gradients of samples 0-3 and 16-19 is " in t for t in texts)
    assert all("sums over its samples" in text for text in texts)


def test_a_loss_that_tells_something_runs_no_backward_pass():
    model, batch, its_loss = make("mlp")
    backward = Unseen(0)

    def counted(model, samples):
        loss = its_loss(model, samples)
        if loss.requires_grad:
            loss.register_hook(lambda _: backward.__setitem__(0, backward[0] + 1))
        return loss

    step = rebatch.Step(model, sgd(model), counted, micro_start=4, growth=False)
    assert warned(lambda: step(batch)) == [] and backward[0] == 4


# ---- which samples ----


def views_in_pairs(model, samples):
    """Supervised contrastive, of two views that are stacked: sample i and i + n/2 are a pair."""
    e = F.normalize(model(samples[0]), dim=1)
    near = (e @ e.T / 0.1).masked_fill(torch.eye(len(e), dtype=torch.bool), -1e9)
    pairs = (samples[1][:, None] == samples[1]) & ~torch.eye(len(e), dtype=torch.bool)
    found = (near.log_softmax(1) * pairs).sum(1)[pairs.any(1)]
    return -found.sum() / max(len(found), 1)


@pytest.mark.parametrize("largest", (16, 8))
def test_pairs_that_lie_half_a_batch_apart_are_seen(largest):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 8)
    limited = fails_above(views_in_pairs, largest)
    step = rebatch.Step(model, sgd(model), limited, growth=False, log_level="quiet")
    (text,) = warned(lambda: step((torch.randn(32, 6), torch.arange(16).repeat(2))))
    assert "and 0 in micro-batches of 4" in text and "samples 0-3 and 16-19" in text


def test_images_of_other_sizes_and_their_targets_are_compared():
    """Lists of a tensor and of a dict for each sample: a loss over the boxes of a micro-batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)

    def over_boxes(model, batch):
        images, targets = batch
        found = model(torch.stack([image.mean((1, 2)) for image in images]))
        errors = [(f - t["boxes"]).abs().sum() for f, t in zip(found, targets)]
        return torch.stack(errors).sum() / max(1, sum(len(t["boxes"]) for t in targets))

    images = [torch.randn(3, 6 + i, 8) for i in range(4)]
    targets = [{"boxes": torch.rand(count, 4)} for count in (1, 3, 0, 2)]
    step = rebatch.Step(model, sgd(model), over_boxes, micro_start=2, growth=False)
    (text,) = warned(lambda: step((images, targets)))
    assert "the loss of samples 0-3 is" in text and "so the update depends on how memory" in text


def test_a_batch_that_slice_cuts_is_compared_at_its_beginning():
    model, (x, y), _ = make("mlp")
    options = {"slice": lambda b, first, n: (b[0][first : first + n], b[1][first : first + n])}
    options["length"] = lambda batch: len(batch[1])
    step = rebatch.Step(model, sgd(model), summed, micro_start=4, growth=False, **options)
    (text,) = warned(lambda: step((x, y)))
    assert ": the loss of samples 0-7 is " in text and "sums over its samples" in text


# ---- what else there may be ----


def test_the_warning_is_at_the_line_of_the_user():
    model, batch, _ = make("mlp")
    step = rebatch.Step(model, sgd(model), summed, micro_start=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(batch)
    assert caught[0].filename == __file__


def test_attention_of_higher_order_is_compared():
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)

    def attend(model, samples):
        x = samples[0][:, None]  # needs no gradient, which there is on a GPU alone
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is not compiled
            return (model(flex(x, x, x)) ** 2).mean()

    step = rebatch.Step(model, sgd(model), attend, micro_start=4, growth=False)
    assert warned(lambda: step((torch.randn(16, 4, 16),))) == []
    step = rebatch.Step(model, sgd(model), lambda m, s: attend(m, s) * len(s[0]), micro_start=4)
    (text,) = warned(lambda: step((torch.randn(16, 4, 16),)))
    assert "sums over its samples" in text


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
    assert text.startswith("rebatch: step 0: the loss of samples 24-27 and 56-59 is ")


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
