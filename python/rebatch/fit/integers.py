"""On the stand-in for CUDA, whose kernels compute nothing: computes on the host what programs
decide by. These are masks, positions and lengths: tensors of integers and booleans that come from
such alone, or from no tensor."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Optional

import torch
from torch.utils._pytree import tree_flatten, tree_map

from rebatch.torch.private import TorchDispatchMode

_MOST = 1 << 22  # elements of a tensor that is computed


class Integers(TorchDispatchMode):
    """While it is active, operations on integers have their results. Allocates nothing on the
    GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            return result
        outputs = list(_tensors(result))
        if outputs and _has_result(func) and _are_integers([*_tensors((args, kwargs)), *outputs]):
            with contextlib.suppress(Exception):  # what the host lacks stays as it is
                _fill(outputs, func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs)))
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))


def _has_result(func: Any) -> bool:
    """Whether its output is computed, and the same each time."""
    is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    is_empty = "empty" in func._schema.name
    return not (is_view or is_empty or torch.Tag.nondeterministic_seeded in func.tags)


def _are_integers(tensors: list[torch.Tensor]) -> bool:
    return any(t.is_cuda for t in tensors) and all(
        type(t) is torch.Tensor
        and not (t.is_floating_point() or t.is_complex())
        and t.numel() <= _MOST
        for t in tensors
    )


def _span(tensor: torch.Tensor) -> Optional[torch.Tensor]:
    """All memory from the first element to the last, which is copied without a kernel."""
    if not tensor.numel():
        return None
    count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride()))
    return tensor.as_strided((count,), (1,), tensor.storage_offset())


def _on_host(leaf: Any) -> Any:
    """A tensor's copy in host memory, and the host in place of a GPU."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda:
        return leaf
    span = _span(leaf)
    if span is None:
        return torch.empty_like(leaf, device="cpu")
    return span.cpu().as_strided(leaf.size(), leaf.stride(), 0)


def _fill(outputs: list[torch.Tensor], computed: Any) -> None:
    """Give the outputs the values that the host has computed."""
    for output, values in zip(outputs, _tensors(computed)):
        span = _span(output)
        if span is not None and values.size() == output.size() and values.dtype == output.dtype:
            host = span.cpu()
            host.as_strided(output.size(), output.stride(), 0).copy_(values)
            span.copy_(host)
