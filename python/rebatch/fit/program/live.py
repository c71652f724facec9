"""What is alive in the program's process, by kind. Must not know what is done with it."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any, Dict, Iterable, Iterator, List, Optional

import torch

_KINDS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
_STEPS = "rebatch.torch.core.training"
_frozen: list[Any] = []  # weak references
_objects = gc.get_objects


def _all_objects(generation: Optional[int] = None) -> List[Any]:
    found = _objects(generation)  # before another list is there, which would be among them
    found += [each for reference in _frozen if (each := reference()) is not None]
    return found


def freeze() -> None:
    """Before the process is copied: what is there is not gone through again, which would copy all
    memory in which Python's objects are. Of those kinds it is still found, also by a Backward that
    looks for its optimizers."""
    kinds = _KINDS + ((sys.modules[_STEPS].Training,) if _STEPS in sys.modules else ())
    _frozen.extend(weakref.ref(each) for each in _of(kinds, _objects()))
    gc.freeze()
    gc.get_objects = _all_objects


def live(kind: Any) -> Iterator[Any]:
    """All objects of a kind of these, or of a subclass."""
    return _of(kind, _all_objects())


def has_step() -> bool:
    """Whether the program has made a Step, which answers."""
    return _STEPS in sys.modules and any(live(sys.modules[_STEPS].Training))


class _IsKind(Dict[type, bool]):
    """Of each type, of which there are few beside the objects, whether it is of a kind."""

    def __init__(self, kind: Any):
        self._kind = kind

    def __missing__(self, each: type) -> bool:
        self[each] = found = issubclass(each, self._kind)
        return found


def _of(kind: Any, objects: Iterable[Any]) -> Iterator[Any]:
    is_kind = _IsKind(kind)
    return (each for each in objects if is_kind[type(each)])


def weights_of() -> list[torch.Tensor]:
    """The parameters and buffers of all modules."""
    found: dict[int, torch.Tensor] = {}
    for module in live(torch.nn.Module):
        for tensors in module.__dict__.get("_parameters", {}), module.__dict__.get("_buffers", {}):
            found.update({id(t): t for t in tensors.values() if isinstance(t, torch.Tensor)})
    return list(found.values())


def states_of() -> list[torch.Tensor]:
    """What the optimizers keep."""
    return [
        value
        for optimizer in live(torch.optim.Optimizer)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
