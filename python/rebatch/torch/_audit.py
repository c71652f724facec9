"""What an attempt changed is put back, or named.

Before each attempt the audit takes note of what the modules hold, by reference, and of the version
of each tensor, which PyTorch increases when it is changed in place. Tensors that are known to
change in place are copied: buffers, and whatever was seen to change in an attempt before. In the
first step, where nothing is known, small tensors are copied too, and contents are compared, but for
those of trained parameters, because a change through .data has no version."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from rebatch import _library as c
from rebatch._library import GuardPoint
from rebatch.torch._copies import Copies, copied, copies_on_host, sums_of
from rebatch.torch._tree import Held, Place, Tree

# So much of what might change is copied to the host in the first step.
_FIRST_BYTES = 512 << 20


class NotPutBackError(c.Error):
    """A failed attempt changed something, and there is no copy of what it was."""


def _batch_tensors(value: Any, name: str = "batch") -> Iterator[Tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _batch_tensors(part, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _batch_tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _batch_tensors(part, f"{name}[{i}]")


def _mark(tensor: torch.Tensor) -> tuple:
    """What changes with the tensor's contents."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # it has none: one of inference mode, or without memory
        return 0, 0


def _marks(tensors: Sequence[torch.Tensor]) -> List[tuple]:
    try:
        return [(t._version, t.data_ptr()) for t in tensors]
    except RuntimeError:
        return [_mark(t) for t in tensors]


class _Noted:
    """What was at one point."""

    def __init__(self, held: Held, batch: Sequence[Tuple[str, torch.Tensor]], compares: bool):
        self.held, self.batch = held, batch
        self.tensors = held.tensors + [tensor for _, tensor in batch]
        self.marks = _marks(self.tensors)
        self.sums = sums_of(self.tensors) if compares else None

    def changed(self, later: Optional["_Noted"] = None) -> List[torch.Tensor]:
        """The tensors that have changed in place, until `later`, or until now."""
        marks = _marks(self.tensors) if later is None else later.of(self.tensors)
        different = [i for i, (a, b) in enumerate(zip(self.marks, marks)) if a != b]
        if self.sums is not None and not (later and later.sums is None):
            now = later.sums_of(self.tensors) if later else sums_of(self.tensors)
            different += [i for i, (a, b) in enumerate(zip(self.sums, now)) if _differ(a, b)]
        return [self.tensors[i] for i in dict.fromkeys(different)]

    def of(self, tensors: Sequence[torch.Tensor]) -> List[tuple]:
        """The marks of these, now for those that were not noted."""
        if len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors)):
            return self.marks
        known = {id(t): mark for t, mark in zip(self.tensors, self.marks)}
        return [known.get(id(t)) or _mark(t) for t in tensors]

    def sums_of(self, tensors: Sequence[torch.Tensor]) -> List[Optional[int]]:
        known = {id(t): total for t, total in zip(self.tensors, self.sums)}
        return [known.get(id(t)) for t in tensors]


def _differ(a: Optional[int], b: Optional[int]) -> bool:
    return a is not None and b is not None and a != b


class Audit:
    """Saves and restores, at the points of a session's guards, what a step's modules hold, the
    tensors of its batch, and `state`: tensors, modules, and objects with a state_dict(), by
    name."""

    def __init__(
        self, modules: Sequence[Tuple[str, torch.nn.Module]], state: Sequence[Tuple[str, Any]] = ()
    ):
        own = [(name, part) for name, part in state if isinstance(part, torch.nn.Module)]
        self.tree = Tree([*modules, *own])
        self._own_modules = [module for _, module in own]
        self._own_tensors = {
            name: part for name, part in state if isinstance(part, torch.Tensor)
        }
        self._objects = [
            part for _, part in state if not isinstance(part, (torch.Tensor, torch.nn.Module))
        ]
        self._states: Dict[int, list] = {}
        self._known: Dict[tuple, Place] = {}  # places whose tensors change in place
        self._known_in_batch: Set[str] = set()
        self._batch: List[Tuple[str, torch.Tensor]] = []
        self._copies = {point: Copies() for point in GuardPoint}
        self._noted: Dict[int, _Noted] = {}
        self._running: Optional[_Noted] = None  # what an attempt began with
        self._unknown = {True, False}  # modes, training or not, in which no attempt has succeeded
        self._is_training = True
        self._first: List[Tuple[torch.Tensor, torch.Tensor]] = []  # tensors and their copies
        self._told: Set[str] = set()

    # ---- a step ----

    def begin(self, batch: Any, is_training: bool = True) -> None:
        """Before a step or an evaluation. May run out of memory."""
        self.tree.refresh()
        self._batch = list(_batch_tensors(batch))
        self._is_training = is_training
        self._told.clear()
        self._know_own()
        tensors = self._copied_tensors()
        for copies in self._copies.values():
            copies.prepare(tensors)

    def end(self) -> None:
        """After it: nothing of the step is held."""
        self._batch, self._running, self._first = [], None, []
        self._noted.clear()
        self._states.clear()

    def _know_own(self) -> None:
        """Modules of `state` change in place, whatever was seen."""
        if not self._own_modules:
            return
        mine = {id(table) for m in self._own_modules for sub in m.modules() for table in (
            vars(sub), sub._parameters
        )}
        for place, _ in self.tree.take().places(self.tree.prefixes()):
            if id(place.table) in mine:
                self._know(place)

    # ---- what is copied ----

    def _know(self, place: Place) -> None:
        self._known[id(place.table), place.key, place.entry] = place

    def _copied_tensors(self) -> Dict[Any, torch.Tensor]:
        tensors: Dict[Any, Any] = {
            (id(table), key): b for table in self.tree.buffers for key, b in table.items()
        }
        tensors.update(self._own_tensors)
        tensors.update((key, place.tensor()) for key, place in self._known.items())
        tensors.update((name, t) for name, t in self._batch if name in self._known_in_batch)
        return {key: t for key, t in tensors.items() if t is not None}

    def _copy_first(self, held: Held) -> None:
        """Nothing is known yet: copy what has no gradient, since that is what changes in place."""
        small = [t for t in held.tensors if not (t.requires_grad and t.is_leaf)]
        self._first = copies_on_host(small + [t for _, t in self._batch], _FIRST_BYTES)

    # ---- the points ----

    def save(self, point: int) -> None:
        noted = None
        if self._running and point == GuardPoint.ATTEMPT:
            noted = self._learn()
        is_first = self._is_training in self._unknown
        if noted is None or (is_first and noted.sums is None):
            noted = _Noted(self.tree.take(), self._batch, compares=is_first)
        if point == GuardPoint.STEP and is_first:
            self._copy_first(noted.held)
        self._noted[point] = noted
        self._running = noted if point == GuardPoint.ATTEMPT else None
        self._copies[point].save(self._copied_tensors())
        self._states[point] = [copied(part.state_dict()) for part in self._objects]

    def restore(self, point: int) -> None:
        """Raises Error where something cannot be put back."""
        noted, self._running = self._noted[point], None
        changed = noted.changed()
        copies = self._copies[point]
        first = [] if point == GuardPoint.STEP else self._known_tensors()
        saved = copies.has()
        from_first = {id(t): copy for t, copy in self._first if id(t) not in saved}
        for known in first:  # it had changed since then
            from_first.pop(id(known), None)
        self.put_back(point)
        copies.restore()
        lost = []
        with torch.no_grad():
            for tensor in changed:
                if id(tensor) in from_first:
                    _put_back(tensor, from_first[id(tensor)])
                elif id(tensor) not in saved:
                    lost.append(tensor)
        for part, state in zip(self._objects, self._states[point]):
            part.load_state_dict(copied(state))
        if changed:
            self._tell(self._know_all(noted, changed), {id(t) for t in lost})

    def put_back(self, point: int) -> None:
        """Only what modules hold, not yet what is in it: a failed attempt's tensors are let go."""
        if point in self._noted:
            self._noted[point].held.put_back()

    def _known_tensors(self) -> List[torch.Tensor]:
        tensors = [place.tensor() for place in self._known.values()]
        tensors += [t for name, t in self._batch if name in self._known_in_batch]
        return [t for t in tensors if t is not None]

    # ---- what is known ----

    def _learn(self) -> _Noted:
        """An attempt has succeeded. What it changed in place is copied from now on. Returns what
        there is now."""
        before = self._running
        now = _Noted(self.tree.take(), self._batch, compares=before.sums is not None)
        if now.sums is not None or now.marks != before.marks:
            changed = before.changed(now)
            known = self._copies[GuardPoint.ATTEMPT].has()
            if any(id(t) not in known for t in changed):
                self._know_all(before, changed)
        self._unknown.discard(self._is_training)
        now.sums = None
        return now

    def _know_all(self, noted: _Noted, changed: List[torch.Tensor]) -> Dict[str, int]:
        """Their names, and the ids of the tensors."""
        wanted, names = {id(t) for t in changed}, {}
        for place, tensor in noted.held.places(self.tree.prefixes()):
            if id(tensor) in wanted:
                wanted.remove(id(tensor))
                names[place.name] = id(tensor)
                self._know(place)
        for name, tensor in noted.batch:
            if id(tensor) in wanted:
                names[name] = id(tensor)
                self._known_in_batch.add(name)
        return names

    def _tell(self, names: Dict[str, int], lost: Set[int]) -> None:
        mine = [name for name, of in names.items() if of in lost and name not in self._told]
        if not mine:
            return
        self._told.update(mine)
        what = ", ".join(repr(name) for name in mine[:3])
        if len(mine) > 3:
            what += f" and {len(mine) - 3} others"
        advice = "give the Step state=[...] with them, and they are put back"
        if all(name.startswith("batch") for name in mine):
            advice = "change a copy"
        raise NotPutBackError(
            f"rebatch: {what} changed in place in an attempt that failed, and there is no copy of "
            f"what was there before: loss_fn must not change them, or {advice}",
            c.Status.E_STATE,
        )

    @contextlib.contextmanager
    def accepting(self) -> Iterator[None]:
        """What is changed within stays, also when the step is undone."""
        noted = self._noted.get(GuardPoint.STEP)
        before = _Noted(self.tree.take(), self._batch, compares=False)
        try:
            yield
        finally:
            if noted:
                self.tree.refresh()
                after = self.tree.take()
                noted.held.accept(before.held, after)
                now = {id(t): _mark(t) for t in before.changed()}
                then = {id(t): mark for t, mark in zip(before.tensors, before.marks)}
                noted.marks = [
                    now[id(t)] if id(t) in now and then[id(t)] == mark else mark
                    for t, mark in zip(noted.tensors, noted.marks)
                ]


def _put_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if tensor.shape == copy.shape:
        tensor.copy_(copy)
    else:
        tensor.data = copy.to(tensor.device, copy=True)
