"""An OOM that loss_fn keeps to itself: PyTorch counts it, and no attempt has failed."""

import contextlib
import re
import warnings

import pytest
import torch

import rebatch.torch as rebatch


def by_except(model, samples):
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    return model(samples).square().mean()


def by_suppress(model, samples):
    with contextlib.suppress(RuntimeError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    return model(samples).square().mean()


def by_a_helper(model, samples):
    return by_except(model, samples)


@pytest.mark.parametrize("loss_fn", (by_except, by_suppress, by_a_helper))
def test_an_oom_that_loss_fn_keeps_to_itself_is_told_with_its_line(loss_fn):
    model = torch.nn.Linear(4, 1).cuda()
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(torch.randn(8, 4, device="cuda"))
    (text,) = [str(w.message) for w in caught if "kept that to itself" in str(w.message)]
    line = int(re.search(r"test_swallowed.py:(\d+)", text)[1])
    with open(__file__, encoding="utf-8") as file:
        written = file.readlines()[line - 1]
    assert "except torch.OutOfMemoryError" in written or "suppress(RuntimeError)" in written


def test_what_copes_elsewhere_or_raises_again_is_not_told():
    def loss_fn(model, samples):
        try:
            getattr(torch, "cuda").mem_get_info()
        except RuntimeError as error:
            raise ValueError from error
        return model(samples).square().mean()

    def copes(*_):
        """As PyTorch's search for the fastest convolution, whose workspaces may not fit."""
        by_except(torch.nn.Identity(), torch.zeros(1))

    model = torch.nn.Linear(4, 1).cuda()
    model.register_forward_pre_hook(copes)
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.randn(8, 4, device="cuda"))
