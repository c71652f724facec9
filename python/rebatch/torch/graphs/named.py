"""The places that the program's code reads on the host while a pass runs, as far as it names them:
variables, and attributes of objects, classes, files and modules. Functions are followed to those
that they name."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from typing import Any, Dict, Iterable, Sequence, Set, Tuple

import torch

from rebatch.torch.private import HOOK_TABLES
from rebatch.torch.undo.contents import (
    ATOMS,
    MISSING,
    WITH_ATTRIBUTES,
    attributes_of,
    entries_of,
    is_container,
)
from rebatch.torch.undo.module_tree import names_of
from rebatch.torch.undo.places import (
    FUNCTIONS,
    Place,
    is_of_program,
    named_by,
    names_in,
    own_variables,
)

# Levels of attributes, from what a function or module has: cfg.loss.weight is read in the second.
_LEVELS = 2
_MOST_ENTRIES = 1024  # of a container
# What properties give that is a number, a flag or a text; device and dtype follow from parameters.
_NUMBERS = ATOMS - {torch.device, torch.dtype}
# Of accelerate, whose backward() hands it to DeepSpeed alone.
_NOT_READ = {"sync_gradients"}
_OF_OPTIMIZERS = {"param_groups", "defaults"}
# What reads attributes without their names.
_READ_ALL = frozenset(("vars", "getattr", "__dict__", "asdict"))


def _function_of(member: Any) -> Any:
    """That of a method or property, as a class has it."""
    return getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))


def _is_wholly_own(kind: type) -> bool:
    """Of what an installed class keeps, such as a Trainer, much is its own count of steps."""
    return kind in WITH_ATTRIBUTES or all(map(is_of_program, kind.__mro__[:-1]))


def _may_be_owner(value: Any, level: int) -> bool:
    """An optimizer has the rate, however it is reached."""
    is_near = level <= _LEVELS and not isinstance(value, torch.Tensor)
    return is_near or isinstance(value, torch.optim.Optimizer)


class Named:
    """What some functions and modules read: places, and values with contents, by name."""

    def __init__(
        self,
        functions: Sequence[Any],
        modules: Iterable[Tuple[str, torch.nn.Module]],
        objects: Sequence[Place] = (),
        attributes: Sequence[Place] = (),
    ):
        self.places: Dict[Tuple[Any, ...], Place] = {}
        self.values: Dict[int, Tuple[str, Any]] = {}
        self.modules: Dict[int, Tuple[str, torch.nn.Module]] = {}
        self._names: Set[str] = {"forward", "__call__"}  # that code has
        self._owners: Dict[int, Tuple[str, Any, int]] = {}  # of attributes; the level of these
        for name, module in modules:
            self._add_module(name, module)
        for function in functions:
            self._follow(function)
        for place in objects:
            self.put(place)
        self._look_at_owners()
        for place in attributes:  # which are no deeper than they are
            self.put(place, _LEVELS + 1)
        self._look_at_owners()

    def _look_at_owners(self) -> None:
        size = -1
        while size != len(self._names) + len(self.values):  # until nothing new is named
            size = len(self._names) + len(self.values)
            for owner in list(self._owners.values()):
                self._look_at_attributes(*owner)

    def _follow(self, function: Any) -> None:
        self._names |= names_in(function)
        for place in named_by(function):
            self.put(place)

    def put(self, place: Place, level: int = 1) -> None:
        """It is read, and what is there has attributes of this level."""
        if place.at not in self.places:
            self.places[place.at] = place
            self._look(place.name, place.get(), level)

    def _look(self, name: str, value: Any, level: int) -> None:
        if type(value) in ATOMS or value is MISSING or id(value) in self.values:
            return
        self.values[id(value)] = name, value
        if isinstance(value, torch.nn.Module):
            for inner, module in value.named_modules(prefix=name):
                self._add_module(inner, module)
        elif isinstance(value, FUNCTIONS):
            if isinstance(value, functools.partial) or is_of_program(value):
                self._follow(value)
        elif isinstance(value, types.BuiltinMethodType):
            self._look(name, value.__self__, level)  # dict.get of one
        elif is_container(value):
            for key, part in list(itertools.islice(entries_of(value), _MOST_ENTRIES)):
                self._look(f"{name}[{key!r}]", part, level)
        elif isinstance(value, (type, types.ModuleType)):
            if is_of_program(value):
                self._owners[id(value)] = value.__name__, value, level
        elif _may_be_owner(value, level):
            self._owners[id(value)] = name, value, level
            self._look("", type(value), level)

    def _add_module(self, name: str, module: torch.nn.Module) -> None:
        if id(module) in self.modules:
            return
        self.modules[id(module)] = name, module
        kind = type(module)
        if not kind.__module__.startswith("torch."):
            self._names |= names_in(kind.forward)  # by which it reads its own objects
            self._owners[id(module)] = name, module, _LEVELS
        self._look("", kind, 1)
        for key in names_of(module):
            self._look(f"{name}.{key}", vars(module)[key], 1)
        for table in HOOK_TABLES:
            for hook in list(getattr(module, table).values()):
                self._look(getattr(hook, "__name__", type(hook).__name__), hook, 1)

    def _look_at_attributes(self, name: str, owner: Any, level: int) -> None:
        if isinstance(owner, type):
            for base in owner.__mro__:
                if is_of_program(base):
                    self._look_at_members(base.__name__, base, level)
        elif isinstance(owner, types.ModuleType):
            self._look_at_members(name, owner, level)
        else:
            self._look_at_properties(name, owner)
            if not isinstance(owner, torch.nn.Module):  # of which all is read
                self._look_at_own(name, owner, level)

    def _look_at_members(self, name: str, owner: Any, level: int) -> None:
        """Of a class or file: variables and functions."""
        variables = own_variables(owner)
        for key in sorted(self._names & vars(owner).keys()):
            member = vars(owner)[key]
            if key in variables and not isinstance(member, (functools.cached_property, type)):
                self.put(Place(f"{name}.{key}", owner, key), level + 1)
            else:
                self._look(key, _function_of(member), level)

    def _look_at_own(self, name: str, owner: Any, level: int) -> None:
        attributes = attributes_of(owner)
        reads_all = not self._names.isdisjoint(_READ_ALL) and _is_wholly_own(type(owner))
        own = getattr(owner, "__dict__", {})
        if isinstance(owner, torch.optim.Optimizer):  # it has more for each parameter
            attributes = {key: attributes[key] for key in attributes.keys() & _OF_OPTIMIZERS}
        for key in sorted(attributes if reads_all else self._names & attributes.keys()):
            self.put(Place(f"{name}.{key}", own if key in own else owner, key), level + 1)

    def _look_at_properties(self, name: str, owner: Any) -> None:
        """What they give, as far as it is known to be alike by its value."""
        for key in sorted(self._names.intersection(dir(type(owner))) - _NOT_READ):
            if isinstance(inspect.getattr_static(type(owner), key), property):
                place = Place(f"{name}.{key}", owner, key)
                if place.at not in self.places and type(_value_of(place)) in _NUMBERS:
                    self.places[place.at] = place


def _value_of(place: Place) -> Any:
    try:
        return place.get()
    except Exception:  # a property that fails here
        return MISSING
