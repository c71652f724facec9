"""Tensors outside of a Step that get gradients from its loss_fn: those of the other network of a
GAN, which another optimizer owns. Their gradients are kept apart as the Step's own are."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Sequence, Set

import torch

from rebatch._user_code import is_object
from rebatch.torch.undo.module_tree import unique
from rebatch.torch.undo.places import named_by

# Entries of a container that are looked at.
_MOST_ENTRIES = 64


def _parts_of(value: Any, is_inner: bool = False) -> Iterator[Any]:
    """A value, or the entries of a container, or the attributes of an object of the program."""
    if isinstance(value, (list, tuple)):
        yield from value[:_MOST_ENTRIES]
    elif isinstance(value, dict):
        yield from list(value.values())[:_MOST_ENTRIES]
    elif is_object(value) and hasattr(value, "__dict__") and not is_inner:
        for part in list(vars(value).values()):
            yield from _parts_of(part, is_inner=True)
    else:
        yield value


def _owned_by(optimizer: Any) -> List[torch.Tensor]:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return [p for group in groups for p in group["params"]]


def leaves_outside(functions: Sequence[Callable[..., Any]], own: Set[int]) -> List[Any]:
    """Those of what some functions name, but for the ids in `own`, and for what an optimizer owns
    that they name too: they may step it, with the gradients of several calls."""
    named = [place.get() for f in functions for place in named_by(f)]
    parts = [part for value in named for part in _parts_of(value)]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    for part in parts:
        if isinstance(part, torch.nn.Module):
            tensors += part.parameters()
    known = own.union(id(p) for part in parts for p in _owned_by(part))
    return unique(t for t in tensors if t.requires_grad and t.is_leaf and id(t) not in known)
