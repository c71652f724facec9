"""What a model's modules bring of the program's own: the functions that run in a forward and a
backward pass, and objects that modules hold."""

from __future__ import annotations

import functools
from typing import Any, Container, Iterable, Iterator, List, Tuple

import torch

from rebatch.torch._reach import is_object, is_of_the_program
from rebatch.torch._tree import ATOMS, Tree

_LOOKED_INTO = 64  # entries of a container


def _is_own(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):  # an object that can be called
        function = type(function)
    return is_of_the_program(function)


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    tables: List[Any] = [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]
    for parameter in module._parameters.values():
        if parameter is not None:
            tables += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    for table in tables:
        if table:
            yield from table.values()


def called_by(modules: Iterable[torch.nn.Module]) -> List[Any]:
    """The forward of each class, and hooks of modules and of their parameters."""
    modules = list(modules)
    kinds = {type(module): module for module in reversed(modules)}
    found: List[Any] = [m.forward for kind, m in kinds.items() if is_of_the_program(kind)]
    found += [hook for module in modules for hook in _hooks_of(module) if _is_own(hook)]
    return found


def objects_in(tree: Tree, modules: Container[torch.nn.Module]) -> List[Tuple[str, Any]]:
    """Objects of the program's own classes that attributes of these modules hold, with the modules'
    classes and the attributes' names."""
    found = [  # of what most attributes are, numbers and texts are no objects
        (i, name, value)
        for i, attributes, name in tree.attributes
        if type(value := attributes.get(name)) not in ATOMS
    ]
    return [
        (f"{type(tree.modules[i]).__name__}.{name}", value)
        for i, name, value in found
        if _are_objects(value) and tree.modules[i] in modules
    ]


def _are_objects(value: Any) -> bool:
    """Whether a value is one, or has one as an entry."""
    if isinstance(value, (list, tuple)):
        return any(is_object(entry) for entry in value[:_LOOKED_INTO])
    if isinstance(value, dict):
        return len(value) <= _LOOKED_INTO and any(is_object(entry) for entry in value.values())
    return is_object(value)
