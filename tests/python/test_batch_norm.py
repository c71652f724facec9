"""BatchNorm in training mode: no micro-batch has one sample, whatever memory and limits say."""

import copy
import warnings

import pytest
import torch

import rebatch.torch
from models import out_of_memory, same_bits, state_of


class Net(torch.nn.Module):
    """Runs out of memory for more samples than `largest`."""

    def __init__(self, largest=1000):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        )
        self.__dict__["sizes"] = Sizes(largest)

    def forward(self, x):
        out = self.body(x)
        self.sizes.note(len(x))
        return out


class Sizes:
    """Of the micro-batches that fit."""

    __slots__ = ("largest", "seen")

    def __init__(self, largest):
        self.largest, self.seen = largest, []

    def __deepcopy__(self, _memo):
        return Sizes(self.largest)

    def note(self, size):
        if size > self.largest:
            out_of_memory(None)
        self.seen.append(size)


def mean_loss(model, x):
    return model(x).square().mean()


def batch_of(samples):
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))


def step_of(model, loss_fn=mean_loss, **options):
    options = {"growth": False, "log_level": "quiet", **options}
    return rebatch.torch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, **options)


def by_hand(model, x, sizes):
    """One update of the batch in micro-batches of these sizes."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for part in x.split(sizes):
        (mean_loss(model, part) * (len(part) / len(x))).backward()
    optimizer.step()
    return state_of(model)


@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
@pytest.mark.parametrize(
    "samples, largest, options, sizes",
    (
        (9, 4, {}, [3, 3, 3]),
        (9, 3, {"micro_start": 2}, [2, 2, 2, 3]),
        (9, 3, {"micro_start": 1}, [2, 2, 2, 3]),
        (3, 3, {"micro_start": 2}, [3]),
        (9, 9, {"micro_multiple_of": 4, "micro_start": 4}, [4, 5]),
        (9, 4, {"micro_multiple_of": 2, "micro_start": 4}, [4, 2, 3]),  # 5 do not fit
        (9, 9, {"micro_allowed": [1, 2], "micro_start": 2}, [2, 2, 2, 3]),
        (9, 9, {"cost": lambda batch, first, count: count, "micro_start": 2}, [2, 2, 2, 3]),
        (8, 4, {}, [4, 4]),
    ),
)
def test_a_sample_that_is_left_joins_its_neighbour(samples, largest, options, sizes, gradients):
    model, x = Net(largest), batch_of(samples)
    expected = by_hand(copy.deepcopy(model), x, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rebatch.torch.CutWarning)
        step_of(model, gradients=gradients, **options)(x)
    ran = model.sizes.seen
    assert ran[: len(sizes)] == sizes and 1 not in ran
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(state_of(model), expected))


def test_results_have_each_sample_once():
    def loss_and_results(model, x):
        return mean_loss(model, x), {"x": x, "count": rebatch.torch.Sum(torch.tensor(len(x)))}

    step, x = step_of(Net(), loss_and_results, micro_start=2), batch_of(7)
    step(x)
    assert step.outputs["x"].equal(x) and step.outputs["count"] == 7
    assert step.report.microbatches == 4  # the last one is empty


def test_what_does_not_fit_in_pairs_is_exhausted_and_changes_nothing():
    model = Net(2)
    before = state_of(model)
    with pytest.raises(rebatch.torch.Exhausted):
        step_of(model, micro_start=2)(batch_of(9))
    assert same_bits(state_of(model), before)


@pytest.mark.parametrize("options", ({"micro_smallest": 1}, {"micro_largest": 1}))
def test_limits_of_ones_own_count(options):
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        step_of(Net(1), **options)(batch_of(4))


def test_batch_norm_in_evaluation_mode_needs_no_pairs():
    model = Net(1).eval()
    step_of(model)(batch_of(5))
    assert model.sizes.seen[:5] == [1] * 5


def test_batch_norm_that_trains_later_is_seen():
    model = Net(3).eval()
    step = step_of(model, micro_start=1)
    step(batch_of(5))
    model.train()
    model.sizes.seen.clear()
    step(batch_of(5))
    assert model.sizes.seen[:2] == [2, 3] and step.report.step == 1


def test_a_resumed_training_has_pairs():
    model = Net()
    step = step_of(model)
    step.load_state_dict({"step": 3, "micro": 1})
    step(batch_of(5))
    assert model.sizes.seen[:2] == [2, 3]


@pytest.mark.parametrize("samples, micro", ((9, 2), (10, 3), (17, 9), (33, 16)))
def test_a_comparison_of_cuts_runs_no_sample_alone(samples, micro):
    step = step_of(Net(), micro_start=micro)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(batch_of(samples))
    assert not [w for w in caught if "could not be compared" in str(w.message)]
    assert 1 not in step.model.sizes.seen


def test_a_check_runs_no_sample_alone():
    found = step_of(Net()).check(batch_of(9), accept="batch_norm")
    assert found, str(found)
