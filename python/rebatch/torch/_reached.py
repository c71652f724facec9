"""What a function of the program reaches outside of the model, and what an attempt that failed has
changed there: variables of the functions around it, globals that it names, the object whose method
it is, its default arguments, and those of a functools.partial.

Before each attempt the values of these variables are noted, with the entries of containers, the
attributes of objects and the versions of tensors. That is exact for numbers, small containers and
small NumPy arrays, so they are put back; a tensor that changes in place is copied once an attempt
has shown that."""

from __future__ import annotations

import argparse
import collections
import io
import operator
import random
import types
import warnings
from collections.abc import Iterator as AnyIterator
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from rebatch import _library as c
from rebatch._library import GuardPoint
from rebatch.torch._called import called_by, objects_in
from rebatch.torch._copies import Copies, copies_on_host
from rebatch.torch._reach import Slots, is_of_the_program
from rebatch.torch._state import functions_of
from rebatch.torch._tree import Tree, put_back_entries

# Containers of up to _LOOKED_INTO entries are looked into, and of up to _COPIED put back whole. Of
# a longer one the length and the ends are noted: a list that has grown is cut.
_LOOKED_INTO, _COPIED = 64, 1024
# Containers, objects and tensors that are looked at.
_MOST_PARTS = 512
# Arrays of NumPy up to this size are copied.
_ARRAY_BYTES = 64 << 10
# Tensors of which nothing is known are copied to the host in the first step, up to this size in
# all. Later those of a variable in which one has changed before, each up to the other size.
_FIRST_BYTES, SMALL_BYTES = 64 << 20, 1 << 20

_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))
(
    _SKIPPED,
    _TENSOR,
    _MODULE,
    _ENTRIES,
    _TUPLE,
    _OBJECT,
    _CLASS,
    _ARRAY,
    _GENERATOR,
    _OPTIMIZER,
    _ITERATOR,
) = range(11)
_MISSING = object()


def _is_metric(kind: type) -> bool:
    """As those of torcheval and ignite."""
    return all(callable(getattr(kind, name, None)) for name in ("update", "compute", "reset"))


def _kind_of(kind: type) -> int:
    """How values of a type are looked at."""
    for base, how in (
        (torch.Tensor, _TENSOR),
        (torch.nn.Module, _MODULE),
        ((list, dict, set, collections.deque), _ENTRIES),
        (tuple, _TUPLE),
        (torch.Generator, _GENERATOR),
        ((types.SimpleNamespace, argparse.Namespace, LRScheduler), _OBJECT),
        (torch.optim.Optimizer, _OPTIMIZER),
    ):
        if issubclass(kind, base):
            return how
    if kind is random.Random or (kind.__module__.startswith("numpy.random") and _has_state(kind)):
        return _GENERATOR
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _ARRAY
    if issubclass(kind, type):
        return _CLASS
    if is_of_the_program(kind) or _is_metric(kind):
        return _OBJECT
    is_iterator = issubclass(kind, AnyIterator) and not issubclass(kind, io.IOBase)
    return _ITERATOR if is_iterator else _SKIPPED


def _has_state(kind: type) -> bool:
    return hasattr(kind, "bit_generator") or hasattr(kind, "get_state")


class _Kinds(dict[Any, Any]):
    def __missing__(self, kind: type) -> int:
        how = self[kind] = _kind_of(kind)
        return how


_kinds = _Kinds()
_kinds.update(dict.fromkeys((*_ATOMS, types.FunctionType, types.ModuleType), _SKIPPED))


def _copy_of(container: Any) -> Any:
    for kind in (dict, set):
        if isinstance(container, kind):
            return kind(container)
    return list(container)


def _ends_of(container: Any) -> tuple[Any, ...]:
    """The length, and of a sequence the first and the last entry."""
    is_sequence = isinstance(container, (list, collections.deque))
    return (len(container), *((container[0], container[-1]) if is_sequence else ()))


class Marks:
    """What some variables held at one time."""

    def __init__(self, slots: Slots, known_modules: Any = (), updating: Any = ()):
        self._slots, self._known, self._updating = slots, known_modules, updating
        self.values = slots.values()
        self._entries: List[tuple[Any, ...]] = []  # (container, its entries)
        self._classes: List[tuple[Any, ...]] = []  # (class, its attributes)
        self._ends: List[tuple[Any, ...]] = []  # (long container, its length and ends)
        self._arrays: List[tuple[Any, ...]] = []  # (array, copy)
        self.generators: List[Any] = []
        self._states: List[tuple[Any, ...]] = []  # (how to put a generator's state back, state)
        self.tensors: List[torch.Tensor] = []
        self.slots: List[int] = []  # in which these are
        self.modules: Dict[torch.nn.Module, int] = {}  # that are none of the model's, and slots
        self._iterators: List[tuple[Any, ...]] = []  # (iterator, how many entries it has left)
        self._seen: Set[int] = set()
        for i, value in enumerate(self.values):
            if _kinds[type(value)]:
                self._walk(value, i)
        self.versions = [_version(t) for t in self.tensors]

    def _walk(self, value: Any, slot: int) -> None:
        found, seen = [value], self._seen
        while found and len(seen) < _MOST_PARTS:
            part = found.pop()
            how = _kinds[type(part)]
            if not how or id(part) in seen:
                continue
            if how != _TUPLE:  # tuples are made anew
                seen.add(id(part))
            if how == _TENSOR:
                self.tensors.append(part)
                self.slots.append(slot)
            elif how == _ENTRIES:
                found += self._note_container(part)
            elif how == _TUPLE:
                found += part[:_LOOKED_INTO]
            elif how == _OBJECT:
                attributes = getattr(part, "__dict__", None)
                if attributes is not None:
                    found += self._note_container(attributes)
            elif how == _MODULE:
                if part not in self._known:
                    self.modules.setdefault(part, slot)
            elif how == _CLASS:
                found += self._note_class(part)
            elif how == _OPTIMIZER:
                self._note_optimizer(part, slot)
            else:
                self._note_other(part, how)

    def _note_container(self, container: Any) -> Sequence[Any]:
        """Returns what it holds."""
        length = len(container)
        if length > _COPIED:
            self._ends.append((container, _ends_of(container)))
            return ()
        entries = _copy_of(container)
        self._entries.append((container, entries))
        if length > _LOOKED_INTO:
            return ()
        return list(entries.values()) if isinstance(entries, dict) else entries

    def _note_other(self, part: Any, how: int) -> None:
        if how == _ARRAY:
            if part.nbytes <= _ARRAY_BYTES and part.flags.writeable:
                self._arrays.append((part, part.copy()))
        elif how == _GENERATOR:
            get, put = functions_of(part)
            self.generators.append(part)
            self._states.append((put, get()))
        elif how == _ITERATOR:
            self._iterators.append((part, _left_in(part)))

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, slot: int) -> None:
        """Its learning rates and other numbers, and what it keeps of each parameter, unless that is
        for the update of the Step to change."""
        tables: List[dict[Any, Any]] = list(optimizer.param_groups)
        if not any(optimizer is own for own in self._updating):
            tables += [optimizer.state, *optimizer.state.values()]
        self._entries += [(table, dict(table)) for table in tables]
        for table in tables:
            tensors = [value for value in table.values() if isinstance(value, torch.Tensor)]
            self.tensors += tensors
            self.slots += [slot] * len(tensors)

    def _note_class(self, part: type) -> Iterable[Any]:
        """Returns what it holds."""
        if not is_of_the_program(part):
            return ()
        data = {
            name: value
            for name, value in vars(part).items()
            if name[:2] != "__" and (_kinds[type(value)] or type(value) in _ATOMS)
        }
        self._classes.append((part, data))
        return data.values()

    # ---- after an attempt that failed ----

    def put_back(self) -> None:
        """All but the contents of tensors and arrays, and generators."""
        self._slots.put_back(self.values)
        for container, entries in self._entries:
            put_back_entries(container, entries)
        for owner, attributes in self._classes:
            for name, value in attributes.items():
                if vars(owner).get(name, _MISSING) is not value:
                    setattr(owner, name, value)

    def put_back_contents(self) -> None:
        for array, copy in self._arrays:
            if array.tobytes() != copy.tobytes():
                array[...] = copy
        for put, state in self._states:
            put(state)

    def cut_back(self) -> List[Any]:
        """Long containers that have grown at their end are as they were. Returns those that have
        changed otherwise."""
        return [container for container, ends in self._ends if not _cut_back(container, ends)]

    def moved(self) -> List[Any]:
        """Iterators from which something was taken, or may have been."""
        return [part for part, left in self._iterators if left < 0 or _left_in(part) != left]

    def changed(self, later: Optional["Marks"] = None) -> List[Tuple[torch.Tensor, int]]:
        """The tensors that have changed in place until `later`, or until now, and their slots."""
        if later and self.versions == later.versions and _are_same(self.tensors, later.tensors):
            return []
        return [
            (tensor, slot)
            for tensor, slot, version in zip(self.tensors, self.slots, self.versions)
            if _version(tensor) != version
        ]

    def name_of(self, wanted: Any) -> str:
        """A variable, with the way from it to what it holds."""
        for variable, value in zip(self._slots.names, self.values):
            found: List[Tuple[str, Any]] = [(variable, value)]
            seen: Set[int] = set()
            while found and len(seen) < _MOST_PARTS:
                name, part = found.pop(0)
                if part is wanted:
                    return name
                if id(part) not in seen and _kinds[type(part)]:
                    seen.add(id(part))
                    found += _named_parts(name, part)
        return "a variable"


def _named_parts(name: str, part: Any) -> Iterator[Tuple[str, Any]]:
    how = _kinds[type(part)]
    if how == _OBJECT:
        yield from ((f"{name}.{k}", v) for k, v in getattr(part, "__dict__", {}).items())
    elif how == _TUPLE or isinstance(part, (list, collections.deque)):
        yield from ((f"{name}[{i}]", v) for i, v in enumerate(list(part)[:_LOOKED_INTO]))
    elif how == _OPTIMIZER:
        tables = (*part.param_groups, *part.state.values())
        yield from ((f"{name}.state", v) for table in tables for v in table.values())
    elif isinstance(part, dict):
        yield from ((f"{name}[{k!r}]", v) for k, v in list(part.items())[:_LOOKED_INTO])


def _left_in(iterator: Any) -> int:
    """How many entries an iterator has left; -1: it does not tell."""
    if not hasattr(iterator, "__length_hint__"):
        return -1
    return operator.length_hint(iterator, -1)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # it has none: one of inference mode
        return 0


def _are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


def _cut_back(container: Any, ends: tuple[Any, ...]) -> bool:
    length = ends[0]
    now = len(container)
    if isinstance(container, (list, collections.deque)):
        if now < length or container[0] is not ends[1] or container[length - 1] is not ends[2]:
            return False
        for _ in range(now - length):
            container.pop()
        return True
    if now < length or isinstance(container, set):
        return bool(now == length)
    for _ in range(now - length):
        container.popitem()  # that which was added last
    return True


class Reached:
    """Saves and restores, at the points of a session's guards, what some functions reach. Modules
    that they reach are for the audit to save, and so are the tensors whose ids handled() gives. The
    state of the optimizers `updating` is not theirs to change. In the first step first_bytes of the
    tensors are copied, since nothing is known of them."""

    def __init__(
        self,
        functions: Callable[[], Sequence[Any]],
        handled: Callable[[], Set[int]] = set,
        updating: Sequence[Any] = (),
        first_bytes: Optional[int] = None,
    ):
        self._functions, self._handled, self._updating = functions, handled, updating
        self._slots = Slots(())
        self._marks: Dict[int, Marks] = {}
        self._running: Optional[Marks] = None  # what an attempt began with
        self._copies: Dict[int, Copies] = {point: Copies() for point in GuardPoint}
        self._changing: Set[int] = set()  # slots in which a tensor was seen to change in place
        self._changing_tensors: Dict[int, torch.Tensor] = {}
        self._first: List[Tuple[torch.Tensor, torch.Tensor]] = []
        self._first_bytes = _FIRST_BYTES if first_bytes is None else first_bytes
        self._is_first = True  # no attempt has succeeded
        self._told: Set[str] = set()
        self._called_by_others: List[Any] = []  # functions that modules outside of the model call
        self.generators: List[Any] = []  # that the functions reach

    def begin(self, tree: Tree) -> Tuple[List[tuple[Any, ...]], List[torch.Tensor]]:
        """Before a step or an evaluation of a model, whose modules are the tree's. Returns modules
        outside of the model that the functions reach, by name, and tensors that get gradients by
        themselves and are in no module."""
        known = tree.known_without_reached()
        functions = [*self._functions(), *called_by(m for m in tree.modules if m in known)]
        objects = objects_in(tree, known)
        marks = self._look(functions, objects, known)
        called = called_by(m for module in marks.modules for m in module.modules())
        if called != self._called_by_others:
            self._called_by_others = called
            marks = self._look(functions, objects, known)
        self.generators = marks.generators
        modules = [(marks.name_of(module), module) for module in marks.modules]
        return modules, [t for t in marks.tensors if t.requires_grad and t.is_leaf]

    def _look(
        self, functions: Sequence[Any], objects: Sequence[Tuple[str, Any]], known: Set[Any]
    ) -> Marks:
        """At the variables of these functions, as they are now."""
        functions = [*functions, *self._called_by_others]
        if not self._slots.are_of(functions, objects):
            changing = {self._slots.names[slot] for slot in self._changing}
            self._slots = Slots(functions, objects)
            self._changing = {i for i, name in enumerate(self._slots.names) if name in changing}
        return Marks(self._slots, known, self._updating)

    def end(self) -> None:
        """After it: nothing of the step is held."""
        self._marks.clear()
        self._running, self._first, self.generators = None, [], []

    # ---- the points ----

    def save(self, point: int) -> None:
        if not self._slots.names:
            return
        marks = Marks(self._slots, (), self._updating)
        if self._running and point == GuardPoint.ATTEMPT:
            self._learn(self._running, marks)
        if point == GuardPoint.STEP and self._is_first:
            self._first = copies_on_host(marks.tensors, self._first_bytes)
        self._marks[point] = marks
        self._running = marks if point == GuardPoint.ATTEMPT else None
        if self._changing:
            self._copies[point].save(self._copied(marks))

    def _learn(self, before: Marks, now: Marks) -> None:
        """An attempt has succeeded."""
        self._is_first = False
        for tensor, slot in before.changed(now):
            self._changing.add(slot)
            self._changing_tensors[id(tensor)] = tensor

    def _copied(self, marks: Marks) -> Dict[Any, torch.Tensor]:
        there = {id(t) for t in marks.tensors}
        self._changing_tensors = {k: t for k, t in self._changing_tensors.items() if k in there}
        return {
            (slot, i): tensor
            for i, (tensor, slot) in enumerate(zip(marks.tensors, marks.slots))
            if slot in self._changing
            and (tensor.nbytes <= SMALL_BYTES or id(tensor) in self._changing_tensors)
        }

    def guard(self, has_error: Callable[[], bool]) -> "_Guard":
        """For a session; has_error() is whether the program has raised an exception in it."""
        return _Guard(self, has_error)

    def put_back(self, point: int) -> None:
        """All but contents of tensors, so that what a failed attempt made is let go."""
        if point in self._marks:
            self._marks[point].put_back()

    def restore(self, point: int) -> None:
        """Raises Error where a tensor cannot be put back."""
        if point not in self._marks:
            return
        marks, self._running = self._marks[point], None
        changed = marks.changed()
        self.put_back(point)
        marks.put_back_contents()
        self._warn_of_long(marks, marks.cut_back())
        self._warn_of_iterators(marks)
        if changed:
            self._put_back_tensors(marks, changed, point)

    @torch.no_grad()
    def _put_back_tensors(self, marks: Marks, changed: List[tuple[Any, ...]], point: int) -> None:
        saved = self._copies[point].has() if self._changing else ()
        first = {id(t): copy for t, copy in self._first}
        if point == GuardPoint.ATTEMPT:  # some had changed since then
            first = {key: t for key, t in first.items() if key not in self._changing_tensors}
        if saved:
            self._copies[point].restore()
        lost, handled = [], self._handled()
        for tensor, slot in changed:
            self._changing.add(slot)
            self._changing_tensors[id(tensor)] = tensor
            if id(tensor) in saved or id(tensor) in handled:
                continue
            if id(tensor) in first and tensor.shape == first[id(tensor)].shape:
                tensor.copy_(first[id(tensor)])
            else:
                lost.append(tensor)
        if lost:
            names = ", ".join(repr(marks.name_of(t)) for t in lost[:3])
            raise c.Error(
                f"rebatch: {names} changed in place in an attempt that failed, and there is no "
                "copy of what was there before: give the Step state=[...] with it, or let loss_fn "
                "return (loss, extras), which has each sample once in step.outputs",
                c.Status.E_STATE,
            )

    def _warn_of_iterators(self, marks: Marks) -> None:
        names = [marks.name_of(iterator) for iterator in marks.moved()]
        new = [name for name in names if name not in self._told]
        if new:
            self._told.update(new)
            warnings.warn(
                f"rebatch: what an attempt that failed took from the iterator "
                f"{', '.join(map(repr, new[:3]))} is not put back: expected a loss_fn that takes "
                "its values from the batch, or from a generator of random numbers",
                RuntimeWarning,
                stacklevel=2,
            )

    def _warn_of_long(self, marks: Marks, containers: List[Any]) -> None:
        names = [marks.name_of(container) for container in containers]
        new = [name for name in names if name not in self._told]
        if new:
            self._told.update(new)
            warnings.warn(
                f"rebatch: {', '.join(map(repr, new[:3]))} has more than {_COPIED} entries, and "
                "changed in an attempt that failed, which stays: expected loss_fn to return (loss, "
                "extras), which has each sample once in step.outputs",
                RuntimeWarning,
                stacklevel=2,
            )


class _Guard:
    """Of one session. After an exception of the program's own its variables stay as they are, as
    without rebatch: nothing runs again, and they may tell what went wrong."""

    def __init__(self, reached: Reached, has_error: Callable[[], bool]):
        self._reached, self._has_error, self.save = reached, has_error, reached.save

    def restore(self, point: int) -> None:
        if not self._has_error():
            self._reached.restore(point)
