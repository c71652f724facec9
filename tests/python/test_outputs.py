"""What loss_fn returns beside the loss: each sample is counted once, whatever happens."""

import collections

import pytest
import torch

import rebatch.torch as rebatch
from models import fails_above, make, out_of_memory, step_or_backward


def with_extras(make_extras):
    def loss_fn(model, samples):
        x, y = samples
        predicted = model(x)
        return ((predicted - y) ** 2).mean(), make_extras(predicted, y)

    return loss_fn


def limited(loss_fn, largest, where):
    """loss_fn runs out of memory for more samples, in its forward or backward pass."""

    def run(model, samples):
        if where == "forward" and len(samples[0]) > largest:
            out_of_memory(None)
        loss, extras = loss_fn(model, samples)
        if where == "backward" and len(samples[0]) > largest:
            loss.register_hook(out_of_memory)
        return loss, extras

    return run


def make_step(loss_fn, kind="step", **options):
    model, batch, _ = make("mlp")
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = step_or_backward(kind, model, optimizer, loss_fn, log_level="quiet", **options)
    return step, batch


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
@pytest.mark.parametrize("kind", ("step", "backward"))
def test_each_sample_is_in_the_outputs_once(where, gradients, kind):
    loss_fn = with_extras(
        lambda predicted, y: {
            "predicted": predicted,
            "positive": rebatch.Sum((predicted > 0).sum()),
            "seen": rebatch.Sum(len(y)),
            "names": [f"{value:.3f}" for value in y.tolist()],
        }
    )
    step, batch = make_step(limited(loss_fn, 4, where), kind, gradients=gradients, grow_after=2)
    for _ in range(6):  # sizes that are tried again when it may grow
        step(batch)
        predicted = step.model(batch[0]).detach()
        assert torch.allclose(step.outputs["predicted"], predicted, atol=1e-6)
        assert not step.outputs["predicted"].requires_grad
        assert step.outputs["positive"] == (predicted > 0).sum()
        assert step.outputs["seen"] == 16
        assert step.outputs["names"] == [f"{value:.3f}" for value in batch[1].tolist()]


def test_an_oom_after_the_last_micro_batch_starts_them_again():
    """Clipping fails once: the batch runs again from zero_grad."""
    step, batch = make_step(with_extras(lambda p, y: p), micro_start=4)
    left, finish = [1], step._training.program.update.finish_gradients

    def fail_once():
        if left and left.pop():
            out_of_memory(None)
        finish()

    step._training.program.update.finish_gradients = fail_once
    step(batch)
    assert step.report.redone_samples == 16 and step.outputs.shape == (16,)


def test_a_loss_alone_leaves_no_outputs():
    model, batch, loss_fn = make("mlp")
    step, _ = make_step(loss_fn)
    step(batch)
    assert step.outputs is None


def test_a_step_that_fails_has_no_outputs():
    step, batch = make_step(with_extras(lambda p, y: p))
    step(batch)
    step.loss_fn = fails_above(step.loss_fn, 0)
    with pytest.raises(rebatch.Exhausted):
        step(batch)
    assert step.outputs is None


def test_evaluation_has_outputs_of_its_own():
    step, batch = make_step(with_extras(lambda p, y: p))
    step(batch)
    trained = step.outputs
    step.loss_fn = limited(step.loss_fn, 4, "forward")
    loss = step.evaluate(batch)
    assert step.evaluation_report.micro == 4
    assert torch.allclose(step.evaluation_outputs, step.model(batch[0]))
    assert loss.dim() == 0 and step.outputs is trained


def test_outputs_stay_when_the_program_writes_over_what_they_were_made_of():
    shown = torch.zeros(16)

    def loss_fn(model, samples):
        predicted = model(samples[0])
        shown[: len(predicted)] = predicted.detach()
        return predicted.mean(), {"shown": shown[: len(predicted)]}

    step, batch = make_step(loss_fn, micro_start=4)
    step(batch)
    assert torch.allclose(step.outputs["shown"], step.model(batch[0]))


@pytest.mark.parametrize(
    "extras, sentence",
    (
        (lambda p, y: p.mean(), "the value beside the loss that loss_fn returned is a scalar"),
        (lambda p, y: {"acc": 0.5}, "'acc' that loss_fn returned is a scalar: expected a tensor"),
        (lambda p, y: {"acc": p.sum()}, "rebatch.Sum(value), which is summed"),
        (lambda p, y: {"acc": p.mean()}, "rebatch.Mean(value), which is averaged over the samples"),
        (lambda p, y: {"what": object()}, "'what' that loss_fn returned is a object"),
        (lambda p, y: (p, object()), "entry 1 of the value beside the loss that loss_fn returned"),
        (lambda p, y: (p,) * len(y), "is a tuple of 5 for one micro-batch and of 1 for another"),
        (lambda p, y: {str(len(y)): p} if len(y) == 1 else {}, "for another: expected the same"),
    ),
)
def test_what_cannot_be_joined_is_said_with_its_name(extras, sentence):
    step, batch = make_step(with_extras(extras), micro_start=5)
    with pytest.raises(ValueError) as caught:
        step(batch)
    assert sentence in str(caught.value)


def test_a_tuple_of_three_is_no_result():
    step, batch = make_step(lambda model, samples: (model(samples[0]).mean(), 1, 2))
    with pytest.raises(ValueError, match="returned 3 values: expected a loss, or a loss and one"):
        step(batch)
    with pytest.raises(TypeError, match="Sum was given a str: expected a number or a tensor"):
        rebatch.Sum("much")
    with pytest.raises(TypeError, match="Mean was given a list: expected a number or a tensor"):
        rebatch.Mean([1.0])


@pytest.mark.parametrize("micro", (16, 4, 5))  # 16 samples, the last micro-batch of one
def test_a_mean_is_that_of_the_batch_whatever_the_cut(micro):
    def means(predicted, y):
        squares = (predicted - y) ** 2
        positive = predicted > 0
        return {
            "loss": rebatch.Mean(squares.mean()),
            "half": rebatch.Mean(squares.mean().to(torch.bfloat16)),
            "all": {"positive": rebatch.Mean(positive.float().mean()), "one": rebatch.Mean(1)},
            "fields": rebatch.Mean(torch.stack([predicted.mean(), y.mean()])),
        }

    step, (x, y) = make_step(with_extras(means), micro_start=micro)
    loss = step((x, y))
    predicted = step.model(x).detach()
    found = step.outputs
    assert torch.equal(found["loss"], loss) and found["half"].dtype == torch.float32
    assert torch.allclose(found["half"], loss, rtol=0.01) and found["all"]["one"] == 1
    assert torch.isclose(found["all"]["positive"], (predicted > 0).float().mean())
    assert torch.allclose(found["fields"], torch.stack([predicted.mean(), y.mean()]), atol=1e-6)
    step.evaluate((x, y))
    assert torch.isclose(step.evaluation_outputs["loss"], loss)


def test_a_mean_counts_each_sample_once_after_an_oom():
    means = with_extras(lambda predicted, y: rebatch.Mean((predicted - y).mean()))
    step, (x, y) = make_step(limited(means, 3, "backward"))
    step((x, y))
    assert step.report.ooms and torch.isclose(step.outputs, (step.model(x) - y).mean(), atol=1e-6)


# ---- batch_dim ----


def of_sequences(make_extras):
    def loss_fn(model, part):
        out, hidden = model(part)
        return out.square().mean(), make_extras(out, hidden)

    return loss_fn


@pytest.mark.parametrize("micro", (8, 4, 3))
def test_with_batch_dim_results_are_joined_where_their_samples_are(micro):
    torch.manual_seed(0)
    gru, x = torch.nn.GRU(3, 5, num_layers=2), torch.randn(7, 8, 3)
    loss_fn = of_sequences(
        lambda out, hidden: {
            "hidden": hidden,  # (layers, samples, width)
            "last": out[-1],  # (samples, width)
            "norm": out.square().mean(dim=(0, 2)),  # (samples,)
            "by time": out.mean(2),  # (time, samples)
        }
    )
    optimizer = torch.optim.SGD(gru.parameters(), 0.0)
    step = rebatch.Step(gru, optimizer, loss_fn, batch_dim=1, micro_start=micro)
    step(x)
    out, hidden = gru(x)
    expected = {"hidden": hidden, "last": out[-1], "norm": out.square().mean(dim=(0, 2))}
    for name, value in expected.items():
        assert torch.allclose(step.outputs[name], value, atol=1e-6), name
    assert torch.allclose(step.outputs["by time"], out.mean(2), atol=1e-6)
    step.evaluate(x)
    assert torch.allclose(step.evaluation_outputs["hidden"], hidden, atol=1e-6)


@pytest.mark.parametrize("micro", (8, 3))
def test_a_state_that_is_carried_comes_back_as_the_model_returned_it(micro):
    torch.manual_seed(0)
    lstm, x = torch.nn.LSTM(3, 5, num_layers=2), torch.randn(7, 8, 3)
    Both = collections.namedtuple("Both", "state loss")

    def loss_fn(model, part):
        out, hidden = model(part)
        loss = out.square().mean()
        return loss, Both(hidden, rebatch.Mean(loss))

    optimizer = torch.optim.SGD(lstm.parameters(), 0.0)
    step = rebatch.Step(lstm, optimizer, loss_fn, batch_dim=1, micro_start=micro)
    loss, (_, expected) = step(x), lstm(x)
    assert type(step.outputs) is Both and torch.isclose(step.outputs.loss, loss)
    assert len(step.outputs.state) == 2
    for found, state in zip(step.outputs.state, expected):
        assert torch.allclose(found, state, atol=1e-6)


def test_a_result_without_the_samples_of_batch_dim_is_said_in_the_first_step():
    gru = torch.nn.GRU(3, 5)
    loss_fn = of_sequences(lambda out, hidden: out.flatten(0, 1))
    step = rebatch.Step(gru, torch.optim.SGD(gru.parameters(), 0.0), loss_fn, batch_dim=1)
    with pytest.raises(ValueError, match=r"of shape \(56, 5\) for 8 samples: expected one entry"):
        step(torch.randn(7, 8, 3))


def test_entries_of_lists_hold_no_graph_of_autograd():
    """Which would hold what the pass has saved."""

    def make_extras(predicted, y):
        return [predicted[0], {"a": (predicted[1], "b")}, [predicted[2]]]

    model, batch, _ = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = rebatch.Step(model, optimizer, with_extras(make_extras))
    step(batch)
    first, second, third = step.outputs
    found = [first, second["a"][0], third[0]]
    assert not any(t.requires_grad for t in found) and second["a"][1] == "b"
