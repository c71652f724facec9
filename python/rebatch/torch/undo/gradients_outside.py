"""Tensors outside of a Step that get gradients from its loss_fn: those of the other network of a
GAN, which another optimizer owns. Their gradients are kept apart as the Step's own are."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, Iterator, List, Sequence, Set

import torch

from rebatch._user_code import is_object
from rebatch.torch.undo.module_tree import unique
from rebatch.torch.undo.places import FUNCTIONS, Place, is_of_program, named_by

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


def _named(values: Sequence[Any]) -> Iterator[Any]:
    """These, and what functions among them name, and those of the program that they call."""
    left, seen = list(values), set()
    while left:
        value = left.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, functools.partial) or (
            isinstance(value, FUNCTIONS) and is_of_program(value)
        ):
            left += [place.get() for place in named_by(value)]


def leaves_outside(
    functions: Sequence[Callable[..., Any]], own: Set[int], block: Iterable[Place] = ()
) -> List[Any]:
    """Those of what some functions name, but for the ids in `own`, and for what an optimizer owns
    that they name too: they may step it, with the gradients of several calls. A block of a program
    stands beside the lines that step its optimizers, so there these count too."""
    named = [place.get() for function in functions for place in named_by(function)]
    parts = [part for value in _named(named) for part in _parts_of(value)]
    known = own.union(id(p) for part in parts for p in _owned_by(part))
    values = [place.get() for place in block]
    parts += [part for value in _named(values) for part in _parts_of(value)]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    for part in parts:
        if isinstance(part, torch.nn.Module):
            tensors += part.parameters()
    return unique(t for t in tensors if t.requires_grad and t.is_leaf and id(t) not in known)
