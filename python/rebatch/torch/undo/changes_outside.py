"""What loss_fn changes outside of the model, which is not put back, is told once.

In the first steps all that loss_fn and the model's modules name is looked at before an attempt, so
one that fails there shows what it changed. After these nothing is looked at before an OOM. The
attempt that runs again after it is the experiment: what changes then has changed in the attempt
that failed too. What moves within it and comes back, such as a counter that a pair of hooks moves
up and down, is told where it is not what it was in the first steps."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import io
import itertools
import operator
import pickle
import types
import warnings
from collections.abc import Iterator as AnyIterator
from typing import (
    AbstractSet,
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Optional,
    Protocol,
    Sequence,
    Set,
    Tuple,
)

import torch

from rebatch._library import GuardPoint
from rebatch._user_code import is_object, user_stacklevel
from rebatch.torch.private import HOOK_TABLES
from rebatch.torch.undo.contents import (
    ATOMS,
    WITH_ATTRIBUTES,
    attributes_of,
    contents_of,
    entries_of,
    is_container,
)
from rebatch.torch.undo.generators import is_generator
from rebatch.torch.undo.module_tree import is_compiled, names_of
from rebatch.torch.undo.places import FUNCTIONS, Place, is_of_program, named_by, own_variables

# Steps in which everything is looked at, and attempts in these; looks within an attempt.
_LOOKS, _MOST_ATTEMPTS, _LOOKS_WITHIN = 3, 32, 32
_GRADIENTS = "gradients of "
_ADVICE = (
    "give the Step state=[...] with tensors, modules and objects that have state_dict(), or return "
    "the value beside the loss"
)
_NOTHING = ("", None)  # the mark of None

Found = Dict[str, Dict[Any, Any]]  # by name, what changes with it: marks by keys


def _text_of(state: Any) -> bytes:
    """Of a generator. No array is printed: NumPy may leave most of its numbers out."""
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


def _referents(value: Any) -> Iterable[Any]:
    """What an iterator takes its entries from: a zip has a tuple of these."""
    for part in gc.get_referents(value):
        yield from part if isinstance(part, tuple) else (part,)


class Marks:
    """What changes where a value changes, of `roots` and `places`, by name, and of all that some
    functions name and some modules' classes and hooks, at any depth. Of what is known, nothing, and
    of what is apart, no gradients."""

    most = 1 << 14  # entries of all that is looked at
    most_entries = 1024  # of a container, beside its length
    most_array_bytes = 64 << 10  # of an array of NumPy that is compared
    names_parts_of_modules = False  # tensors that a module holds have its name

    def __init__(
        self,
        functions: Sequence[Any],
        modules: Sequence[torch.nn.Module],
        known: AbstractSet[int],
        apart: AbstractSet[int] = frozenset(),
        roots: Sequence[Tuple[str, Any]] = (),
        places: Iterable[Place] = (),
    ):
        self._known, self._apart = known, apart
        self._left = self.most
        self._optimizers: Set[str] = set()  # the names of those, whose gradients others have too
        self._seen: Set[int] = set()
        # Names, values to look into, and whether what these hold has the same name.
        self._queue: collections.deque[Tuple[str, Any, bool]] = collections.deque()
        self.has_compiled = False  # modules, which are to run as they are
        self.found: Found = {}
        for name, value in roots:
            self._note(name, value)
        for function in functions:
            self._follow(function)
        for kind in {type(module): None for module in modules}:
            self._queue.append((kind.__name__, kind, False))
        for module in modules:
            for table in (getattr(module, name) for name in HOOK_TABLES):
                for hook in table.values():
                    if isinstance(hook, FUNCTIONS) or is_object(hook):
                        name = getattr(hook, "__name__", type(hook).__name__)
                        self._queue.append((name, hook, False))
        self._look_into_all()
        for place in places:  # those that have no other name
            if id(place.get()) not in self._seen:
                self._note(place.name, place.get(), place.mark_key)
        self._look_into_all()
        self.is_whole = self._left > 0

    def _look_into_all(self) -> None:
        while self._queue and self._left > 0:
            self.look_into(*self._queue.popleft())

    def _follow(self, function: Any, owner: str = "self") -> None:
        for place in named_by(function):
            name = owner if place.name == "self" else place.name
            self._note(name, place.get(), place.mark_key)
        if isinstance(function, types.FunctionType):
            self._note_attributes(function.__name__, function, vars(function))

    # ---- what is noted ----

    def _note(self, name: str, value: Any, key: Any = "", is_part: bool = False) -> None:
        """That the name has this value, and look into it later."""
        if id(value) in self._known:
            return
        marks = self.found.setdefault(name, {})
        marks[key] = self._mark(value)
        if type(value) in ATOMS:
            return
        if isinstance(value, torch.Tensor):
            self.note_gradient(name, value)
        self._queue.append((name, value, is_part))

    def _mark(self, value: Any) -> Tuple[Any, ...]:
        if type(value) in ATOMS:
            return "", repr(value) if isinstance(value, (float, complex)) else value
        if id(value) in self._known or not isinstance(value, torch.Tensor):
            return (id(value),)
        return id(value), *self.mark_of_contents(value)

    def mark_of_contents(self, tensor: torch.Tensor) -> Tuple[Any, ...]:
        return () if tensor.is_inference() else (tensor._version,)

    def note_gradient(self, name: str, tensor: torch.Tensor) -> None:
        gradient = tensor.grad if tensor.is_leaf else None
        is_apart = name in self._optimizers or id(tensor) in self._apart
        if gradient is not None and not is_apart:
            marks = self.found.setdefault(_GRADIENTS + name, {})
            marks[id(tensor)] = id(gradient), gradient._version

    def _note_attributes(
        self, name: str, owner: Any, attributes: Dict[Any, Any], is_part: bool = False
    ) -> None:
        self._left -= len(attributes)
        for key, part in list(attributes.items()):
            if is_part:
                self._note(name, part, (id(owner), key), True)
            else:
                self._note(f"{name}.{key}", part)

    def _note_entries(self, name: str, value: Any, is_part: bool) -> None:
        marks = self.found.setdefault(name, {})
        entries: Any = vars(value) if isinstance(value, torch.Tensor) else value
        self._left -= min(len(entries), self.most_entries)
        marks[id(value), "length"] = "", len(entries)
        is_named = not (is_part or isinstance(value, set))
        for key, part in list(itertools.islice(entries_of(entries), self.most_entries)):
            key = key if type(key) in ATOMS else id(key)
            marks[id(value), key] = self._mark(part)
            if type(part) in ATOMS or id(part) in self._known:
                continue
            if isinstance(part, torch.Tensor):
                self.note_gradient(name, part)
            self._queue.append((f"{name}[{key!r}]" if is_named else name, part, is_part))

    # ---- what is looked into ----

    def look_into(self, name: str, value: Any, is_part: bool) -> None:
        if id(value) in self._seen or id(value) in self._known:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            self.has_compiled |= is_compiled(value)
            attributes = {key: vars(value)[key] for key in names_of(value)}
            for table in (value._parameters, value._buffers, value._modules):
                self._note_attributes(name, value, table, not self.names_parts_of_modules)
            is_own = self.names_parts_of_modules or is_of_program(type(value))
            self._note_attributes(name, value, attributes, not is_own)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizers.add(name)
            self._note_attributes(name, value, vars(value), True)
        elif isinstance(value, (*FUNCTIONS, type, types.ModuleType)):
            self._look_into_code(name, value)
        elif isinstance(value, types.BuiltinMethodType):
            if not isinstance(value.__self__, types.ModuleType):  # list.append of one
                self._note(name, value.__self__, "self")
        elif is_generator(value):
            self.found.setdefault(name, {})["state"] = _text_of(contents_of(value))
        elif is_container(value) or isinstance(value, torch.Tensor):
            self._note_entries(name, value, is_part)
        elif is_object(value):
            self._note_attributes(name, value, attributes_of(value), is_part)
            self._queue.append((type(value).__name__, type(value), False))
        elif isinstance(value, WITH_ATTRIBUTES):
            self._note_attributes(name, value, vars(value), is_part)
        else:
            self.found.setdefault(name, {})["inside"] = self._inside(value)

    def _look_into_code(self, name: str, value: Any) -> None:
        """What functions name, and the variables of classes and files, where they are the program's
        own."""
        if isinstance(value, functools.partial) or is_of_program(value):
            if isinstance(value, FUNCTIONS):
                self._follow(value, f"{name}.__self__")
                return
            self._note_attributes(value.__name__, value, own_variables(value))
            inner = [*vars(value).values(), *getattr(value, "__bases__", ())]
            for part in inner:
                part = getattr(part, "__func__", getattr(part, "fget", part))
                if isinstance(part, (types.FunctionType, type)):
                    self._queue.append((part.__name__, part, False))

    def _inside(self, value: Any) -> Any:
        """Of what is looked at without its parts."""
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return hash(value.tobytes()) if value.nbytes <= self.most_array_bytes else None
        if isinstance(value, types.GeneratorType):
            frame, inner = value.gi_frame, value.gi_yieldfrom
            if frame is None:
                return None
            return [id(local) for local in frame.f_locals.values()], self._inside(inner)
        if isinstance(value, contextvars.ContextVar):
            return self._mark(value.get(None))
        if isinstance(value, io.IOBase):
            with contextlib.suppress(Exception):  # it is closed, or a terminal
                return value.tell()
            return None
        if isinstance(value, AnyIterator):
            if hasattr(value, "__dict__"):
                return [self._mark(part) for part in vars(value).values()]
            # How far a cycle has come is not told: who names one takes its next entry.
            hint = object() if isinstance(value, itertools.cycle) else operator.length_hint(value)
            sources = [part for part in _referents(value) if isinstance(part, AnyIterator)]
            return repr(value), hint, *map(self._inside, sources)
        return None


def _is_lost(name: str, before: Marks, now: Marks) -> bool:
    """Whether something that was there is another or gone, or a number or text is new in a
    container. A cache that was filled is none of these: the samples that run again find it."""
    if name not in before.found:
        return False
    then, marks = before.found[name], now.found.get(name, {})
    was = {key: mark for key, mark in then.items() if mark != _NOTHING and not _is_length(key)}
    return any(marks.get(key) != mark for key, mark in was.items()) or any(
        mark[0] == "" and not _is_length(key) for key, mark in marks.items() if key not in then
    )


def _is_length(key: Any) -> bool:
    return isinstance(key, tuple) and key[1] == "length"


class Block(Protocol):
    """Of the program, that runs in place of a function."""

    def places(self) -> Iterable[Place]:
        """What it names."""

    def not_assigned(self, names: List[str]) -> List[str]:
        """But for variables that it has assigned."""

    def tell(self, names: List[str]) -> None:
        """What it changes."""


class Told:
    """A guard that puts nothing back. `functions` gives those that run in a micro-batch, `known`
    the ids of what is put back, `name` what users call the function, and `modules` the model's."""

    def __init__(
        self,
        functions: Callable[[], Sequence[Any]],
        known: Callable[[], Set[int]],
        name: Callable[[], str],
        advice: str = _ADVICE,
        modules: Callable[[], Sequence[torch.nn.Module]] = tuple,
    ):
        self._functions, self._known, self._name, self._advice = functions, known, name, advice
        self._modules = modules
        self.block: Optional[Block] = None  # of the program, that runs in place of a function
        self._ran: Optional[Marks] = None  # the end of what of an attempt may fail
        self.apart: Sequence[Sequence[torch.Tensor]] = ()  # whose gradients are kept apart
        self._is_due = self.is_done = False
        self._left = _LOOKS + 1  # steps in which attempts are looked at before an OOM, and this one
        self._attempts_left = _MOST_ATTEMPTS
        self._ids: Set[int] = set()  # of what is known, in an attempt
        self._before: Optional[Marks] = None  # an attempt
        self._last: Optional[Marks] = None  # that was looked at before an OOM
        self._found: List[str] = []  # names of what attempts that failed have changed
        self._moved: Set[str] = set()  # and of what has changed within the one that runs
        self._hook: Any = None

    def begin(self) -> None:
        """Another batch: what failed before it does not run again."""
        self._end()
        self._is_due, self._found = False, []
        self._left -= self._left > 0

    def _end(self) -> None:
        """Of an attempt."""
        if self._hook:
            self._hook.remove()
        self._before = self._hook = self._ran = None

    def save(self, point: int) -> None:
        if point != GuardPoint.ATTEMPT or self.is_done:
            return
        if self._is_due:
            self._look()
            if self._last and self._before and changed_in(self._last, self._before):
                self._watch()  # an attempt that failed may have left what the next one puts back
        elif self._left and self._attempts_left:
            self._attempts_left -= 1
            self._look()
            self._last = self._before

    def restore(self, point: int) -> None:
        if self._before and not self.is_done:
            before, now = self._before, self._ran or self._marks()
            self._found += [name for name in changed_in(before, now) if _is_lost(name, before, now)]
        self._end()
        self._is_due = not self.is_done

    @property
    def is_looking(self) -> bool:
        """For what the attempt that runs changes."""
        return self._before is not None

    def ran(self, has_failed: bool = False) -> None:
        """What of an attempt can fail: what the program changes from now on is no part of it."""
        if self._before and (self._is_due or has_failed):
            self._ran = self._marks()

    def succeeded(self) -> None:
        """An attempt has: warn of what it changed, if it ran after one that failed."""
        if not (self._is_due and self._before):
            self._end()
            return
        before, now, found = self._before, self._ran or self._marks(), self._found
        changed = changed_in(before, now)
        if self._last:
            back = self._moved.difference(changed)
            changed += [name for name in changed_in(self._last, before) if name in back]
        self.begin()
        self._last = now
        of_gradients = [_GRADIENTS + name for name in changed]  # which that says already
        names = [name for name in dict.fromkeys(found + changed) if name not in of_gradients]
        names = [name for name in names if not is_within(name, names)]
        names = self.block.not_assigned(names) if self.block else names
        if names:
            self.is_done, self._last = True, None
            (self.block.tell if self.block else self._warn)(names)

    def _look(self) -> None:
        self._ids = self._known()
        self._before = self._marks()

    def _marks(self) -> Marks:
        apart = {id(p) for tensors in self.apart for p in tensors}
        places = self.block.places() if self.block else ()
        return Marks(self._functions(), self._modules(), self._ids, apart, places=places)

    def _watch(self) -> None:
        """Look within the attempt too, before modules run."""
        modules = self._modules()
        self._moved, gap = set(), 1 + len(modules) // _LOOKS_WITHIN
        if any(map(is_compiled, modules)) or (self._before and self._before.has_compiled):
            return
        calls = itertools.count()

        def look(_module: Any, _inputs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            call = next(calls)
            if call % gap == 0 and call < gap * _LOOKS_WITHIN and self._before:
                self._moved.update(changed_in(self._before, self._marks()))

        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(look)

    def _warn(self, names: List[str]) -> None:
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        warnings.warn(
            f"rebatch: {self._name()} changes {', '.join(map(repr, names[:3]))}{more} outside of "
            f"the model, in attempts that fail too, and that is not put back: {self._advice}",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )


def changed_in(before: Marks, now: Marks) -> List[str]:
    """The names of what is another."""
    each = {**before.found, **now.found}
    if not (before.is_whole and now.is_whole):  # some is in one of them alone
        each = {name: marks for name, marks in before.found.items() if name in now.found}
    return [name for name in each if before.found.get(name) != now.found.get(name)]


def is_within(name: str, names: Iterable[str]) -> bool:
    """Whether it is the name of a part of another one."""
    return any(name != each and name.startswith((f"{each}.", f"{each}[")) for each in names)
