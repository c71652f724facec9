"""The memory that the first step of PyTorch's optimizers needs: what it keeps, and its temporary
tensors."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch

from rebatch.torch.undo.copies import own_part

# Tensors of a parameter's size that an optimizer of PyTorch keeps from its first step on.
_KEPT = {
    "SGD": 0,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "RMSprop": 1,
    "Adadelta": 2,
    "Adagrad": 0,  # it has made it before
    "ASGD": 1,
    "Rprop": 2,
}


def _parameter_bytes(group: Dict[str, Any]) -> int:
    """On this rank."""
    parts = [own_part(p) for p in group["params"]]
    return sum(-(-p.numel() * p.element_size() // 512) * 512 for p in parts)


def _kept_tensors(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> int:
    name = type(optimizer).__name__
    kept = _KEPT[name]
    kept += bool(group.get("amsgrad")) + bool(group.get("centered"))
    return kept + (name in ("SGD", "RMSprop") and group.get("momentum", 0) != 0)


# Temporary tensors at the most within a step, beside what is kept: of all parameters at once where
# the implementation is "foreach", of the largest one where it is a loop.
_ALL = {
    "SGD": 1,
    "Adam": 1,
    "AdamW": 1,
    "NAdam": 1,
    "RAdam": 1,
    "Adamax": 1,
    "RMSprop": 1,
    "Adadelta": 2,
    "Adagrad": 2,
    "ASGD": 1,
    "Rprop": 2,
}
_LARGEST = {
    "SGD": 2,
    "Adam": 3,
    "AdamW": 3,
    "NAdam": 3,
    "RAdam": 5,
    "Adamax": 2,
    "RMSprop": 2,
    "Adadelta": 3,
    "Adagrad": 2,
    "ASGD": 2,
    "Rprop": 3,
}


def _temporary_bytes(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> int:
    name = type(optimizer).__name__
    if group.get("fused") or not group["params"]:
        return 0
    if group.get("foreach") is False:
        return _LARGEST[name] * max(_parameter_bytes({"params": [p]}) for p in group["params"])
    has_own_gradient = bool(group.get("weight_decay") or group.get("maximize"))
    more = int(name in ("NAdam", "RMSprop", "Adadelta") and has_own_gradient)
    more += name == "ASGD" and bool(group.get("maximize"))
    more += name in ("NAdam", "Adamax") and bool(group.get("capturable"))
    return (_ALL[name] + more) * _parameter_bytes(group)


def _is_before_first_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of PyTorch whose needs are known, and has not stepped yet."""
    is_known = type(optimizer).__name__ in _KEPT
    if not is_known or not type(optimizer).__module__.startswith("torch.optim"):
        return False
    if type(optimizer).__name__ == "Adagrad":
        return all(state["step"].item() == 0 for state in optimizer.state.values())
    return not optimizer.state


def first_update_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The memory that the first step of an optimizer of PyTorch needs at the most: what it keeps,
    and its temporary tensors. 0 for other optimizers, and after the first step."""
    if not _is_before_first_step(optimizer):
        return 0
    return sum(
        _parameter_bytes(group) * _kept_tensors(optimizer, group)
        + _temporary_bytes(optimizer, group)
        for group in optimizer.param_groups
    )


def first_kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of that, what it keeps."""
    if not _is_before_first_step(optimizer):
        return 0
    groups = optimizer.param_groups
    return sum(_parameter_bytes(group) * _kept_tensors(optimizer, group) for group in groups)


_WARM_UPS = 4


def warm_up_first_update(optimizer: torch.optim.Optimizer) -> None:
    """Allocate and free what the first step needs, tensor by tensor and in its order, so that
    PyTorch's allocator has blocks of these sizes. Its free bytes alone tell nothing of pieces that
    are too small. What a pass gets from the device changes where the next one finds its blocks, so
    passes are made until one gets nothing: the step, which asks for the same, gets nothing then."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.is_cuda]
    if not parameters or not _is_before_first_step(optimizer):
        return
    for _ in range(_WARM_UPS):
        before = torch.cuda.memory_reserved(parameters[0].device)
        _warm_up_once(optimizer)
        if torch.cuda.memory_reserved(parameters[0].device) == before:
            return


def _warm_up_once(optimizer: torch.optim.Optimizer) -> None:
    held = []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.is_cuda]
        kept = _kept_tensors(optimizer, group)
        held += [torch.empty_like(p) for p in parameters for _ in range(kept)]
        if group.get("foreach") is False and not group.get("fused"):
            _warm_up_loop(parameters, _LARGEST[type(optimizer).__name__])
        else:
            _warm_up_all(parameters, _temporary_bytes(optimizer, group))


def _warm_up_loop(parameters: List[torch.Tensor], count: int) -> None:
    """The loop binds its names anew for each parameter, so the tensors of the one before are freed
    one by one."""
    bound: List[Optional[torch.Tensor]] = [None] * count
    for p in parameters:
        for i in range(count):
            bound[i] = torch.empty_like(p)


def _warm_up_all(parameters: List[torch.Tensor], left: int) -> None:
    held = []
    while parameters and left > 0:
        for p in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            size = _parameter_bytes({"params": [p]})
            if size <= left:
                held.append(torch.empty_like(p))
            left -= size
