"""Ways to use less memory for each sample, as rungs for Step(lighten=...)."""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, List

import torch
from torch.utils.checkpoint import checkpoint

from rebatch.torch._update import check_has, check_optimizer


def checkpointing(*modules: torch.nn.Module) -> Callable[[bool], None]:
    """A rung that recomputes the activations of these modules in the backward pass.

        blocks = model.transformer.h
        step = rebatch.Step(..., lighten=[rebatch.checkpointing(*blocks)])

    A Hugging Face model may be given as a whole: its own gradient checkpointing is used."""
    if not modules:
        raise ValueError("rebatch: checkpointing() has no module: expected the model's blocks")
    for module in modules:
        check_has("an argument of checkpointing()", module, "forward", "a torch.nn.Module")

    def switch(on: bool) -> None:
        for module in modules:
            if not _switch_its_own(module, on):
                _switch_forward(module, on)

    return switch


class _Recompute:
    """The forward of a module while its activations are recomputed. A copy of the module, or a
    saved one, has the forward that the module had before, and no trace of this class."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.own = module, vars(module).get("forward")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        forward = self.own or functools.partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        return checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    def __reduce__(self) -> tuple:
        if self.own is None:
            return getattr, (self.module, "forward")  # of the copy, whose class has it
        return operator.getitem, ([self.own], 0)  # as it would be copied without rebatch


def _switch_forward(module: torch.nn.Module, on: bool) -> None:
    now = vars(module).get("forward")
    if on == isinstance(now, _Recompute):
        return
    if on:
        module.forward = _Recompute(module)
    elif now.own is None:  # the class's is no attribute of the instance
        del module.forward
    else:
        module.forward = now.own


def _switch_its_own(module: torch.nn.Module, on: bool) -> bool:
    """Switch the checkpointing of a Hugging Face model; False: it has none."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # the new name first
        if not hasattr(module, f"{name}_enable"):
            continue
        if on:
            # Reentrant checkpointing loses gradients where the inputs of a block need none.
            getattr(module, f"{name}_enable")({"use_reentrant": False})
        else:
            getattr(module, f"{name}_disable")()
        return True
    return False


def offload(optimizer: torch.optim.Optimizer) -> Callable[[bool], None]:
    """A rung that keeps the optimizer's state in host memory except during its step.

    This frees the memory of the state for the forward and backward passes."""
    check_optimizer("the argument of offload()", optimizer)
    hooks: List[Any] = []

    def move(to_host: bool) -> None:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    device = torch.device("cpu") if to_host else parameter.device
                    state[name] = value.to(device)

    def switch(on: bool) -> None:
        if on:
            hooks.append(optimizer.register_step_pre_hook(lambda *_: move(False)))
            hooks.append(optimizer.register_step_post_hook(lambda *_: move(True)))
            move(True)
            return
        while hooks:
            hooks.pop().remove()
        move(False)

    return switch
