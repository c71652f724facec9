"""The comparison of gradients by itself once a batch was cut: it warns of an update that depends on
the cut, is silent for one that does not, and leaves the training as it was."""

import copy
import itertools
import random
import re
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import rebatch.torch as rebatch
from rebatch._library import EventKind, LogLevel
from rebatch.torch.check import cut_comparison
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
    assert text.startswith("rebatch: step 2: the loss of samples ")
    whole, parts = (float(text.split(word)[1].split()[0]) for word in (" is ", "batch and "))
    assert whole == pytest.approx(2 * parts, rel=2e-3)
    assert "2 times as large" in text and "return the mean, or pass a normalizer" in text


def test_a_step_with_on_event_is_told_there():
    told = []
    assert warnings_of("mlp", summed, on_event=lambda *said: told.append(said)) == []
    ((text, event),) = [(t, e) for t, e in told if e.kind == EventKind.CUT]
    assert text.startswith("rebatch: step 2: the loss of samples ")
    assert (event.level, event.step, event.batch, event.micro_after) == (LogLevel.WARN, 2, 16, 8)
    assert event.text.decode() == text


def test_nothing_is_said_where_nothing_is_cut():
    model, batch, _ = make("mlp")
    step = rebatch.Step(model, sgd(model), summed)
    assert warned(lambda: [step(batch) for _ in range(3)]) == []


def test_one_allowed_size_is_no_cut_of_memory():
    model, batch, _ = make("mlp")
    step = rebatch.Step(model, sgd(model), summed, micro_allowed=[4])
    assert warned(lambda: [step(batch) for _ in range(3)]) == []


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
    assert warned(lambda: [step(batch) for _ in range(5)]) == []


def test_a_sum_beside_batch_norm_is_the_sum():
    (text,) = warnings_of("conv", summed)
    assert "sums over its samples" in text


def test_a_sum_with_a_normalizer_is_silent_and_a_mean_is_named():
    normalizer = lambda batch: float(len(batch[1]))
    assert warnings_of("mlp", summed, normalizer=normalizer) == []
    (text,) = warnings_of("mlp", normalizer=normalizer)
    assert "although there is a normalizer" in text


@pytest.mark.parametrize(
    "value, expected",
    (
        (lambda out, y: rebatch.Mean((out - y).square().mean().sqrt()), "made of sums"),
        (
            lambda out, y: rebatch.Sum((out - y).square().mean()),
            "a mean over the samples in a rebatch.Mean",
        ),
        (lambda out, y: {"p": out.softmax(0)}, r"outputs\['p'\] of .* differs by \d"),
        (lambda out, y: (torch.stack([out.max(), out.min()]), out), r"outputs\[0\] .* is of shape"),
    ),
)
def test_what_is_beside_the_loss_and_depends_on_the_cut_is_named(value, expected):
    def loss_fn(model, samples):
        out = model(samples[0])
        return ((out - samples[1]) ** 2).mean(), value(out, samples[1])

    (text,) = warnings_of("mlp", loss_fn)
    assert re.match(r"rebatch: step [24]: outputs", text) and re.search(expected, text), text


def test_what_is_beside_the_loss_and_does_not_depend_on_it_is_silent():
    def loss_fn(model, samples):
        out = model(samples[0])
        error = (out - samples[1]).square()
        seen = {"mean": rebatch.Mean(error.mean()), "sum": rebatch.Sum(error.sum(0))}
        return error.mean(), {**seen, "rows": out.tolist(), "both": (out, error)}

    for autocast in (None, torch.bfloat16):
        assert warnings_of("mlp", loss_fn, autocast=autocast) == []


def test_a_loss_over_pairs_says_what_works():
    def contrastive(model, samples):
        z = F.normalize(model.body[0](samples[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    (text,) = warnings_of("mlp", contrastive)
    assert "a loss over pairs of samples needs embed=, or micro_smallest=<the batch's size>" in text


def test_a_loss_over_pairs_kept_whole_is_exact():
    """micro_smallest is the batch, so memory makes the step lighter, and no bit changes."""

    def contrastive(model, samples):
        z = F.normalize(model[2](model[1](model[0](samples))), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    def run(fails):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        levels = [rebatch.checkpointing(model[0], model[2])]
        is_light = []
        levels.append(is_light.append)

        def limited(model, samples):
            loss = contrastive(model, samples)
            if fails and not is_light:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss

        step = rebatch.Step(
            model, sgd(model), limited, micro_smallest=16, lighten=levels, log_level="quiet"
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


@pytest.mark.parametrize("micro", (2, 4, 16))
def test_two_samples_run_beside_three_steps_after_the_first_that_was_cut(micro):
    """In one micro-batch and in two, before micro-batches other than the first. Not in the step
    that ran out of memory."""
    model, batch, its_loss = make("mlp", samples=32)
    lengths = Unseen()
    limited = fails_above(counting(its_loss, lengths), micro)
    step = rebatch.Step(model, sgd(model), limited, growth=False, log_level="quiet")
    assert warned(lambda: step(batch)) == [] and step.report.ooms
    plain = [micro] * (32 // micro)
    assert lengths[:] == plain
    for _ in range(3):
        lengths.clear()
        assert warned(lambda: step(batch)) == []
        expected = [[n] for n in plain]
        two = 2 if micro > 2 and _ else 1
        for at, beside in zip(
            (1, 2, 3), ([2 * two], [two], [two])
        ):  # before the last one, all that are left
            expected[min(at, len(expected) - 1)][-1:-1] = beside
        assert lengths[:] == sum(expected, [])
    lengths.clear()
    assert warned(lambda: [step(batch) for _ in range(20)]) == []
    assert lengths[:] == plain * 20


def test_a_step_that_runs_out_of_memory_compares_no_further():
    model, batch, its_loss = make("mlp", samples=32)
    lengths, room = Unseen(), Unseen(8)

    def loss_fn(model, samples):
        lengths.append(len(samples[1]))
        if len(samples[1]) > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if len(lengths) == 7:
            room[0] = 4
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=8, growth=False, log_level="quiet")
    for _ in range(2):
        step(batch)
    assert step.report.ooms == 1
    assert lengths[4:] == [8, 2, 8, 1, 8, 4, 4, 4, 4]


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
        texts = warned(lambda: [step(batch) for _ in range(4)])
        assert bool(texts) is compares
        return state_of(model), copy.copy(counts), batch[0].clone(), torch.rand(3)

    plain, compared = run(False), run(True)
    assert same_bits(plain[0], compared[0]) and plain[1] == compared[1] == [4] * 16
    assert torch.equal(plain[2], compared[2]) and torch.equal(plain[3], compared[3])


def test_after_an_oom_in_a_comparison_only_losses_are_compared():
    model, batch, _ = make("mlp")
    lengths = Unseen()

    def loss_fn(model, samples):
        lengths.append(len(samples[1]))
        if len(samples[1]) == 2 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return summed(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False, log_level="quiet")
    assert warned(lambda: [step(batch) for _ in range(2)]) == []
    assert lengths[:] == [4] * 5 + [2] + [4] * 3 and not step.report.ooms
    (text,) = warned(lambda: [step(batch) for _ in range(2)])
    assert "in micro-batches of 1" in text and "sums over its samples" in text


def test_an_oom_behind_a_pass_of_a_comparison_leaves_the_generators(monkeypatch):
    """In what it tells of random numbers."""
    model, batch, its_loss = make("mlp")
    model.eval()

    def drawing(model, samples):
        return its_loss(model, samples) * (1 + random.random())

    def trained(fails):
        mine, failures = copy.deepcopy(model), Unseen(0)

        def note_draws(comparison, snapshot, mode):
            if fails:
                failures[0] += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        monkeypatch.setattr(cut_comparison.Comparison, "_note_draws", note_draws)
        options = {"micro_start": 4, "growth": False, "on_event": lambda *_: None}
        step = rebatch.Step(mine, sgd(mine), drawing, **options)
        random.seed(0)
        for _ in range(5):
            step(batch)
        assert bool(failures[0]) is fails
        return state_of(mine), random.getstate()

    failed, clean = trained(True), trained(False)
    assert same_bits(failed[0], clean[0]) and failed[1] == clean[1]


def test_where_memory_runs_out_in_two_comparisons_there_is_no_third():
    model, batch, its_loss = make("mlp")
    lengths = Unseen()

    def loss_fn(model, samples):
        lengths.append(len(samples[1]))
        if len(samples[1]) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    assert warned(lambda: [step(batch) for _ in range(5)]) == []
    assert lengths[:].count(2) == 2 and lengths[:].count(4) == 20


def test_where_the_samples_are_alike_those_of_the_next_batches_are_compared():
    """All samples are of one class, so class weights make no difference."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    step = rebatch.Step(model, sgd(model), class_weights, micro_start=8, growth=False)
    alike = torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
    other = torch.randn(16, 8), torch.tensor([0] * 12 + [1, 0, 1, 0])
    assert warned(lambda: [step(alike) for _ in range(2)]) == []
    (text,) = warned(lambda: [step(other) for _ in range(3)])
    assert text.startswith("rebatch: step 4: ") and "class weights" in text


def test_a_loss_that_is_no_number_at_each_cut_tells_nothing():
    model, batch, its_loss = make("mlp")
    nan = lambda model, samples: its_loss(model, samples) * float("nan")
    step = rebatch.Step(model, sgd(model), nan, micro_start=4, growth=False)
    assert warned(lambda: [step(batch) for _ in range(5)]) == []


def labels_are_missing(model, samples):
    return F.cross_entropy(model(samples[0]), samples[1], ignore_index=-100)


def share_of_weights(model, samples):
    """0 / 0 where no sample of a micro-batch has a weight."""
    losses = F.cross_entropy(model(samples[0]), samples[1].clamp(min=0), reduction="none")
    weights = (samples[1] >= 0).float()
    return (losses * weights).sum() / weights.sum()


def standardized(model, samples):
    x = samples[0]
    return F.cross_entropy(model((x - x.mean(0)) / x.std(0)), samples[1].clamp(min=0))


@pytest.mark.parametrize("loss_fn", (labels_are_missing, share_of_weights, standardized))
def test_a_loss_that_is_no_number_for_some_samples_alone_is_told(loss_fn):
    for seed in range(12):
        torch.manual_seed(seed)
        model = torch.nn.Linear(8, 3)
        step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)

        def run():
            for _ in range(4):
                labels = torch.randint(3, (16,))
                labels[torch.rand(16) < 0.4] = -100
                labels[::4] = 1  # in each micro-batch
                step((torch.randn(16, 8), labels))

        (text,) = warned(run)
        assert "of some samples alone is no finite number" in text and "a normalizer" in text


def test_what_cannot_be_compared_is_said():
    """At the smallest size, and at the next one."""
    model, batch, its_loss = make("mlp")

    def loss_fn(model, samples):
        if len(samples[1]) < 3:
            raise KeyError("few samples")
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=8, growth=False)
    (text,) = warned(lambda: [step(batch) for _ in range(4)])
    assert text.startswith("rebatch: step 2: the gradients could not be compared at two cuts")
    assert "(KeyError: 'few samples')" in text


def test_a_model_that_needs_cudnn_is_compared_with_it():
    """A convolution that PyTorch itself does not have in this precision, for example."""
    model, batch, _ = make("mlp")

    def loss_fn(model, samples):
        if not torch.backends.cudnn.enabled:
            raise RuntimeError("slow_conv is not implemented for 'Half'")
        return summed(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=8, growth=False)
    (text,) = warned(lambda: [step(batch) for _ in range(4)])
    assert "sums over its samples" in text and torch.backends.cudnn.enabled


def test_one_sample_that_no_micro_batch_can_have_alone_is_no_mistake():
    model, batch, its_loss = make("mlp")

    def loss_fn(model, samples):
        assert len(samples[1]) > 1
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=8, growth=False)
    assert warned(lambda: [step(batch) for _ in range(6)]) == []


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
    assert all(": the gradient of the loss of samples " in text for text in texts)
    assert all("sums over its samples" in text for text in texts)


# ---- gradients that depend on the cut, where losses do not ----


def hooked(hook):
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    for p in model.parameters():
        p.register_hook(hook)
    return model


class Unit(torch.autograd.Function):
    """Normalizes the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.norm() + 1e-8)


def classify(model, samples):
    return F.cross_entropy(model(samples[0]), samples[1])


def through_unit(model, samples):
    return F.cross_entropy(model[2](Unit.apply(model[1](model[0](samples[0])))), samples[1])


def by_frequency():
    return torch.nn.Sequential(
        torch.nn.Embedding(4, 6, scale_grad_by_freq=True), torch.nn.Linear(6, 4)
    )


def words(model, samples):
    return F.cross_entropy(model(samples[1] // 2), samples[1])


HIDDEN = {
    "clamped": (lambda: hooked(lambda g: g.clamp(-0.005, 0.005)), classify),
    "normalized": (lambda: hooked(lambda g: 0.1 * g / (g.norm() + 1e-8)), classify),
    "noise": (lambda: hooked(lambda g: g + 0.01), classify),
    "in the middle": (lambda: hooked(lambda g: g), through_unit),
    "by frequency": (by_frequency, words),
}


@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
@pytest.mark.parametrize("name", HIDDEN)
def test_a_gradient_that_depends_on_the_cut_is_told(name, dtype):
    make_model, loss_fn = HIDDEN[name]
    for seed in range(12):
        torch.manual_seed(seed)
        model = make_model()
        step = rebatch.Step(model, sgd(model), loss_fn, autocast=dtype, micro_start=4, growth=False)
        batches = [(torch.randn(32, 6), torch.randint(4, (32,))) for _ in range(4)]
        (text,) = warned(lambda: [step(batch) for batch in batches])
        assert ": the gradient of the loss of samples " in text


def token_mean(model, samples):
    return F.cross_entropy(model(samples[0]).flatten(0, 1), samples[1].flatten(), ignore_index=0)


@pytest.mark.parametrize("dtype", ("fp32", "autocast", "model"))
def test_a_mean_over_tokens_is_told(dtype):
    """Near the initialization, where it changes the loss by less than 16 bits can show."""
    options = {"autocast": torch.bfloat16} if dtype == "autocast" else {}
    for seed in range(12):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Embedding(50, 32), torch.nn.Linear(32, 64), torch.nn.GELU(),
            torch.nn.Linear(64, 50),
        )  # fmt: skip
        model.to(torch.bfloat16 if dtype == "model" else torch.float32)
        tokens = torch.randint(1, 50, (32, 25))
        tokens[torch.arange(25) > torch.randint(4, 25, (32, 1))] = 0
        step = rebatch.Step(model, sgd(model), token_mean, micro_start=8, growth=False, **options)
        batch = tokens[:, :-1], tokens[:, 1:]
        assert len(warned(lambda: [step(batch) for _ in range(4)])) == 1


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
    batch = torch.randn(32, 6), torch.arange(16).repeat(2)
    (text,) = warned(lambda: [step(batch) for _ in range(4)])
    assert "and -0 in micro-batches of 2" in text and "a loss over pairs of samples" in text


def views_that_alternate(model, samples):
    """The same, where sample 2 i and 2 i + 1 are a pair."""
    order = torch.arange(len(samples[0])).view(-1, 2).t().flatten()
    return views_in_pairs(model, (samples[0][order], samples[1][order]))


def test_views_that_alternate_are_seen():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 8)
    options = {"micro_multiple_of": 2, "micro_start": 8, "growth": False}
    step = rebatch.Step(model, sgd(model), views_that_alternate, **options)
    batch = torch.randn(32, 6), torch.arange(32) // 2
    (text,) = warned(lambda: [step(batch) for _ in range(4)])
    assert "a loss over pairs of samples" in text


def ranked(model, samples):
    """Of neighbours, the first is to be above the second; what is left over has no loss."""
    scores = model(samples[0])[:, 0]
    count = len(scores) // 2 * 2
    return -F.logsigmoid(scores[0:count:2] - scores[1:count:2]).sum() / len(scores)


def test_pairs_that_alternate_are_seen():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    step = rebatch.Step(model, sgd(model), ranked, micro_start=4, growth=False)
    (text,) = warned(lambda: [step((torch.randn(32, 6),)) for _ in range(4)])
    assert "and 0 in micro-batches of 1" in text or "and -0 in micro" in text


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
    (text,) = warned(lambda: [step((images, targets)) for _ in range(4)])
    assert "the loss of samples " in text and "so the update depends on how memory" in text


def test_of_a_batch_that_slice_cuts_neighbours_are_compared():
    model, (x, y), _ = make("mlp")
    options = {"slice": lambda b, first, n: (b[0][first : first + n], b[1][first : first + n])}
    options["length"] = lambda batch: len(batch[1])
    step = rebatch.Step(model, sgd(model), summed, micro_start=4, growth=False, **options)
    (text,) = warned(lambda: [step((x, y)) for _ in range(3)])
    first, second = map(int, text.split("the loss of samples ")[1].split(" is ")[0].split("-"))
    assert second == first + 1 and "sums over its samples" in text


# ---- what else there may be ----


def spread(model, samples):
    out = model(samples[0])
    return (out - samples[1]).square().mean() + 0 * out.detach().std(dim=0).nan_to_num().mean()


def test_passes_over_one_sample_give_no_warnings():
    """PyTorch warns of a deviation of one sample. What a program warns of is given as ever."""
    model, batch, _ = make("mlp")

    def warning(model, samples):
        warnings.warn(f"of {len(samples[0])} samples")
        return spread(model, samples)

    step = rebatch.Step(model, sgd(model), warning, micro_start=8, log_level="quiet")
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            step(batch)
        assert step.check(batch)
    assert [str(w.message) for w in caught] == 10 * ["of 8 samples"]
    assert warnings.filters == filters


def test_the_warning_is_at_the_line_of_the_user():
    model, batch, _ = make("mlp")
    step = rebatch.Step(model, sgd(model), summed, micro_start=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
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
    assert warned(lambda: [step((torch.randn(16, 4, 16),)) for _ in range(4)]) == []
    step = rebatch.Step(model, sgd(model), lambda m, s: attend(m, s) * len(s[0]), micro_start=4)
    (text,) = warned(lambda: [step((torch.randn(16, 4, 16),)) for _ in range(3)])
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
    assert warned(lambda: [step(batch) for _ in range(4)]) == []
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
    assert warned(lambda: [step(batch) for _ in range(3)]) == [] and next(counts) == 12


def test_beside_another_thread_that_trains_nothing_is_compared():
    """A comparison sets switches of PyTorch, which are of all threads."""
    has_trained, may_end = threading.Event(), threading.Event()

    def train():
        model, batch, loss_fn = make("mlp")
        step = rebatch.Step(model, sgd(model), loss_fn)
        step(batch)
        has_trained.set()
        may_end.wait()
        step(batch)

    thread = threading.Thread(target=train)
    thread.start()
    has_trained.wait()
    model, batch, _ = make("mlp")
    step = rebatch.Step(model, sgd(model), summed, micro_start=8, growth=False)
    try:
        assert warned(lambda: [step(batch) for _ in range(3)]) == []
    finally:
        may_end.set()
        thread.join()
    assert len(warned(lambda: [step(batch) for _ in range(3)])) == 1


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
    (text,) = warned(lambda: [step(batch) for _ in range(3)])
    assert "58" in text.split("the loss of samples ")[1].split(" is ")[0]
