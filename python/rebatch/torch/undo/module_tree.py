"""What the modules of a model hold, by reference: parameters, buffers, and data in attributes."""

from __future__ import annotations

import itertools
import operator
from typing import (
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

import torch

from rebatch.torch.private import MODULE_TABLES
from rebatch.torch.undo.contents import (
    ATOMS,
    MISSING,
    Contents,
    hold_same,
    holds_still,
    entries_of,
    is_data,
    is_same_dict,
    parts_of,
    put_back_contents,
    walk,
    walk_attributes,
)
from rebatch.torch.undo.generators import is_generator
from rebatch.torch.undo.places import Place

# Attributes that every module has; these are no data of the model.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
# What an update changes in an optimizer and a GradScaler, and what it saves by itself.
_OF_UPDATES = {"state", "param_groups", "_scale", "_growth_tracker", "_per_optimizer_states"}
# Wrappers that keep what they do in attributes.
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")
_NO_DATA = object()
_KINDS = {"_parameters": "parameter", "_buffers": "buffer"}
_T = TypeVar("_T", bound=torch.Tensor)


def unique(tensors: Iterable[_T]) -> List[_T]:
    """Each once, in order. A tensor's own hash is a function in Python; its id is not."""
    return list({id(t): t for t in tensors}.values())


class Held:
    """What modules, and what updates them, held at one time. Tensors are held by reference:
    `tensors` are those that no table of buffers has."""

    def __init__(self, tree: "Tree"):
        self.holders, self._live = tree.holders, tree.tables
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
        buffers = self._tables[MODULE_TABLES.index("_buffers") :: len(MODULE_TABLES)]
        own = [b for table in buffers for b in table.values() if b is not None]
        for tensor in (*self._parameters, *own):  # which may have gradients beside .grad
            walk_attributes(tensor, self._contents, self.tensors)
        self.tensors = unique(self.tensors)

    def _add(self, i: int, value: Any, tree: "Tree") -> None:
        if type(value) is tuple and not parts_of(value):
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
            if not is_same_dict(live, saved):
                live.clear()
                live.update(saved)
        for (_, attributes, name), value in zip(self._attributes, self._values):
            if value is not _NO_DATA and attributes.get(name, MISSING) is not value:
                attributes[name] = value
        known = {(id(attributes), name) for _, attributes, name in self._attributes}
        for holder in self.holders:
            for name in names_of(holder):
                if (id(vars(holder)), name) not in known and is_data(vars(holder)[name]):
                    del vars(holder)[name]
        put_back_contents(self._contents)
        for parameter, needs_gradient in zip(self._parameters, self._needs_gradient):
            if parameter.requires_grad is not needs_gradient:
                parameter.requires_grad_(needs_gradient)

    def places(self, prefixes: Dict[int, str]) -> Iterator[Tuple[Place, torch.Tensor]]:
        """Tensors of tables and attributes, by name."""
        for place, value in self.values(prefixes):
            if isinstance(value, torch.Tensor):
                yield place, value

    def roots(self, prefixes: Dict[int, str]) -> Iterator[Tuple[Place, Any]]:
        """Parameters and buffers, then attributes, by name."""
        for i, (live, table) in enumerate(zip(self._live, self._tables)):
            module, number = divmod(i, len(MODULE_TABLES))
            kind = _KINDS.get(MODULE_TABLES[number])
            if table and kind:
                prefix = prefixes.get(id(self.holders[module]), "")
                for key, tensor in table.items():
                    if tensor is not None:
                        yield Place(prefix + key, live, key, kind=kind), tensor
        for (i, attributes, key), value in zip(self._attributes, self._values):
            value = attributes.get(key) if value is _NO_DATA else value
            name = prefixes.get(id(self.holders[i]), "") + key
            yield Place(name, attributes, key, kind="attribute"), value

    def values(self, prefixes: Dict[int, str]) -> Iterator[Tuple[Place, Any]]:
        """What tables and attributes hold, beside numbers and texts, each once, by name."""
        seen: set[Any] = set()
        for root in self.roots(prefixes):
            found = [root]
            while found:
                place, value = found.pop()
                if type(value) in ATOMS or id(value) in seen:
                    continue
                seen.add(id(value))
                yield place, value
                _, entries = self._contents.get(id(value), (None, ()))
                if not is_generator(value) and parts_of(entries):
                    found += [(place.inner(value, k), part) for k, part in entries_of(entries)]

    def beside(self, prefixes: Dict[int, str], parameters: Set[int]) -> Iterator[Place]:
        """Tensors that some parameters have as attributes, such as gradients in another dtype."""
        if not any(parts_of(self._contents[key][1]) for key in parameters & self._contents.keys()):
            return
        for place, _ in self.places(prefixes):
            if place.path and id(place.owner.get(place.key)) in parameters:
                yield place

    def changes(self, later: "Held", prefixes: Dict[int, str]) -> Iterator[Place]:
        """Entries of tables and attributes that are others later, or hold others."""
        if not self._has_entries_of(later):
            yield from self._changed_entries(later, prefixes)
        moved = {
            key
            for key, (value, entries) in self._contents.items()
            if key in later._contents and not hold_same(value, entries, later._contents[key][1])
        }
        if moved:
            for place, value in self.values(prefixes):
                if id(value) in moved:
                    yield Place(place.name, place.owner, place.key)

    def moved(self, prefixes: Dict[int, str]) -> Iterator[Place]:
        """Attributes that are others now, or hold others."""
        for (i, attributes, key), value in zip(self._attributes, self._values):
            if value is not _NO_DATA and attributes.get(key, MISSING) is not value:
                yield Place(prefixes.get(id(self.holders[i]), "") + key, attributes, key)
        moved = {
            key
            for key, (value, entries) in self._contents.items()
            if not holds_still(value, entries)
        }
        for place, value in self.values(prefixes) if moved else ():
            if id(value) in moved:
                yield Place(place.name, place.owner, place.key)

    def _has_entries_of(self, later: "Held") -> bool:
        are_same = self._live is later._live and self._attributes is later._attributes
        return (
            are_same
            and all(map(operator.is_, self._values, later._values))
            and all(map(is_same_dict, self._tables, later._tables))
        )

    def _changed_entries(self, later: "Held", prefixes: Dict[int, str]) -> Iterator[Place]:
        mine, after = self._dicts(), later._dicts()
        names = {id(vars(m)): prefixes.get(id(m), "") for m in (*self.holders, *later.holders)}
        for i, table in enumerate(self._live):
            names[id(table)] = prefixes.get(id(self.holders[i // len(MODULE_TABLES)]), "")
        for key, (live, held) in mine.items():
            now = after.get(key, (live, {}))[1]
            for name in {**held, **now}:
                if held.get(name, MISSING) is not now.get(name, MISSING):
                    yield Place(f"{names[key]}{name}", live, name)

    def ids(self) -> Set[int]:
        """Of containers and objects, at any depth, and of generators."""
        return set(self._contents)

    @property
    def has_large(self) -> bool:
        return bool(self._large)

    def large(self, prefixes: Dict[int, str]) -> List[str]:
        """The names of attributes with more entries than were looked at."""
        names = []
        for i in self._large:
            holder, _, name = self._attributes[i]
            names.append(prefixes.get(id(self.holders[holder]), "") + name)
        return names

    def _dicts(self) -> Dict[int, Tuple[dict[Any, Any], dict[Any, Any]]]:
        """Tables and attributes that are data: (live, what was held)."""
        dicts = {id(live): (live, saved) for live, saved in zip(self._live, self._tables)}
        for holder in self.holders:
            dicts[id(vars(holder))] = (vars(holder), {})
        for (_, attributes, name), value in zip(self._attributes, self._values):
            if value is not _NO_DATA:
                dicts[id(attributes)][1][name] = value
        return dicts

    def accept(self, before: "Held", after: "Held") -> None:
        """What changed from `before` to `after` is as if it had always been so."""
        mine, old = self._dicts(), before._dicts()
        for key, (_, saved) in after._dicts().items():
            then = old[key][1] if key in old else saved
            if key not in mine or is_same_dict(then, saved):
                continue
            kept = mine[key][1]
            kept.update((k, v) for k, v in saved.items() if then.get(k, MISSING) is not v)
            for name in set(then) - set(saved):
                kept.pop(name, None)
        held = [
            (i, vars(holder), name)
            for i, holder in enumerate(self.holders)
            for name in mine[id(vars(holder))][1]
        ]
        self._attributes, self._large = held, []
        self._values = [mine[id(attributes)][1][name] for _, attributes, name in held]


def is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def names_of(holder: Any) -> List[str]:
    """The own attributes of a module, an optimizer or a scheduler."""
    if type(holder).__module__.startswith(_WRAPPERS):
        return []
    others = _OF_EVERY_MODULE if isinstance(holder, torch.nn.Module) else _OF_UPDATES
    return [name for name in vars(holder) if name not in others]


def _table(module: torch.nn.Module, name: str) -> dict[Any, Any]:
    table = getattr(module, name)
    return table if isinstance(table, dict) else dict(table.items())  # of TorchScript: a copy


class Tree:
    """The modules of a model, or of several: a list that is made again when there are others. And
    `others` that hold something too: optimizers and schedulers, by name."""

    def __init__(
        self,
        roots: Sequence[Tuple[str, torch.nn.Module]],
        others: Sequence[Tuple[str, Any]] = (),
    ):
        self._roots = list(roots)
        self._others = [(name, other) for name, other in others if hasattr(other, "__dict__")]
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
        self._prefixes: Dict[int, str] = {}  # made when they are asked for
        self.tables = [_table(m, name) for m in self.modules for name in MODULE_TABLES]
        self.buffers = self.tables[MODULE_TABLES.index("_buffers") :: len(MODULE_TABLES)]
        self._parameter_tables = self.tables[0 :: len(MODULE_TABLES)]
        self._module_tables = self.tables[MODULE_TABLES.index("_modules") :: len(MODULE_TABLES)]
        self._children = self._children_now()
        self.holders = [*self.modules, *(other for _, other in self._others)]
        self._dicts = [vars(holder) for holder in self.holders]
        self._look_at_attributes()

    def _look_at_attributes(self) -> None:
        self.plain.clear()
        self._lengths = [len(attributes) for attributes in self._dicts]
        self.attributes = [  # the holders' own: holder, all attributes, name
            (i, attributes, name)
            for i, (holder, attributes) in enumerate(zip(self.holders, self._dicts))
            for name in names_of(holder)
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
        """The beginning of the names of what each holder holds."""
        if not self._prefixes:
            found = {id(other): f"{name}." for name, other in self._others}
            for root_name, root in self._named_roots():
                for name, module in root.named_modules(prefix=root_name):
                    found.setdefault(id(module), f"{name}." if name else "")
            self._prefixes = found
        return self._prefixes
