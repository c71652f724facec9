"""What an attempt changed is put back, or named.

Before each attempt the audit takes note of what the modules hold, by reference, and of the version
of each tensor, which PyTorch increases when it is changed in place. Tensors that are known to
change in place are copied: buffers, and whatever was seen to change in an attempt before. In the
first step, where nothing is known, small tensors are copied too, and contents are compared, but for
those of trained parameters, because a change through .data has no version. All are compared where
samples run again after a failure: what then changes without a version has changed in the attempt
that failed too."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from rebatch import _library as c
from rebatch._library import GuardPoint
from rebatch.torch._batch import batch_tensors
from rebatch.torch._copies import Copies, copied, copies_on_host, sums_of
from rebatch.torch._tree import MOST_ENTRIES, Held, Place, Tree, unique

# So much of what might change is copied to the host in the first step.
_FIRST_BYTES = 512 << 20


class NotPutBackError(c.Error):
    """A failed attempt changed something, and there is no copy of what it was."""


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes with the tensor's contents."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # it has none: one of inference mode, or without memory
        return 0, 0


def _marks(tensors: Sequence[torch.Tensor]) -> List[tuple[Any, ...]]:
    try:
        return [(t._version, t.data_ptr()) for t in tensors]
    except RuntimeError:
        return [_mark(t) for t in tensors]


class _Noted:
    """What was at one point."""

    def __init__(
        self,
        held: Held,
        batch: Sequence[Tuple[str, torch.Tensor]],
        compares: bool,
        compares_all: bool = False,
    ):
        self.compares_all = compares_all  # trained parameters too
        self.held, self.batch = held, batch
        self.tensors = held.tensors + [tensor for _, tensor in batch]
        self.marks = _marks(self.tensors)
        self.sums = sums_of(self.tensors, compares_all) if compares or compares_all else None

    def changed(self, later: Optional["_Noted"] = None) -> List[torch.Tensor]:
        """The tensors that have changed in place, until `later`, or until now."""
        marks = _marks(self.tensors) if later is None else later.of(self.tensors)
        found = [t for t, a, b in zip(self.tensors, self.marks, marks) if a != b]
        return unique(found + self.changed_contents(later))

    def changed_contents(self, later: Optional["_Noted"] = None) -> List[torch.Tensor]:
        """Those of which that is known by their contents."""
        if self.sums is None or (later and later.sums is None):
            return []
        now = (later or self).sums_of(self.tensors, is_now=not later)
        return [t for t, a, b in zip(self.tensors, self.sums, now) if _differ(a, b)]

    def unmarked(self, later: "_Noted") -> List[torch.Tensor]:
        """Those that have changed without a mark."""
        marks = later.of(self.tensors)
        marked = {id(t) for t, a, b in zip(self.tensors, self.marks, marks) if a != b}
        return [t for t in self.changed_contents(later) if id(t) not in marked]

    def of(self, tensors: Sequence[torch.Tensor]) -> List[tuple[Any, ...]]:
        """The marks of these, now for those that were not noted."""
        if len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors)):
            return self.marks
        known = {id(t): mark for t, mark in zip(self.tensors, self.marks)}
        return [known.get(id(t)) or _mark(t) for t in tensors]

    def sums_of(self, tensors: Sequence[torch.Tensor], is_now: bool) -> List[Optional[int]]:
        if is_now:
            return sums_of(tensors, self.compares_all)
        known = {id(t): total for t, total in zip(self.tensors, self.sums or ())}
        return [known.get(id(t)) for t in tensors]


def _has_hook(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter with a hook that may step an optimizer within a backward pass."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _differ(a: Optional[int], b: Optional[int]) -> bool:
    return a is not None and b is not None and a != b


class Audit:
    """Saves and restores, at the points of a session's guards, what a step's modules hold, the
    tensors of its batch, and `state`: tensors, modules, and objects with a state_dict(), by
    name. trained() gives the parameters that an update changes. Without copies_first, what changes
    in place in the first attempt of all has no copy, buffers excepted."""

    def __init__(
        self,
        modules: Sequence[Tuple[str, torch.nn.Module]],
        state: Sequence[Tuple[str, Any]] = (),
        trained: Callable[[], Sequence[torch.Tensor]] = tuple,
        copies_first: bool = True,
    ):
        self._trained = trained
        own = [(name, part) for name, part in state if isinstance(part, torch.nn.Module)]
        self.tree = Tree([*modules, *own])
        self._own_modules = [module for _, module in own]
        self._own_tensors = {name: part for name, part in state if isinstance(part, torch.Tensor)}
        self._objects = [
            part for _, part in state if not isinstance(part, (torch.Tensor, torch.nn.Module))
        ]
        self._states: Dict[int, list[Any]] = {}
        self._known: Dict[tuple[Any, ...], Place] = {}  # places whose tensors change in place
        self._known_in_batch: Set[str] = set()
        self._batch: List[Tuple[str, torch.Tensor]] = []
        self._copies: Dict[int, Copies] = {point: Copies() for point in GuardPoint}
        self._noted: Dict[int, _Noted] = {}
        self._running: Optional[_Noted] = None  # what an attempt began with
        # Modes, training or not, in which no attempt has succeeded.
        self._copies_first = copies_first
        self._unknown = {True, False} if copies_first else set()
        self._is_training = True
        self._first: List[Tuple[torch.Tensor, torch.Tensor]] = []  # tensors and their copies
        self._is_suspect = False  # an attempt has failed, and not all contents were compared
        self._told: Set[str] = set()
        self._told_large: Set[str] = set()
        self.is_cut = False  # the micro-batch that runs is not the whole batch

    # ---- a step ----

    def set_reached(self, modules: Sequence[Tuple[str, torch.nn.Module]]) -> None:
        """Before begin(): modules outside of the model that functions reach now. Of new ones
        nothing is known."""
        if self.tree.set_reached(modules) and self._copies_first:
            self._unknown = {True, False}

    def begin(self, batch: Any, is_training: bool = True) -> None:
        """Before a step or an evaluation. May run out of memory."""
        self.tree.refresh()
        self._batch = list(batch_tensors(batch))
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

    def handled(self) -> Set[int]:
        """The ids of the tensors that are put back, or named, here."""
        found = [*self.tree.take().tensors, *self._own_tensors.values()]
        found += [b for table in self.tree.buffers for b in table.values()]
        found += [tensor for _, tensor in self._batch]
        return {id(tensor) for tensor in found}

    def _know_own(self) -> None:
        """Modules of `state` change in place, whatever was seen."""
        if not self._own_modules:
            return
        mine = {
            id(table)
            for m in self._own_modules
            for sub in m.modules()
            for table in (vars(sub), sub._parameters)
        }
        for place, _ in self.tree.take().places(self.tree.prefixes()):
            if id(place.table) in mine:
                self._know(place)

    # ---- what is copied ----

    def _know(self, place: Place) -> None:
        self._known[id(place.table), place.key, place.path] = place

    def _copied_tensors(self) -> Dict[Any, torch.Tensor]:
        tensors: Dict[Any, Any] = {
            (id(table), key): b for table in self.tree.buffers for key, b in table.items()
        }
        tensors.update(self._own_tensors)
        tensors.update((key, place.tensor()) for key, place in self._known.items())
        tensors.update((name, t) for name, t in self._batch if name in self._known_in_batch)
        return {key: t for key, t in tensors.items() if t is not None}

    def _copy_first(self, held: Held) -> None:
        """Nothing is known yet: copy what no optimizer trains, since that is what changes in place,
        and what a hook may change."""
        trained = {id(t) for t in self._trained()}
        small = [t for t in held.tensors if id(t) not in trained or _has_hook(t)]
        self._first = copies_on_host(small + [t for _, t in self._batch], _FIRST_BYTES)

    # ---- the points ----

    def save(self, point: int) -> None:
        before = self._running if point == GuardPoint.ATTEMPT else None
        noted = self._learn(before) if before else None
        is_first = self._is_training in self._unknown
        if (
            noted is None
            or (is_first and noted.sums is None)
            or (self._is_suspect and not noted.compares_all)
        ):
            noted = _Noted(self.tree.take(), self._batch, is_first, self._is_suspect)
        if point == GuardPoint.STEP and is_first:
            self._copy_first(noted.held)
        self._noted[point] = noted
        self._running = noted if point == GuardPoint.ATTEMPT else None
        self._copies[point].save(self._copied_tensors())
        self._states[point] = [copied(part.state_dict()) for part in self._objects]

    def restore(self, point: int, has_failed: bool = True) -> None:
        """After an attempt, that has failed or was none of the step. Raises Error where something
        cannot be put back."""
        noted, self._running = self._noted[point], None
        self._is_suspect = self._is_suspect or (has_failed and not noted.compares_all)
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
        self._warn_of_large(noted.held)
        if changed:
            names = self._know_all(noted, changed)
            self._refuse_hooks(names, changed)
            self._tell(names, {id(t) for t in lost})

    def put_back(self, point: int) -> None:
        """Only what modules hold, not yet what is in it: a failed attempt's tensors are let go."""
        if point in self._noted:
            self._noted[point].held.put_back()

    def _known_tensors(self) -> List[torch.Tensor]:
        tensors = [place.tensor() for place in self._known.values()]
        tensors += [t for name, t in self._batch if name in self._known_in_batch]
        return [t for t in tensors if t is not None]

    # ---- what is known ----

    def _learn(self, before: _Noted) -> _Noted:
        """An attempt has succeeded. What it changed in place is copied from now on. Returns what
        there is now."""
        now = _Noted(self.tree.take(), self._batch, before.sums is not None, before.compares_all)
        was_suspect, self._is_suspect = self._is_suspect, False
        self._unknown.discard(self._is_training)
        if now.sums is not None or now.marks != before.marks:
            changed = before.changed(now)
            known = self._copies[GuardPoint.ATTEMPT].has()
            if any(id(t) not in known for t in changed):
                names = self._know_all(before, changed)
                if self.is_cut:
                    self._refuse_hooks(names, changed)
                if was_suspect:
                    self._tell(names, {id(t) for t in before.unmarked(now)} - known)
        now.sums, now.compares_all = None, False
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
        advice = "give the Step state=[...] with them, and they are put back"
        if all(name.startswith("batch") for name in mine):
            advice = "change a copy"
        raise NotPutBackError(
            f"rebatch: {_listed(mine)} changed in place in an attempt that failed, and there is no "
            f"copy of what was there before: loss_fn must not change them, or {advice}",
            c.Status.E_STATE,
        )

    def _refuse_hooks(self, names: Dict[str, int], changed: List[torch.Tensor]) -> None:
        hooked = {id(t) for t in changed if _has_hook(t)}
        mine = [name for name, of in names.items() if of in hooked and name not in self._told]
        if mine:
            self._told.update(mine)
            raise NotPutBackError(
                f"rebatch: {_listed(mine)} changed within a backward pass, and each has a hook of "
                "register_post_accumulate_grad_hook(): an optimizer that steps there steps once a "
                "micro-batch, and its state cannot be put back: expected the optimizer to be given "
                "to the Step, which steps it once a batch",
                c.Status.E_STATE,
            )

    def _warn_of_large(self, held: Held) -> None:
        if not held.has_large:
            return
        mine = [n for n in held.large(self.tree.prefixes()) if n not in self._told_large]
        if mine:
            self._told_large.update(mine)
            warnings.warn(
                f"rebatch: {_listed(mine)} of the model has more than {MOST_ENTRIES} entries, so "
                "what an attempt that failed changed in it stays: expected fewer, or loss_fn to "
                "leave it as it is",
                RuntimeWarning,
                stacklevel=2,
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
