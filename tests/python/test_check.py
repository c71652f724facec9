"""Step.check(): each mistake is found and named; correct steps have none."""

import pytest
import torch

import rebatch.torch as rebatch
from models import fails_above, make, same_bits, state_of


def check(kind, loss_fn=None, accept=(), **options):
    model, batch, its_loss = make(kind)
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn or its_loss, **options
    )
    before = state_of(model), torch.get_rng_state()
    found = step.check(batch, accept=accept)
    assert same_bits(state_of(model), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(p.grad is None for p in model.parameters())
    return found


def kinds(found):
    return [f.kind for f in found.findings if f.is_mistake]


@pytest.mark.parametrize("kind", ("mlp", "gpt"))
def test_a_correct_step_has_no_mistake(kind):
    found = check(kind)
    assert found and kinds(found) == []
    assert str(found).endswith("runs, 0 mistakes")


def summed(model, samples):
    return ((model(samples[0]) - samples[1]) ** 2).sum()


def test_a_loss_that_is_summed_is_named():
    found = check("mlp", summed)
    assert kinds(found) == ["sum"]
    assert "return the mean" in str(found)


def test_a_mean_with_a_normalizer_is_named():
    mean = lambda model, samples: summed(model, samples) / len(samples[0])
    assert kinds(check("mlp", mean, normalizer=lambda batch: 16.0)) == ["mean_with_normalizer"]
    assert check("mlp", summed, normalizer=lambda batch: 16.0)


def test_a_mean_over_tokens_is_named():
    def masked_mean(model, samples):
        x, y = samples
        mask = (torch.arange(len(y)) < 3).float() + (y > 0.5)
        return (((model(x) - y) ** 2) * mask).sum() / mask.sum()

    found = check("mlp", masked_mean)
    assert kinds(found) == ["cut"] and "pass a normalizer" in str(found)


def test_batch_norm_is_named_with_its_module():
    found = check("conv")
    assert kinds(found) == ["batch_norm"] and "'body.1'" in str(found)
    for part in ("statistics of a micro-batch", "GroupNorm", "SyncBatchNorm", "micro_allowed=[N]",
                 'accept="batch_norm"'):
        assert part in str(found)


@pytest.mark.parametrize("accept", ("batch_norm", ["batch_norm"], ("sum", "batch_norm")))
def test_batch_norm_that_is_accepted_is_a_note(accept):
    found = check("conv", accept=accept)
    assert found and [(f.kind, f.is_mistake) for f in found.findings] == [("batch_norm", False)]
    assert "'body.1'" in str(found) and "accept=" not in str(found)


def test_other_mistakes_are_found_beside_an_accepted_one():
    assert kinds(check("conv", summed, accept="batch_norm")) == ["sum"]
    assert check("conv", summed, accept=["batch_norm", "sum"])


def test_what_is_accepted_is_the_name_of_a_mistake():
    with pytest.raises(ValueError, match="accept has 'batchnorm': did you mean 'batch_norm'?"):
        check("mlp", accept="batchnorm")
    with pytest.raises(ValueError, match="accept has 7: expected some of 'batch_norm', "):
        check("mlp", accept=[7])
    with pytest.raises(TypeError, match="accept is 7: expected"):
        check("mlp", accept=7)


@pytest.mark.parametrize(
    "options", ({"micro_allowed": [4]}, {"micro_largest": 4, "micro_multiple_of": 4},
                {"micro_largest": 4, "micro_smallest": 4})
)
def test_batch_norm_of_one_size_is_a_note(options):
    found = check("conv", **options)
    assert found and [f.kind for f in found.findings] == ["batch_norm"]
    assert "the size is always 4" in str(found)
    assert kinds(check("conv", micro_multiple_of=4)) == ["batch_norm"]


def test_a_hidden_generator_is_named():
    generator = torch.Generator()

    def noisy(model, samples):
        x, y = samples
        return ((model(x + torch.randn(x.shape, generator=generator)) - y) ** 2).mean()

    assert kinds(check("mlp", noisy)) == ["not_repeatable"]


def test_dropout_is_a_note():
    assert [f.kind for f in check("mlp").findings] == ["dropout"]


def test_more_samples_than_fit_are_checked_at_the_size_that_fits():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), fails_above(loss_fn, 5)
    )
    assert step.check(batch)
