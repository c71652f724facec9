"""How many samples a batch has, and its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Iterator, Tuple

import torch


def _is_array(value: Any) -> bool:
    """A NumPy array, without an import of NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "shape")


def _is_fields(value: Any) -> bool:
    """A tuple or list of tensors, or of what holds tensors: its members are fields of the batch."""
    return isinstance(value, (list, tuple)) and any(_has_tensor(v) for v in value)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor) or _is_array(value):
        return True
    if isinstance(value, Mapping):
        return any(_has_tensor(v) for v in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_tensor(getattr(value, f.name)) for f in dataclasses.fields(value))
    return _is_fields(value)


def _tensors(value: Any, name: str) -> Iterator[Tuple[str, int]]:
    """The name and the first dimension of each tensor in a batch."""
    if isinstance(value, torch.Tensor) or _is_array(value):
        if len(value.shape):
            yield name, int(value.shape[0])
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif _is_fields(value):
        for i, part in enumerate(value):
            yield from _tensors(part, f"{name}[{i}]")


def batch_length(batch: Any, otherwise: str = ", or `slice` and `length` for others") -> int:
    """The number of samples: the first dimension of the batch's tensors. `otherwise` is what
    messages offer beside such batches.

    Raises ValueError when there is no tensor, or when tensors disagree."""
    found = list(_tensors(batch, "batch"))
    if not found:
        raise ValueError(
            f"rebatch: the batch, a {type(batch).__name__}, has no tensor with a first dimension: "
            f"expected tensors, or dicts, lists or tuples of them{otherwise}"
        )
    name, length = found[0]
    for other, its in found[1:]:
        if its != length:
            raise ValueError(
                f"rebatch: {name} has {length} samples and {other} has {its}: expected one "
                f"first dimension{otherwise}"
            )
    if length == 0:
        raise ValueError(f"rebatch: {name} has 0 samples: expected at least 1")
    return length


def _slice_list(values: Any, first: int, count: int, length: int) -> Any:
    """A list without tensors has one entry for each sample, or is not about samples."""
    return values[first : first + count] if len(values) == length else values


def slice_batch(batch: Any, first: int, count: int, length: int) -> Any:
    """Samples [first, first + count) of a batch of `length` samples, of the same type. Tensors are
    views."""
    if isinstance(batch, torch.Tensor) or _is_array(batch):
        return batch[first : first + count] if len(batch.shape) else batch
    if isinstance(batch, Mapping):
        parts = {k: slice_batch(v, first, count, length) for k, v in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = {
            f.name: slice_batch(getattr(batch, f.name), first, count, length)
            for f in dataclasses.fields(batch)
            if f.init
        }
        return dataclasses.replace(batch, **parts)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(slice_batch(v, first, count, length) for v in batch))
    if isinstance(batch, (list, tuple)):
        if _is_fields(batch):
            return type(batch)(slice_batch(v, first, count, length) for v in batch)
        return _slice_list(batch, first, count, length)
    return batch
