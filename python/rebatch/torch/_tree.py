"""What the modules of a model hold: parameters, buffers, and data in attributes, by reference."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import torch

_TABLES = (
    "_parameters", "_buffers", "_modules",
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)
# Attributes that every module has; these are no data of the model.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
# Wrappers that keep what they do in attributes.
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")
_ATOMS = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
)
_CONTAINERS = (list, dict, tuple, set, collections.deque)
_MOST_ENTRIES = 1024  # of a list that is looked at: longer ones hold no state of a step
_MISSING, _NO_DATA = object(), object()


class Place(NamedTuple):
    """Where a tensor is held: in a table of a module, or in a list or dict of an attribute."""

    name: str
    table: dict
    key: Any
    entry: Any = None

    def tensor(self) -> Any:
        """What is there now; None where it is no tensor."""
        value = self.table.get(self.key)
        if self.entry is not None:
            try:
                value = value[self.entry]
            except (TypeError, LookupError):
                return None
        return value if isinstance(value, torch.Tensor) else None


def unique(tensors: Iterable[torch.Tensor]) -> List[torch.Tensor]:
    """Each once, in order. A tensor's own hash is a function in Python; its id is not."""
    return list({id(t): t for t in tensors}.values())


def entries_of(value: Any) -> Iterator[Tuple[Any, Any]]:
    """(key, entry) of a container."""
    return iter(value.items()) if isinstance(value, Mapping) else enumerate(value)


def _is_same(a: dict, b: dict) -> bool:
    return len(a) == len(b) and all(b.get(key, _MISSING) is value for key, value in a.items())


def _is_same_list(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


def _put_back_entries(container: Any, entries: Any) -> None:
    if isinstance(container, tuple):
        return
    if isinstance(container, (dict, set)):
        if not (_is_same(container, entries) if isinstance(container, dict) else (
            container == entries
        )):
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
            p for table in self._tables[0 :: len(_TABLES)] for p in table.values() if p is not None
        ]
        self._needs_gradient = [p.requires_grad for p in self.tensors]
        self._parameters = self.tensors.copy()
        self._attributes = tree.attributes
        self._values = [attributes[name] for _, attributes, name in tree.attributes]
        self._contents: List[Tuple[int, Any]] = []  # the entries of a container, by its number
        for i, value in enumerate(self._values):
            if type(value) not in _ATOMS:
                self._add(i, value)

    def _add(self, i: int, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, _CONTAINERS) and len(value) <= _MOST_ENTRIES:
            self._contents.append((i, value if isinstance(value, tuple) else value.copy()))
            parts = value.values() if isinstance(value, dict) else value
            self.tensors += [part for part in parts if isinstance(part, torch.Tensor)]
        else:
            self._values[i] = _NO_DATA

    def put_back(self) -> None:
        """Modules hold again what they held."""
        for live, saved in zip(self._live, self._tables):
            if not _is_same(live, saved):
                live.clear()
                live.update(saved)
        for (_, attributes, name), value in zip(self._attributes, self._values):
            if value is not _NO_DATA and attributes.get(name, _MISSING) is not value:
                attributes[name] = value
        known = {(id(attributes), name) for _, attributes, name in self._attributes}
        for module in self.modules:
            for name in _names_of(module):
                if (id(vars(module)), name) not in known and is_data(vars(module)[name]):
                    del vars(module)[name]
        for i, entries in self._contents:
            _put_back_entries(self._values[i], entries)
        for parameter, needs_gradient in zip(self._parameters, self._needs_gradient):
            if parameter.requires_grad is not needs_gradient:
                parameter.requires_grad_(needs_gradient)

    def places(self, prefixes: Dict[int, str]) -> Iterator[Tuple[Place, torch.Tensor]]:
        """Parameters and tensors of attributes, by name."""
        for i, module in enumerate(self.modules):
            live, prefix = self._live[i * len(_TABLES)], prefixes.get(id(module), "")
            for key, p in self._tables[i * len(_TABLES)].items():
                if p is not None:
                    yield Place(prefix + key, live, key), p
        names = [
            prefixes.get(id(self.modules[i]), "") + name for i, _, name in self._attributes
        ]
        for name, (_, attributes, key), value in zip(names, self._attributes, self._values):
            if isinstance(value, torch.Tensor):
                yield Place(name, attributes, key), value
        for i, entries in self._contents:
            _, attributes, key = self._attributes[i]
            for entry, value in entries_of(entries):
                if isinstance(value, torch.Tensor):
                    yield Place(f"{names[i]}[{entry!r}]", attributes, key, entry), value

    def _dicts(self) -> Dict[int, Tuple[dict, dict]]:
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
            kept.update((k, v) for k, v in saved.items() if then.get(k, _MISSING) is not v)
            for name in set(then) - set(saved):
                kept.pop(name, None)
        held = [
            (i, vars(module), name)
            for i, module in enumerate(self.modules)
            for name in mine[id(vars(module))][1]
        ]
        contents = {id(self._values[i]): entries for i, entries in self._contents}
        self._attributes = held
        self._values = [mine[id(attributes)][1][name] for _, attributes, name in held]
        self._contents = [
            (i, contents[id(v)]) for i, v in enumerate(self._values) if id(v) in contents
        ]


def is_data(value: Any) -> bool:
    return type(value) in _ATOMS or isinstance(value, (torch.Tensor, *_CONTAINERS))


def _names_of(module: torch.nn.Module) -> List[str]:
    """The module's own attributes."""
    if type(module).__module__.startswith(_WRAPPERS):
        return []
    return [name for name in vars(module) if name not in _OF_EVERY_MODULE]


def _table(module: torch.nn.Module, name: str) -> dict:
    table = getattr(module, name)
    return table if isinstance(table, dict) else dict(table.items())  # of TorchScript: a copy


class Tree:
    """The modules of a model, or of several: a list that is made again when there are others."""

    def __init__(self, roots: Sequence[Tuple[str, torch.nn.Module]]):
        self._roots = list(roots)
        self._children: List[Any] = []
        self.modules: List[torch.nn.Module] = []
        self.refresh()

    def refresh(self) -> None:
        """Look for modules that were added or removed."""
        children = [c for m in self.modules for c in m._modules.values()]
        if self.modules and children == self._children:
            return
        found = dict.fromkeys(m for _, root in self._roots for m in root.modules())
        self.modules = list(found)
        self._children = [c for m in self.modules for c in m._modules.values()]
        self.tables = [_table(m, name) for m in self.modules for name in _TABLES]
        self.buffers = self.tables[_TABLES.index("_buffers") :: len(_TABLES)]
        self._dicts = [vars(m) for m in self.modules]
        self._look_at_attributes()

    def _look_at_attributes(self) -> None:
        self._lengths = [len(attributes) for attributes in self._dicts]
        self.attributes = [  # the modules' own: module, all attributes, name
            (i, attributes, name)
            for i, (module, attributes) in enumerate(zip(self.modules, self._dicts))
            for name in _names_of(module)
        ]

    def take(self) -> Held:
        if [len(attributes) for attributes in self._dicts] != self._lengths:
            self._look_at_attributes()
        try:
            return Held(self)
        except KeyError:  # an attribute took the place of another
            self._look_at_attributes()
            return Held(self)

    def parameters(self) -> List[torch.nn.Parameter]:
        """All of them, each once."""
        tables = self.tables[0 :: len(_TABLES)]
        return unique(p for t in tables for p in t.values() if p is not None)

    def prefixes(self) -> Dict[int, str]:
        """The beginning of the names of what each module holds."""
        found: Dict[int, str] = {}
        for root_name, root in self._roots:
            for name, module in root.named_modules(prefix=root_name):
                found.setdefault(id(module), f"{name}." if name else "")
        return found
