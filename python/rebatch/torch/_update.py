"""What the optimizers do at the end of an effective batch, and the memory that they will need."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch

# Tensors of a parameter's size that an optimizer of PyTorch keeps from its first step on.
_KEPT = {"SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1}


def _parameter_bytes(group: dict) -> int:
    return sum(-(-p.numel() * p.element_size() // 512) * 512 for p in group["params"])


def _kept_tensors(optimizer: torch.optim.Optimizer, group: dict) -> int:
    name = type(optimizer).__name__
    kept = _KEPT[name]
    kept += bool(group.get("amsgrad")) + bool(group.get("centered"))
    return kept + (name in ("SGD", "RMSprop") and group.get("momentum", 0) != 0)


def first_update_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The memory that the first step of an optimizer of PyTorch needs: what it keeps, and, unless
    it is fused, one temporary of each parameter. 0 for other optimizers, and after the first
    step."""
    if optimizer.state or type(optimizer).__name__ not in _KEPT:
        return 0
    if not type(optimizer).__module__.startswith("torch.optim"):
        return 0
    return sum(
        _parameter_bytes(group) * (_kept_tensors(optimizer, group) + (not group.get("fused")))
        for group in optimizer.param_groups
    )


def check_has(name: str, value: Any, member: str, expected: str) -> None:
    """TypeError for an argument that does not have a member of what is expected."""
    if not hasattr(value, member):
        raise TypeError(f"rebatch: {name} is of type {type(value).__name__}: expected {expected}")


def check_optimizer(name: str, value: Any) -> None:
    check_has(name, value, "param_groups", "a torch.optim.Optimizer")


class Update:
    """The optimizers' step, with a GradScaler, clipping and schedulers."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        scaler: Optional[Any],
        clip: Optional[float],
    ):
        self.optimizers, self._schedulers = list(optimizers), list(schedulers)
        for optimizer in self.optimizers:
            check_optimizer("optimizer", optimizer)
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "rebatch: the optimizer is LBFGS, whose step runs the model again: expected "
                    "one whose step takes no closure"
                )
        for scheduler in self._schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ValueError(
                    "rebatch: lr_scheduler is ReduceLROnPlateau, which needs a metric: call its "
                    "step(metric) yourself after evaluation"
                )
            check_has("lr_scheduler", scheduler, "step", "a scheduler of torch.optim")
        if scaler is not None:
            check_has("scaler", scaler, "scale", "a torch.amp.GradScaler")
        if clip is not None and not clip > 0:
            raise ValueError(f"rebatch: clip is {clip!r}: expected a norm above 0")
        self._scaler, self._clip = scaler, clip

    @property
    def parameters(self) -> List[torch.nn.Parameter]:
        groups = (g for optimizer in self.optimizers for g in optimizer.param_groups)
        return list(dict.fromkeys(p for g in groups for p in g["params"] if p.requires_grad))

    def keeps(self, parameters: Sequence[torch.nn.Parameter]) -> List[torch.nn.Parameter]:
        """Those of a model's parameters whose gradients zero_grad() leaves, and to which a batch
        adds its own."""
        mine = set(self.parameters)
        return [p for p in parameters if p.requires_grad and p not in mine]

    @property
    def device(self) -> torch.device:
        """That of the first parameter: a module may be moved at any time."""
        groups = (g for optimizer in self.optimizers for g in optimizer.param_groups)
        return next(p for g in groups for p in g["params"] if p.requires_grad).device

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._scaler is not None:  # it may have unscaled gradients that are gone now
            self._scaler._per_optimizer_states.clear()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss to .grad."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def finish_gradients(self) -> None:
        """When the last micro-batch is accumulated: unscale and clip. This changes gradients, so an
        OOM here makes the effective batch run again."""
        if self._clip is None:
            return
        if self._scaler is not None:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, self._clip)

    def first_bytes(self) -> int:
        return sum(first_update_bytes(optimizer) for optimizer in self.optimizers)

    def apply(self) -> None:
        """Change the parameters."""
        for optimizer in self.optimizers:
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)

    def done(self) -> None:
        """The update was applied."""
        if self._scaler is not None:
            self._scaler.update()
        for scheduler in self._schedulers:
            scheduler.step()
