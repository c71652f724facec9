"""Memory of rebatch's pool for another process: what is exported, and how it is read there."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rebatch import _library
from rebatch._library import lib
from rebatch._user_code import user_stacklevel
from rebatch.torch.allocator import install
from rebatch.torch.allocator.arenas import Arena
from rebatch.torch.private import begin_allocating, end_allocating, get_device_index

_Device = torch.device | int | str | None
_arenas: dict[tuple[str, int], Arena] = {}
_threads: dict[tuple[str, int], int] = {}  # that are within a block


class Export(NamedTuple):
    """What another process needs to map the memory of a tag; address and pieces may be JSON."""

    address: int  #: a tensor lies at tensor.data_ptr() - address
    pieces: list[tuple[int, int]]  #: offset and size in bytes of each
    fds: list[int]  #: a file descriptor of each piece, which the caller closes


@contextlib.contextmanager
def exportable(tag: str) -> Iterator[None]:
    """What this thread allocates on the current GPU within the block can be exported by its tag.

    It lies in pages of its own, which stay where they are until the process ends: what is freed of
    it serves later blocks of the same tag. Where the driver or a container gives no file
    descriptors for memory, a warning says so, and the block is like `tag()`. So it is before
    install().
    """
    index = torch.cuda.current_device() if install.installed() else -1
    arena = _arenas.get((tag, index))
    if index >= 0 and arena is None:
        try:
            arena = _arenas[tag, index] = Arena(index, is_shared=True)
        except _library.Error as error:
            if error.status != _library.Status.E_UNSUPPORTED:
                raise
            warnings.warn(
                f"rebatch: {tag!r} cannot be exported: {str(error).removeprefix('rebatch: ')}",
                stacklevel=user_stacklevel(),
            )
    with install.tag(tag):
        key, thread = (tag, index), threading.get_ident()
        within = _threads.get(key, 0)
        if arena is None or within == thread:
            yield
            return
        if within:
            raise RuntimeError(
                f"rebatch: exportable({tag!r}) is entered while another thread is within such a "
                "block: expected one thread at a time, or another tag"
            )
        begin_allocating(index, arena.id)
        _threads[key] = thread
        try:
            yield
        finally:
            _threads[key] = 0
            end_allocating(index, arena.id)


def export(tag: str, device: _Device = None) -> Export:
    """The memory that was allocated within `exportable(tag)`, for another process.

    What is allocated there later may need another export. Send `fds` over a Unix socket
    (socket.send_fds(), at most 253 at a time), and close them.

    Raises KeyError where nothing of that tag can be exported, and Error where the driver or a
    container refuses.
    """
    arena = _arenas.get((tag, get_device_index(device, optional=True)))
    address, pieces = arena.export() if arena else (0, [])
    if not pieces:
        raise KeyError(
            f"rebatch: nothing of {tag!r} can be exported: allocate it on that GPU within "
            f"`with rebatch.exportable({tag!r}):` after install()"
        )
    return Export(address, [(p.offset, p.bytes) for p in pieces], [p.fd for p in pieces])


class _Mapped:
    """Memory of another process, as PyTorch takes it."""

    def __init__(self, pieces: Any, index: int) -> None:
        handle, address = ctypes.c_void_p(), ctypes.c_void_p()
        options = _library.CudaOptions(ordinal=index)
        _library.check(lib.rebatch_device_open_cuda(ctypes.byref(handle), ctypes.byref(options)))
        try:
            map_pieces = lib.rebatch_export_map
            _library.check(map_pieces(ctypes.byref(address), handle, pieces, len(pieces)))
        except _library.Error:
            lib.rebatch_device_close(handle)
            raise
        size = pieces[-1].offset + pieces[-1].bytes
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address.value, False), "version": 3,
        }  # fmt: skip
        weakref.finalize(self, _unmap, handle, address, pieces, index).atexit = False


def _unmap(handle: Any, address: Any, pieces: Any, index: int) -> None:
    torch.cuda.synchronize(index)
    lib.rebatch_export_unmap(handle, address, pieces, len(pieces))
    lib.rebatch_device_close(handle)


def map_export(
    pieces: Sequence[tuple[int, int]], fds: Sequence[int], device: _Device = None
) -> torch.Tensor:
    """The bytes that another process has exported, as one tensor, without a copy.

    A tensor of the other process that lies at `offset` is `memory[offset:offset + bytes]`, with
    `.view(dtype).view(shape)`. It is to be read: a write fails where the driver maps it read-only.
    It is mapped as long as a tensor of it exists; `fds` can be closed after the call. This process
    needs no install(), and both agree when to read.
    """
    if len(pieces) != len(fds):
        raise ValueError(f"rebatch: there are {len(fds)} fds: expected {len(pieces)}, one a piece")
    rows = [
        _library.ExportPiece(offset=offset, bytes=size, fd=fd)
        for (offset, size), fd in zip(pieces, fds)
    ]
    index = get_device_index(device, optional=True)
    mapped = _Mapped((_library.ExportPiece * len(rows))(*rows), index)
    return torch.as_tensor(mapped, device=torch.device("cuda", index))
