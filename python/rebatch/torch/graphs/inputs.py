"""The samples of a micro-batch as a graph has them: tensors at addresses that stay, and all else as
a part of its key. Must not know what a graph is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Callable, Iterator, List, Tuple

import torch

from rebatch.torch.batches.cut import with_entries
from rebatch.torch.batches.kinds import is_plain
from rebatch.torch.private import foreach_copy_
from rebatch.torch.undo.contents import ATOMS

_ALIGNMENT = 64  # elements


class NotCapturedError(Exception):
    """A graph cannot have this: a sentence says what, and what was expected."""


def flattened(samples: Any) -> Tuple[Any, List[torch.Tensor]]:
    """(key, tensors) of samples: with equal keys, one graph serves. Raises NotCapturedError."""
    tensors: List[torch.Tensor] = []
    return _key_of(samples, "batch", tensors), tensors


def _key_of(value: Any, name: str, tensors: List[torch.Tensor]) -> Any:
    kind = type(value)
    if kind is torch.Tensor and is_plain(value):
        if value.requires_grad:
            raise NotCapturedError(f"{name} requires a gradient: expected a tensor that does not")
        tensors.append(value)
        return value.dtype, value.shape, value.stride(), value.device
    if kind in ATOMS:
        return kind, value
    if isinstance(value, (list, tuple)):
        parts = tuple([_key_of(v, f"{name}[{i}]", tensors) for i, v in enumerate(value)])
        return kind, parts
    if isinstance(value, Mapping):
        return kind, tuple([(k, _key_of(v, f"{name}[{k!r}]", tensors)) for k, v in value.items()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return kind, tuple([_key_of(getattr(value, n), f"{name}.{n}", tensors) for n in names])
    raise NotCapturedError(
        f"{name} is a {kind.__name__}: expected tensors, numbers and texts, in lists, tuples, "
        "dicts and dataclasses"
    )


def parts_of(value: Any) -> Iterator[Any]:
    """Samples, and what is in them, at any depth."""
    yield value
    entries: Any = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Mapping):
        entries = value.values()
    elif dataclasses.is_dataclass(value):
        entries = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for part in entries:
        yield from parts_of(part)


def _rebuilt(value: Any, take: Callable[[], torch.Tensor]) -> Any:
    """The same samples with other tensors, in the order of flattened()."""
    if isinstance(value, torch.Tensor):
        return take()
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(part, take) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return with_entries(value, {k: _rebuilt(v, take) for k, v in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{n: _rebuilt(getattr(value, n), take) for n in names})
    return value


def _memory_for(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As far behind an aligned address: compiled code and libraries' choices may depend on that."""
    like, offset = torch.empty_like(tensor, device=device), tensor.storage_offset()
    if offset >= 2 * _ALIGNMENT:
        offset = _ALIGNMENT + offset % _ALIGNMENT
    if not offset or like.stride() != tensor.stride():
        return like
    return like.new_empty(offset + like.numel()).as_strided(like.shape, like.stride(), offset)


class Inputs:
    """Memory on a device for samples of one key. Those on the host are copied into it too, so that
    a loss_fn that moves them to the device finds them there."""

    def __init__(self, samples: Any, tensors: List[torch.Tensor], device: torch.device):
        self._tensors = [_memory_for(tensor, device) for tensor in tensors]
        found = iter(self._tensors)
        self.samples = _rebuilt(samples, lambda: next(found))
        self.fill(tensors)

    def fill(self, tensors: List[torch.Tensor]) -> None:
        """With the samples of another micro-batch."""
        if len(tensors) == 1:
            self._tensors[0].copy_(tensors[0])
        elif tensors:
            foreach_copy_(self._tensors, tensors)
