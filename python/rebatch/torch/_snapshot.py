"""What a training holds: a copy of it, what has changed since, and putting it back.

Beside parameters, buffers and generators that is what modules hold as plain attributes, the batch,
and the variables of the program that loss_fn reads or writes."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import random
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch

from rebatch.torch._state import functions_of, is_same_state, seed_generator

_NUMBERS = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, collections.deque)
# Longer containers are data sets rather than counters.
_LONGEST = 1000
_OF_ALL_MODULES = frozenset(vars(torch.nn.Module())) | {"training"}
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


def _copy(value: Any, depth: int = 2) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if depth and isinstance(value, dict):
        return {k: _copy(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, _CONTAINERS):
        return [_copy(v, depth - 1) for v in value]
    return value


def _is_same(value: Any, copy: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if not isinstance(copy, torch.Tensor) or value.shape != copy.shape:
            return False
        if value.dtype != copy.dtype or value.layout != copy.layout:
            return False
        if value.layout != torch.strided:
            return torch.equal(value.detach().to_dense(), copy.to_dense())
        return bool(torch.equal(value, copy) or torch.allclose(value, copy, 0, 0, equal_nan=True))
    if isinstance(value, dict):
        return isinstance(copy, dict) and list(value) == list(copy) and all(
            map(_is_same, value.values(), copy.values())
        )
    if isinstance(value, _CONTAINERS):
        return isinstance(copy, list) and len(value) == len(copy) and all(
            map(_is_same, value, copy)
        )
    if isinstance(value, float) and value != value:
        return isinstance(copy, float) and copy != copy
    return value is copy or (isinstance(value, _NUMBERS) and value == copy)


@torch.no_grad()
def _put_contents(value: Any, copy: Any) -> None:
    """Write the copy of an object into it."""
    if isinstance(value, torch.Tensor):
        value.copy_(copy)
    elif isinstance(value, dict):
        contents = {k: _put_back_item(value.get(k), v) for k, v in copy.items()}
        value.clear()
        value.update(contents)
    elif isinstance(value, (list, collections.deque)):
        items = [_put_back_item(v, c) for v, c in zip(_padded(value, len(copy)), copy)]
        value.clear()
        value.extend(items)
    elif isinstance(value, set):
        value.clear()
        value.update(copy)


def _padded(values: Any, length: int) -> list:
    return (list(values) + [None] * length)[:length]


def _put_back_item(value: Any, copy: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor):
        if value.shape == copy.shape and value.dtype == copy.dtype:
            if not _is_same(value, copy):
                _put_contents(value, copy)
            return value
    return _copy(copy)


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
    for key, value in vars(module).items():
        if key not in _OF_ALL_MODULES and _is_state(value):
            yield _in_dict("attribute", prefix + key, vars(module), key)
    yield _in_dict("mode", prefix.rstrip(".") or type(module).__name__, vars(module), "training")


def _of_gradient(name: str, p: torch.nn.Parameter) -> Place:
    return Place("gradient", name, lambda: p.grad, lambda value: setattr(p, "grad", value))


def _of_parameter(name: str, p: torch.nn.Parameter) -> Place:
    return Place("parameter", name, lambda: p, lambda _: None)


def _batch_tensors(value: Any, name: str) -> Iterator[Place]:
    if isinstance(value, torch.Tensor):
        yield Place("batch", name, lambda: value, lambda _: None)
    elif isinstance(value, collections.abc.Mapping):
        for key, part in value.items():
            yield from _batch_tensors(part, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _batch_tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _batch_tensors(part, f"{name}[{i}]")


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
            cell.cell_contents
        except ValueError:  # it has no value yet
            continue
        yield _cell_place(name, cell)
    names = set(code.co_names)
    for constant in code.co_consts:  # functions within it
        if isinstance(constant, types.CodeType):
            names |= set(constant.co_names)
    for name in sorted(names & set(function.__globals__)):
        yield _in_dict("variable", name, function.__globals__, name)


def _attributes_of(name: str, value: Any) -> Iterator[Place]:
    """Of an object of the program's own class, as a meter that averages."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, torch.Tensor)):
        return
    own = [kind.__module__.split(".")[0] for kind in type(value).__mro__[:-1]]
    if not own or {"builtins", "torch", "rebatch", "numpy"} & set(own):
        return
    yield from _attributes(name, value)


def _attributes(name: str, value: Any) -> Iterator[Place]:
    for key in list(getattr(value, "__dict__", ())):
        yield _in_dict("variable", f"{name}.{key}", vars(value), key)


def _outside(
    root: torch.nn.Module, function: Any, owners: Sequence[Any]
) -> Iterator[Place]:
    places = list(_variables_of(function))
    for owner in owners:
        places += _attributes(type(owner).__name__, owner)
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
                if _is_state(inner.get()):
                    yield inner


def _all_of_modules(prefix: str, root: torch.nn.Module, kind: str = "") -> Iterator[Place]:
    for name, p in root.named_parameters():
        yield _of_parameter(prefix + name, p)
        yield _of_gradient(prefix + name, p)
    for name, module in root.named_modules():
        for place in _of_module(f"{prefix}{name}." if name else prefix, module):
            yield dataclasses.replace(place, kind=kind) if kind else place


# ---- generators ----


class AllGenerators:
    """The states of PyTorch's generators, of some others, and of Python's and NumPy's."""

    def __init__(self, devices: Sequence[torch.device], others: Sequence[Any]):
        self._devices, self._others = list(devices), list(others)
        self._functions = [functions_of(generator) for generator in others]

    def states(self) -> list:
        states: list = [torch.get_rng_state()]
        states += [torch.cuda.get_rng_state(device) for device in self._devices]
        states += [get() for get, _ in self._functions]
        states.append(random.getstate())
        if "numpy" in sys.modules:
            states.append(sys.modules["numpy"].random.get_state())
        return states

    def put(self, states: list) -> None:
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

    def is_at(self, states: list) -> bool:
        return all(is_same_state(a, b) for a, b in zip(self.states(), states))


# ---- the snapshot ----


class Snapshot:
    """The state of the places of a training, as it is when the snapshot is made."""

    def __init__(self, places: Sequence[Place], generators: AllGenerators):
        self._places, self._generators = self._distinct(places), generators
        self._states = generators.states()
        self._values = [place.get() for place in self._places]
        self._copies = [_copy(value) for value in self._values]

    @staticmethod
    def _distinct(places: Sequence[Place]) -> List[Place]:
        return list({(place.kind, place.name): place for place in places}.values())

    def restore(self) -> None:
        self._generators.put(self._states)
        for i, place in enumerate(self._places):
            value, copy = self._values[i], self._copies[i]
            if place.get() is not value:
                place.put(value)
            if self._has_other_contents(i, value):
                _put_contents(value, copy)

    def _has_other_contents(self, i: int, value: Any) -> bool:
        """By the contents: BatchNorm and kernels of one's own leave a tensor's version as it is."""
        return value is not _MISSING and not _is_same(value, self._copies[i])

    def changes(self) -> Dict[Tuple[str, str], Any]:
        """What is not as it was, by kind and name, with a copy of what it is now."""
        found = {}
        for i, place in enumerate(self._places):
            now = place.get()
            if now is self._values[i] and not self._has_other_contents(i, now):
                continue
            if not _is_same(now, self._copies[i]):
                found[place.kind, place.name] = _copy(now)
        return found

    def draws(self) -> bool:
        """Whether random numbers were drawn since."""
        return not self._generators.is_at(self._states)


def all_places(
    root: torch.nn.Module, batch: Any, loss_fn: Any, owners: Sequence[Any] = ()
) -> List[Place]:
    return [
        *_all_of_modules("", root),
        *_batch_tensors(batch, "batch"),
        *_outside(root, loss_fn, owners),
    ]


def places_beside_parameters(
    root: torch.nn.Module, loss_fn: Any, owners: Sequence[Any] = ()
) -> List[Place]:
    """Those that are small: without parameters, gradients and the batch."""
    places = [*_all_of_modules("", root), *_outside(root, loss_fn, owners)]
    return [place for place in places if place.kind not in ("parameter", "gradient")]
