"""What a value holds, at any depth, by reference: the one walker of what modules, optimizers and
functions hold. Must not know which of that is looked at, and when."""

from __future__ import annotations

import argparse
import collections
import functools
import operator
import types
from collections.abc import Mapping
from typing import Any, Dict, Iterable, Iterator, List, Tuple, cast

import torch

from rebatch._user_code import is_object
from rebatch.torch.undo.generators import functions_of, is_generator, is_same_state

ATOMS = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
)
WITH_ATTRIBUTES = (types.SimpleNamespace, argparse.Namespace)  # that are all that they are
CONTAINERS = (list, dict, tuple, set, collections.deque)
MOST_ENTRIES = 1 << 16  # of a value, with those of the containers in it
_FEW_ENTRIES = 64  # that are looked at one by one, rather than by a set of their types
MISSING = object()

# Containers, objects of the program, generators and tensors, with their entries, attributes or
# states, by id.
Contents = Dict[int, Tuple[Any, Any]]


def is_container(value: Any) -> bool:
    return isinstance(value, CONTAINERS)


def is_data(value: Any) -> bool:
    """Whether it is looked at."""
    is_plain = type(value) in ATOMS or is_container(value) or isinstance(value, torch.Tensor)
    return is_plain or is_object(value) or is_generator(value)


@functools.lru_cache(maxsize=None)
def _slots_of(kind: Any) -> Dict[str, Any]:
    """How each attribute is reached that the class keeps in no dict."""
    return {
        name: member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }


def attributes_of(value: Any) -> Dict[str, Any]:
    """Those of an object of the program: a copy."""
    found = {**getattr(value, "__dict__", {})}
    for name, member in _slots_of(cast(Any, type(value))).items():
        try:
            found[name] = member.__get__(value)
        except AttributeError:
            found[name] = MISSING
    return found


def _put_back_attributes(value: Any, attributes: Dict[str, Any]) -> None:
    own, kind = getattr(value, "__dict__", {}), cast(Any, type(value))
    slots = {name: m for name, m in _slots_of(kind).items() if name in attributes}
    kept = {name: part for name, part in attributes.items() if name not in slots}
    if not is_same_dict(own, kept):
        own.clear()
        own.update(kept)
    for name, member in slots.items():
        if attributes[name] is not MISSING:
            member.__set__(value, attributes[name])
        elif attributes_of(value)[name] is not MISSING:
            member.__delete__(value)


def contents_of(value: Any) -> Any:
    """What a value holds: the entries of a container, in one of Python's own, the attributes of an
    object or a tensor, or the state of a generator. None: nothing that is looked at."""
    for kind in (dict, set, tuple):
        if isinstance(value, kind):
            return value if kind is tuple else kind(value)
    if isinstance(value, (list, collections.deque)):
        return list(value)
    if isinstance(value, torch.Tensor):
        return {**value.__dict__}
    if is_object(value):
        return attributes_of(value)
    return functions_of(value)[0]() if is_generator(value) else None


def entry_of(value: Any, key: Any) -> Any:
    """What a value holds there. Raises TypeError or LookupError."""
    return value[key] if is_container(value) else attributes_of(value)[key]


def is_same_dict(a: Dict[Any, Any], b: Dict[Any, Any]) -> bool:
    """Whether they have the same entries in the same order. Keys may be tensors, of which == is no
    bool."""
    if len(a) != len(b):
        return False
    have_same_keys = not a or list(map(hash, a)) == list(map(hash, b))
    return have_same_keys and all(map(operator.is_, a.values(), b.values()))


def hold_same(value: Any, a: Any, b: Any) -> bool:
    """Whether two copies of what it holds are alike."""
    if is_generator(value):
        return is_same_state(a, b)
    if isinstance(a, dict):
        return is_same_dict(a, b)
    if isinstance(a, set):
        return bool(a == b)
    return len(a) == len(b) and all(map(operator.is_, a, b))


def holds_still(value: Any, entries: Any) -> bool:
    """Whether it holds what a copy says."""
    if isinstance(value, torch.Tensor):
        own = value.__dict__
        return not own if not entries else is_same_dict(entries, own)
    return is_generator(value) or hold_same(value, entries, contents_of(value))


def entries_of(container: Any) -> Iterator[Tuple[Any, Any]]:
    """(key, entry) of a container, or of what contents_of() has returned."""
    return iter(container.items()) if isinstance(container, Mapping) else enumerate(container)


def parts_of(copy: Any) -> Iterable[Any]:
    """The entries that are more than numbers and texts."""
    parts = copy.values() if isinstance(copy, dict) else copy
    if len(copy) > _FEW_ENTRIES and ATOMS.issuperset(map(type, parts)):
        return ()
    return [part for part in parts if type(part) not in ATOMS]


def walk(
    value: Any,
    contents: Contents,
    tensors: List[torch.Tensor],
    modules: List[torch.nn.Module],
    most: int = MOST_ENTRIES,
) -> bool:
    """Collect what a value is and holds, at any depth. False: those are more entries than `most`,
    and some were not looked at."""
    found = [value]
    while found:
        part = found.pop()
        if isinstance(part, torch.nn.Module):
            modules.append(part)
            continue
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        if id(part) in contents:
            continue
        entries = contents_of(part)
        if entries is None:
            continue
        contents[id(part)] = part, entries
        if not is_generator(part):
            most -= len(entries)
            if most < 0:
                return False
            found.extend(parts_of(entries))
    return True


def walk_attributes(tensor: torch.Tensor, contents: Contents, tensors: List[torch.Tensor]) -> None:
    """Collect what a tensor has as attributes, but not the tensor."""
    own = {**tensor.__dict__}
    contents[id(tensor)] = tensor, own
    for value in own.values():
        if type(value) not in ATOMS:
            walk(value, contents, tensors, [])


def put_back_contents(contents: Contents) -> None:
    """Containers have again the entries that they had, and generators the state."""
    for value, entries in contents.values():
        _put_back(value, entries)


def _put_back(value: Any, entries: Any) -> None:
    if isinstance(value, tuple):
        return
    if is_container(value):
        if not hold_same(value, entries, value):
            value.clear()
            (value.extend if isinstance(entries, list) else value.update)(entries)
    elif is_generator(value):
        get, put = functions_of(value)
        if not is_same_state(get(), entries):
            put(entries)
    else:
        _put_back_attributes(value, entries)
