"""How many samples a batch has, and its parts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import sys
import types
from collections import UserDict
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Protocol, Set, Tuple

import torch

from rebatch.torch.batches.kinds import Taking, are_same, is_array, lacks_memory, samples_of
from rebatch.torch.session.oom import is_oom

# Up to _FIELDS tensors of one form in a list are fields, as torch's DataLoader makes them, unless
# each is an image with so many channels.
_FIELDS, _CHANNELS = 4, (1, 3, 4)
_ONE_A_SAMPLE = "slice=lambda batch, first, count: batch[first : first + count] and length=len"

# A batch may be an object of any class: its attributes are looked into, so many objects deep, where
# they are containers of so many entries at the most.
_OBJECTS, _LOOKED_INTO = 3, 1024
_NO_BATCHES = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


_PLAIN = frozenset((torch.Tensor,))


def _is_plain(batch: Any) -> bool:
    """Whether it is a tuple of tensors that have samples: what most batches are."""
    return (
        type(batch) is tuple
        and _PLAIN.issuperset(map(type, batch))
        and all(map(torch.Tensor.dim, batch))
        and len(batch) > 0
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_array(value)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _tensors(value: Any) -> List[Any]:
    """Those that it is or has."""
    if _is_tensor(value):
        return [value]
    parts: Iterable[Any] = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif _is_record(value):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [tensor for part in parts for tensor in _tensors(part)]


def _has_tensors(value: Any) -> bool:
    """Whether it is a list or tuple with tensors, or with what holds tensors."""
    return isinstance(value, (list, tuple)) and bool(_tensors(value))


def _form(value: Any) -> Any:
    """Samples in a list are of one form, and fields mostly not."""
    if _is_tensor(value):
        return type(value), value.dtype, value.ndim
    if isinstance(value, Mapping):
        return type(value), tuple(value)
    return type(value)


def _is_of_samples(values: Any) -> bool:
    """Whether a list could have one entry for each sample."""
    is_plain = not hasattr(values, "_fields")
    return is_plain and len(values) > 0 and len({_form(v) for v in values}) == 1


def _is_image(tensor: Any) -> bool:
    """Of (channels, height, width), or a volume, rather than a few samples."""
    sizes = () if getattr(tensor, "is_nested", False) else tuple(tensor.shape)
    return len(sizes) in (3, 4) and sizes[0] in _CHANNELS and min(sizes[1:]) > max(_CHANNELS)


def _are_images(values: Any) -> bool:
    """Whether each entry is an image, or has one."""
    return all(any(map(_is_image, _tensors(value))) for value in values)


def batch_tensors(
    value: Any, name: str = "batch", objects: int = _OBJECTS
) -> Iterator[Tuple[str, torch.Tensor]]:
    """The tensors of a batch, by name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from batch_tensors(part, f"{name}[{key!r}]", objects)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from batch_tensors(getattr(value, field.name), f"{name}.{field.name}", objects)
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from batch_tensors(part, f"{name}[{i}]", objects)
    elif objects and hasattr(value, "__dict__") and not isinstance(value, _NO_BATCHES):
        for key, part in list(vars(value).items()):
            if not isinstance(part, (list, dict, tuple)) or len(part) <= _LOOKED_INTO:
                yield from batch_tensors(part, f"{name}.{key}", objects - 1)


# Whole batches whose `slice` is looked at.
_WHOLE_LOOKS = 3


def _is_same(part: Any, batch: Any) -> bool:
    """Whether what a `slice` made of a whole batch has what the batch has."""
    mine, its = dict(batch_tensors(part)), dict(batch_tensors(batch))
    try:
        return (
            type(part) is type(batch)
            and bool(its)
            and mine.keys() == its.keys()
            and all(mine[n].device == t.device and are_same(mine[n], t) for n, t in its.items())
        )
    except Exception as error:  # tensors of a kind that cannot be compared
        if is_oom(error):
            raise
        return False


# How the lists of tensors in a batch are read: each has a field of the batch in an entry, or a
# sample; or the batch is such a list, and those in it have samples.
_FIELD, _SAMPLE, _FIELD_OF_SAMPLES = "field", "sample", "field of samples"


def _inner(reading: str) -> str:
    return _SAMPLE if reading == _FIELD_OF_SAMPLES else reading


def _reads_samples(value: Any, reading: str) -> bool:
    return reading == _SAMPLE and _is_of_samples(value)


def _with_samples(value: Any, name: str, reading: str) -> Iterator[Tuple[str, Any]]:
    """Each tensor in a batch, and list of samples, by name."""
    if _is_tensor(value):
        if value.ndim:
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _with_samples(part, f"{name}[{key!r}]", reading)
    elif _is_record(value):
        for field in dataclasses.fields(value):
            yield from _with_samples(getattr(value, field.name), f"{name}.{field.name}", reading)
    elif _has_tensors(value):
        if _reads_samples(value, reading):
            yield name, value
            return
        for i, part in enumerate(value):
            yield from _with_samples(part, f"{name}[{i}]", _inner(reading))


def _counts(batch: Any, reading: str, dim: int) -> List[Tuple[str, int]]:
    """How many samples each of them has."""
    return [
        (name, samples_of(part, dim) if _is_tensor(part) else len(part))
        for name, part in _with_samples(batch, "batch", reading)
    ]


def _lists(value: Any) -> Iterator[Any]:
    """The outermost lists that could have an entry for each sample."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _lists(part)
    elif _is_record(value):
        for field in dataclasses.fields(value):
            yield from _lists(getattr(value, field.name))
    elif _has_tensors(value):
        if _is_of_samples(value):
            yield value
        else:
            for part in value:
                yield from _lists(part)


def _lists_of(batch: Any, reading: str) -> List[Any]:
    """The lists of a batch that have samples by a reading."""
    members = batch if reading == _FIELD_OF_SAMPLES else [batch]
    return [values for member in members for values in _lists(member)]


def _take_entries(values: Any, spans: List[slice], length: int) -> Any:
    """A list without tensors has one entry for each sample, or is not about samples."""
    if len(values) != length:
        return values
    return functools.reduce(operator.add, (values[span] for span in spans))


def with_entries(value: Any, parts: Dict[Any, Any]) -> Any:
    """A mapping of the same type. A class derived from dict may take other arguments."""
    kind: Any = type(value)
    if kind is dict or not isinstance(value, dict):
        return parts if kind is dict else kind(parts)
    like = copy.copy(value)
    for key, part in parts.items():
        like[key] = part
    return like


def owned(value: Any, is_shared: Callable[[Any], bool]) -> Any:
    """A part with copies of those of its tensors and arrays that must not reach the batch."""
    if _is_tensor(value):
        copied = value.clone if isinstance(value, torch.Tensor) else value.copy
        return copied() if is_shared(value) else value
    if not _has_shared(value, is_shared):
        return value

    def own(part: Any) -> Any:
        return owned(part, is_shared)

    if isinstance(value, Mapping):
        return with_entries(value, {k: own(v) for k, v in value.items()})
    if _is_record(value):
        names = (f.name for f in dataclasses.fields(value) if f.init)
        return dataclasses.replace(value, **{n: own(getattr(value, n)) for n in names})
    if hasattr(value, "_fields"):
        return type(value)(*map(own, value))
    return type(value)(map(own, value))


def _has_shared(value: Any, is_shared: Callable[[Any], bool]) -> bool:
    def has(part: Any) -> bool:
        return _has_shared(part, is_shared)

    if _is_tensor(value):
        return is_shared(value)
    if isinstance(value, Mapping):
        return any(map(has, value.values()))
    if _is_record(value):
        return any(has(getattr(value, f.name)) for f in dataclasses.fields(value))
    return isinstance(value, (list, tuple)) and any(map(has, value))


def shallow(value: Any) -> Any:
    """The same tensors in containers of its own, which a loss_fn may take them out of."""
    if isinstance(value, dict):
        return with_entries(value, {k: shallow(v) for k, v in value.items()})
    if type(value) in (list, tuple, Batches):
        return type(value)(map(shallow, value))
    return copy.copy(value) if isinstance(value, UserDict) or _is_record(value) else value


class Batches(List[Any]):
    """Batches of a loader that are one effective batch, and run one after another."""

    @classmethod
    def of(cls, batches: Any) -> "Batches":
        if not isinstance(batches, (list, tuple)) or not batches:
            raise ValueError(
                f"rebatch: batches is {batches!r:.60}: expected a list of batches, at least one"
            )
        return cls(batches)


class Cuts(Protocol):
    """How a batch is cut: a Cut, or what does more when a part begins."""

    def length(self, batch: Any, /) -> int:
        """Its samples."""

    def part(self, batch: Any, first: int, count: int, samples: int, /) -> Any:
        """Some of them."""


class Cut:
    """How batches are cut: `dim` is the dimension of the samples. A tuple has the batch's fields;
    so has a list, unless only one tensor a sample makes sense, in it or in a list within.

    slice, length    functions for batches of other types
    otherwise        what messages offer beside batches that are known"""

    def __init__(
        self,
        dim: int = 0,
        slice: Optional[Callable[[Any, int, int], Any]] = None,
        length: Optional[Callable[[Any], int]] = None,
        otherwise: str = ", or `slice` and `length` for others",
    ):
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
            raise ValueError(
                f"rebatch: batch_dim is {dim!r}: expected the number of a dimension, from 0"
            )
        for name, function in (("slice", slice), ("length", length)):
            if not (function is None or callable(function)):
                raise TypeError(f"rebatch: {name} is {function!r}: expected a function")
        self.dim, self._slice, self._length, self._otherwise = dim, slice, length, otherwise
        self.within: Optional[Cut] = None  # which `slice` cuts by
        self._whole_looks = _WHOLE_LOOKS  # that are left; -1: whole batches are sliced
        self.reading = _FIELD  # of the batch whose length was asked for last
        self._usual = ""  # where lists may be read in several ways, by those of the batches before
        self._possible: List[str] = []  # readings of the batch, where its lists have several

    @property
    def has_slice(self) -> bool:
        """Whether a function of the program cuts."""
        return self._slice is not None

    def length(self, batch: Any) -> int:
        """The number of samples.

        Raises ValueError when there is no tensor, when tensors disagree, or when a list may have
        either fields or samples."""
        self._possible = []
        if self._length:
            return self._length(batch)
        if _is_plain(batch) and not self.dim:
            self.reading = _FIELD
            lengths: Set[int] = {tensor.size(0) for tensor in batch}
            if len(lengths) == 1 and 0 not in lengths:
                return lengths.pop()
        counts = {r: _counts(batch, r, self.dim) for r in self._readings(batch)}
        if not counts[_FIELD]:
            raise ValueError(
                f"rebatch: the batch, a {type(batch).__name__}, has no tensor with a dimension of "
                "samples: expected tensors, or dicts, lists or tuples of them"
                f"{self._otherwise}"
            )
        agreeing = [r for r in counts if len({n for _, n in counts[r]}) == 1]
        self.reading = self._choose(batch, agreeing, counts)
        found = counts[self.reading]
        _check_counts(found, self._otherwise)
        return found[0][1]

    def _readings(self, batch: Any) -> List[str]:
        """Those that are possible, the preferred one first."""
        if self.dim or not any(True for _ in _lists(batch)):
            return [_FIELD]
        if type(batch) is list:
            return [_FIELD, _FIELD_OF_SAMPLES, _SAMPLE]
        return [_FIELD, _FIELD_OF_SAMPLES if isinstance(batch, tuple) else _SAMPLE]

    def _choose(
        self, batch: Any, agreeing: List[str], counts: Dict[str, List[Tuple[str, int]]]
    ) -> str:
        if not agreeing:
            return _FIELD
        of_samples = [r for r in agreeing if r != _FIELD and _lists_of(batch, r)]
        if not of_samples:
            return agreeing[0]
        self._possible = [r for r in agreeing if r == _FIELD or r in of_samples]
        if agreeing[0] != _FIELD:
            self._usual = of_samples[0]
        elif self._usual not in agreeing:
            self._usual = self._guessed(batch, of_samples[0], counts)
        return self._usual

    def _guessed(self, batch: Any, reading: str, counts: Dict[str, List[Tuple[str, int]]]) -> str:
        """Whether lists that may have fields have samples."""
        lists = _lists_of(batch, reading)
        # Beside images, or labels, a dict a sample has as many boxes as others by chance.
        if any(map(_are_images, lists)) or (
            len(counts[reading]) > 1 and any(isinstance(values[0], Mapping) for values in lists)
        ):
            return reading
        longest = max(map(len, lists))
        if longest > _FIELDS:
            raise ValueError(
                f"rebatch: the batch has a list of {longest} tensors with equal first dimensions, "
                "which may be fields of the batch or samples: expected a tuple for fields, or "
                f"{_ONE_A_SAMPLE} for samples"
            )
        return _FIELD

    def other_readings(self) -> List[str]:
        """How the lists of the batch whose length was asked for last may be read instead."""
        return [reading for reading in self._possible if reading != self.reading]

    def read_as(self, reading: str) -> str:
        """From now on, where lists may be read in several ways. Returns what is to be written."""
        self._usual = reading
        return "a tuple for fields" if reading == _FIELD else f"{_ONE_A_SAMPLE} for samples"

    def part(self, batch: Any, first: int, count: int, length: int) -> Any:
        """Samples [first, first + count) of a batch of `length` samples, of the same type. Tensors
        are views, NumPy arrays are copies."""
        if self._slice:
            is_whole = count == length and not self.within
            part = self._whole(batch, length) if is_whole else self._slice(batch, first, count)
        elif _is_plain(batch) and not self.dim:
            try:
                return tuple([tensor[first : first + count] for tensor in batch])
            except (RuntimeError, NotImplementedError):  # a tensor of another kind
                return self._taken(batch, [slice(first, first + count)], length)
        else:
            part = self._taken(batch, [slice(first, first + count)], length)
        # Nothing tells that an array was changed in place, so who changes one must not reach the
        # batch.
        return owned(part, is_array) if "numpy" in sys.modules else part

    def _whole(self, batch: Any, length: int) -> Any:
        """A whole batch. Where `slice` was seen to change nothing, a shallow copy is enough: what
        loss_fn takes out of that is there for a retry."""
        assert self._slice is not None
        if self._whole_looks == 0:
            return copy.copy(batch)
        part = self._slice(batch, 0, length)
        if self._whole_looks > 0:
            self._whole_looks = self._whole_looks - 1 if _is_same(part, batch) else -1
        return part

    def described(self, batch: Any) -> str:
        """Where a batch is cut, and what to write for another cut."""
        if self.within:
            return self.within.described(batch)
        if self._slice:
            return "by `slice`: expected a part that loss_fn takes as it takes the whole batch"
        places = [
            f"dimension {min(self.dim, part.ndim - 1)} of {name}, of shape {tuple(part.shape)}"
            if _is_tensor(part)
            else f"the entries of {name}"
            for name, part in _with_samples(batch, "batch", self.reading)
        ]
        graph = next((name for name, tensor in batch_tensors(batch) if tensor.grad_fn), "")
        what = (
            "samples in each tensor of the batch, which a mask has not, and none in what loss_fn "
            "keeps outside of it; `batch_dim` and `slice` cut otherwise"
        )
        if graph:
            what = f"{graph} without its graph, which the first backward pass frees (detach())"
        elif self.reading == _FIELD and any(True for _ in _lists(batch)):
            what = f"{_ONE_A_SAMPLE} if each entry of the list is a sample"
        elif self.reading != _FIELD:
            what = "a tuple if each entry of the list is a field"
        more = f", and {len(places) - 4} more" if len(places) > 4 else ""
        return f"in {', '.join(places[:4])}{more}: expected {what}"

    def arranged(self, batch: Any, spans: List[Tuple[int, int]], length: int) -> Any:
        """A batch of some spans (first, count) of the samples of another, one after another. None
        where a `slice` of the program's own cuts it."""
        if self.within:
            return self.within.arranged(batch, spans, length)
        if self._slice:
            return None
        slices = [slice(first, first + count) for first, count in spans]
        return self._taken(batch, slices, length)

    def _taken(self, batch: Any, spans: List[slice], length: int) -> Any:
        take = Taking(spans, self.dim)
        try:
            return self._part(batch, take, length, self.reading)
        except Exception as error:
            if is_oom(error):
                raise
            raise ValueError(_why_uncut(batch, take, error, self._otherwise)) from error

    def _part(self, batch: Any, take: Taking, length: int, reading: str) -> Any:
        def cut(value: Any) -> Any:
            return self._part(value, take, length, _inner(reading))

        if _is_tensor(batch):
            return take(batch) if batch.ndim else batch
        if isinstance(batch, Mapping):
            return with_entries(batch, {k: cut(v) for k, v in batch.items()})
        if _is_record(batch):
            fields = (f.name for f in dataclasses.fields(batch) if f.init)
            parts = {name: cut(getattr(batch, name)) for name in fields}
            return dataclasses.replace(batch, **parts)
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(cut(v) for v in batch))
        if isinstance(batch, (list, tuple)):
            if _has_tensors(batch) and not _reads_samples(batch, reading):
                return type(batch)(cut(v) for v in batch)
            return _take_entries(batch, take.spans, length)
        return batch


def _why_uncut(batch: Any, take: Taking, error: Exception, otherwise: str) -> str:
    """What to write where a part of a batch could not be made."""
    for name, tensor in batch_tensors(batch):
        try:
            take(tensor)
        except Exception:
            if lacks_memory(tensor):
                return (
                    f"rebatch: {name} has no memory: loss_fn has freed it, and with it the samples "
                    "that have not run yet: expected it to free that of a copy"
                )
            what = f"{name}, a {type(tensor).__name__} of layout {tensor.layout}"
            break
    else:
        what = f"the batch, a {type(batch).__name__}"
    why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return f"rebatch: {what}, cannot be cut ({why}): expected other tensors{otherwise}"


def cut_of(options: dict[Any, Any]) -> Cut:
    """How batches are cut by some arguments of a Step, which are taken out."""
    defaults = {"batch_dim": 0, "slice": None, "length": None}
    return Cut(*(options.pop(name, default) for name, default in defaults.items()))


def _check_counts(found: List[Tuple[str, int]], otherwise: str) -> None:
    name, length = found[0]
    for other, its in found[1:]:
        if its != length:
            raise ValueError(
                f"rebatch: {name} has {length} samples and {other} has {its}: expected one "
                f"number{otherwise}, or batch_dim where it is not the first dimension that counts "
                "the samples"
            )
    if length == 0:
        raise ValueError(f"rebatch: {name} has 0 samples: expected at least 1")
