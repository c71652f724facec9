"""What a training holds: a copy of it, what has changed since, and putting it back.

Beside parameters, buffers and generators that is what modules hold as plain attributes, the batch,
and the variables of the program that loss_fn reads or writes."""

from __future__ import annotations

import collections
import types
from typing import AbstractSet, Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch

from rebatch._library import GuardPoint
from rebatch._user_code import is_object
from rebatch.torch.batches.cut import batch_tensors
from rebatch.torch.batches.kinds import are_same, is_array
from rebatch.torch.program.program import Running
from rebatch.torch.undo.changes_outside import Marks
from rebatch.torch.undo.contents import ATOMS, contents_of, is_container, is_data
from rebatch.torch.undo.copies import copy_of, put_back
from rebatch.torch.undo.generators import is_generator, is_same_state
from rebatch.torch.undo.module_tree import Tree
from rebatch.torch.undo.places import Place, Saved, inside, named_by, place_of, variables_of
from rebatch.torch.undo.places import attributes as attributes_at
from rebatch.torch.undo.undo import Undo

_ATOMS: Tuple[Any, ...] = tuple(ATOMS)
_TRAINED = ("parameter", "gradient")
_SMALL_BYTES = 1 << 20
# Longer containers are data sets rather than counters.
_LONGEST = 1000

Copies = Dict[int, Tuple[torch.Tensor, Optional[torch.Tensor]]]  # by id
Changes = Dict[Tuple[str, str], Any]  # by kind and name


def _is_state(value: Any) -> bool:
    if is_container(value):
        return not isinstance(value, tuple) and len(value) <= _LONGEST
    return isinstance(value, (torch.Tensor, *_ATOMS))


def _copy(value: Any, depth: int = 4) -> Any:
    """To be compared; deep enough for what is told by it."""
    if isinstance(value, torch.Tensor):
        return copy_of(value)
    if depth and (isinstance(value, dict) or is_object(value)):
        entries = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        return {k: _copy(v, depth - 1) for k, v in entries.items()}
    if depth and isinstance(value, (list, tuple, collections.deque)):
        return [_copy(v, depth - 1) for v in value]
    return set(value) if isinstance(value, set) else value


def _is_same_number(value: Any, other: Any) -> bool:
    if isinstance(value, float) and value != value:
        return isinstance(other, float) and other != other
    return value is other or (isinstance(value, _ATOMS) and bool(value == other))


# ---- the places of a training ----


def _of_modules(root: torch.nn.Module, prefix: str = "", kind: str = "") -> Iterator[Place]:
    """Parameters and gradients; and buffers, data in attributes, and modes, as of one kind."""
    tree = Tree([("", root)])
    held, prefixes = tree.take(), tree.prefixes()
    for place, value in held.roots(prefixes):
        name, own_kind = prefix + place.name, place.kind
        if own_kind == "parameter":
            yield Place(name, place.owner, place.key, kind=own_kind)
            yield Place(name, value, "grad", kind="gradient")
        elif place.key != "training" and is_data(value):
            yield Place(name, place.owner, place.key, kind=kind or own_kind)
    for module in tree.modules:
        name = (prefix + prefixes.get(id(module), "")).rstrip(".") or type(module).__name__
        yield Place(name, vars(module), "training", kind=kind or "mode")


def _outside(running: Running) -> Iterator[Place]:
    program = running.program
    places = list(variables_of(program.loss_fn))
    for owner in program.owners:
        places += attributes_at(type(owner).__name__, owner, vars(owner))
    known = set(program.modules.modules())
    for place in places:
        value = place.get()
        if _is_state(value):
            yield place
        elif isinstance(value, torch.nn.Module):
            if value not in known:
                yield from _of_modules(value, f"{place.name}.", "variable")
        else:
            for inner in inside(place.name, value):
                if _is_state(inner.get()) or is_object(inner.get()):
                    yield inner


def places_of(running: Running) -> List[Place]:
    """All those of the training whose batch runs."""
    modules = running.program.modules
    batch = [place_of(name, t, "batch") for name, t in batch_tensors(running.batch)]
    root = modules[0] if len(modules) == 1 else modules
    return [*_of_modules(root), *batch, *_outside(running)]


class Reached(Marks):
    """What can be put back of all that is looked at for what a step changes: variables, what they
    hold, and small tensors and arrays, in which a program may count."""

    def __init__(
        self,
        functions: Sequence[Any],
        modules: Sequence[torch.nn.Module],
        known: AbstractSet[int] = frozenset(),
    ):
        self.places: List[Place] = []
        self.arrays: List[Tuple[Any, Any]] = []  # of NumPy, with copies
        super().__init__(functions, modules, {*known, *map(id, modules)})
        self._saved = Saved(())
        small = [t for t in self._saved.add(self.places) if t.nbytes <= _SMALL_BYTES]
        self._copies = {id(t): (t, copy_of(t)) for t in small}

    @classmethod
    def by(cls, running: Running) -> Reached:
        """By what runs in an attempt."""
        program, undo = running.program, running.undo
        known = undo.handled() | program.handled()
        return cls(program.functions_of_an_attempt(), undo.tree.modules, known)

    def put_back(self) -> None:
        self._saved.put_back()
        _put_back_contents(self._copies)
        for array, copy in self.arrays:
            array[...] = copy

    def _follow(self, function: Any, owner: str = "self") -> None:
        self.places += named_by(function)
        if isinstance(function, types.FunctionType):
            self.places.append(place_of(function.__name__, vars(function)))
        super()._follow(function, owner)

    def _note_attributes(
        self, name: str, owner: Any, attributes: Dict[Any, Any], is_part: bool = False
    ) -> None:
        if isinstance(owner, (type, types.ModuleType)):
            self.places += attributes_at(name, owner, attributes)
        super()._note_attributes(name, owner, attributes, is_part)

    def look_into(self, name: str, value: Any, is_part: bool) -> None:
        is_new = id(value) not in self._seen and id(value) not in self._known
        if is_new and isinstance(value, torch.nn.Module):
            self.places += (p for p in _of_modules(value) if p.kind not in _TRAINED)
        super().look_into(name, value, is_part)

    def _inside(self, value: Any) -> Any:
        if is_array(value) and value.nbytes <= self.most_array_bytes and value.flags.writeable:
            self.arrays.append((value, value.copy()))
        return super()._inside(value)


# ---- the snapshot ----


def _counts(place: Place) -> bool:
    """The steps of a scheduler."""
    kind = torch.optim.lr_scheduler.LRScheduler
    return place.key == "last_epoch" and isinstance(place.owner, kind)


def _put_back_contents(copies: Copies) -> None:
    """By what they are: BatchNorm and kernels of one's own leave a tensor's version."""
    for tensor, copy in copies.values():
        if copy is not None and not are_same(tensor, copy):
            put_back(tensor, copy)


class Snapshot(Saved):
    """What some places of a training hold, its generators, and what an Undo has saved at a point,
    as they are when the snapshot is made. Of an object of the program no tensors are copied: it may
    be a set of data."""

    def __init__(self, running: Running, places: Iterable[Place], undo: Undo, point: GuardPoint):
        self._generators, self._undo, self._point = running.generators, undo, point
        self._states = self._generators.states()
        super().__init__(())
        each = {(place.kind, place.name): place for place in places}.values()
        tensors = self.add(place for place in each if not is_object(place.get()))
        self.add(place for place in each if is_object(place.get()))
        self._copies = {id(t): (t, copy_of(t)) for t in tensors}
        self.reached: Optional[Reached] = None  # more that is put back

    def restore(self) -> None:
        self._undo.restore(self._point, has_failed=False)
        self._generators.put(self._states)
        self.put_back()
        _put_back_contents(self._copies)
        if self.reached:
            self.reached.put_back()
        self._undo.save(self._point)

    def changes(self) -> Changes:
        """What is not as it was, with a copy of what it is now."""
        return {
            (place.kind, place.name): _copy(now)
            for place, then in self.values
            if not self._is_same(now := place.get(), then, set())
        }

    def _is_same(self, now: Any, then: Any, seen: set[Any]) -> bool:
        """Whether a value is what another one was."""
        if isinstance(then, torch.Tensor):
            _, copy = self._copies.get(id(then), (then, None))
            return isinstance(now, torch.Tensor) and (copy is None or are_same(now, copy))
        if id(then) not in self.contents:
            return _is_same_number(now, then)
        if id(then) in seen:
            return True
        seen.add(id(then))
        if type(now) is not type(then):
            return False
        held, entries = contents_of(now), self.contents[id(then)][1]
        if is_generator(then):
            return is_same_state(held, entries)
        if isinstance(entries, set) or len(held) != len(entries):
            return bool(held == entries)
        if isinstance(entries, dict):
            return list(held) == list(entries) and all(
                self._is_same(v, entries[k], seen) for k, v in held.items()
            )
        return all(self._is_same(a, b, seen) for a, b in zip(held, entries))

    def moved(self) -> List[str]:
        """The names of parameters, and counts of schedulers, that are not what they were."""
        each = [(p, then) for p, then in self.values if p.kind == "parameter" or _counts(p)]
        return [p.name for p, then in each if not self._is_same(p.get(), then, set())]

    def draws(self, but_for_torchs: bool = False) -> bool:
        """Whether random numbers were drawn since, by PyTorch's generators or by others alone."""
        return self._generators.have_moved(self._states, but_for_torchs)


def parameters_outside(running: Running) -> List[torch.Tensor]:
    """Of modules that are outside of the model."""
    found = (place.get() for place in _outside(running) if place.kind == "parameter")
    return [tensor for tensor in found if tensor is not None]


def snapshot_outside(running: Running, moving: AbstractSet[int] = frozenset()) -> Snapshot:
    """Within an attempt: of what it may change in the model, and of what is outside of that and
    small, with no gradients, and those parameters alone whose ids are given."""
    places = [p for p in _outside(running) if p.kind not in _TRAINED or id(p.get()) in moving]
    snapshot = Snapshot(running, places, running.undo, GuardPoint.ATTEMPT)
    snapshot.reached = Reached.by(running)
    return snapshot
