"""What loss_fn changes outside of the model, which is not put back, is told once.

Nothing is looked at before a first OOM. The attempt that runs again after it is the experiment:
what changes then, of what loss_fn names, has changed in the attempt that failed too."""

from __future__ import annotations

import argparse
import collections
import functools
import inspect
import itertools
import operator
import random
import types
import warnings
from collections.abc import Iterator as AnyIterator
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from rebatch._library import GuardPoint
from rebatch._user_code import is_object, user_stacklevel
from rebatch.torch.undo.generators import functions_of
from rebatch.torch.undo.contents import ATOMS
from rebatch.torch.undo.module_tree import names_of

# Entries of a container that are looked at, beside its length.
_MOST_ENTRIES = 64
# Arrays of NumPy up to this size are compared.
_ARRAY_BYTES = 64 << 10
_GRADIENTS = "gradients of "
_ADVICE = (
    "give the Step state=[...] with tensors, modules and objects that have state_dict(), or return "
    "the value beside the loss"
)
_SKIPPED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_WITH_ATTRIBUTES = (types.FunctionType, types.SimpleNamespace, argparse.Namespace)


def _names_in(code: types.CodeType) -> Set[str]:
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def named_by(function: Any) -> Iterator[Tuple[str, Any]]:
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


def _state_of(value: Any) -> Any:
    """Of a generator of random numbers; None where it is none."""
    kind = type(value)  # whose attributes ask no object, which may answer to every name
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if hasattr(kind, "bit_generator") or kind.__name__ == "RandomState":
        return repr(functions_of(value)[0]())
    return None


class _Marks:
    """What changes where a value changes: by the names of what some functions name. Of what is
    known, nothing."""

    def __init__(self, functions: Sequence[Any], known: Set[int], apart: Set[int]):
        self._known, self._apart = known, known | apart
        self.found: Dict[str, Any] = {}
        for function in functions:
            for name, value in named_by(function):
                is_skipped = isinstance(value, _SKIPPED) and not _is_in(value, functions)
                if not (is_skipped or id(value) in known):
                    self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        """Of an object of the program, its attributes."""
        if not (is_object(value) or isinstance(value, _WITH_ATTRIBUTES)):
            self._note(name, value)
            return
        self.found[name] = id(value)
        for key, part in list(getattr(value, "__dict__", {}).items()):
            if id(part) not in self._known:
                self._note(f"{name}.{key}", part)

    def _note(self, name: str, value: Any) -> None:
        self.found[name] = self._of(value)
        self.found[_GRADIENTS + name] = self._gradients_of(value)

    def _of(self, value: Any) -> Any:
        if type(value) in ATOMS or isinstance(value, torch.Tensor):
            return self._of_entry(value)
        if isinstance(value, torch.nn.Module):
            return [self._of_module(m) for m in value.modules() if id(m) not in self._known]
        if isinstance(value, torch.optim.Optimizer):
            return [self._of_entry(p) for group in value.param_groups for p in group["params"]]
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return id(value), value.tobytes() if value.nbytes <= _ARRAY_BYTES else None
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            return None if frame is None else [id(local) for local in frame.f_locals.values()]
        if isinstance(value, AnyIterator):
            if hasattr(value, "__dict__"):
                return self._of_entries(vars(value).values())
            return repr(value), operator.length_hint(value)
        if isinstance(value, (list, tuple, dict, set, collections.deque)):
            entries = value.values() if isinstance(value, dict) else value
            return id(value), len(value), self._of_entries(entries)
        state = _state_of(value)
        return id(value) if state is None else state

    def _of_module(self, module: torch.nn.Module) -> Any:
        tensors = [*module._parameters.values(), *module._buffers.values()]
        return self._of_entries([*tensors, *(vars(module)[name] for name in names_of(module))])

    def _of_entries(self, entries: Iterable[Any]) -> List[Any]:
        return [self._of_entry(part) for part in itertools.islice(entries, _MOST_ENTRIES)]

    def _of_entry(self, value: Any) -> Any:
        if type(value) in ATOMS:
            return repr(value)
        if id(value) in self._known or not isinstance(value, (torch.Tensor, list, dict, set)):
            return id(value)
        if not isinstance(value, torch.Tensor):
            return id(value), len(value)
        return id(value), 0 if value.is_inference() else value._version

    def _gradients_of(self, value: Any) -> Any:
        """Of a tensor, of those in a list, or of a module."""
        parts: Iterable[Any] = value if isinstance(value, (list, tuple)) else [value]
        parts = value.parameters() if isinstance(value, torch.nn.Module) else parts
        leaves = [p for p in parts if isinstance(p, torch.Tensor) and p.is_leaf]
        gradients = [p.grad for p in leaves if p.grad is not None and id(p) not in self._apart]
        return [(id(gradient), gradient._version) for gradient in gradients]


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    return any(value is each for each in values)


class Told:
    """A guard that puts nothing back. `functions` gives those that run in a micro-batch, `known`
    the ids of what is put back, and `name` what users call the function."""

    def __init__(
        self,
        functions: Callable[[], Sequence[Any]],
        known: Callable[[], Set[int]],
        name: Callable[[], str],
        advice: str = _ADVICE,
    ):
        self._functions, self._known, self._name, self._advice = functions, known, name, advice
        self.apart: Sequence[Sequence[torch.Tensor]] = ()  # whose gradients are kept apart
        self._is_due = self._is_done = False
        self._before: Optional[Dict[str, Any]] = None

    def begin(self) -> None:
        """Another batch: what failed before it does not run again."""
        self._is_due, self._before = False, None

    def save(self, point: int) -> None:
        if self._is_due and point == GuardPoint.ATTEMPT:
            self._before = self._marks()

    def restore(self, point: int) -> None:
        self._is_due, self._before = not self._is_done, None

    def succeeded(self) -> None:
        """An attempt has: warn of what it changed, if it ran after one that failed."""
        before = self._before
        self.begin()
        if before is None:
            return
        now = self._marks()
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        of_gradients = [_GRADIENTS + name for name in changed]  # which that says already
        names = [name for name in changed if name not in of_gradients]
        if names:
            self._is_done = True
            self._warn(names)

    def _marks(self) -> Dict[str, Any]:
        apart = {id(p) for tensors in self.apart for p in tensors}
        return _Marks(self._functions(), self._known(), apart).found

    def _warn(self, names: List[str]) -> None:
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        warnings.warn(
            f"rebatch: {self._name()} changes {', '.join(map(repr, names[:3]))}{more} outside of "
            f"the model, in attempts that fail too, and that is not put back: {self._advice}",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
