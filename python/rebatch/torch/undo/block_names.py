"""The variables of a block of the program that runs again after an OOM. Numbers, texts, small
tensors, arrays of NumPy and what is made of these are put back, and what else it assigned is None,
so that no name holds tensors of the block that failed. Of what was there before, changes are found,
to be told. Must not know the batch."""

from __future__ import annotations

import collections
import ctypes
import gc
import inspect
import sys
import types
import weakref
from typing import Any, Dict, Iterable, Iterator, List, Set, Tuple

import torch

from rebatch._user_code import is_object
from rebatch.torch.undo.contents import ATOMS, attributes_of, is_container
from rebatch.torch.undo.places import Place, globals_in, place_of

_SMALL_BYTES = 4096  # of tensors without a graph, which are kept
_MOST = 64  # entries of a container in which tensors are looked for, and attributes of an object
_MOST_KEPT = 256  # entries of a value that is kept, with those of the containers in it
_NO_STATE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """A tensor, or those that a container has."""
    parts: Iterable[Any] = (value,)
    if is_container(value):
        parts = value.values() if isinstance(value, dict) else value
    for _, part in zip(range(_MOST), list(parts) if is_container(value) else parts):
        if isinstance(part, torch.Tensor):
            yield part


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= _SMALL_BYTES


def _is_kept(value: Any) -> bool:
    """Whether a name can have it again: a number or text, a small tensor without a graph, an array
    of NumPy, or a container or an object of the program that has nothing else."""
    values, left = [value], _MOST_KEPT
    while values:
        value = values.pop()
        kind = type(value)
        if kind in ATOMS:
            continue
        if isinstance(value, torch.Tensor):
            if value.requires_grad or not _is_small(value):
                return False
        elif is_container(value) or kind is frozenset or is_object(value):
            parts = attributes_of(value) if is_object(value) else value
            left -= 1 + len(parts)
            if left < 0:
                return False
            parts = parts.values() if isinstance(parts, dict) else parts
            if not ATOMS.issuperset(map(type, parts)):
                values += parts
        elif kind.__module__ != "numpy" and gc.is_tracked(value):  # a Decimal and a date are not
            return False
    return True


def _token(value: Any) -> Any:
    """What shows later that it is the same object, and keeps no tensor: a weak reference to it, or
    to a tensor that it holds, or the object."""
    try:
        return weakref.ref(value)
    except TypeError:  # a list, dict or tuple
        held = next(_tensors_in(value), None)
        return (lambda: value) if held is None else weakref.ref(held)


def _mark(value: Any, is_part: bool = False) -> Any:
    """Another one when what it holds has changed, as far as a glance shows."""
    if type(value) in ATOMS:
        return repr(value) if isinstance(value, (float, complex)) else value
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, (list, dict, set, collections.deque)):
        return id(value), len(value)
    if is_object(value) and not is_part:
        attributes = list(attributes_of(value).items())[:_MOST]
        return id(value), [(name, _mark(part, True)) for name, part in attributes]
    return id(value)


def _has_copy(frame: types.FrameType) -> bool:
    """Whether f_locals is a copy of a function's variables, which the frame keeps: before Python
    3.13, where it became the variables themselves (PEP 667)."""
    return sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _variables_of(frame: types.FrameType) -> Dict[str, Any]:
    there = frame.f_locals
    values = dict(there)
    if _has_copy(frame):
        there.clear()  # it would hold tensors
    return values


def named_in(frame: types.FrameType) -> Iterator[Place]:
    """Variables of a function, and those of its file that it names."""
    names, globals_ = globals_in(frame.f_code), frame.f_globals
    own = {} if frame.f_locals is globals_ else _variables_of(frame)
    for name, value in own.items():
        yield place_of(name, value)
    for name in sorted(names & globals_.keys() - own.keys()):
        yield Place(name, globals_, name)


def _assign(frame: types.FrameType, changed: Dict[str, Any]) -> None:
    there = frame.f_locals
    there.update(changed)
    if _has_copy(frame):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        there.clear()


class BlockNames:
    """What the names in a frame are when a block begins there."""

    def __init__(self, frame: types.FrameType, known: Set[int]):
        """Of what is `known`, by its id, changes are put back by others."""
        self._frame, self._known = frame, known
        self._kept: Dict[str, Any] = {}
        self._tokens: Dict[str, Tuple[int, Any]] = {}
        for name, value in _variables_of(frame).items():
            if _is_kept(value):
                self._kept[name] = value
            else:
                self._tokens[name] = id(value), _token(value)
        self._marks = self._older_marks()
        self._assigned: List[Tuple[str, Any]] = []  # tensors of the block that failed
        self.emptied: Set[str] = set()  # names of something, which are None by now

    def assigned(self) -> Set[str]:
        """Names of values that are others."""
        values = _variables_of(self._frame)
        return {name for name, value in values.items() if not self._is_same(name, value)}

    def _is_same(self, name: str, value: Any) -> bool:
        """Whether it has the value that it had."""
        if name in self._kept:
            old = self._kept[name]
            return old is value or type(value) in ATOMS and _mark(old) == _mark(value)
        key, token = self._tokens.get(name, (0, None))
        return key == id(value) and token() is not None

    def _older_marks(self) -> Dict[str, Any]:
        """Of what local names had before, and of globals that the code names."""
        code, variables = self._frame.f_code, self._frame.f_globals
        found = {name: variables[name] for name in code.co_names if name in variables}
        for name, value in _variables_of(self._frame).items():
            found.pop(name, None)
            if type(value) not in ATOMS and self._is_same(name, value):
                found[name] = value
        skipped = (*_NO_STATE, torch.nn.Module, torch.optim.Optimizer)
        return {
            name: _mark(value)
            for name, value in found.items()
            if not isinstance(value, skipped) and id(value) not in self._known
        }

    def let_go(self) -> None:
        """After the block has succeeded: names that it assigned hold no graph, as those of a
        function that has returned. A small tensor, such as a sum of losses, goes on without it."""
        of_graphs: Dict[str, Any] = {
            name: value.detach() if isinstance(value, torch.Tensor) and _is_small(value) else None
            for name, value in _variables_of(self._frame).items()
            if not self._is_same(name, value)
            and any(t.grad_fn is not None for t in _tensors_in(value))
        }
        if of_graphs:
            _assign(self._frame, of_graphs)
            self.emptied.update(name for name, value in of_graphs.items() if value is None)

    def put_back(self) -> List[str]:
        """After an OOM. Returns the names of what was changed and is not put back."""
        values = _variables_of(self._frame)
        changed = {
            name: self._kept.get(name)
            for name, value in values.items()
            if not self._is_same(name, value) and (name in self._kept or type(value) not in ATOMS)
        }
        changed.update((name, old) for name, old in self._kept.items() if name not in values)
        self._assigned = [
            (name, weakref.ref(t))
            for name in changed
            for t in _tensors_in(values.get(name))
            if id(t) not in self._known and t is not changed[name]
        ]
        values.clear()
        _assign(self._frame, changed)
        self.emptied.update(name for name in changed if name in self._tokens)
        now = self._older_marks()
        return [name for name, mark in self._marks.items() if name in now and now[name] != mark]

    def empty_among(self, names: Set[str]) -> List[str]:
        """Which of them are None now."""
        values = _variables_of(self._frame)
        return sorted(name for name in names if values.get(name, names) is None)

    def still_held(self) -> List[str]:
        """Once no exception is handled, whose frames hold what they were called with: the names
        that had tensors which something else holds."""
        return list(dict.fromkeys(name for name, alive in self._assigned if alive() is not None))
