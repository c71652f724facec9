"""Where a function of the program finds what lies outside of it."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch

# Calls of functions of the program are followed so far.
_DEEPEST = 4
_MISSING = object()
# Packages whose objects know by themselves what they are for.
_OTHERS = frozenset(
    (*sys.builtin_module_names, *sys.stdlib_module_names, "torch", "numpy", "rebatch")
) - {"__main__"}


@functools.lru_cache(maxsize=None)
def is_own(package: str) -> bool:
    """Whether a package is the program's own, and not one that was installed."""
    if package in _OTHERS:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return not any(folder in file for folder in ("site-packages", "dist-packages"))


def is_of_the_program(value: Any) -> bool:
    """A function or class."""
    return is_own((getattr(value, "__module__", None) or "builtins").split(".")[0])


class _AreObjects(dict[type, bool]):
    """Whether a type is a class of the program, and neither a module nor a function."""

    def __missing__(self, kind: type) -> bool:
        skipped = (torch.nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType)
        self[kind] = not issubclass(kind, (*skipped, list, dict, tuple, set)) and (
            is_of_the_program(kind)
        )
        return self[kind]


_are_objects = _AreObjects()


def is_object(value: Any) -> bool:
    """Of a class of the program that is no module and no container."""
    return _are_objects[type(value)]


_names: "weakref.WeakKeyDictionary[types.CodeType, Tuple[Set[str], Set[str]]]" = (
    weakref.WeakKeyDictionary()
)


def _names_in(code: types.CodeType) -> Tuple[Set[str], Set[str]]:
    """(globals, attributes) that a function's code names, with those of functions within it."""
    if code not in _names:
        variables, attributes = set(), set()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME"):
                variables.add(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD"):
                attributes.add(instruction.argval)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                inner = _names_in(constant)
                variables |= inner[0]
                attributes |= inner[1]
        _names[code] = variables, attributes
    return _names[code]


class Slots:
    """The variables outside of some functions: cells, entries of namespaces, and values that
    nothing can assign, by name. `objects` are more of these."""

    def __init__(self, functions: Sequence[Any], objects: Sequence[Tuple[str, Any]] = ()):
        self._functions, self._objects = list(functions), list(objects)
        self._cells: List[Tuple[str, types.CellType]] = []
        self._entries: List[Tuple[str, dict[Any, Any], str]] = []
        self._values: List[Tuple[str, Any]] = self._objects.copy()
        self._seen: Set[Any] = set()
        for function in functions:
            self._add_function(function, 0)
        self.names = [str(name) for name, *_ in (*self._cells, *self._entries, *self._values)]
        self._constants = [value for _, value in self._values]

    def are_of(self, functions: Sequence[Any], objects: Sequence[Tuple[str, Any]]) -> bool:
        """Whether these are theirs; a bound method is another object each time."""
        return (
            len(functions) == len(self._functions)
            and all(a is b or a == b for a, b in zip(functions, self._functions))
            and len(objects) == len(self._objects)
            and all(a is b for (_, a), (_, b) in zip(objects, self._objects))
        )

    def values(self) -> List[Any]:
        found = []
        for _, cell in self._cells:
            try:
                found.append(cell.cell_contents)
            except ValueError:
                found.append(_MISSING)
        found += [table.get(key, _MISSING) for _, table, key in self._entries]
        return found + self._constants

    def put_back(self, values: Sequence[Any]) -> None:
        """Of those that have others than these, which were there before."""
        now = self.values()
        for i, (_, cell) in enumerate(self._cells):
            if now[i] is not values[i]:
                if values[i] is _MISSING:
                    del cell.cell_contents
                else:
                    cell.cell_contents = values[i]
        for i, (_, table, key) in enumerate(self._entries, len(self._cells)):
            if now[i] is not values[i]:
                if values[i] is _MISSING:
                    table.pop(key, None)
                else:
                    table[key] = values[i]

    # ---- finding them ----

    def _add_function(self, function: Any, depth: int) -> None:
        """And those that it names, if they are the program's own."""
        if isinstance(function, functools.partial):
            given = [*enumerate(function.args), *function.keywords.items()]
            self._values += [(f"argument {key!r} of a functools.partial", v) for key, v in given]
            function = function.func
        if isinstance(function, torch.nn.Module):
            self._values.append((type(function).__name__, function))
            return
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._values.append(("self", owner))
        has_type = not isinstance(function, (types.FunctionType, types.MethodType, type))
        if has_type and callable(function) and is_of_the_program(type(function)):
            self._values.append((type(function).__name__, function))
            owner = function
        for plain in _functions_in(function):
            self._add_own(plain, depth, None if isinstance(owner, type) else type(owner))

    def _add_own(self, function: types.FunctionType, depth: int, kind: Optional[type]) -> None:
        """If it is the program's. `kind` is the class whose method it is."""
        if function not in self._seen and depth < _DEEPEST and is_of_the_program(function):
            self._seen.add(function)
            self._add_plain(function, depth, kind)

    def _add_methods(self, kind: type, names: Set[str], depth: int) -> None:
        """Of a class, those that a method names."""
        for name in sorted(names):
            method = inspect.getattr_static(kind, name, None)
            method = getattr(method, "__func__", method)
            if isinstance(method, types.FunctionType):
                self._add_own(method, depth, kind)

    def _add_plain(self, function: types.FunctionType, depth: int, kind: Optional[type]) -> None:
        code, names = function.__code__, function.__globals__
        own_name = function.__name__
        self._values += [
            (f"a default of {own_name}()", value)
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        ]
        variables, attributes = _names_in(code)
        if own_name in variables or own_name in code.co_freevars:
            self._values.append((own_name, vars(function)))  # it may count in its own attributes
        found = list(zip(code.co_freevars, function.__closure__ or ()))
        known = {id(cell) for _, cell in self._cells}
        self._cells += [(name, cell) for name, cell in found if id(cell) not in known]
        inner = [_content_of(cell) for _, cell in found]
        for name in sorted(variables):
            if name in names or name not in _builtins():
                inner += self._add_global(name, names, attributes)
        for value in inner:
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self._add_function(value, depth + 1)
        if kind is not None:
            self._add_methods(kind, attributes, depth + 1)

    def _add_global(self, name: str, names: Dict[str, Any], attributes: Set[str]) -> List[Any]:
        """Returns its value. Of a module of the program those of its variables that are named."""
        value = names.get(name, _MISSING)
        if not isinstance(value, types.ModuleType):
            self._add_entry(name, names, name)
            return [value]
        if not is_own(value.__name__.split(".")[0]):
            return []
        inner = sorted(attributes & set(vars(value)))
        for key in inner:
            self._add_entry(f"{name}.{key}", vars(value), key)
        return [vars(value)[key] for key in inner]

    def _add_entry(self, name: str, table: dict[Any, Any], key: str) -> None:
        if not any(t is table and k == key for _, t, k in self._entries):
            self._entries.append((name, table, key))


def _functions_in(function: Any) -> Iterator[types.FunctionType]:
    """A function, and those that decorators have put around it; of an object its __call__."""
    if isinstance(function, type):
        return
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        function = inspect.getattr_static(type(function), "__call__", None)
    function = getattr(function, "__func__", function)
    while isinstance(function, types.FunctionType):
        yield function
        function = inspect.getattr_static(function, "__wrapped__", None)
        function = getattr(function, "__func__", function)


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value yet
        return _MISSING


def _builtins() -> Dict[str, Any]:
    return vars(sys.modules["builtins"])
