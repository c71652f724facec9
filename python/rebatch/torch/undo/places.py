"""Where values are: in a table of a module, an attribute, or a variable that a function names. And
what some places hold at one time, which can be put back. Must not know whose values these are."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from typing import (
    Any,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Set,
    Tuple,
    Type,
    TypeVar,
)

import torch

from rebatch._user_code import is_object, is_own
from rebatch.torch.undo.contents import (
    MISSING,
    Contents,
    attributes_of,
    entry_of,
    is_container,
    put_back_contents,
    walk,
)

# With a code object, or what has one behind it.
FUNCTIONS = (
    *(types.FunctionType, types.MethodType, functools.partial),
    type(functools.lru_cache(int)),
)
_NO_VARIABLES = (
    *(types.FunctionType, types.MethodType, functools.partial),
    *(types.BuiltinFunctionType, types.ModuleType),
    *(staticmethod, classmethod, property, types.MemberDescriptorType, types.GetSetDescriptorType),
)
_T = TypeVar("_T")


class Place(NamedTuple):
    """An entry of a dict, or an attribute of another owner; with a path, an entry or attribute of
    the value there. `kind` is "parameter", "gradient", "buffer", "attribute", "variable", "batch"
    or "mode"."""

    name: str
    owner: Any
    key: Any
    path: tuple[Any, ...] = ()
    kind: str = "variable"

    @property
    def at(self) -> Tuple[Any, ...]:
        """The same for two of one place."""
        return id(self.owner), self.key, self.path

    @property
    def mark_key(self) -> Tuple[Any, ...]:
        """The same for two of one place, and for two of a value that is never another."""
        return ("", id(self.get())) if isinstance(self.owner, _Own) else ("", *self.at)

    def get(self) -> Any:
        """What is there now, or MISSING."""
        owner, key = self.owner, self.key
        is_dict = isinstance(owner, dict)
        value: Any = owner.get(key, MISSING) if is_dict else getattr(owner, key, MISSING)
        for key in self.path:
            try:
                value = entry_of(value, key)
            except (TypeError, LookupError):
                return MISSING
        return value

    def put(self, value: Any) -> None:
        """Of a place without a path. MISSING: nothing is there any more."""
        if isinstance(self.owner, dict):
            if value is MISSING:
                self.owner.pop(self.key, None)
            else:
                self.owner[self.key] = value
        elif value is MISSING:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)

    def inner(self, owner: Any, key: Any) -> "Place":
        """That of an entry or attribute of the value."""
        name = f"{self.name}[{key!r}]" if is_container(owner) else f"{self.name}.{key}"
        return Place(name, self.owner, self.key, (*self.path, key))


class _Own(Dict[Any, Any]):
    """What a place is in that is none of the program's."""


def place_of(name: str, value: Any, kind: str = "variable") -> Place:
    """One of a value that is never another."""
    return Place(name, _Own({name: value}), name, kind=kind)


class Saved:
    """What some places hold, and what is in it, at one time: by reference."""

    def __init__(self, places: Iterable[Place]):
        self.values: List[Tuple[Place, Any]] = []
        self.contents: Contents = {}
        self.add(places)

    def add(self, places: Iterable[Place]) -> List[torch.Tensor]:
        """Hold what these do too. Returns the tensors that are not held yet."""
        tensors: List[torch.Tensor] = []
        for place in places:
            value = place.get()
            self.values.append((place, value))
            walk(value, self.contents, tensors, [])
        return tensors

    def put_back(self) -> None:
        for place, value in self.values:
            if place.get() is not value:
                place.put(value)
        put_back_contents(self.contents)


# ---- what functions name ----


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """That of functions that it makes too."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _with_inner(part)


@functools.lru_cache(maxsize=1024)
def globals_in(code: types.CodeType) -> FrozenSet[str]:
    """The names of variables that are none of a function: one of an attribute may be the same."""
    return frozenset(
        it.argval
        for part in _with_inner(code)
        for it in dis.get_instructions(part)
        if it.opname.rpartition("_")[2] in ("GLOBAL", "NAME")
    )


@functools.lru_cache(maxsize=1024)
def _imports_in(code: types.CodeType) -> FrozenSet[str]:
    """The files that it imports where it runs, by the names that it gives them."""
    return frozenset(
        it.argval
        for part in _with_inner(code)
        for it in dis.get_instructions(part)
        if it.opname == "IMPORT_NAME"
    )


def _imported(name: str, variables: Dict[str, Any]) -> Iterator[Place]:
    """A file of the program; one of the same package has a name that may be relative."""
    package = variables.get("__package__") or ""
    for full in (name, f"{package}.{name}".rstrip(".")):
        module = sys.modules.get(full)
        if isinstance(module, types.ModuleType) and is_of_program(module):
            yield place_of(full.rpartition(".")[2], module)


def _with_wrapped(function: Any) -> Iterator[Any]:
    """A function, and what it wraps; of those around another one, the program's own."""
    innermost = inspect.unwrap(function)
    while function is not innermost:
        variables = getattr(getattr(function, "__func__", function), "__globals__", None)
        if variables and is_own(str(variables.get("__name__")).split(".")[0]):
            yield function
        function = function.__wrapped__
    yield innermost


def names_in(function: Any) -> Set[str]:
    """All that a function names: globals and attributes, and texts beside getattr()."""
    while isinstance(function, functools.partial):
        function = function.func
    codes = [getattr(each, "__code__", None) for each in _with_wrapped(function)]
    parts = [part for code in codes if code for part in _with_inner(code)]
    names = {name for part in parts for name in part.co_names}
    if "getattr" in names:
        names |= {text for part in parts for text in part.co_consts if isinstance(text, str)}
    return names


def named_by(function: Any) -> Iterator[Place]:
    """What a function names: variables of the functions around it, globals, its default arguments,
    those of a functools.partial, and the object whose method it is, as "self". Of a function that
    is decorated, what its decorators name too."""
    if isinstance(function, functools.partial):
        for i, value in enumerate(function.args):
            yield place_of(f"argument {i}", value)
        for name in function.keywords:
            yield Place(name, function.keywords, name)
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is None and is_object(function):
        owner, function = function, inspect.getattr_static(type(function), "__call__", None)
    if owner is not None:
        yield place_of("self", owner)
    for each in _with_wrapped(function):
        yield from _named_by(getattr(each, "__func__", each))


def _named_by(function: Any) -> Iterator[Place]:
    """Of one function, and not of what it wraps."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            _ = cell.cell_contents
            yield Place(name, cell, "cell_contents")
        except ValueError:  # it has no value yet
            yield place_of(name, None)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in defaults:
        yield place_of(f"a default of {function.__name__}()", value)
    variables = function.__globals__
    for name in sorted(globals_in(code) & variables.keys()):
        yield Place(name, variables, name)
    for name in sorted(_imports_in(code)):
        yield from _imported(name, variables)


def variables_of(function: Any) -> Iterator[Place]:
    """What a function names, with the attributes of the object whose method it is."""
    for place in named_by(function):
        yield from inside("self", place.get()) if place.name == "self" else (place,)


def used_by(function: Any, kind: Type[_T]) -> List[Tuple[str, _T]]:
    """Objects of a class that a function is, is a method of, or names, by name."""
    own = [("", function), ("", getattr(function, "__self__", None))]
    own += [(place.name, place.get()) for place in variables_of(function)]
    return [(name, value) for name, value in own if isinstance(value, kind)]


def inside(name: str, value: Any) -> Iterator[Place]:
    """The attributes of an object or a class of the program's own, as a meter that averages."""
    if is_object(value):
        return attributes(name, value, attributes_of(value))
    is_class = isinstance(value, type) and is_of_program(value)
    return attributes(name, value, own_variables(value) if is_class else ())


def attributes(name: str, owner: Any, keys: Iterable[str]) -> Iterator[Place]:
    return (Place(f"{name}.{key}", owner, key) for key in keys)


def is_of_program(value: Any) -> bool:
    """A function, class or file of the program."""
    is_file = isinstance(value, types.ModuleType)
    name = value.__name__ if is_file else getattr(value, "__module__", None)
    return is_own(str(name or "builtins").split(".")[0])


def own_variables(value: Any) -> Dict[str, Any]:
    """Of a class or file."""
    return {
        key: part
        for key, part in vars(value).items()
        if not (key.startswith("__") or isinstance(part, _NO_VARIABLES))
    }
