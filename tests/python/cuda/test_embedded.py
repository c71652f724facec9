"""Losses over the whole batch on CUDA memory: on PyTorch's native allocator, and, in a process of
its own, on rebatch's pool. On a real GPU gradients are compared too."""

import copy

import pytest
import torch

import rebatch.torch as rebatch

from conftest import INSTALLED, STANDIN, assert_passes_installed
from test_steps import MIB, QUIET, Wide, little_memory, live


@pytest.mark.skipif(INSTALLED, reason="is that run")
def test_all_of_these_on_rebatchs_pool():
    assert_passes_installed(__file__)


def embed(model, samples):
    return model(samples).mean(1)


def spread(model, rows, batch):
    assert len(rows) == len(batch) == 32
    return (rows @ rows.T).square().mean()


def made(loss_fn=spread, **options):
    torch.manual_seed(0)
    model = Wide().cuda()
    step = rebatch.Step(
        model, torch.optim.AdamW(model.parameters()), loss_fn, embed=embed, **{**QUIET, **options}
    )
    return step, torch.randn(32, 512, 512, device="cuda")


@pytest.mark.parametrize("options", ({}, {"learn": True}, {"gradients": "inplace"}))
def test_memory_that_is_short_cuts_both_passes(standin, options):
    step, batch = made(**options)
    before = live()
    with little_memory(160 * MIB):
        for _ in range(3):
            loss = step(batch)
        assert step.report.ooms == 0 and loss.dim() == 0
    assert 1 <= step.report.micro < 32
    del loss, batch
    assert live() - before <= 16 * MIB  # what AdamW keeps, and gradients


def test_memory_that_goes_away_in_mid_run_is_survived(standin):
    step, batch = made()
    step(batch)
    assert step.report.microbatches == 1
    with little_memory(100 * MIB):
        step(batch)
        assert step.report.micro < 32 and step.report.ooms > 0
        step(batch)
        assert step.report.ooms == 0


def test_a_loss_that_does_not_fit_is_named(standin):
    def too_large(model, rows, batch):
        pairs = rows.new_zeros(200 * MIB // 4, requires_grad=True)
        return rows.sum() + pairs.sum()

    step, batch = made(too_large)
    with little_memory(160 * MIB), pytest.raises(rebatch.Exhausted) as raised:
        step(batch)
    assert "over the whole batch of 32 samples" in str(raised.value)


@pytest.mark.skipif(STANDIN is not None, reason="kernels of the stand-in do nothing")
@pytest.mark.parametrize("size", (32, 7))
def test_gradients_are_those_of_the_uncut_batch(size):
    step, batch = made(micro_start=size)
    exact = copy.deepcopy(step.model).double()
    spread(exact, embed(exact, batch.double()), batch).backward()
    step(batch)
    for mine, theirs in zip(step.model.parameters(), exact.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= 1e-3 * theirs.grad.norm()
