"""What loss_fn changes outside of the model, which is not put back, is told once.

Nothing is looked at before a first OOM. The attempt that runs again after it is the experiment:
what changes then, of what loss_fn names, has changed in the attempt that failed too."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Iterator as AnyIterator
from typing import Any, Callable, Dict, Iterator, List, Sequence, Set, Tuple

import torch

from rebatch._library import GuardPoint
from rebatch._user_code import is_object, user_stacklevel
from rebatch.torch.undo.generators import functions_of
from rebatch.torch.undo.module_tree import ATOMS

# Entries of a container that are looked at, beside its length.
_MOST_ENTRIES = 64
# Arrays of NumPy up to this size are compared.
_ARRAY_BYTES = 64 << 10
_SKIPPED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def _names_in(code: types.CodeType) -> Set[str]:
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _named_by(function: Any) -> Iterator[Tuple[str, Any]]:
    """What a function names: variables of the functions around it, globals, its default arguments,
    those of a functools.partial, and the object whose method it is."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        function = function.func
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", None)
    if owner is None and is_object(function):
        owner, function = function, inspect.getattr_static(type(function), "__call__", None)
    if owner is not None:
        yield "self", owner
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            yield name, None
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((f"a default of {function.__name__}()", value) for value in defaults)
    variables = function.__globals__
    yield from ((name, variables[name]) for name in sorted(_names_in(code) & set(variables)))


def _tensor_mark(tensor: torch.Tensor) -> Any:
    gradient = tensor.grad if tensor.is_leaf else None
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), version, None if gradient is None else (id(gradient), gradient._version)


def _tensors_of(value: Any) -> List[torch.Tensor]:
    """Of a module or an optimizer."""
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [p for group in value.param_groups for p in group["params"]]


def _mark(value: Any) -> Any:
    """What changes where a value changes."""
    if isinstance(value, torch.Tensor):
        return _tensor_mark(value)
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        return [_tensor_mark(tensor) for tensor in _tensors_of(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return id(value), value.tobytes() if value.nbytes <= _ARRAY_BYTES else None
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else [id(local) for local in frame.f_locals.values()]
    if isinstance(value, AnyIterator):
        state = getattr(value, "__dict__", None)
        return repr(value) if state is None else {k: _entry_mark(v) for k, v in state.items()}
    if isinstance(value, (list, tuple, dict, set, collections.deque)):
        entries = value.values() if isinstance(value, dict) else value
        marks = [_entry_mark(part) for part in itertools.islice(entries, _MOST_ENTRIES)]
        return id(value), len(value), marks
    with_state = _state_of(value)
    return id(value) if with_state is None else with_state


def _state_of(value: Any) -> Any:
    """Of a generator of random numbers."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if hasattr(value, "bit_generator") or type(value).__name__ in ("Random", "RandomState"):
        return repr(functions_of(value)[0]())
    return None


def _entry_mark(value: Any) -> Any:
    if type(value) in ATOMS:
        return repr(value)
    if isinstance(value, (list, dict, set)):
        return id(value), len(value)
    return _tensor_mark(value) if isinstance(value, torch.Tensor) else id(value)


def _marks_of(functions: Sequence[Any], is_known: Callable[[Any], bool]) -> Dict[str, Any]:
    """By name. Of an object of the program, its attributes; of what is known, nothing."""
    found: Dict[str, Any] = {}
    for function in functions:
        for name, value in _named_by(function):
            if is_known(value) or (isinstance(value, _SKIPPED) and value not in functions):
                continue
            if type(value) in ATOMS:
                found[name] = repr(value)
            elif is_object(value) or isinstance(value, types.FunctionType):
                inner = dict(getattr(value, "__dict__", {}))
                found[name] = id(value)
                for key, part in inner.items():
                    if not is_known(part):
                        found[f"{name}.{key}"] = _entry_or_mark(part)
            else:
                found[name] = _mark(value)
    return found


def _entry_or_mark(value: Any) -> Any:
    return repr(value) if type(value) in ATOMS else _mark(value)


class Told:
    """A guard that puts nothing back. `functions` gives those that run in a micro-batch, and
    `known` the ids of what is put back."""

    def __init__(self, functions: Callable[[], Sequence[Any]], known: Callable[[], Set[int]]):
        self._functions, self._known = functions, known
        self._is_due = self._is_done = False
        self._before: Dict[str, Any] = {}

    def save(self, point: int) -> None:
        if self._is_due and point == GuardPoint.ATTEMPT:
            self._before = self._marks()

    def restore(self, point: int) -> None:
        self._is_due = not self._is_done
        self._before = {}

    def succeeded(self) -> None:
        """An attempt has: warn of what it changed, if it ran after one that failed."""
        if not (self._is_due and self._before):
            return
        before, self._before, self._is_due = self._before, {}, False
        now = self._marks()
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if names:
            self._is_done = True
            self._warn(names)

    def _marks(self) -> Dict[str, Any]:
        known = self._known()
        return _marks_of(self._functions(), lambda value: id(value) in known)

    def _warn(self, names: List[str]) -> None:
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        warnings.warn(
            f"rebatch: loss_fn changes {', '.join(map(repr, names[:3]))}{more} outside of the "
            "model, in attempts that fail too, and that is not put back: give the Step "
            "state=[...] with tensors, modules and objects that have state_dict(), or return the "
            "value beside the loss",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
