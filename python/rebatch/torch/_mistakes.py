"""What a loss_fn must leave to the Step, which says so before any update. Must not know a session,
and how gradients are accumulated."""

from __future__ import annotations

from typing import Sequence

import torch


def refuse_gradients(
    loss_name: str, models: Sequence[torch.nn.Module], trained: Sequence[torch.nn.Parameter]
) -> None:
    """ValueError where one of these parameters, which had no gradient before loss_fn ran, has one
    now: it is not weighted by the part of the batch."""
    found = {id(p) for p in trained if p.grad is not None}
    if not found:
        return
    names = (
        f"'model[{i}].{name}'" if len(models) > 1 else repr(name)
        for i, model in enumerate(models)
        for name, p in model.named_parameters()
        if id(p) in found
    )
    raise ValueError(
        f"rebatch: {next(names, 'a parameter of the optimizer')} got a gradient while {loss_name} "
        f"ran, which counts once in each micro-batch, whatever its size: expected {loss_name} to "
        "return the sum of its losses and to call no backward(), since the Step calls it"
    )
