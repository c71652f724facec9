"""What a training holds: a copy of it, what has changed since, and putting it back.

Beside parameters, buffers and generators that is what modules hold as plain attributes, the batch,
and the variables of the program that loss_fn reads or writes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import random
import sys
import types
from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence, Tuple

import torch

from rebatch._user_code import is_object
from rebatch.torch.batches.cut import batch_tensors
from rebatch.torch.batches.kinds import are_same
from rebatch.torch.program.program import Program
from rebatch.torch.undo.changes_outside import is_of_program, variables_of
from rebatch.torch.undo.contents import (
    attributes_of,
    contents_of,
    is_data,
    put_back_contents,
    walk,
)
from rebatch.torch.undo.copies import copy_of, put_back
from rebatch.torch.undo.generators import (
    cuda_devices_of,
    functions_of,
    is_generator,
    is_same_state,
    seed_generator,
)
from rebatch.torch.undo.module_tree import Tree, names_of

_NUMBERS = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, collections.deque)
# Longer containers are data sets rather than counters.
_LONGEST = 1000
_MISSING = object()


@dataclasses.dataclass
class Place:
    """Where a value is. `kind` is "parameter", "gradient", "buffer", "attribute", "variable",
    "batch" or "mode"."""

    kind: str
    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


def _is_state(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *_NUMBERS)) or (
        isinstance(value, _CONTAINERS) and len(value) <= _LONGEST
    )


def _copy(value: Any, depth: int = 4) -> Any:
    """To be compared; deep enough for what is told by it."""
    if isinstance(value, torch.Tensor):
        return copy_of(value)
    if depth and (isinstance(value, dict) or is_object(value)):
        entries = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        return {k: _copy(v, depth - 1) for k, v in entries.items()}
    if depth and isinstance(value, (list, tuple, collections.deque)):
        return [_copy(v, depth - 1) for v in value]
    return set(value) if isinstance(value, set) else value


def _is_same_number(value: Any, other: Any) -> bool:
    if isinstance(value, float) and value != value:
        return isinstance(other, float) and other != other
    return value is other or (isinstance(value, _NUMBERS) and value == other)


class _Kept:
    """A value and what it holds: containers with their entries, and copies of tensors. Of an object
    of the program no tensors are copied: it may be a set of data."""

    def __init__(self, value: Any):
        self.value = value
        self._contents: Dict[int, Any] = {}
        tensors: List[torch.Tensor] = []
        self.is_whole = walk(value, self._contents, tensors, [])
        copies = [None if is_object(value) else copy_of(t) for t in tensors]
        self._copies = {id(t): (t, copy) for t, copy in zip(tensors, copies)}

    @torch.no_grad()
    def restore(self) -> None:
        put_back_contents(self._contents)
        for tensor, copy in self._copies.values():
            # By the contents: BatchNorm and kernels of one's own leave a tensor's version.
            if copy is not None and not are_same(tensor, copy):
                put_back(tensor, copy)

    def is_same(self, now: Any) -> bool:
        """Whether a value is what this one was."""
        return self._is_same(now, self.value, set())

    def _is_same(self, now: Any, then: Any, seen: set[Any]) -> bool:
        if isinstance(then, torch.Tensor):
            copy = self._copies[id(then)][1]
            return isinstance(now, torch.Tensor) and (copy is None or are_same(now, copy))
        if id(then) not in self._contents:
            return _is_same_number(now, then)
        if id(then) in seen:
            return True
        seen.add(id(then))
        if type(now) is not type(then):
            return False
        held, entries = contents_of(now), self._contents[id(then)][1]
        if is_generator(then):
            return is_same_state(held, entries)
        if isinstance(entries, set) or len(held) != len(entries):
            return bool(held == entries)
        if isinstance(entries, dict):
            return list(held) == list(entries) and all(
                self._is_same(v, entries[k], seen) for k, v in held.items()
            )
        return all(self._is_same(a, b, seen) for a, b in zip(held, entries))


# ---- the places of a training ----


def _in_dict(kind: str, name: str, owner: Dict[Any, Any], key: Any) -> Place:
    def put(value: Any) -> None:
        if value is _MISSING:
            owner.pop(key, None)
        else:
            owner[key] = value

    return Place(kind, name, lambda: owner.get(key, _MISSING), put)


def _of_module(prefix: str, module: torch.nn.Module) -> Iterator[Place]:
    """Buffers and plain attributes of one module."""
    for key in module._buffers:
        yield _in_dict("buffer", prefix + key, module._buffers, key)
    for key in names_of(module):
        if key != "training" and is_data(vars(module)[key]):
            yield _in_dict("attribute", prefix + key, vars(module), key)
    yield _in_dict("mode", prefix.rstrip(".") or type(module).__name__, vars(module), "training")


def _of_gradient(name: str, p: torch.nn.Parameter) -> Place:
    return Place("gradient", name, lambda: p.grad, lambda value: setattr(p, "grad", value))


def _of_parameter(name: str, p: torch.nn.Parameter) -> Place:
    return Place("parameter", name, lambda: p, lambda _: None)


def _itself(value: Any) -> Any:
    return value


def _of_batch(batch: Any) -> Iterator[Place]:
    for name, tensor in batch_tensors(batch):
        yield Place("batch", name, functools.partial(_itself, tensor), lambda _: None)


def _cell_place(name: str, cell: Any) -> Place:
    return Place(
        "variable",
        name,
        lambda: cell.cell_contents,
        lambda value: setattr(cell, "cell_contents", value),
    )


def _variables_of(function: Any) -> Iterator[Place]:
    """The variables outside of a function that it names: of the functions around it, and globals.
    And the attributes of the object whose method it is."""
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield from _attributes_of("self", owner)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            _ = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
        yield _cell_place(name, cell)
    names = set(code.co_names)
    for constant in code.co_consts:  # functions within it
        if isinstance(constant, types.CodeType):
            names |= set(constant.co_names)
    for name in sorted(names & set(function.__globals__)):
        yield _in_dict("variable", name, function.__globals__, name)


def modules_used_by(function: Any) -> List[Tuple[str, torch.nn.Module]]:
    """A module, or those that a function is a method of or names, by name."""
    own = [("", function), ("", getattr(function, "__self__", None))]
    own += [(place.name, place.get()) for place in _variables_of(function)]
    return [(name, value) for name, value in own if isinstance(value, torch.nn.Module)]


def optimizers_used_by(function: Any) -> List[Tuple[str, torch.optim.Optimizer]]:
    """Those that a function names."""
    own = [(place.name, place.get()) for place in _variables_of(function)]
    return [(name, value) for name, value in own if isinstance(value, torch.optim.Optimizer)]


def _attributes_of(name: str, value: Any) -> Iterator[Place]:
    """Of an object or a class of the program's own, as a meter that averages."""
    if is_object(value):
        yield from _attributes(name, value, attributes_of(value))
    elif isinstance(value, type) and is_of_program(value):
        yield from _attributes(name, value, variables_of(value))


def _attributes(name: str, owner: Any, attributes: Iterable[str]) -> Iterator[Place]:
    def put(key: str, value: Any) -> None:
        if value is _MISSING:
            delattr(owner, key)
        else:
            setattr(owner, key, value)

    for key in attributes:
        get = functools.partial(getattr, owner, key, _MISSING)
        yield Place("variable", f"{name}.{key}", get, functools.partial(put, key))


def _outside(root: torch.nn.Module, function: Any, owners: Sequence[Any]) -> Iterator[Place]:
    places = list(_variables_of(function))
    for owner in owners:
        places += _attributes(type(owner).__name__, owner, list(vars(owner)))
    known = set(root.modules())
    for place in places:
        value = place.get()
        if _is_state(value):
            yield place
        elif isinstance(value, torch.nn.Module) and value in known:
            pass
        elif isinstance(value, torch.nn.Module):
            yield from _all_of_modules(place.name + ".", value, "variable")
        else:
            for inner in _attributes_of(place.name, value):
                if _is_state(inner.get()) or is_object(inner.get()):
                    yield inner


def _all_of_modules(prefix: str, root: torch.nn.Module, kind: str = "") -> Iterator[Place]:
    for inner, module in Tree([("", root)]).named_modules():
        for key, p in module._parameters.items():
            if p is not None:
                yield _of_parameter(prefix + inner + key, p)
                yield _of_gradient(prefix + inner + key, p)
        for place in _of_module(prefix + inner, module):
            yield dataclasses.replace(place, kind=kind) if kind else place


# ---- generators ----


class AllGenerators:
    """The states of PyTorch's generators, of some others, and of Python's and NumPy's."""

    def __init__(self, devices: Sequence[torch.device], others: Sequence[Any]):
        self._devices, self._others = list(devices), list(others)
        self._functions = [functions_of(generator) for generator in others]

    def states(self) -> list[Any]:
        states: list[Any] = [torch.get_rng_state()]
        states += [torch.cuda.get_rng_state(device) for device in self._devices]
        states += [get() for get, _ in self._functions]
        states.append(random.getstate())
        if "numpy" in sys.modules:
            states.append(sys.modules["numpy"].random.get_state())
        return states

    def put(self, states: list[Any]) -> None:
        left = iter(states)
        torch.set_rng_state(next(left))
        for device in self._devices:
            torch.cuda.set_rng_state(next(left), device)
        for _, put in self._functions:
            put(next(left))
        random.setstate(next(left))
        for state in left:
            sys.modules["numpy"].random.set_state(state)

    def seed(self, seed: int) -> None:
        """Other numbers from here on."""
        torch.manual_seed(seed)
        for generator in self._others:
            seed_generator(generator, seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)

    def have_moved(self, states: list[Any], but_for_torchs: bool = False) -> bool:
        """Whether they are no more at some states; or whether others than PyTorch's are not."""
        known = [True] * (1 + len(self._devices))
        known += [isinstance(generator, torch.Generator) for generator in self._others]
        moved = [not is_same_state(a, b) for a, b in zip(self.states(), states)]
        return any(moved[len(known) :]) or any(
            m for m, is_torchs in zip(moved, known) if not (is_torchs and but_for_torchs)
        )


# ---- the snapshot ----


class Snapshot:
    """The state of the places of a training, as it is when the snapshot is made."""

    def __init__(self, places: Sequence[Place], generators: AllGenerators):
        self._places, self._generators = self._distinct(places), generators
        self._states = generators.states()
        self._kept = [_Kept(place.get()) for place in self._places]

    @staticmethod
    def _distinct(places: Sequence[Place]) -> List[Place]:
        return list({(place.kind, place.name): place for place in places}.values())

    def restore(self) -> None:
        self._generators.put(self._states)
        for place, kept in zip(self._places, self._kept):
            if place.get() is not kept.value:
                place.put(kept.value)
            kept.restore()

    def changes(self) -> Dict[Tuple[str, str], Any]:
        """What is not as it was, by kind and name, with a copy of what it is now."""
        return {
            (place.kind, place.name): _copy(now)
            for place, kept in zip(self._places, self._kept)
            if not kept.is_same(now := place.get())
        }

    def draws(self, but_for_torchs: bool = False) -> bool:
        """Whether random numbers were drawn since, by PyTorch's generators or by others alone."""
        return self._generators.have_moved(self._states, but_for_torchs)


def all_places(
    root: torch.nn.Module, batch: Any, loss_fn: Any, owners: Sequence[Any] = ()
) -> List[Place]:
    return [
        *_all_of_modules("", root),
        *_of_batch(batch),
        *_outside(root, loss_fn, owners),
    ]


def places_outside(root: torch.nn.Module, loss_fn: Any, owners: Sequence[Any] = ()) -> List[Place]:
    """Those outside of the model that are small: without parameters and gradients."""
    places = _outside(root, loss_fn, owners)
    return [place for place in places if place.kind not in ("parameter", "gradient")]


def snapshot_outside(program: Program) -> Snapshot:
    """Of the generators, and of what is outside of the model and small."""
    root = program.modules[0] if len(program.modules) == 1 else program.modules
    tensors = [*program.update.parameters, *root.buffers()]
    generators = AllGenerators(cuda_devices_of(tensors), program.generators)
    return Snapshot(places_outside(root, program.loss_fn, program.owners), generators)
