"""What micro-batches of the program need by their cost: figures of a device's memory, and a session
of the C library that learns from them. Must not know who makes micro-batches."""

from __future__ import annotations

import ctypes as C
import weakref
from typing import Any, Union

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch.torch.allocator import install as allocator
from rebatch.torch.private import memory_stats, reset_peak_memory_stats
from rebatch.torch.session.native_meter import NativeMeter
from rebatch.torch.session.session import close_session
from rebatch.torch.session.weak_methods import weakly

_UNKNOWN = (1 << 64) - 1


class PoolFigures:
    """Of rebatch's pool on a device."""

    are_known = True

    def __init__(self, device: torch.device):
        self._pool, self._stats = allocator.pool(device), c.PoolStats()

    def begin(self) -> None:
        c.check(lib.rebatch_pool_reset_peaks(self._pool))
        self.read()

    def read(self) -> None:
        c.check(lib.rebatch_pool_get_stats(self._stats, self._pool))
        self.live, self.ooms = self._stats.live_bytes, self._stats.ooms
        self.peak = self._stats.live_peak_bytes

    def available(self) -> int:
        bytes_ = C.c_size_t()
        c.check(lib.rebatch_pool_available(C.byref(bytes_), self._pool))
        return bytes_.value


class NativeFigures:
    """Of PyTorch's allocator on a device."""

    are_known = True

    def __init__(self, device: torch.device):
        self._device, self._meter = device, NativeMeter(device)
        allocator.limit_native(device)

    def begin(self) -> None:
        reset_peak_memory_stats(self._device.index)
        self.read()

    def read(self) -> None:
        statistics = memory_stats(self._device.index)
        allocated = statistics["allocated_bytes"]["all"]
        self.live, self.peak = allocated["current"], allocated["peak"]
        self.ooms = statistics["num_ooms"]

    def available(self) -> int:
        return self._meter.available_bytes()


class NoFigures:
    """Of a CPU, whose memory nobody counts."""

    are_known = False
    live = peak = ooms = 0

    def begin(self) -> None:
        pass

    read = begin

    def available(self) -> int:
        return _UNKNOWN


def figures_of(device: torch.device) -> Union[PoolFigures, NativeFigures, NoFigures]:
    if device.type != "cuda":
        return NoFigures()
    return PoolFigures(device) if allocator.installed() else NativeFigures(device)


class CostMemory:
    """Learns, for each key, what a cost needs. `needed_bytes` of a micro-batch, and `asked_bytes`
    of the request that failed in it, are what C reads, and what is available then."""

    def __init__(self, device: torch.device, options: c.Options):
        self.figures = figures_of(device)
        self.needed_bytes = self.asked_bytes = 0
        self.available_bytes = _UNKNOWN
        self._struct = c.Meter(
            begin=lambda _phase, _size, _user: None,
            read=weakly(self._read, gone=c.Status.E_USER),
            available=weakly(self._get_available, gone=c.Status.E_USER),
            release=lambda _user: 0,
        )
        options.meter = C.pointer(self._struct)
        dry, opened = C.c_void_p(), C.c_void_p()
        c.check(lib.rebatch_device_open_dry(C.byref(dry), C.c_size_t(-1).value, 0))
        c.check(lib.rebatch_open(C.byref(opened), dry, C.byref(options)))
        self.rb = opened.value
        self.close = weakref.finalize(self, close_session, self.rb, dry.value, options)

    def _read(self, out: Any, _user: Any) -> int:
        out[0] = c.MeterReading(peak_bytes=self.needed_bytes, asked_bytes=self.asked_bytes)
        return 0

    def _get_available(self, out: Any, _user: Any) -> int:
        out[0] = self.available_bytes
        return 0

    def learn(self, key: int, cost: int, result: int, budget: int) -> int:
        """rebatch_learn_cost()."""
        out = C.c_size_t(budget)
        c.check(lib.rebatch_learn_cost(self.rb, key + 1, cost, result, C.byref(out)))
        return out.value
