"""What a training holds: a copy of it, what has changed since, and putting it back.

Beside parameters, buffers and generators that is what modules hold as plain attributes, the batch,
and the variables of the program that loss_fn reads or writes."""

from __future__ import annotations

import collections
from typing import Any, Dict, Iterable, Iterator, List, Tuple

import torch

from rebatch._library import GuardPoint
from rebatch._user_code import is_object
from rebatch.torch.batches.cut import batch_tensors
from rebatch.torch.batches.kinds import are_same
from rebatch.torch.program.program import Running
from rebatch.torch.undo.contents import ATOMS, contents_of, is_container, is_data
from rebatch.torch.undo.copies import copy_of, put_back
from rebatch.torch.undo.generators import is_generator, is_same_state
from rebatch.torch.undo.module_tree import Tree
from rebatch.torch.undo.places import Place, Saved, attributes, inside, place_of, variables_of
from rebatch.torch.undo.undo import Undo

_ATOMS: Tuple[Any, ...] = tuple(ATOMS)
# Longer containers are data sets rather than counters.
_LONGEST = 1000

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
        places += attributes(type(owner).__name__, owner, vars(owner))
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


# ---- the snapshot ----


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

    def restore(self) -> None:
        self._undo.restore(self._point, has_failed=False)
        self._generators.put(self._states)
        self.put_back()
        for tensor, copy in self._copies.values():
            # By the contents: BatchNorm and kernels of one's own leave a tensor's version.
            if copy is not None and not are_same(tensor, copy):
                put_back(tensor, copy)
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

    def draws(self, but_for_torchs: bool = False) -> bool:
        """Whether random numbers were drawn since, by PyTorch's generators or by others alone."""
        return self._generators.have_moved(self._states, but_for_torchs)


def snapshot_outside(running: Running) -> Snapshot:
    """Within an attempt: of what it may change in the model, and of what is outside of that and
    small, without parameters and gradients."""
    places = [p for p in _outside(running) if p.kind not in ("parameter", "gradient")]
    return Snapshot(running, places, running.undo, GuardPoint.ATTEMPT)
