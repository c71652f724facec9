"""Which code of the program runs in a pass, and methods of which objects. What a function names
does not tell all: config.weight may be what __getattr__ finds, and schedule.value() what an object
of an installed package keeps."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import weakref
from typing import Any, Dict, Iterator, List, Set, Tuple

import torch
from torch.overrides import TorchFunctionMode

from rebatch._user_code import is_own
from rebatch.torch.graphs.inputs import parts_of
from rebatch.torch.private import TorchDispatchMode, is_profiling
from rebatch.torch.undo.contents import ATOMS, MISSING, attributes_of, is_container
from rebatch.torch.undo.places import FUNCTIONS, Place, place_of

_MOST = 4096  # pieces of code, each with one object
_NO_OWNERS = (
    *(torch.nn.Module, torch.Tensor, torch.Generator, type, types.ModuleType),  # seen elsewhere
    *(TorchDispatchMode, TorchFunctionMode),  # around a pass, and none of its own
)
# What is looked at where the program itself calls it: what it calls is its own affair.
_INNER = frozenset((*sys.builtin_module_names, *sys.stdlib_module_names, "torch", "numpy"))


def _package_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] if frame else ""


def _owner_of(frame: types.FrameType) -> Any:
    """A reference to the object whose method runs; None: nobody looks at its attributes."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if type(owner) in ATOMS or isinstance(owner, _NO_OWNERS):
        return None
    if inspect.getattr_static(type(owner), code.co_name, MISSING) is MISSING:
        return None
    try:
        return weakref.ref(owner)
    except TypeError:
        return None


def _is_scheduler(owner: Any) -> bool:
    """Of the learning rate: a Trainer asks it, too."""
    return owner is not None and isinstance(owner(), torch.optim.lr_scheduler.LRScheduler)


def _is_record(value: Any) -> bool:
    """An object of which nothing else is known."""
    return not isinstance(value, (*_NO_OWNERS, *FUNCTIONS)) and hasattr(value, "__dict__")


class Ran:
    """`functions` are the program's own, without the variables around them; `objects` are those
    whose methods are, and `attributes` what methods of installed packages name."""

    def __init__(self) -> None:
        self.functions: List[Any] = []
        self.objects: List[Place] = []
        self.attributes: List[Place] = []
        self._found: Dict[Tuple[int, int], Tuple[Any, Any, Any]] = {}

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around a pass. Where somebody else profiles, nothing is found."""
        if sys.getprofile() or is_profiling():
            yield
            return
        sys.setprofile(self._noted)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _noted(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and len(self._found) < _MOST:
            with contextlib.suppress(Exception):  # of an object that answers to no question
                self._note(frame)

    def _note(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED:  # of a class or file
            return
        package = _package_of(frame)
        is_program = is_own(package)
        owner = _owner_of(frame)
        is_inner = package in _INNER and not is_own(_package_of(frame.f_back))
        if package == "rebatch" or (is_inner and not _is_scheduler(owner)):
            return
        if is_program or owner:
            key = id(code), id(owner() if owner else None)
            self._found.setdefault(key, (code, owner, frame.f_globals if is_program else None))

    def places(self) -> Iterator[Place]:
        """All that may change: of what is in attributes, numbers, texts and containers too."""
        yield from self.objects
        for place in self.attributes:
            yield place
            value = place.get()
            for key, part in vars(value).items() if _is_record(value) else ():
                if type(part) in ATOMS or is_container(part):
                    yield Place(f"{place.name}.{key}", vars(value), key)

    def end(self, batch: Any) -> "Ran":
        """The pass has succeeded, and what it made is gone, but for its batch."""
        of_batch = set(map(id, parts_of(batch)))
        codes: Dict[int, Tuple[types.CodeType, Dict[str, Any]]] = {}
        names: Dict[int, str] = {}  # of objects
        objects: Set[int] = set()
        for code, reference, variables in self._found.values():
            owner = reference() if reference else None
            if variables is not None:
                codes[id(code)] = code, variables
            if owner is None or id(owner) in of_batch:
                continue
            name = names.get(id(owner), "")
            if not name:
                kind = type(owner).__name__
                count = sum(each.partition(" ")[0] == kind for each in names.values())
                name = names[id(owner)] = f"{kind} ({count + 1})" if count else kind
            if variables is None:
                self.attributes += _named_in(name, owner, code)
            elif id(owner) not in objects:
                objects.add(id(owner))
                self.objects.append(place_of(name, owner))
        self._found.clear()
        for code, variables in codes.values():
            cells = tuple(types.CellType() for _ in code.co_freevars)
            made = types.FunctionType(code, variables, code.co_name, None, cells)
            self.functions.append(made)
        return self


def _named_in(name: str, owner: Any, code: types.CodeType) -> Iterator[Place]:
    """The attributes of an object that code names."""
    own = getattr(owner, "__dict__", {})
    texts = code.co_consts if "__dict__" in code.co_names else ()
    named = {*code.co_names, *(text for text in texts if isinstance(text, str))}
    for key in sorted(named & attributes_of(owner).keys()):
        yield Place(f"{name}.{key}", own if key in own else owner, key)
