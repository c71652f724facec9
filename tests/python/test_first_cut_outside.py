"""The comparison of cuts, of a loss_fn that changes parameters outside of the model: an average of
its weights, or another network. They are as without a comparison, and the change is told."""

import copy
import warnings

import pytest
import torch

import rebatch.torch as rebatch
from models import make, same_bits

DECAY = 0.9


class Average:
    """As torch_ema has it."""

    def __init__(self, model):
        self.shadow = copy.deepcopy(model)

    def update(self, model):
        with torch.no_grad():
            for mine, p in zip(self.shadow.parameters(), model.parameters()):
                mine.lerp_(p, 1 - DECAY)


def averaged_by_pytorch(model):
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    )
    return average.update_parameters, average


def averaged_by_a_module(model):
    average = copy.deepcopy(model).requires_grad_(False)

    def update(model):
        for mine, p in zip(average.state_dict().values(), model.state_dict().values()):
            mine.copy_(DECAY * mine + (1 - DECAY) * p)

    return update, average


def averaged_through_data(model):
    average = copy.deepcopy(model)

    def update(model):
        for mine, p in zip(average.parameters(), model.parameters()):
            mine.data.mul_(DECAY).add_(p.data, alpha=1 - DECAY)

    return update, average


def another_network(model):
    network = copy.deepcopy(model)
    inner = torch.optim.SGD(network.parameters(), 0.01)

    def update(_model):
        inner.zero_grad()
        sum(p.square().sum() for p in network.parameters()).backward()
        inner.step()

    return update, network


def a_copy(model):
    """Of the weights that the batch begins with, in each micro-batch."""
    teacher = copy.deepcopy(model)
    return lambda model: teacher.load_state_dict(model.state_dict()), teacher


CHANGES = (averaged_by_pytorch, averaged_by_a_module, averaged_through_data, another_network)


def train(change, compares=True, has_state=False, steps=6):
    """The parameters that loss_fn changes, and what was told."""
    model, (x, y), loss_fn = make("mlp")
    update, other = change(model)

    def changing(model, samples):
        update(model)
        return loss_fn(model, samples) + 0 * other(samples[0]).sum().detach()

    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.05),
        changing,
        micro_start=4,
        growth=False,
        log_level="quiet",
        state=[other] if has_state else [],
    )
    step._training.callbacks.cuts.is_done = not compares
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step((x, y))
    return [p.detach().clone() for p in other.parameters()], [str(w.message) for w in caught]


@pytest.mark.parametrize("has_state", (False, True))
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_each_micro_batch_is_told_and_not_made_once_more(change, has_state):
    changed, told = train(change, has_state=has_state)
    expected, _ = train(change, compares=False, has_state=has_state)
    assert same_bits(changed, expected)
    (text,) = told
    assert "loss_fn changes 'other." in text and "in each micro-batch" in text
    assert "after step(batch)" in text


def test_what_each_micro_batch_sets_to_the_same_is_not_told():
    changed, told = train(a_copy)
    expected, _ = train(a_copy, compares=False)
    assert same_bits(changed, expected) and told == []


def test_a_scheduler_that_steps_in_each_micro_batch_is_told():
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)

    def stepping(model, samples):
        scheduler.step()
        return loss_fn(model, samples)

    step = rebatch.Step(model, optimizer, stepping, micro_start=4, growth=False, log_level="quiet")
    with pytest.warns(rebatch.CutWarning, match="loss_fn changes 'scheduler.last_epoch' in each"):
        for _ in range(6):
            step(batch)
    assert scheduler.last_epoch == 24
