"""Steps by cost, with lighten, and within limits."""

import pytest
import torch

import rebatch.torch as rebatch
from models import (
    fails_above,
    make,
    out_of_memory,
    regression_loss,
    same_bits,
    state_of,
    train,
)


def test_by_cost_one_long_sample_does_not_make_the_others_small():
    model, (x, y), loss_fn = make("mlp", samples=8)
    lengths = [4, 4, 4, 4, 32, 4, 4, 4]
    ran = []

    def cost(batch, first, count):
        return count * max(lengths[first : first + count])

    def limited(m, part):
        first = int(part[2][0])
        if cost(None, first, len(part[0])) > 40:
            out_of_memory(None)
        ran.append((first, len(part[0])))
        return loss_fn(m, part[:2])

    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), limited, cost=cost, log_level="quiet"
    )
    step((x, y, torch.arange(8)))
    assert max(count for _, count in ran) >= 3
    assert sum(count for _, count in ran) == 8


def test_lighten_is_the_last_level_and_is_left_again():
    log = []
    model, batch, loss_fn = make("mlp")
    light = [False]

    def switch(on):
        log.append(on)
        light[0] = on

    def limited(m, part):
        if not light[0] and len(log) == 0:
            out_of_memory(None)
        return loss_fn(m, part)

    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        limited,
        lighten=switch,
        log_level="quiet",
        grow_after=2,
    )
    step(batch)
    assert log == [True] and step.report.lighten_level == 1
    for _ in range(4):
        step(batch)
    assert log == [True, False] and step.report.lighten_level == 0


def test_checkpointing_changes_no_bit():
    states = []
    for light in (False, True):
        model, batch, loss_fn = make("gpt")
        switch = rebatch.checkpointing(model.block)
        switch(light)
        step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
        torch.manual_seed(3)
        step(batch)
        states.append(state_of(model))
        switch(True), switch(False)
        assert "forward" not in vars(model.block)
    assert same_bits(*states)


def test_offloading_the_optimizer_changes_no_bit():
    states = []
    for light in (False, True):
        model, batch, loss_fn = make("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = rebatch.Step(model, optimizer, loss_fn)
        torch.manual_seed(3)
        step(batch)
        switch = rebatch.offload(optimizer)
        if light:
            switch(True)
        step(batch)
        if light:
            switch(False)
        step(batch)
        states.append(state_of(model))
    assert same_bits(*states)


def test_limits_hold():
    _, _, step = train("mlp", micro_largest=6, micro_multiple_of=3)
    assert step.report.micro == 6
    _, _, step = train("mlp", micro_allowed=(2, 8), limited=7)
    assert step.report.micro == 2


@pytest.mark.parametrize(
    "options, cut",
    (
        ({"micro_smallest": 1}, [16, 16, 1]),
        ({}, [11, 11, 11]),
        ({"micro_allowed": [33, 11]}, [11, 11, 11]),
    ),
)
@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.filterwarnings("ignore::rebatch.torch.CutWarning")
def test_batch_norm_is_not_given_one_sample_that_is_left_over(options, cut, where):
    """BatchNorm refuses a single value per channel. 33 samples, of which 16 fit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    batch = (torch.randn(33, 8), torch.randn(33, 1))
    limited, counts = fails_above(regression_loss, 16, where), []

    def loss_fn(model, samples):
        loss = limited(model, samples)
        counts.append(len(samples[0]))
        return loss

    before = state_of(model)
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn,
        log_level="quiet",
        growth=False,
        **options,
    )
    if cut[-1] == 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            step(batch)
        assert same_bits(state_of(model), before)
        return
    for _ in range(3):
        counts.clear()
        assert torch.isfinite(step(batch))
        assert counts[-len(cut) :] == cut
    assert counts == cut and step.report.ooms == 0
    assert not any(torch.equal(a, b) for a, b in zip(state_of(model), before))


def test_training_goes_on_at_the_size_that_was_found():
    _, _, step = train("mlp", limited=4)
    state = step.state_dict()
    model, batch, loss_fn = make("mlp")
    resumed = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, learn=True)
    resumed.load_state_dict(state)
    resumed(batch)
    assert resumed.report.micro == 4 and resumed.report.step == 3


def test_training_goes_on_with_the_levels_that_were_in_use():
    model, batch, loss_fn = make("mlp")
    switched = []

    def make_step(loss_fn, levels=2):
        return rebatch.Step(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            loss_fn,
            lighten=[lambda on, i=i: switched.append((i, on)) for i in range(levels)],
            log_level="quiet",
            grow_after=2,
        )

    step = make_step(lambda m, s: (loss_fn if switched else fails_above(loss_fn, 0))(m, s))
    step(batch)
    state = step.state_dict()
    assert state["lighten_level"] == 1 == step.report.lighten_level
    switched.clear()
    resumed = make_step(loss_fn)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state and switched == []
    resumed(batch)
    assert switched == [(0, True)] and resumed.report.lighten_level == 1
    for _ in range(4):
        resumed(batch)
    assert switched == [(0, True), (0, False)] and resumed.report.lighten_level == 0
    switched.clear()
    without = make_step(loss_fn, levels=0)
    without.load_state_dict(state)
    without(batch)
    assert without.report.lighten_level == 0
    step.load_state_dict({**state, "lighten_level": 0})  # into a Step that is at a level
    step(batch)
    assert switched == [(0, False)] and step.report.lighten_level == 0


def test_a_loss_in_float64_stays_so():
    model, batch, loss_fn = make("mlp")
    batch = tuple(t.double() for t in batch)
    model = model.double().eval()
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn, micro_start=5)
    for _ in range(2):
        loss = step(batch)
        assert loss.dtype == torch.float64
        assert abs(loss - loss_fn(model, batch)) < 1e-14
    assert step.evaluate(batch).dtype == torch.float64
    half = model.bfloat16()
    step = rebatch.Step(half, torch.optim.SGD(half.parameters(), 0.0), loss_fn)
    assert step(tuple(t.bfloat16() for t in batch)).dtype == torch.float32


def test_it_grows_again():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        fails_above(loss_fn, 4),
        log_level="quiet",
        grow_after=2,
    )
    step(batch)
    step.loss_fn = loss_fn
    for _ in range(6):
        step(batch)
    assert step.report.micro == 16
