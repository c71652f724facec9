"""On the stand-in for CUDA, whose kernels compute nothing: computes on the host what programs
decide by. These are masks, positions, lengths and counts: integers and booleans that come from the
host, or from such alone. They say how many rows a mask selects. Where a kernel would have written
the mask, that is not known, and the program is named by file and line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from typing import Any, Iterator, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map

from rebatch.fit.error import FitError
from rebatch.torch.private import TorchDispatchMode

_MOST = 1 << 24  # elements of a tensor that is computed
# Where the program's files are not.
_PACKAGES = (torch.__file__, os.path.dirname(__file__))
_OURS = tuple(os.path.dirname(path) + os.sep for path in _PACKAGES)

_aten = torch.ops.aten
# Their second argument is a list of indices, some of which may be masks.
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
# These write all of their first argument, whatever it held.
_OVERWRITES = (_aten.copy_, _aten.fill_, _aten.zero_)


class Integers(TorchDispatchMode):
    """While it is active, operations on integers have their results. Raises FitError where a size
    is decided by integers that only a kernel would know."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By address, storages on the GPU that hold integers of which a kernel would have written
        # some. As long as one is here, no other has its address.
        self._unknown: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        own = [t for t in types if t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__]
        if any(hasattr(t, "__tensor_flatten__") for t in own):
            return NotImplemented  # they consist of tensors, whose operations come here
        if own:
            return func(*args, **kwargs or {})
        kwargs = kwargs or {}
        if func.overloadpacket in _INDEXED:
            if not _fills_by_mask(args):
                args = (args[0], self._without_masks(func, args[1]), *args[2:])
        elif torch.Tag.dynamic_output_shape in func.tags:
            inputs = [*_tensors((args, kwargs))]
            if any(t.is_cuda for t in inputs) and func.overloadpacket is not _aten.linalg_lstsq:
                return self._sized(func, inputs, args, kwargs)
        result = func(*args, **kwargs)
        self._follow(func, result, args, kwargs)
        return result

    # ---- sizes that contents decide ----

    def _without_masks(self, func: Any, indices: Sequence[Any]) -> list[Any]:
        """Each mask by the positions that it selects, as PyTorch replaces it."""
        replaced: list[Any] = []
        for index in indices:
            if index is not None and index.is_cuda and index.dtype in (torch.bool, torch.uint8):
                self._need(func, [index])
                replaced += _on_gpu(_aten.nonzero(_on_host(index)), index.device).unbind(1)
            else:
                replaced.append(index)
        return replaced

    def _sized(self, func: Any, inputs: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if func.overloadpacket is _aten.masked_select:
            rows, mask = torch.broadcast_tensors(*inputs)
            indices = self._without_masks(func, [mask])
            result = _aten.index.Tensor(rows, indices)
            self._follow(_aten.index.Tensor, result, (rows, indices), {})
            return result
        # The weights of a count decide nothing.
        self._need(func, inputs[:1] if func.overloadpacket is _aten.bincount else inputs)
        values = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        return tree_map(lambda leaf: _on_gpu(leaf, inputs[0].device), values)

    def _need(self, func: Any, tensors: list[torch.Tensor]) -> None:
        if not all(_is_integer(tensor) and self._is_known(tensor) for tensor in tensors):
            name = func.overloadpacket.__name__.strip("_")
            raise FitError(
                f"rebatch: {_place()}: a kernel would decide how large the result of {name}() is, "
                "and none runs here: expected masks and counts that come from the host"
            )

    # ---- what is known ----

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._unknown

    def _follow(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        """Compute the integers that an operation has written, and note whether they are known."""
        effect = _effect_of(func)
        if effect.is_none or isinstance(result, torch.Tensor) and result.is_floating_point():
            return
        written = effect.written(result, args, kwargs)
        if not any(t.is_cuda and _is_integer(t) for t in written):
            return
        read = [] if effect.ignores else [*_tensors((args[effect.overwrites :], kwargs))]
        is_known = False
        if not effect.draws and all(_is_integer(t) or not t.is_cuda for t in read):
            with contextlib.suppress(Exception):  # what the host lacks
                is_known = _compute(func, effect, written, args, kwargs)
        is_known = is_known and all(map(self._is_known, read))
        for tensor in written:
            self._mark(tensor, is_known, effect.overwrites)

    def _mark(self, tensor: torch.Tensor, is_known: bool, is_overwritten: bool) -> None:
        storage = tensor.untyped_storage()
        if not is_known:
            if len(self._unknown) % 1024 == 1023:
                self._unknown = {k: ref for k, ref in self._unknown.items() if not ref.expired()}
            self._unknown[storage._cdata] = StorageWeakRef(storage)
        elif is_overwritten and tensor.numel() * tensor.itemsize == storage.nbytes():
            self._unknown.pop(storage._cdata, None)


# ---- operations ----


@dataclasses.dataclass(frozen=True)
class _Effect:
    """What an operation does with its tensors."""

    is_none: bool  # it gives views, or memory that nothing was written to
    is_fresh: bool  # its results are tensors that were not there before
    mutates: tuple[tuple[int, str], ...]  # arguments that it writes to
    overwrites: bool  # all of the first argument
    ignores: bool  # what its tensors hold: it takes only their sizes
    draws: bool  # random numbers

    def written(self, result: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        into = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.mutates]
        return [*_tensors([into, result if self.is_fresh else None])]


@functools.lru_cache(maxsize=None)
def _effect_of(func: Any) -> _Effect:
    schema = func._schema
    mutates = tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    )
    is_fresh = not any(r.alias_info for r in schema.returns)
    name = schema.name.split("::")[-1]
    return _Effect(
        is_none=not mutates and not is_fresh or "empty" in name,
        is_fresh=is_fresh,
        mutates=mutates,
        overwrites=func.overloadpacket in _OVERWRITES,
        ignores=name.startswith("new_") or name.endswith("_like"),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _fills_by_mask(args: Any) -> bool:
    """Whether values are put by masked_fill_(), which finds no positions: PyTorch's condition."""
    values = args[2] if len(args) > 2 else None
    return values is not None and values.numel() == 1 and not values.is_cuda and len(args[1]) == 1


def _place() -> str:
    """Where the program is: its innermost line outside PyTorch and this package."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith((*_OURS, "<")):
        frame = frame.f_back
    path, near = frame.f_code.co_filename, os.path.relpath(frame.f_code.co_filename)
    return f"{path if near.startswith(os.pardir) else near}:{frame.f_lineno}"


# ---- values ----


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))


def _is_integer(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout == torch.strided
    return is_strided and not (tensor.is_floating_point() or tensor.is_complex())


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from the first element to the last, which is copied without a kernel."""
    count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride()))
    return tensor.as_strided((count,), (1,), tensor.storage_offset())


def _on_host(leaf: Any) -> Any:
    """A tensor's copy in host memory, and the host in place of a GPU. What a kernel would have
    written is only as large."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda:
        return leaf
    if not leaf.numel() or not _is_integer(leaf):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
    return _span(leaf).cpu().as_strided(leaf.size(), leaf.stride(), 0)


def _on_gpu(values: Any, device: torch.device) -> Any:
    if not isinstance(values, torch.Tensor):
        return values
    made = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=device)
    _fill([made], [values])
    return made


def _compute(func: Any, effect: _Effect, written: Any, args: Any, kwargs: Any) -> bool:
    """Give what an operation has written the values that it has on the host. Whether it has."""
    if any(t.numel() > _MOST for t in (*written, *_tensors((args, kwargs)))):
        return False
    on_host = tree_map(_on_host, args), tree_map(_on_host, kwargs)
    values = func(*on_host[0], **on_host[1])
    return _fill(written, effect.written(values, *on_host))


def _fill(outputs: list[torch.Tensor], values: list[torch.Tensor]) -> bool:
    for output, value in zip(outputs, values):
        if value.size() != output.size() or value.dtype != output.dtype:
            return False
        if output.numel() and output.is_cuda:
            span = _span(output)
            host = span.cpu()
            host.as_strided(output.size(), output.stride(), 0).copy_(value)
            span.copy_(host)
    return len(outputs) == len(values)
