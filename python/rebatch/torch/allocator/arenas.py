"""Memory of captured CUDA graphs in rebatch's pool, which is lent between their replays."""

import ctypes
from typing import Any

import torch

from rebatch import _library
from rebatch._library import lib
from rebatch.torch.allocator import install
from rebatch.torch.private import get_device_index


class Arena:
    """The memory of CUDA graphs that are captured with torch.cuda.graph(graph, pool=arena.id).

    A new arena is claimed. After a replay lend() lets the pool use what holds nothing then, and
    claim() has memory mapped there again before the next one: a replay of a graph whose arena is
    lent may end the process. Several graphs may share an arena, if their replays do not overlap.
    drop() comes before a graph whose capture failed is deleted.

    It needs install(). Raises Error where the pool has no virtual memory: its status is
    E_UNSUPPORTED.
    """

    def __init__(
        self, device: torch.device | int | str | None = None, *, is_shared: bool = False
    ) -> None:
        index = get_device_index(device, optional=True)
        install.pool(index)  # or it says what is missing
        torch.cuda.empty_cache()  # so that addresses of an arena that was dropped serve again
        self.id: tuple[int, int] = torch.cuda.graph_pool_handle()
        arena = ctypes.c_void_p()
        self._front = install.front()
        make = self._front.rebatch_torch_make_arena
        _library.check(make(ctypes.byref(arena), index, is_shared, *self.id))
        self._arena: ctypes.c_void_p | None = arena

    def lend(self) -> None:
        """Let the pool use the memory that holds nothing, once the GPU has done its work so far."""
        _library.check(lib.rebatch_arena_lend(self._arena))

    def claim(self) -> bool:
        """Have memory at all addresses again. False: there is none, and nothing changed.

        Raises Error where the GPU failed.
        """
        status = lib.rebatch_arena_claim(self._arena)
        if status == _library.Status.OOM:
            return False
        _library.check(status)
        return True

    def stats(self) -> dict[str, int]:
        """What it holds, by the names in rebatch/arena.h; sizes are in bytes."""
        out = _library.ArenaStats()
        _library.check(lib.rebatch_arena_get_stats(ctypes.byref(out), self._arena))
        return {field[0]: getattr(out, field[0]) for field in out._fields_}

    def export(self) -> tuple[int, Any]:
        """The first address, and what another process can map there, with open descriptors."""
        address, count = ctypes.c_void_p(), ctypes.c_size_t()
        while True:
            room = count.value
            pieces = (_library.ExportPiece * room)()
            status = lib.rebatch_arena_export(
                ctypes.byref(address), pieces, room, ctypes.byref(count), self._arena
            )
            if count.value <= room:
                _library.check(status)
                return address.value or 0, pieces

    def drop(self) -> None:
        """Give all back, but for tensors that still use it, whose memory comes back with them. Its
        graphs must not be replayed any more."""
        if self._arena is not None:
            self._front.rebatch_torch_drop_arena(self._arena)
        self._arena = None
