"""The reduction of a window's gradients: of each group of fully_shard() a reduce-scatter, and with
HSDP an all-reduce over the replicas, in one order on all ranks, and each of them once: after an OOM
the reduction goes on where it was."""

from __future__ import annotations

import collections
import contextlib
from typing import Any, Deque, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

from rebatch.torch.private import chunk_cat
from rebatch.torch.ranks.fsdp.private_names import gradient_dtype, reduce_dtype, reduce_scatter_of
from rebatch.torch.session.oom import is_oom
from rebatch.torch.session.session import Lost

# The inputs of reduce-scatters that are under way: one is filled while another is sent.
_INPUTS = 2


@contextlib.contextmanager
def lost_if_failed() -> Iterator[None]:
    """Around a collective."""
    try:
        yield
    except RuntimeError as error:
        if is_oom(error):
            raise
        raise Lost(str(error)) from error


class _Piece:
    """A group of fully_shard(): the gradients that one reduce-scatter sums. A row of its input is
    what one rank gets: that rank's part of each parameter, padded to the largest rank's."""

    def __init__(self, group: Any, places: List[int]):
        self.group, self.places = group, places  # among all gradients
        self.params = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        self.ranks = dist.get_world_size(scatter_group(group))
        self.replicas = getattr(group.mesh_info, "replicate_process_group", None)
        self.dtype = reduce_dtype(group)
        self.row = sum(p.padded_sharded_param_size.numel() for p in self.params)
        self._comm = reduce_scatter_of(group)
        self.depth = 1 if self._comm else _INPUTS  # another's memory may be one buffer for all

    def empty(self, count: int) -> torch.Tensor:
        if self._comm:
            allocated: torch.Tensor = self._comm.allocate(
                (count,), dtype=self.dtype, device=self.group.device
            )
            return allocated
        return torch.empty(count, dtype=self.dtype, device=self.group.device)

    def fill(self, sums: List[Optional[torch.Tensor]]) -> torch.Tensor:
        """The input, of the gradients that there are, and zeros."""
        filled = self.empty(self.ranks * self.row)
        given = [sums[place] for place in self.places]
        if not any(g is not None for g in given):
            return filled.zero_()
        parts = [self._by_ranks(p, g) for p, g in zip(self.params, given)]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.to(self.dtype) for part in parts]
        chunk_cat(parts, dim=0, num_chunks=self.ranks, out=filled.view(self.ranks, -1))
        return filled

    def _by_ranks(self, p: Any, gradient: Optional[torch.Tensor]) -> torch.Tensor:
        """The gradient with the ranks' parts one after the other along dimension 0."""
        if gradient is None:
            gradient = torch.zeros(p._orig_size, dtype=self.dtype, device=self.group.device)
        dim = p.fsdp_placement.dim
        return torch.cat(gradient.chunk(self.ranks, dim)) if dim else gradient

    def scatter(self, output: torch.Tensor, filled: torch.Tensor) -> Any:
        """Starts the reduce-scatter: the work to wait for, or None."""
        scatter = self._comm or dist.reduce_scatter_tensor
        names = ("output_tensor", "input_tensor") if self._comm else ("output", "input")
        tensors = dict(zip(names, (output, filled)))
        with lost_if_failed():
            group = scatter_group(self.group)
            return scatter(**tensors, group=group, op=dist.ReduceOp.SUM, async_op=True)

    def sum_replicas(self, output: torch.Tensor) -> Any:
        """Starts the all-reduce over the replicas."""
        with lost_if_failed():
            return dist.all_reduce(output, group=self.replicas, async_op=True)

    def parts(self, output: torch.Tensor) -> Iterator[Tuple[int, torch.Tensor]]:
        """Of each gradient its place and what this rank keeps."""
        wanted = {gradient_dtype(p) or output.dtype for p in self.params}
        if len(wanted) == 1:
            output = output.to(wanted.pop())
        offset = 0
        for place, p in zip(self.places, self.params):
            part = output.as_strided(p.sharded_size, p.contiguous_sharded_stride, offset)
            part = part.to(device=p.sharded_param.device, dtype=gradient_dtype(p) or part.dtype)
            yield place, p.to_sharded_dtensor(part)
            offset += p.padded_sharded_param_size.numel()


class Reduction:
    """Of the gradients of one effective batch."""

    def __init__(self, groups: List[Any], stream: Any):
        self._stream, self._handle = stream, groups[0].device_handle
        pieces, count = [], 0
        for group in groups:
            size = sum(p.sharded_param.requires_grad for p in group.fsdp_params)
            if size:
                pieces.append(_Piece(group, list(range(count, count + size))))
            count += size
        self._waiting = list(reversed(pieces))
        self.parts: List[Optional[torch.Tensor]] = [None] * count  # DTensors, in order
        # Inputs, and when they may be freed.
        self._sent: Deque[tuple[Any, ...]] = collections.deque()
        self._filled: Optional[torch.Tensor] = None  # the input of the first that waits
        self._output: Any = None  # of the first that waits, once it is scattered
        self._is_summed = False  # and over the replicas
        self._work: Optional[Any] = None  # of its last collective, which has begun

    def warm_up(self) -> None:
        """Allocate and free what the reduction needs. May run out of memory; no collective."""
        held = []
        # The stream's memory may be that of gradients which an update still reads, and new memory
        # is written with torch.use_deterministic_algorithms().
        self._stream.wait_stream(self._handle.current_stream())
        for piece in self._waiting:
            with self._handle.stream(self._stream):
                held.append(piece.empty(piece.row))
        largest = max(self._waiting, key=lambda piece: piece.ranks * piece.row, default=None)
        if largest:
            held += [largest.empty(largest.ranks * largest.row) for _ in range(largest.depth)]

    def next(self, sums: List[Optional[torch.Tensor]]) -> bool:
        """Reduce a group of the gradients in `sums`, and take these out. After an OOM it may be
        called again. False where no group is left. Raises Lost."""
        current = self._handle.current_stream()
        if not self._waiting:
            current.wait_stream(self._stream)
            self._sent.clear()
            return False
        piece = self._waiting[0]
        if self._output is None:
            self._scatter(piece, sums, current)
        with self._handle.stream(self._stream):
            self._wait()
            if piece.replicas and not self._is_summed:
                self._work = piece.sum_replicas(self._output)
                self._is_summed = True
                self._wait()
            for place, part in piece.parts(self._output):
                self.parts[place] = part
        self._waiting.pop(0)
        self._output, self._is_summed = None, False
        return True

    def _scatter(self, piece: _Piece, sums: List[Optional[torch.Tensor]], current: Any) -> None:
        while len(self._sent) >= piece.depth:
            _, event = self._sent.popleft()
            if event is not None:
                current.wait_event(event)
        filled = piece.fill(sums)
        self._stream.wait_stream(current)
        with self._handle.stream(self._stream):
            output = piece.empty(piece.row)
            self._work = piece.scatter(output, filled)
        self._output, self._filled = output, filled
        for place in piece.places:
            sums[place] = None

    def _wait(self) -> None:
        """In the stream, or on the host where the collective runs there. What has begun is not
        begun again: gloo may copy, and so run out of memory, after a collective has ended."""
        if self._work is not None:
            with lost_if_failed():
                self._work.wait()
            self._work = None
        if self._filled is not None:
            self._sent.append((self._filled, self._stream.record_event()))
            self._filled = None


def scatter_group(group: Any) -> Any:
    """The process group in which a group's gradients are scattered."""
    return group._reduce_scatter_process_group
