"""Ways to use less memory for each sample, as levels for Step(lighten=...)."""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch.utils.checkpoint import checkpoint

from rebatch.torch.update.passes import check_has, check_optimizer
from rebatch.torch.saving.host_inputs import HostInputs


def checkpointing(*modules: torch.nn.Module, offload: bool = False) -> Callable[[bool], None]:
    """A level that recomputes the activations of these modules in the backward pass::

        blocks = model.transformer.h
        step = rebatch.Step(..., lighten=[rebatch.checkpointing(*blocks)])

    With offload, what is kept for that, the modules' inputs, is in pinned host memory between the
    two passes. Copies run beside the kernels, and no bit changes. It may be a level of its own::

        lighten=[rebatch.checkpointing(*blocks), rebatch.checkpointing(*blocks, offload=True)]

    An input goes there if it is on a GPU, was made by operations that autograd recorded, has at
    least 256 KiB, and is no view of a part of a larger tensor.
    A Hugging Face model may be given as a whole: its own gradient checkpointing is used."""
    if not modules:
        raise ValueError("rebatch: checkpointing() has no module: expected the model's blocks")
    for module in modules:
        check_has("an argument of checkpointing()", module, "forward", "a torch.nn.Module")
    inputs = HostInputs() if offload else None
    switches = [_ItsOwn(m, inputs) if _has_its_own(m) else _Forward(m, inputs) for m in modules]

    def switch(on: bool) -> None:
        for one in switches:
            one.switch(on)
        if inputs and not on:
            inputs.release()

    return switch


class _Recompute:
    """The forward of a module while its activations are recomputed. A copy of the module, or a
    saved one, has the forward that the module had before, and no trace of this class."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.own = module, vars(module).get("forward")
        self.is_plain = False  # by a level without inputs
        self.inputs: Optional[HostInputs] = None  # of a level with them

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        forward = self.own or functools.partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        if self.inputs:
            return self.inputs.run(forward, *arguments, **keywords)
        return checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    def __reduce__(self) -> Tuple[Any, ...]:
        if self.own is None:
            return getattr, (self.module, "forward")  # of the copy, whose class has it
        return operator.getitem, ([self.own], 0)  # as it would be copied without rebatch


class _Forward:
    """Switches the checkpointing of a module. Two levels may have it: one without inputs, and one
    with them."""

    def __init__(self, module: torch.nn.Module, inputs: Optional[HostInputs]):
        self._module, self._inputs = module, inputs

    def switch(self, on: bool) -> None:
        now = vars(self._module).get("forward")
        if not isinstance(now, _Recompute):
            if not on:
                return
            now = _Recompute(self._module)
            self._module.forward = now
        if self._inputs:
            now.inputs = self._inputs if on else None
        else:
            now.is_plain = on
        if now.is_plain or now.inputs:
            return
        if now.own is None:  # the class's is no attribute of the instance
            del self._module.forward
        else:
            self._module.forward = now.own


_ITS_OWN = ("activation_checkpointing", "gradient_checkpointing")  # the new name first


def _has_its_own(module: torch.nn.Module) -> bool:
    return any(hasattr(module, f"{name}_enable") for name in _ITS_OWN)


class _ItsOwn:
    """Switches the checkpointing of a Hugging Face model."""

    def __init__(self, model: torch.nn.Module, inputs: Optional[HostInputs]):
        self._model, self._inputs = model, inputs
        self._was_on = False

    def switch(self, on: bool) -> None:
        name = next(name for name in _ITS_OWN if hasattr(self._model, f"{name}_enable"))
        parts: List[Any] = [
            m for m in self._model.modules() if hasattr(m, "gradient_checkpointing")
        ]
        if self._inputs and on:
            self._was_on = any(m.gradient_checkpointing for m in parts)
        if not on and not self._was_on:
            getattr(self._model, f"{name}_disable")()
            return
        # Reentrant checkpointing loses gradients where the inputs of a block need none.
        getattr(self._model, f"{name}_enable")({"use_reentrant": False})
        if self._inputs and on:
            for part in parts:
                part._gradient_checkpointing_func = self._inputs.run


def offload(optimizer: torch.optim.Optimizer) -> Callable[[bool], None]:
    """A level that keeps the optimizer's state in host memory except during its step.

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
