"""What the modules of a model hold, by reference: parameters, buffers, and data in attributes."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Mapping
from typing import (
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

import torch

from rebatch._user_code import is_object
from rebatch.torch.private import MODULE_TABLES

# Attributes that every module has; these are no data of the model.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
# Wrappers that keep what they do in attributes.
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")
ATOMS = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
)
_CONTAINERS = (list, dict, tuple, set, collections.deque)
MOST_ENTRIES = 1 << 16  # of an attribute, with those of the containers in it
_FEW_ENTRIES = 64  # that are looked at one by one, rather than by a set of their types
MISSING, _NO_DATA = object(), object()
_T = TypeVar("_T", bound=torch.Tensor)


class Place(NamedTuple):
    """Where a value is held: in a table of a module, or in containers of an attribute, at these
    keys."""

    name: str
    table: dict[Any, Any]
    key: Any
    path: tuple[Any, ...] = ()

    def tensor(self) -> Any:
        """What is there now; None where it is no tensor."""
        value: Any = self.table.get(self.key)
        for key in self.path:
            try:
                value = (vars(value) if is_object(value) else value)[key]
            except (TypeError, LookupError):
                return None
        return value if isinstance(value, torch.Tensor) else None

    def inner(self, owner: Any, key: Any) -> "Place":
        """That of an entry or attribute of the value."""
        name = f"{self.name}.{key}" if is_object(owner) else f"{self.name}[{key!r}]"
        return Place(name, self.table, self.key, (*self.path, key))


def unique(tensors: Iterable[_T]) -> List[_T]:
    """Each once, in order. A tensor's own hash is a function in Python; its id is not."""
    return list({id(t): t for t in tensors}.values())


def entries_of(value: Any) -> Iterator[Tuple[Any, Any]]:
    """(key, entry) of a container."""
    return iter(value.items()) if isinstance(value, Mapping) else enumerate(value)


def _is_same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    """Whether they have the same entries in the same order."""
    return list(a) == list(b) and all(map(operator.is_, a.values(), b.values()))


def _is_same_list(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _are_same(a: Any, b: Any) -> bool:
    """Whether two copies of a container have the same entries."""
    if isinstance(a, dict):
        return _is_same(a, b)
    return bool(a == b) if isinstance(a, set) else _is_same_list(a, b)


def _copy_of(container: Any) -> Any:
    """The same entries, in a container of Python's own."""
    for kind in (dict, set, tuple):
        if isinstance(container, kind):
            return container if kind is tuple else kind(container)
    return list(container)


def _parts_of(container: Any) -> Iterable[Any]:
    """The entries that are more than numbers and texts."""
    parts = container.values() if isinstance(container, dict) else container
    if len(container) > _FEW_ENTRIES and ATOMS.issuperset(map(type, parts)):
        return ()
    return [part for part in parts if type(part) not in ATOMS]


# Containers, and objects of the program, with their entries or attributes, by id.
Contents = Dict[int, Tuple[Any, Any]]


def walk(
    value: Any,
    contents: Contents,
    tensors: List[torch.Tensor],
    modules: List[torch.nn.Module],
    most: int = MOST_ENTRIES,
) -> bool:
    """Collect the containers, tensors and modules that a value is, or has at any depth. False:
    those are more entries than `most`, and some were not looked at."""
    found = [value]
    while found:
        part = found.pop()
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif id(part) not in contents and (
            isinstance(part, _CONTAINERS) or (is_object(part) and hasattr(part, "__dict__"))
        ):
            container = part if isinstance(part, _CONTAINERS) else vars(part)
            most -= len(container)
            if most < 0:
                return False
            entries = _copy_of(container)
            contents[id(part)] = part, entries
            found.extend(_parts_of(entries))
        elif isinstance(part, torch.nn.Module):
            modules.append(part)
    return True


def put_back_contents(contents: Contents) -> None:
    """Containers have again the entries that they had."""
    for container, entries in contents.values():
        put_back_entries(container, entries)


def put_back_entries(container: Any, entries: Any) -> None:
    if isinstance(container, tuple):
        return
    if not isinstance(container, _CONTAINERS):
        container = vars(container)
    if isinstance(container, (dict, set)):
        if not (
            _is_same(container, entries) if isinstance(container, dict) else (container == entries)
        ):
            container.clear()
            container.update(entries)
    elif not _is_same_list(container, entries):
        container.clear()
        container.extend(entries)


class Held:
    """What the modules held at one time. Tensors are held by reference: `tensors` are those that no
    table of buffers has."""

    def __init__(self, tree: "Tree"):
        self.modules, self._live = tree.modules, tree.tables
        self._tables = [table.copy() if table else {} for table in tree.tables]
        self.tensors: List[torch.Tensor] = [
            p
            for table in self._tables[0 :: len(MODULE_TABLES)]
            for p in table.values()
            if p is not None
        ]
        self._needs_gradient = [p.requires_grad for p in self.tensors]
        self._parameters = self.tensors.copy()
        self._attributes = tree.attributes
        self._values = [attributes[name] for _, attributes, name in tree.attributes]
        self._contents: Contents = {}
        self.hidden: List[torch.nn.Module] = []  # modules that no table of modules has
        self._large: List[int] = []  # attributes with more entries than are looked at
        for i, value in enumerate(self._values):
            if type(value) not in ATOMS and id(value) not in tree.plain:
                self._add(i, value, tree)

    def _add(self, i: int, value: Any, tree: "Tree") -> None:
        if type(value) is tuple and not _parts_of(value):
            tree.plain[id(value)] = value
            return
        if not is_data(value):
            self._values[i] = _NO_DATA
        modules: List[torch.nn.Module] = []
        if not walk(value, self._contents, self.tensors, modules):
            self._large.append(i)
        self.hidden += [module for module in modules if module not in tree.known]

    def put_back(self) -> None:
        """Modules hold again what they held."""
        for live, saved in zip(self._live, self._tables):
            if not _is_same(live, saved):
                live.clear()
                live.update(saved)
        for (_, attributes, name), value in zip(self._attributes, self._values):
            if value is not _NO_DATA and attributes.get(name, MISSING) is not value:
                attributes[name] = value
        known = {(id(attributes), name) for _, attributes, name in self._attributes}
        for module in self.modules:
            for name in names_of(module):
                if (id(vars(module)), name) not in known and is_data(vars(module)[name]):
                    del vars(module)[name]
        put_back_contents(self._contents)
        for parameter, needs_gradient in zip(self._parameters, self._needs_gradient):
            if parameter.requires_grad is not needs_gradient:
                parameter.requires_grad_(needs_gradient)

    def places(self, prefixes: Dict[int, str]) -> Iterator[Tuple[Place, torch.Tensor]]:
        """Parameters and tensors of attributes, by name."""
        for place, value in self._parameter_places(prefixes):
            yield place, value
        for place, value in self.values(prefixes):
            if isinstance(value, torch.Tensor):
                yield place, value

    def _parameter_places(self, prefixes: Dict[int, str]) -> Iterator[Tuple[Place, torch.Tensor]]:
        for i, module in enumerate(self.modules):
            live, prefix = self._live[i * len(MODULE_TABLES)], prefixes.get(id(module), "")
            for key, p in self._tables[i * len(MODULE_TABLES)].items():
                if p is not None:
                    yield Place(prefix + key, live, key), p

    def values(self, prefixes: Dict[int, str]) -> Iterator[Tuple[Place, Any]]:
        """What attributes hold that is more than numbers and texts, each once, by name."""
        seen: set[Any] = set()
        for (i, attributes, key), value in zip(self._attributes, self._values):
            value = attributes.get(key) if value is _NO_DATA else value
            found = [(Place(prefixes.get(id(self.modules[i]), "") + key, attributes, key), value)]
            while found:
                place, value = found.pop()
                if type(value) in ATOMS or id(value) in seen:
                    continue
                seen.add(id(value))
                yield place, value
                _, entries = self._contents.get(id(value), (None, ()))
                if _parts_of(entries):
                    found += [(place.inner(value, k), part) for k, part in entries_of(entries)]

    def changes(self, later: "Held", prefixes: Dict[int, str]) -> Iterator[Place]:
        """Entries of tables and attributes that are others later, or hold others."""
        if not self._has_entries_of(later):
            yield from self._changed_entries(later, prefixes)
        moved = {
            key
            for key, (_, entries) in self._contents.items()
            if key in later._contents and not _are_same(entries, later._contents[key][1])
        }
        if moved:
            for place, value in self.values(prefixes):
                if id(value) in moved:
                    yield Place(place.name, place.table, place.key)

    def _has_entries_of(self, later: "Held") -> bool:
        are_same = self._live is later._live and self._attributes is later._attributes
        return (
            are_same
            and _is_same_list(self._values, later._values)
            and all(map(_is_same, self._tables, later._tables))
        )

    def _changed_entries(self, later: "Held", prefixes: Dict[int, str]) -> Iterator[Place]:
        mine, after = self._dicts(), later._dicts()
        names = {id(vars(m)): prefixes.get(id(m), "") for m in (*self.modules, *later.modules)}
        for i, table in enumerate(self._live):
            names[id(table)] = prefixes.get(id(self.modules[i // len(MODULE_TABLES)]), "")
        for key, (live, held) in mine.items():
            now = after.get(key, (live, {}))[1]
            for name in {**held, **now}:
                if held.get(name, MISSING) is not now.get(name, MISSING):
                    yield Place(f"{names[key]}{name}", live, name)

    @property
    def has_large(self) -> bool:
        return bool(self._large)

    def large(self, prefixes: Dict[int, str]) -> List[str]:
        """The names of attributes with more entries than were looked at."""
        names = []
        for i in self._large:
            module, _, name = self._attributes[i]
            names.append(prefixes.get(id(self.modules[module]), "") + name)
        return names

    def _dicts(self) -> Dict[int, Tuple[dict[Any, Any], dict[Any, Any]]]:
        """Tables and attributes that are data: (live, what was held)."""
        dicts = {id(live): (live, saved) for live, saved in zip(self._live, self._tables)}
        for module in self.modules:
            dicts[id(vars(module))] = (vars(module), {})
        for (_, attributes, name), value in zip(self._attributes, self._values):
            if value is not _NO_DATA:
                dicts[id(attributes)][1][name] = value
        return dicts

    def accept(self, before: "Held", after: "Held") -> None:
        """What changed from `before` to `after` is as if it had always been so."""
        mine, old = self._dicts(), before._dicts()
        for key, (_, saved) in after._dicts().items():
            then = old[key][1] if key in old else saved
            if key not in mine or _is_same(then, saved):
                continue
            kept = mine[key][1]
            kept.update((k, v) for k, v in saved.items() if then.get(k, MISSING) is not v)
            for name in set(then) - set(saved):
                kept.pop(name, None)
        held = [
            (i, vars(module), name)
            for i, module in enumerate(self.modules)
            for name in mine[id(vars(module))][1]
        ]
        self._attributes, self._large = held, []
        self._values = [mine[id(attributes)][1][name] for _, attributes, name in held]


def is_data(value: Any) -> bool:
    is_plain = type(value) in ATOMS or isinstance(value, (torch.Tensor, *_CONTAINERS))
    return is_plain or is_object(value)


def names_of(module: torch.nn.Module) -> List[str]:
    """The module's own attributes."""
    if type(module).__module__.startswith(_WRAPPERS):
        return []
    return [name for name in vars(module) if name not in _OF_EVERY_MODULE]


def _table(module: torch.nn.Module, name: str) -> dict[Any, Any]:
    table = getattr(module, name)
    return table if isinstance(table, dict) else dict(table.items())  # of TorchScript: a copy


class Tree:
    """The modules of a model, or of several: a list that is made again when there are others."""

    def __init__(self, roots: Sequence[Tuple[str, torch.nn.Module]]):
        self._roots = list(roots)
        self._hidden: Dict[torch.nn.Module, str] = {}  # roots that no table has, and their names
        self.modules: List[torch.nn.Module] = []
        self.plain: Dict[int, tuple[Any, ...]] = {}  # tuples of numbers and texts, by id
        self._look()

    def refresh(self) -> bool:
        """Look for modules that were added or removed. Returns whether there are some."""
        if self._children_now() == self._children:
            return False
        self._look()
        return True

    def _children_now(self) -> List[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._module_tables)))

    def _named_roots(self) -> List[Tuple[str, torch.nn.Module]]:
        hidden = [(name, module) for module, name in self._hidden.items()]
        return self._roots + hidden

    def _look(self) -> None:
        found = dict.fromkeys(m for _, root in self._named_roots() for m in root.modules())
        self.modules, self.known = list(found), set(found)
        self.tables = [_table(m, name) for m in self.modules for name in MODULE_TABLES]
        self.buffers = self.tables[MODULE_TABLES.index("_buffers") :: len(MODULE_TABLES)]
        self._parameter_tables = self.tables[0 :: len(MODULE_TABLES)]
        self._module_tables = self.tables[MODULE_TABLES.index("_modules") :: len(MODULE_TABLES)]
        self._children = self._children_now()
        self._dicts = [vars(m) for m in self.modules]
        self._look_at_attributes()

    def _look_at_attributes(self) -> None:
        self.plain.clear()
        self._lengths = [len(attributes) for attributes in self._dicts]
        self.attributes = [  # the modules' own: module, all attributes, name
            (i, attributes, name)
            for i, (module, attributes) in enumerate(zip(self.modules, self._dicts))
            for name in names_of(module)
        ]

    def take(self) -> Held:
        if [len(attributes) for attributes in self._dicts] != self._lengths:
            self._look_at_attributes()
        try:
            held = Held(self)
        except KeyError:  # an attribute took the place of another
            self._look_at_attributes()
            held = Held(self)
        if len(self.plain) > len(self.attributes):  # some tuples are others each time
            self.plain.clear()
        return self._with_hidden(held) if held.hidden else held

    def _with_hidden(self, held: Held) -> Held:
        """Modules in a list, or in an attribute that hides them from their owner, are roots too."""
        self._hidden.clear()  # some of those that were found before may be gone
        while True:
            self._look()
            held = Held(self)
            if not held.hidden:
                return held
            names = {id(value): place.name for place, value in held.values(self.prefixes())}
            self._hidden.update((module, names[id(module)]) for module in held.hidden)

    def entries(self) -> List[Optional[torch.nn.Parameter]]:
        """Of the tables of parameters: some more than once, and None."""
        return list(itertools.chain.from_iterable(map(dict.values, self._parameter_tables)))

    def parameters(self) -> List[torch.nn.Parameter]:
        """All of them, each once."""
        return unique(p for p in self.entries() if p is not None)

    def named_modules(self) -> List[Tuple[str, torch.nn.Module]]:
        """(the beginning of the names of what it holds, module), with those that are hidden."""
        self.refresh()
        self.take()  # finds them
        prefixes = self.prefixes()
        return [(prefixes.get(id(module), ""), module) for module in self.modules]

    def prefixes(self) -> Dict[int, str]:
        """The beginning of the names of what each module holds."""
        found: Dict[int, str] = {}
        for root_name, root in self._named_roots():
            for name, module in root.named_modules(prefix=root_name):
                found.setdefault(id(module), f"{name}." if name else "")
        return found
