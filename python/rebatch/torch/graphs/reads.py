"""Whether something has changed that a captured pass has read on the host. What a graph has of it
is what it was at the capture.

It sees what modules hold, and what the program's code names: variables of functions and files,
default arguments, attributes of objects and classes, entries of containers, small arrays and
tensors on the CPU; attributes that methods name which have run in a pass; modes of PyTorch, and
where tensors lie.

Not seen: attributes of the third level (a.b.c.d), those that code reads without their names, such
as getattr(installed_object, name), what functions of installed packages read, containers of more
than 1024 entries by more than their lengths, files, the environment, the clock."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import itertools
import operator
import types
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import torch

from rebatch.torch.batches.kinds import is_plain
from rebatch.torch.graphs.named import Named
from rebatch.torch.graphs.ran import Ran
from rebatch.torch.private import HOOK_TABLES, HOOKS_OF_TENSORS, MODULE_TABLES
from rebatch.torch.session.modes import Modes
from rebatch.torch.undo.contents import ATOMS, MISSING, is_container
from rebatch.torch.undo.looks import mark_of
from rebatch.torch.undo.module_tree import names_of
from rebatch.torch.undo.places import Place
from rebatch.torch.update.passes import Passes

# Entries of containers, bytes of arrays, and of tensors on the CPU, whose contents are compared.
_MOST_ENTRIES, _MOST_BYTES, _MOST_TENSOR_BYTES = 1024, 4096, 256
_MODES = (
    "torch.get_float32_matmul_precision",
    "torch.is_inference_mode_enabled",
    "torch.backends.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled",
    "torch.backends.cudnn.fp32_precision",
    "torch.backends.cudnn.allow_tf32",
)


# Numbers of one type, without Python's objects; those of ctypes may be shared with a process.
_BYTES: Tuple[Any, ...] = (bytearray, array.array, ctypes.c_int.__mro__[-2])
_needs_gradient = operator.attrgetter("requires_grad")
_hooks = operator.attrgetter(*HOOKS_OF_TENSORS)


class _Read(NamedTuple):
    """get(owner) gives what some names have, one value or a tuple or list of them."""

    get: Callable[[Any], Any]
    owner: Any
    names: List[str]


class _Table(NamedTuple):
    """Of a module: what it holds, with what that was."""

    name: str
    live: Dict[Any, Any]
    then: Dict[Any, Any]


# ---- what is read ----


def _id_of(get: Callable[[Any], Any], owner: Any) -> int:
    return id(get(owner))


def _entries(value: Any) -> List[Any]:
    """Of a container: numbers and texts, and which objects the others are."""
    entries = [*value, *value.values()] if isinstance(value, Mapping) else value
    return [part if type(part) in ATOMS else id(part) for part in entries]


def _entries_of(value: Any) -> Callable[[Any], Any]:
    """What gets those of this container."""
    if len(value) > _MOST_ENTRIES:
        return len
    if not ATOMS.issuperset(map(type, value.values() if isinstance(value, dict) else value)):
        return _entries
    return next((kind for kind in (dict, set) if isinstance(value, kind)), list)


def _contents_of(value: Any, device: torch.device) -> Any:
    """What gets the contents of a value; None: they do not matter."""
    if isinstance(value, torch.Tensor):
        is_on_host = value.device.type == "cpu" != device.type
        return _on_host if is_on_host else None
    if is_container(value) and not isinstance(value, tuple):
        return _entries_of(value)
    if isinstance(value, contextvars.ContextVar):
        return _of_context
    if isinstance(value, types.MappingProxyType):
        return _entries
    if isinstance(value, _BYTES):
        return bytes if memoryview(value).nbytes <= _MOST_BYTES else None
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return operator.methodcaller("tobytes") if value.nbytes <= _MOST_BYTES else None
    return None


def _of_context(variable: contextvars.ContextVar[Any]) -> Any:
    value = variable.get(None)
    return value if type(value) in ATOMS else id(value)


def _on_host(tensor: torch.Tensor) -> Any:
    """Of one on the CPU: what changes in place, and the bits of a small one."""
    if tensor.nbytes > _MOST_TENSOR_BYTES or not is_plain(tensor):
        return mark_of(tensor)
    return mark_of(tensor), tensor.detach().reshape(-1).view(torch.uint8).tolist()


def _address_of(tensors: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """What gets where one lies: for some classes of tensors, the parts that this rank has."""
    try:
        list(map(torch.Tensor.data_ptr, tensors))
        return torch.Tensor.data_ptr
    except Exception:
        return lambda tensor: mark_of(tensor)[1]


def _reads_of(places: Sequence[Place]) -> Iterator[_Read]:
    """Of one owner."""
    owner, numbers = places[0].owner, []
    getter: Any = operator.itemgetter if isinstance(owner, dict) else operator.attrgetter
    for place in places:
        value = place.get()
        if isinstance(value, torch.Tensor):  # == is none of the tensors themselves
            yield _Read(functools.partial(_id_of, getter(place.key)), owner, [place.name])
        elif value is not MISSING:
            numbers.append(place)
    if numbers:
        yield _Read(getter(*(p.key for p in numbers)), owner, [p.name for p in numbers])


def _modes() -> Iterator[_Read]:
    modes = Modes(("cpu", "cuda"))
    yield _Read(lambda _: modes.now(), None, ["a mode of PyTorch, such as autocast"])
    for path in _MODES:
        try:
            value = operator.attrgetter(path.partition(".")[2])(torch)
            is_function = callable(value)
            if is_function:
                value()
        except Exception:  # of another version, or of a setting that was made otherwise
            continue
        owner, _, key = path.rpartition(".")
        at = operator.attrgetter(owner.partition(".")[2])(torch) if "." in owner else torch
        get = operator.methodcaller(key) if is_function else operator.attrgetter(key)
        yield _Read(get, at, [path])


# ---- names of modules ----


def _named(modules: Sequence[torch.nn.Module]) -> Iterator[Tuple[str, torch.nn.Module]]:
    """The model's, and those of other roots."""
    children = {id(child) for module in modules for child in module._modules.values()}
    roots = [module for module in modules if id(module) not in children]
    for i, root in enumerate(roots):
        yield from root.named_modules(prefix=f"model[{i}]" if i else "model")


class Reads:
    """What passes read that run `functions` and `modules`, and what `ran` in some. Made where
    holds() is asked, so that the modes are alike, and once passes have run."""

    def __init__(
        self,
        functions: Sequence[Any],
        modules: Sequence[torch.nn.Module],
        update: Passes,
        ran: Sequence[Ran] = (),
    ):
        functions = [*functions, *(function for each in ran for function in each.functions)]
        objects = [place for each in ran for place in each.objects]
        attributes = [place for each in ran for place in each.attributes]
        named = Named(functions, _named(modules), objects, attributes)
        scaler = getattr(update.scales, "__dict__", {})
        if "_scale" in scaler:
            named.put(Place("scaler._scale", scaler, "_scale"))
        places = list(named.places.values())
        self._tables: List[_Table] = []  # of parameters and buffers, and None
        self._dicts: List[_Table] = []  # of others
        self._empty: List[_Table] = []
        for name, module in named.modules.values():
            places += self._look_at(name, module)
        self._reads = [read for each in _by_owner(places) for read in _reads_of(each)]
        for name, value in named.values.values():
            get = _contents_of(value, update.device)
            self._reads += [_Read(get, value, [name])] if get else []
        self._reads += _modes()
        self._held = named.values  # what is told by its id keeps it
        self._note(named)

    def _look_at(self, name: str, module: torch.nn.Module) -> Iterator[Place]:
        own, attributes = names_of(module), vars(module)
        self._dicts += [_Table(name, attributes, attributes.copy())] if own else []
        for key in own:
            yield Place(f"{name}.{key}", attributes, key)
        for kind in MODULE_TABLES:
            table = getattr(module, kind)
            if not isinstance(table, dict):
                continue  # of TorchScript
            is_of_tensors = kind in ("_parameters", "_buffers")
            tables = self._tables if is_of_tensors else self._dicts
            prefix = f"{name}.{kind}" if kind in HOOK_TABLES else name
            (tables if table else self._empty).append(_Table(prefix, table, table.copy()))
            for key in () if is_of_tensors else table:
                yield Place(_entry_name(prefix, key), table, key)

    def _note(self, named: Named) -> None:
        """What there is now."""
        self._live = [table.live for table in self._tables]
        self._none = [table.live for table in self._empty]
        self._sized = [table.live for table in self._dicts]
        self._lengths = list(map(len, self._sized))
        self._found = self._tensors()
        known = set(map(id, self._found))
        tensors = [(name, v) for name, v in named.values.values() if isinstance(v, torch.Tensor)]
        self._beside = [(name, tensor) for name, tensor in tensors if id(tensor) not in known]
        self._others = [tensor for _, tensor in self._beside]
        self._address = _address_of(self._with_others(self._found))
        self._marks = self._marks_of(self._found)
        self._pairs = [(read.get, read.owner) for read in self._reads]
        self._values = [get(owner) for get, owner in self._pairs]

    # ---- each step ----

    def _tensors(self) -> List[Any]:
        """Parameters and buffers, and None."""
        return list(itertools.chain.from_iterable(map(dict.values, self._live)))

    def _with_others(self, found: List[Any]) -> List[torch.Tensor]:
        return [tensor for tensor in found if tensor is not None] + self._others

    def _marks_of(self, found: List[Any]) -> Tuple[List[Any], List[bool], List[int]]:
        """Where tensors lie, whether they need a gradient, and how many hooks have it."""
        tensors = self._with_others(found)
        hooks = filter(None, itertools.chain.from_iterable(map(_hooks, tensors)))
        flags = list(map(_needs_gradient, tensors))
        return list(map(self._address, tensors)), flags, list(map(len, hooks))

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        try:
            found = self._tensors()
            return bool(
                self._marks_of(found) == self._marks
                and found == self._found  # of two tensors that lie apart == is not asked
                and not any(self._none)
                and list(map(len, self._sized)) == self._lengths
                and [get(owner) for get, owner in self._pairs] == self._values
            )
        except Exception:  # something is gone, or is an array now
            return False

    # ---- its name ----

    def changed(self) -> str:
        """The name of what changed first; "": nothing has."""
        if self.holds():
            return ""
        tables = (*self._tables, *self._empty, *self._dicts)
        parts = (*map(_changed_in, tables), self._changed_tensors(), self._changed_reads())
        return next(itertools.chain(*parts), "")

    def _changed_tensors(self) -> Iterator[str]:
        entries = [(f"{t.name}.{key}", part) for t in self._tables for key, part in t.then.items()]
        named = [(name, part) for name, part in entries if part is not None] + self._beside
        addresses, flags, hooks = self._marks
        for (name, tensor), address, flag in zip(named, addresses, flags):
            if self._address(tensor) != address or tensor.requires_grad is not flag:
                yield name
        if self._marks_of(self._found)[2] != hooks:
            yield "a hook of a parameter"

    def _changed_reads(self) -> Iterator[str]:
        for (get, owner, names), then in zip(self._reads, self._values):
            try:
                now = get(owner)
            except Exception:  # it is gone
                yield names[0]
                continue
            if _differ(now, then):
                pairs = zip(names, now, then) if len(names) > 1 else [(names[0], now, then)]
                yield from (name for name, a, b in pairs if _differ(a, b))


def _by_owner(places: Sequence[Place]) -> List[List[Place]]:
    found: Dict[int, List[Place]] = {}
    for place in places:
        found.setdefault(id(place.owner), []).append(place)
    return list(found.values())


def _differ(now: Any, then: Any) -> bool:
    try:
        return bool(now != then)
    except Exception:  # arrays
        return True


def _changed_in(table: _Table) -> Iterator[str]:
    """The entries that are others, or new."""
    for key in {**table.then, **table.live}:
        now, then = table.live.get(key, MISSING), table.then.get(key, MISSING)
        is_number = type(now) in ATOMS and type(then) in ATOMS
        if now != then if is_number else now is not then:
            yield _entry_name(table.name, key)


def _entry_name(name: str, key: Any) -> str:
    """Hooks have numbers."""
    return f"{name}.{key}" if isinstance(key, str) else name
