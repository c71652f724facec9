"""What an attempt changed in the model, in the batch and in `state` is put back, or named.

In the first three steps an Undo looks at everything: before each attempt it takes note of what the
modules hold, by reference, and of the version of each tensor, which PyTorch increases when it is
changed in place. What an attempt changed is known from then on: later steps save that alone, with
the buffers. After a failure Undo looks at everything again while the samples run again: what
changes then has changed in the attempt that failed too. Contents are compared in the first attempt
and in such a one, because a change through .data has no version. A look serves until something
runs: what is looked at once is not looked at again after an attempt that changed nothing."""

from __future__ import annotations

import contextlib
import enum
import itertools
import warnings
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from rebatch import _library as c
from rebatch._library import GuardPoint
from rebatch._user_code import user_stacklevel
from rebatch.torch.batches.cut import batch_tensors
from rebatch.torch.batches.kinds import lacks_memory
from rebatch.torch.undo.copies import (
    Copies,
    copied,
    copies_on_host,
    put_back,
)
from rebatch.torch.undo.contents import MOST_ENTRIES, walk
from rebatch.torch.undo.looks import Flags, Look, Watch, mark_of
from rebatch.torch.undo.module_tree import Held, Tree, unique
from rebatch.torch.undo.places import Place, Saved

# Steps of each mode, training or evaluation, in which everything is looked at.
_LOOKS = 3
# So much of what might change is copied to the host in the first step.
_FIRST_BYTES = 512 << 20


class NotPutBackError(c.Error):
    """A failed attempt changed something, and there is no copy of what it was."""


class _State(enum.IntEnum):
    """What is known of what attempts change."""

    LOOKS = 0  # save() looks at everything, in the first steps of a mode
    KNOWN = 1  # save() looks at nothing: it copies what was seen to change
    DOUBTS = 2  # one has failed whose contents were not compared: save() looks, and compares
    SUSPECT = 3  # one has failed that was not looked at: the same


class _Event(enum.IntEnum):
    """What changes the state."""

    BEGINS = 0  # a step
    SUCCEEDED = 1  # an attempt that was looked at
    COMPARED = 2  # restore(), of an attempt that was looked at with its contents
    LOOKED = 3  # the same, without its contents
    UNSEEN = 4  # the same, of one that was not looked at


_USUAL = None  # LOOKS or KNOWN, by the steps that are left of the mode
_D, _S = _State.DOUBTS, _State.SUSPECT
_NEXT = (  # the state after an event
    # BEGINS, SUCCEEDED, COMPARED, LOOKED, UNSEEN
    (_USUAL, _USUAL, _State.LOOKS, _D, _S),  # LOOKS
    (_USUAL, _USUAL, _State.KNOWN, _D, _S),  # KNOWN
    (_D, _USUAL, _D, _D, _S),  # DOUBTS
    (_S, _USUAL, _S, _D, _S),  # SUSPECT
)


class _Stage(enum.IntEnum):
    """How far a mode, training or evaluation, has come. What may change is copied in the first."""

    NEW = 0  # no attempt has succeeded
    RAN = 1  # one has
    WATCHED = 2  # and one that was watched


class _Attempt(NamedTuple):
    """The one that runs, where everything is looked at."""

    before: Look  # what it began with
    watch: Optional[Watch]


def _has_hook(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter with a hook that may step an optimizer within a backward pass."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def _zeroes_more(part: Any) -> bool:
    """Whether it is an optimizer that clears more than gradients, such as those in an attribute."""
    zero_grad = getattr(type(part), "zero_grad", torch.optim.Optimizer.zero_grad)
    return zero_grad is not torch.optim.Optimizer.zero_grad


def _parameters_of(part: Any) -> List[torch.Tensor]:
    """Of an optimizer; another object has none."""
    groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else []
    return [p for group in groups for p in group["params"]]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


class Undo:
    """Saves and restores, at the points of a session's guards, what a step's modules hold, the
    tensors of its batch, and `state`: tensors, modules, and objects with a state_dict(), by
    name. And what optimizers and schedulers, updated_by, hold beside what an update changes.
    trained() gives the parameters that an update changes. Without copies_first, what changes
    in place in the first attempt of all has no copy, buffers excepted."""

    def __init__(
        self,
        modules: Sequence[Tuple[str, torch.nn.Module]],
        state: Sequence[Tuple[str, Any]] = (),
        trained: Callable[[], Sequence[torch.Tensor]] = tuple,
        copies_first: bool = True,
        updated_by: Sequence[Tuple[str, Any]] = (),
    ):
        self._trained = trained
        own = [(name, part) for name, part in state if isinstance(part, torch.nn.Module)]
        self.tree = Tree([*modules, *own], updated_by)
        self.compares_contents = True  # by sums, where changes may leave no other trace
        self._own_modules = [module for _, module in own]
        self._own_tensors = {name: part for name, part in state if isinstance(part, torch.Tensor)}
        self.state = list(state)
        self._objects = [
            part for _, part in state if not isinstance(part, (torch.Tensor, torch.nn.Module))
        ]
        self._states: Dict[int, list[Any]] = {}
        self._copies_first = copies_first
        self._given: Any = ()
        self._batch: List[Tuple[str, torch.Tensor]] = []
        self.frees_batch = False  # loss_fn takes memory of the batch away: it is to get copies
        self._is_training = True
        # What was seen to change: in place, in the batch, and entries that are others.
        self._known: Dict[tuple[Any, ...], Place] = {}
        self._known_in_batch: Set[str] = set()
        self._moving: Dict[tuple[Any, ...], Place] = {}
        # Tensors beside trained parameters, which may be gradients: of the first attempt.
        self._beside: List[Place] = []
        # What is saved at each point.
        self._copied: Dict[Any, torch.Tensor] = {}
        self._buffers: List[int] = []  # the ids of those that are in it, where it has nothing else
        self._memory: Dict[int, Copies] = {point: Copies() for point in GuardPoint}
        self._copies = dict(self._memory)
        self._is_fresh = False  # nothing ran since the step was saved that changes what is saved
        self._may_zero = any(map(_zeroes_more, (part for _, part in updated_by)))
        self._looks: Dict[int, Look] = {}  # where everything is looked at
        self._entries: Dict[int, Saved] = {}
        self._flags: Optional[Flags] = None  # where it is not
        # The modules' parameters when the step began, some more than once, and who needs gradients.
        self.parameters: List[torch.nn.Parameter] = []
        self.need_gradient: List[bool] = []
        self._first: List[Tuple[torch.Tensor, torch.Tensor]] = []  # tensors and their copies
        # What is not known yet.
        self._attempt: Optional[_Attempt] = None
        self._now: Optional[Look] = None  # what there is, where nothing has run since the look
        self._state = _State.LOOKS
        self.is_looking = True  # at everything
        self._left = {True: 0, False: 0}  # steps in which everything is looked at, by mode
        self._stages: Dict[bool, _Stage] = {}  # by mode
        self._has_failed = False  # an attempt of this step
        self._told: Set[str] = set()
        self._told_large: Set[str] = set()
        self._know_nothing()

    def _know_nothing(self) -> None:
        self._left = dict.fromkeys(self._left, _LOOKS)
        first = _Stage.NEW if self._copies_first else _Stage.WATCHED
        self._stages = dict.fromkeys(self._left, first)
        self._go(_Event.BEGINS)

    def _go(self, event: _Event) -> None:
        state = _NEXT[self._state][event]
        if state is _USUAL:
            state = _State.LOOKS if self._left[self._is_training] else _State.KNOWN
        self._state, self.is_looking = state, state is not _State.KNOWN

    # ---- a step ----

    def begin(self, batch: Any, is_training: bool = True) -> None:
        """Before a step or an evaluation. May run out of memory."""
        if self.tree.refresh():  # of new modules nothing is known
            self._know_nothing()
        self._look_at_parameters()
        self._given, self._batch = batch, []
        if self.frees_batch:
            self._known_in_batch.clear()  # it is not reached any more
        if self._known_in_batch:
            self._find_batch()
        self._is_training, self._has_failed, self._now = is_training, False, None
        self._go(_Event.BEGINS)
        self._told.clear()
        self._know_own()
        self._find_copied()

    def _look_at_parameters(self) -> None:
        self.parameters = [p for p in self.tree.entries() if p is not None]
        self.need_gradient = [p.requires_grad for p in self.parameters]

    def _flags_now(self) -> Flags:
        return Flags(self.tree.modules, self.parameters, self.need_gradient)

    def end(self) -> None:
        """After it: nothing of the step is held."""
        self._end_attempt()
        self._left[self._is_training] -= self._left[self._is_training] > 0
        self._given, self._batch, self._first, self._flags = (), [], [], None
        self._is_fresh, self._now = False, None
        if self._known_in_batch:
            self._copied = {}
            for copies in self._memory.values():
                copies.save({})
        self._looks.clear()
        self._entries.clear()
        self._states.clear()

    def _find_batch(self) -> None:
        self._batch = list(batch_tensors(self._given))

    def _know_own(self) -> None:
        """Modules of `state` change in place, whatever was seen."""
        if not self._own_modules or not self.is_looking:
            return
        mine = {
            id(table)
            for m in self._own_modules
            for sub in m.modules()
            for table in (vars(sub), sub._parameters)
        }
        for place, _ in self.tree.take().places(self.tree.prefixes()):
            if id(place.owner) in mine:
                self._know(place)

    def handled(self) -> Set[int]:
        """The ids of what is put back, or named, here."""
        held = self._now.held if self._now else self.tree.take()
        found = [*self.tree.modules, *held.tensors, *(part for _, part in self.state)]
        found += [b for table in self.tree.buffers for b in table.values()]
        found += [tensor for _, tensor in batch_tensors(self._given)]
        found += [p for part in self._objects for p in _parameters_of(part)]
        return {id(part) for part in found} | held.ids()

    def changing(self) -> List[torch.Tensor]:
        """The tensors that attempts change in place, of which there are copies."""
        return list(self._copied.values())

    def carried(self, count: int) -> List[str]:
        """The names of what attempts leave in modules that has a tensor with a dimension of this
        size."""
        found = []
        for place in self._moving.values():
            tensors: List[torch.Tensor] = []
            walk(place.get(), {}, tensors, [])
            if any(count in tensor.shape for tensor in tensors):
                found.append(place.name)
        return found

    # ---- what is copied ----

    def _know(self, place: Place) -> None:
        self._known[place.at] = place

    def _find_copied(self) -> None:
        buffers = list(itertools.chain.from_iterable(map(dict.values, self.tree.buffers)))
        others = self._own_tensors or self._objects or self._known or self._known_in_batch
        if not (others or self.is_looking) and list(map(id, buffers)) == self._buffers:
            return  # as they were
        self._buffers = [] if others or self.is_looking else list(map(id, buffers))
        tensors: Dict[Any, Any] = {
            (id(table), key): b
            for table in self.tree.buffers
            for key, b in table.items()
            if b is not None
        }
        tensors.update(self._own_tensors)
        for i, part in enumerate(self._objects):
            tensors.update({(i, j): p for j, p in enumerate(_parameters_of(part))})
        places = ((place.at, place.get()) for place in (*self._beside, *self._known.values()))
        tensors.update((at, t) for at, t in places if isinstance(t, torch.Tensor))
        tensors.update((name, t) for name, t in self._batch if name in self._known_in_batch)
        self._copied = {key: t for key, t in tensors.items() if t is not None}

    def _copy_first(self, held: Held) -> None:
        """Nothing is known yet: copy what no optimizer trains, since that is what changes in place,
        and what a hook may change."""
        trained = {id(t) for t in self._trained()}
        small = [t for t in held.tensors if id(t) not in trained or _has_hook(t)]
        self._first = copies_on_host(small + [t for _, t in self._batch], _FIRST_BYTES)

    # ---- the points ----

    def save(self, point: int) -> None:
        self._looks.pop(point, None)
        if point == GuardPoint.STEP or self._may_zero:
            self._now = None
        is_fresh = self._is_fresh
        self._is_fresh = point == GuardPoint.STEP and not self._may_zero
        if is_fresh and not self.is_looking:
            self._save_as_step(point)
            return
        self._copies[point] = self._memory[point]
        if self.is_looking:
            self._look_at(point)
        elif point == GuardPoint.STEP:
            self._flags = self._flags_now()
        if self._moving:
            self._find_copied()
            self._entries[point] = Saved(self._moving.values())
        self._copies[point].save(self._copied)
        if self._objects:
            self._states[point] = [copied(part.state_dict()) for part in self._objects]

    def _save_as_step(self, point: int) -> None:
        """What is saved of the step is what there is at the point."""
        every: Tuple[Dict[int, Any], ...] = (self._copies, self._entries, self._states)
        for saved in every:
            if GuardPoint.STEP in saved:
                saved[point] = saved[GuardPoint.STEP]

    def _look_at(self, point: int) -> None:
        stage = self._stages[self._is_training]
        is_watching = stage is not _Stage.WATCHED and not self._has_failed
        compares = self._state is not _State.LOOKS or stage is _Stage.NEW or is_watching
        look = self._look_now(self.compares_contents and compares)
        self._looks[point] = look
        self._end_attempt()
        if point == GuardPoint.ATTEMPT:
            is_watched, self._now = is_watching and look.has_sums, None
            self._attempt = _Attempt(look, Watch(self.tree, look) if is_watched else None)
        elif stage is _Stage.NEW:
            self._copy_first(look.held)

    def _look_now(self, compares: bool) -> Look:
        """At what there is. The last look serves, where nothing has run since."""
        look = self._now
        held = self.tree.take() if look is None else look.held
        self._find_batch()
        if self._stages[self._is_training] is _Stage.NEW:
            trained = {id(t) for t in self._trained()}
            self._beside = list(held.beside(self.tree.prefixes(), trained))
        self._find_copied()  # of hidden modules too, which take() finds
        if look is None or (compares and not look.has_sums):
            look = Look(held, self._batch, compares)
        self._now = look if compares else look.without_sums()
        return self._now

    def restore(self, point: int, has_failed: bool = True) -> None:
        """After an attempt, that has failed or was none of the step. Raises Error where something
        cannot be put back."""
        look, self._is_fresh = self._looks.get(point), False
        self._has_failed |= has_failed
        self._end_attempt()
        if has_failed:
            seen = _Event.COMPARED if look and look.has_sums else _Event.LOOKED
            self._go(seen if look else _Event.UNSEEN)
        changed = unique(look.changed() + self._freed_of_batch()) if look else []
        copies = self._copies[point]
        lost = self._put_back_first(point, changed)
        self.put_back(point)
        copies.restore()
        for part, state in zip(self._objects, self._states.get(point, ())):
            part.load_state_dict(copied(state))
        self._now = None if changed else look
        if look:
            self._warn_of_large(look.held)
        if look and changed:
            names = self._know_all(look, changed)
            self._tell(names, {id(t) for t in lost})

    def _freed_of_batch(self) -> List[torch.Tensor]:
        """What has lost its memory, and with it samples that have not run yet."""
        freed = [tensor for _, tensor in self._batch if lacks_memory(tensor)]
        self.frees_batch |= bool(freed)
        return freed

    def _put_back_first(self, point: int, changed: List[torch.Tensor]) -> List[torch.Tensor]:
        """From the copies on the host, where there is no other. Returns those without any."""
        saved = self._copies[point].has()
        first = {id(t): copy for t, copy in self._first if id(t) not in saved}
        if point != GuardPoint.STEP:
            for known in self._known_tensors():  # it had changed since then
                first.pop(id(known), None)
        for tensor in changed:
            if id(tensor) in first:
                put_back(tensor, first[id(tensor)])
        return [t for t in changed if id(t) not in first and id(t) not in saved]

    def put_back(self, point: int) -> None:
        """Only what modules hold, not yet what is in it: a failed attempt's tensors are let go."""
        if point in self._looks:
            self._looks[point].held.put_back()
        else:
            if self._flags:
                self._flags.put_back()
            if point in self._entries:
                self._entries[point].put_back()

    def _known_tensors(self) -> List[torch.Tensor]:
        tensors = [place.get() for place in self._known.values()]
        tensors += [t for name, t in self._batch if name in self._known_in_batch]
        return [t for t in tensors if isinstance(t, torch.Tensor)]

    # ---- what is known ----

    def succeeded(self) -> None:
        """An attempt has. What it changed is saved from now on."""
        if self._attempt is None:
            return
        before, watch = self._attempt
        self._end_attempt()
        if watch:
            self._moving.update({place.at: place for place in watch.moved})
        self._put_back_first(GuardPoint.ATTEMPT, self._freed_of_batch())
        now = self._now = Look(self.tree.take(), self._batch, before.has_sums)
        was = self._state
        self._go(_Event.SUCCEEDED)
        stage = _Stage.WATCHED if watch else _Stage.RAN
        self._stages[self._is_training] = max(stage, self._stages[self._is_training])
        prefixes = self.tree.prefixes()
        changes = before.held.changes(now.held, prefixes)
        moved = [place for place in changes if place.at not in self._moving]
        self._moving.update({place.at: place for place in moved})
        if watch:  # the host waits for the device from here on
            self._know_all(before, watch.found())
        changed = before.changed(now)
        known = self._copies[GuardPoint.ATTEMPT].has()
        if self._beside or any(id(t) not in known for t in changed):
            self._beside = []
            names = self._know_all(before, changed)
            if was in (_State.DOUBTS, _State.SUSPECT):
                lost = before.unmarked(now) if was is _State.DOUBTS else changed
                self._tell(names, {id(t) for t in lost} - known)
        if was is _State.SUSPECT and moved:
            self._warn_of_late([place.name for place in moved])

    def _end_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt and attempt.watch:
            attempt.watch.end()

    def _know_all(self, look: Look, changed: List[torch.Tensor]) -> Dict[str, int]:
        """Their names, and the ids of the tensors."""
        if not changed:
            return {}
        wanted, names = {id(t) for t in changed}, {}
        for place, tensor in look.held.places(self.tree.prefixes()):
            if id(tensor) in wanted:
                wanted.remove(id(tensor))
                names[place.name] = id(tensor)
                self._know(place)
        for name, tensor in look.batch:
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
                stacklevel=user_stacklevel(),
            )

    def _warn_of_late(self, names: List[str]) -> None:
        warnings.warn(
            f"rebatch: {_listed(names)} of the model changed in an attempt that failed, and in "
            f"none of the first {_LOOKS} steps, so what that attempt changed there stays; what "
            "later ones change is put back",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )

    @contextlib.contextmanager
    def accepting(self) -> Iterator[None]:
        """What is changed within stays, also when the step is undone."""
        look, flags = self._looks.get(GuardPoint.STEP), self._flags
        before = Look(self.tree.take(), self._batch, compares=False) if look else None
        try:
            yield
        finally:
            self._now = None
            if self.tree.refresh():
                self._know_nothing()
            if flags:
                self._look_at_parameters()
                self._flags = self._flags_now()
            if look and before:
                look.held.accept(before.held, self.tree.take())
                now = {id(t): mark_of(t) for t in before.changed()}
                then = {id(t): mark for t, mark in zip(before.tensors, before.marks)}
                look.marks = [
                    now[id(t)] if id(t) in now and then[id(t)] == mark else mark
                    for t, mark in zip(look.tensors, look.marks)
                ]
