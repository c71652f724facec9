"""On the stand-in for CUDA, whose kernels compute nothing: computes on the host what programs
decide by. These are masks, positions, lengths and counts: integers and booleans that come from the
host, or from such alone. They say how many rows a mask selects. Where a kernel would have written
the mask, that is not known. A copy of the program is tried with one choice of rows and with
another; before that, the program is named by file and line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from types import FrameType
from typing import Any, Iterator, Optional, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map

from rebatch.fit.controls import standin
from rebatch.fit.error import undecided
from rebatch.torch.private import TorchDispatchMode, storage_address

# Bytes of a tensor that is computed; of one of floats; and of one that is computed from a kernel's
# zeros, by which programs decide too: whether a loss is finite.
_MOST, _MOST_OF_FLOATS, _MOST_OF_ZEROS = 1 << 28, 1 << 24, 1 << 22
# Bytes from which on a tensor is not copied to the GPU, where no kernel would read it.
_LARGE = 1 << 24
# Where the program's files are not.
_FIT = os.path.dirname(__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(_FIT)) + os.sep
_BETWEEN = (os.path.dirname(torch.__file__) + os.sep, _FIT)

_PLAIN = torch.Tensor.__torch_dispatch__
_aten = torch.ops.aten
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
# These write all of their first argument, whatever it held.
_OVERWRITES = (_aten.copy_, _aten.fill_, _aten.zero_)
# These bring integers to the host.
_READS = (_aten._local_scalar_dense, _aten._to_copy, _aten.copy_)
_LEAST_SQUARES = _aten.linalg_lstsq  # not by contents on a GPU
_COUNTS = (_aten.sum, _aten.count_nonzero)
# How far another integer is at least from the one that is read; a count is as large as it may be,
# so that no bound of the program's hides it.
_OTHER = 97


class Integers(TorchDispatchMode):
    """While it is active, operations on integers have their results. Raises FitError where a size
    is decided by integers that only a kernel would know, but with `assumes`: there a mask selects
    what it would by zeros. With `reads_others`, the program reads others in place of these, and
    such a mask selects all, or nothing: a size that the program takes from them is another."""

    def __init__(self, reads_others: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads_others = reads_others
        self.assumes = False
        self.assumed = ""  # the first sentence that says where, and of which operation
        self.ooms = 0  # operations that failed by one
        self.read_at = ""  # where the program has first read a kernel's integers: file and line
        # By address, storages on the GPU that hold integers of which a kernel would have written
        # some, and the most that one may be which is a count. As long as one is here, no other has
        # its address.
        self._unknown: dict[int, tuple[Any, int]] = {}
        # Likewise those of floats that integers alone have made, as a mask's sum, and of those that
        # come from the host and are whole numbers, as a mask in floats.
        self._counts: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        own = [t for t in types if t.__torch_dispatch__ is not _PLAIN]
        if any(hasattr(t, "__tensor_flatten__") for t in own):
            return NotImplemented  # they consist of tensors, whose operations come here
        if own:
            return func(*args, **kwargs or {})
        try:
            return self._run(func, args, kwargs or {})
        except torch.OutOfMemoryError:
            self.ooms += 1
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        effect = _effect_of(func)
        if effect.has_indices:
            if not _fills_by_mask(args):
                args = (args[0], self._without_masks(func, args[1]), *args[2:])
        elif func.overloadpacket is _aten._coalesce and args[0].is_cuda:
            return self._coalesced(func, args[0])
        elif effect.has_sizes:
            inputs = [*_tensors((args, kwargs))]
            if any(t.is_cuda for t in inputs):
                return self._sized(func, inputs, args, kwargs)
        is_left_out = effect.reads and _is_large(_sent(func, args, kwargs))
        if is_left_out:
            standin().standin_leave_out(True)
        try:
            result = func(*args, **kwargs)
        finally:
            if is_left_out:
                standin().standin_leave_out(False)
        if _is_sparse(result):
            self._follow_sparse(result, [t for t in _tensors((args, kwargs)) if _is_sparse(t)])
            return result
        if effect.reads:
            result = self._as_read(result, args)
        if not effect.is_none:
            self._follow(func, effect, result, args, kwargs)
        return result

    def _as_read(self, result: Any, args: Any) -> Any:
        """What the program reads of the GPU, noted where a kernel would have written it."""
        if isinstance(result, torch.Tensor) and result.is_cuda:
            return result
        *_, source = _tensors(args)
        is_decision = source.numel() == 1 and source.dtype == torch.bool
        if is_decision or not self._is_count(source) or self._is_known(source):
            return result
        frame = _frame()
        if frame.f_code.co_filename.startswith(_OURS):  # what rebatch itself reads is no size
            return result
        self.read_at = self.read_at or _place(frame)
        if not self.reads_others:
            return result
        other = max(_OTHER, self._most_of(source))
        if not isinstance(result, torch.Tensor):
            return result + other
        return result.logical_not_() if result.dtype == torch.bool else result.add_(other)

    # ---- sizes that contents decide ----

    def _without_masks(self, func: Any, indices: Sequence[Any]) -> list[Any]:
        """Each mask by the positions that it selects, as PyTorch replaces it."""
        replaced: list[Any] = []
        for index in indices:
            if index is not None and index.is_cuda and index.dtype in (torch.bool, torch.uint8):
                replaced += self._positions(func, index).unbind(1)
            else:
                replaced.append(index)
        return replaced

    def _positions(self, func: Any, mask: torch.Tensor) -> torch.Tensor:
        """Of what a mask selects."""
        if self._is_known(mask) and _is_integer(mask):
            on_host = _on_host(mask)
        elif self.assumes:
            self.assumed = self.assumed or _decides(func)
            on_host = _on_host(mask) if mask.nbytes <= _MOST_OF_ZEROS else _none_of(mask)
            if self.reads_others:
                on_host = _none_of(mask) if on_host.all() else ~_none_of(mask)
        else:
            raise undecided(_decides(func))
        positions: torch.Tensor = _on_gpu(_aten.nonzero(on_host), mask.device)
        return positions

    def _sized(self, func: Any, inputs: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        if func.overloadpacket is _aten.masked_select:
            rows, mask = torch.broadcast_tensors(*inputs)
            indices = self._without_masks(func, [mask])
            result = _aten.index.Tensor(rows, indices)
            index = _aten.index.Tensor
            self._follow(index, _effect_of(index), result, (rows, indices), {})
            return result
        if func.overloadpacket is _aten._ctc_loss:  # which itself brings the lengths to the host
            self._need(func, inputs[2:])
            return func(*args, **kwargs)
        if func.overloadpacket is _aten.nonzero:
            return self._positions(func, inputs[0])
        # The weights of a count decide nothing.
        self._need(func, inputs[:1] if func.overloadpacket is _aten.bincount else inputs)
        values = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        return tree_map(lambda leaf: _on_gpu(leaf, inputs[0].device), values)

    def _coalesced(self, func: Any, sparse: torch.Tensor) -> torch.Tensor:
        """As many rows as there are different indices."""
        indices, values = _indices_of(sparse), _aten._values(sparse)
        self._need(func, [indices])
        sides = sparse.size()[: indices.size(0)]
        numbers, places = torch.zeros((), dtype=torch.int64), _on_host(indices)
        for row, side in zip(places, sides):
            numbers = numbers * side + row
        own = torch.stack(torch.unravel_index(torch.unique(numbers), sides))
        # Meanwhile a GPU has those numbers, their order, and where each begins.
        meanwhile = [indices.new_empty(indices.size(1)) for _ in range(3)]
        rows = values.new_empty((own.size(1), *values.shape[1:]))
        del meanwhile
        return torch.sparse_coo_tensor(
            _on_gpu(own, indices.device),
            rows,
            sparse.size(),
            is_coalesced=True,
            check_invariants=False,
        )

    def _follow_sparse(self, result: torch.Tensor, read: list[torch.Tensor]) -> None:
        """The indices of a sum are those of its parts, one behind the other, and else its own."""
        indices, parts = _indices_of(result), [_indices_of(sparse) for sparse in read]
        place = indices.untyped_storage().data_ptr()
        if not read or any(part.untyped_storage().data_ptr() == place for part in parts):
            return
        used = parts if sum(part.size(1) for part in parts) == indices.size(1) else parts[:1]
        is_known = all(self._is_known(part) for part in parts) and _fill(
            [indices], [torch.cat([_on_host(part) for part in used], dim=1)]
        )
        self._mark(indices, is_known, True)

    def _need(self, func: Any, tensors: list[torch.Tensor]) -> None:
        if not all(_is_integer(tensor) and self._is_known(tensor) for tensor in tensors):
            raise undecided(_decides(func))

    # ---- what is known ----

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return storage_address(tensor) not in self._unknown

    def _is_count(self, tensor: Any) -> bool:
        """Whether it holds integers, or what these alone have made."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return isinstance(tensor, torch.Tensor) and _is_integer(tensor)
        is_there = tensor.is_cuda and tensor.layout == torch.strided
        return is_there and storage_address(tensor) in self._counts

    def _most_of(self, tensor: torch.Tensor) -> int:
        """0: it is no count."""
        return self._unknown.get(storage_address(tensor), (None, 0))[1]

    def _follow(self, func: Any, effect: _Effect, result: Any, args: Any, kwargs: Any) -> None:
        """Compute the integers that an operation has written, and note whether they are known."""
        if isinstance(result, torch.Tensor) and not (result.is_cuda or effect.mutates):
            return
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        sends_count = is_float and effect.reads and _is_whole_numbers(_sent(func, args, kwargs))
        if is_float and not sends_count and not (args and self._is_count(args[0])):  # most are so
            return
        written = effect.written(result, args, kwargs)
        read = [] if effect.ignores else [*_tensors((args[effect.overwrites :], kwargs))]
        have_values = all(self._is_count(tensor) or not tensor.is_cuda for tensor in read)
        makes_counts = sends_count or have_values and any(tensor.is_cuda for tensor in read)
        followed = []
        for tensor in (each for each in written if each.is_cuda):
            if _is_integer(tensor) or makes_counts and tensor.layout == torch.strided:
                followed.append(tensor)
            elif self._is_count(tensor):
                del self._counts[storage_address(tensor)]
        if not followed:
            return
        are_known = have_values and all(map(self._is_known, read))
        most = _MOST_OF_FLOATS if are_known else _MOST_OF_ZEROS
        if have_values and all(map(_is_integer, (*read, *written))):
            most = _MOST
        is_computed = effect.is_collective
        is_here = not effect.is_collective and not effect.draws
        if is_here and all(tensor.nbytes <= most for tensor in (*read, *written)):
            with contextlib.suppress(Exception):  # what the host lacks
                is_computed = _needs_no_kernel(_sent(func, args, kwargs), written) or _compute(
                    func, effect, written, args, kwargs, makes_counts
                )
        is_known = is_computed and are_known
        counted = [tensor for tensor in read if self._is_count(tensor)]
        most = max(map(self._most_of, counted), default=0)
        if func.overloadpacket in _COUNTS and counted:
            most = counted[0].numel() // max(written[0].numel(), 1)
        for tensor in followed:
            self._mark(tensor, is_known, effect.overwrites, most)

    def _mark(
        self, tensor: torch.Tensor, is_known: bool, is_overwritten: bool, most: int = 0
    ) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point():
            if len(self._counts) % 1024 == 1023:
                self._counts = {k: each for k, each in self._counts.items() if not each.expired()}
            self._counts[storage._cdata] = StorageWeakRef(storage)
        if not is_known:
            if len(self._unknown) % 1024 == 1023:
                old = self._unknown.items()
                self._unknown = {k: each for k, each in old if not each[0].expired()}
            self._unknown[storage._cdata] = (StorageWeakRef(storage), most)
        elif is_overwritten and tensor.numel() * tensor.itemsize == storage.nbytes():
            self._unknown.pop(storage._cdata, None)


@functools.lru_cache(maxsize=None)
def start() -> Integers:
    """Those of this process, which are active from the first call on."""
    integers = Integers()
    integers.__enter__()  # type: ignore[no-untyped-call]
    return integers


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
    is_collective: bool  # its values come from the process group, perhaps after it has returned
    has_indices: bool  # a list of them, some of which may be masks, is its second argument
    has_sizes: bool  # contents decide how large its results are
    reads: bool  # from the GPU to the host

    def written(self, result: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        into = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.mutates]
        return [*_tensors([into, result if self.is_fresh else None])]


@functools.lru_cache(maxsize=None)
def _effect_of(func: Any) -> _Effect:
    schema, operation = func._schema, func.overloadpacket
    mutates = tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    )
    is_fresh = not any(r.alias_info for r in schema.returns)
    space, name = schema.name.split("::")
    return _Effect(
        is_none=not mutates and not is_fresh or "empty" in name or operation is _aten.set_,
        is_fresh=is_fresh,
        mutates=mutates,
        overwrites=operation in _OVERWRITES,
        ignores=name.startswith("new_") or name.endswith("_like"),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        is_collective="c10d" in space,
        has_indices=operation in _INDEXED,
        has_sizes=torch.Tag.dynamic_output_shape in func.tags and operation is not _LEAST_SQUARES,
        reads=operation in _READS,
    )


def _fills_by_mask(args: Any) -> bool:
    """Whether values are put by masked_fill_(), which finds no positions: PyTorch's condition."""
    values = args[2] if len(args) > 2 else None
    return values is not None and values.numel() == 1 and not values.is_cuda and len(args[1]) == 1


def _frame() -> FrameType:
    """The innermost line outside PyTorch and the fit."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith((*_BETWEEN, "<")):
        frame = frame.f_back
    return frame


def is_of_packages(path: str) -> bool:
    """Whether a file is PyTorch's or rebatch's, not the program's."""
    return path.startswith((_OURS, *_BETWEEN, "<"))


def place(path: str, line: object) -> str:
    """A line of the program, as it is told."""
    near = os.path.relpath(path)
    return f"{path if near.startswith(os.pardir) else near}:{line}"


def _decides(func: Any) -> str:
    name = func.overloadpacket.__name__.strip("_")
    return f"{_place(_frame())}: a kernel would decide how large the result of {name}() is"


def _place(frame: FrameType) -> str:
    while frame.f_back and is_of_packages(frame.f_code.co_filename):
        frame = frame.f_back
    return place(frame.f_code.co_filename, frame.f_lineno)


# ---- values ----


def _sent(func: Any, args: Any, kwargs: Any) -> Optional[torch.Tensor]:
    """What an operation copies from the host to the GPU."""
    if func.overloadpacket is _aten._to_copy:
        source, device = args[0], kwargs.get("device")
        is_sent = device is not None and torch.device(device).type == "cuda"
    elif func.overloadpacket is _aten.copy_:
        source, is_sent = args[1], args[0].is_cuda
    else:
        return None
    is_strided = source.layout == torch.strided and not source.is_nested
    return source if is_sent and is_strided and source.device.type == "cpu" else None


def _is_large(sent: Optional[torch.Tensor]) -> bool:
    return sent is not None and sent.nbytes > (_MOST if _is_integer(sent) else _LARGE)


def _is_whole_numbers(sent: Optional[torch.Tensor]) -> bool:
    if sent is None or not sent.is_floating_point() or sent.nbytes > _MOST_OF_FLOATS:
        return False
    first = sent.flatten()[:64] if sent.is_contiguous() else sent
    return all(bool((part == part.round()).all()) for part in (first, sent))


def _needs_no_kernel(sent: Optional[torch.Tensor], written: list[torch.Tensor]) -> bool:
    """Whether the copy needs no kernel."""
    return sent is not None and written[0].is_contiguous()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))


def _is_integer(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout == torch.strided
    return is_strided and not (tensor.is_floating_point() or tensor.is_complex())


def _is_sparse(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.is_cuda and each.layout == torch.sparse_coo


def _indices_of(sparse: torch.Tensor) -> torch.Tensor:
    indices: torch.Tensor = _aten._indices(sparse)
    return indices


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from the first element to the last, which is copied without a kernel."""
    count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride()))
    return tensor.as_strided((count,), (1,), tensor.storage_offset())


def _on_host(leaf: Any, has_floats: bool = False) -> Any:
    """A tensor's copy in host memory, and the host in place of a GPU. What a kernel would have
    written is zeros: floats, but where they are counts."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda:
        return leaf
    if not _is_integer(leaf) and not has_floats:
        return torch.zeros((), dtype=leaf.dtype).expand(leaf.size())
    if not leaf.numel():
        return torch.empty_like(leaf, device="cpu")
    return _span(leaf).cpu().as_strided(leaf.size(), leaf.stride(), 0)


def _none_of(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.size(), dtype=torch.bool)


def _on_gpu(values: Any, device: torch.device) -> Any:
    if not isinstance(values, torch.Tensor):
        return values
    made = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=device)
    _fill([made], [values])
    return made


def _compute(
    func: Any, effect: _Effect, written: Any, args: Any, kwargs: Any, has_floats: bool
) -> bool:
    """Give what an operation has written the values that it has on the host. Whether it has."""
    on_host = tree_map(lambda leaf: _on_host(leaf, has_floats), (args, kwargs))
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
