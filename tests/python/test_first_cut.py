"""The comparison of losses by itself when a batch is first cut: it warns of a loss that depends on
the cut, is silent for one that does not, and leaves the training as it was."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

import rebatch.torch as rebatch
from models import fails_above, make, same_bits, state_of


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
    assert text.startswith("rebatch: step 0: the loss of samples 0-7 is ")
    whole, parts = (float(text.split(word)[1].split()[0]) for word in (" 0-7 is ", "batch and "))
    assert whole == pytest.approx(2 * parts, rel=2e-3)
    assert "2 times as large" in text and "return the mean, or pass a normalizer" in text


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


def test_a_window_of_one_class_does_not_hide_class_weights():
    """All of the first samples are of one class; a later comparison sees others."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    y = torch.tensor([0] * 12 + [1, 0, 0, 0])

    def loss_fn(model, samples):
        weight = torch.tensor([1.0, 20.0])
        return F.cross_entropy(model(samples[0]), samples[1], weight=weight)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    texts = warned(lambda: [step((torch.randn(16, 4), y)) for _ in range(10)])
    assert len(texts) == 1 and "samples 12-15" in texts[0]


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
        step._cuts.is_done = not compares
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
        if len(samples[1]) == 2:
            raise KeyError("two samples")
        return its_loss(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    (text,) = warned(lambda: step(batch))
    assert "could not be compared at two cuts (KeyError: 'two samples')" in text


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


def test_with_other_ranks_nothing_is_compared(monkeypatch):
    """DistributedDataParallel broadcasts buffers in forward passes: one rank alone would hang."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    model, batch, _ = make("mlp")
    counts = itertools.count()

    def loss_fn(model, samples):
        next(counts)
        return summed(model, samples)

    step = rebatch.Step(model, sgd(model), loss_fn, micro_start=4, growth=False)
    assert warned(lambda: step(batch)) == [] and next(counts) == 4


def test_a_comparison_costs_less_than_a_micro_batch():
    """Each of its samples runs forward twice, and none backward; later comparisons are rare."""
    model, batch, its_loss = make("mlp")

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            counted[torch.is_grad_enabled()].append(len(x))
            return self.inner(x)

    class Counted:
        """No variable that a comparison puts back."""

        __slots__ = ("lengths",)

        def __init__(self):
            self.lengths = []

        def append(self, n):
            self.lengths.append(n)

    counted = {True: Counted(), False: Counted()}
    counting = Counting()
    step = rebatch.Step(counting, sgd(counting), its_loss, micro_start=4, growth=False)
    assert warned(lambda: [step(batch) for _ in range(8)]) == []
    assert counted[True].lengths == [4] * 32
    assert counted[False].lengths == [4, 2, 2] * 4  # after batches 1, 2, 4 and 8
