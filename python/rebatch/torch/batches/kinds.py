"""Tensors of every kind: plain, sparse, nested, and those of other libraries. Each is cut, joined
and compared by what its kind can do."""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Sequence

import torch

from rebatch.torch.private import base_functions

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc)


def is_array(value: Any) -> bool:
    """A NumPy array, without an import of NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "shape")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its contents lie in memory of its own, by shape and strides."""
    dispatch = type(tensor).__torch_dispatch__
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and dispatch is torch.Tensor.__torch_dispatch__
    )


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether its memory was freed, or a part of it: nothing may be read or written there."""
    if not is_plain(tensor) or not tensor.numel():
        return False
    return int(tensor.untyped_storage().nbytes()) < _end_bytes(tensor)


def give_memory(tensor: torch.Tensor) -> None:
    """So that it can be written."""
    if lacks_memory(tensor):
        tensor.untyped_storage().resize_(_end_bytes(tensor))


def plain_parts(tensor: torch.Tensor) -> List[torch.Tensor]:
    """The plain tensors in which its contents lie; itself, where those are not known."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if is_plain(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for each in inner for part in plain_parts(each)]


@torch.no_grad()
def are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are of one kind and have the same contents; NaNs are the same."""
    if a.dtype != b.dtype or a.layout != b.layout or a.is_nested != b.is_nested:
        return False
    if not a.is_nested and a.shape != b.shape:
        return False
    with base_functions():
        pairs = plain_parts(a), plain_parts(b)
        return len(pairs[0]) == len(pairs[1]) and all(map(_have_same_bits, *pairs))


def _have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or lacks_memory(a) or lacks_memory(b):
        return False
    return torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True)


def bytes_of(tensor: torch.Tensor) -> int:
    """Of its contents."""
    if tensor.layout is torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return int(tensor.nbytes)


def _end_bytes(tensor: torch.Tensor) -> int:
    """Where it ends in its storage."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def samples_of(value: Any, dim: int) -> int:
    """The size of a tensor or array along a dimension: the last one where it has no such one."""
    dim = min(dim, value.ndim - 1)
    return int(value.size(dim) if isinstance(value, torch.Tensor) else value.shape[dim])


def dims_of_samples(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> List[int]:
    """The dimensions in which each of these tensors has an entry for each of its samples."""
    first = tensors[0]
    if any(t.dim() != first.dim() for t in tensors):
        return []
    dims = range(1 if first.is_nested else first.dim())
    return [d for d in dims if all(samples_of(t, d) == n for t, n in zip(tensors, counts))]


class Taking:
    """Takes spans of the samples of the tensors of one batch."""

    def __init__(self, spans: List[slice], dim: int):
        self.spans, self._dim = spans, dim
        self._offsets: Dict[int, torch.Tensor] = {}  # of what was taken, by those of its whole

    def __call__(self, values: Any) -> Any:
        """Of a tensor or array, one after another: a view where one span is one without gaps."""
        dim = min(self._dim, values.ndim - 1)
        if is_array(values):
            parts = [values[(slice(None),) * dim + (span,)] for span in self.spans]
            return parts[0] if len(parts) == 1 else sys.modules["numpy"].concatenate(parts, dim)
        if values.is_nested:
            return self._nested(values, dim)
        if values.layout is torch.sparse_coo:
            return self._sparse(values, dim)
        if values.layout in _COMPRESSED:
            return self._sparse(values.to_sparse(), dim).to_sparse(layout=values.layout)
        parts = [values[(slice(None),) * dim + (span,)] for span in self.spans]
        if len(parts) > 1:
            return torch.cat(parts, dim)
        # Of another dimension than the first a part has gaps, where kernels may ask for none.
        return parts[0].contiguous() if dim and values.is_contiguous() else parts[0]

    def _sparse(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        taken = [torch.arange(span.start, span.stop) for span in self.spans]
        return values.index_select(dim, torch.cat(taken).to(values.device))

    def _nested(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Those that have the same offsets have so again, or PyTorch would not add them up."""
        if dim:
            raise ValueError("the samples of a nested tensor are in its first dimension")
        every = values.unbind()
        rows = [row for span in self.spans for row in every[span]]
        if values.layout is torch.strided:
            return torch.nested.as_nested_tensor(rows)
        whole: Any = values
        offsets = self._offsets.get(id(whole.offsets()))
        if offsets is not None:
            return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)
        taken: Any = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        self._offsets[id(whole.offsets())] = taken.offsets()
        return taken  # type: ignore[no-any-return]


def joined(parts: List[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Parts of one tensor, which were taken."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.is_nested:
        rows = [row for part in parts for row in part.unbind()]
        return torch.nested.as_nested_tensor(rows, layout=first.layout)
    if first.layout in _COMPRESSED:
        whole = torch.cat([part.to_sparse() for part in parts], dim)
        return whole.to_sparse(layout=first.layout)
    return torch.cat(parts, dim)
