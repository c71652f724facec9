"""Figures of PyTorch's native CUDA allocator for a session that does not use a rebatch pool."""

from __future__ import annotations

import ctypes as C
from typing import Any, Dict, Optional, Tuple

import torch

from rebatch import _library as c
from rebatch.torch.private import memory_fraction, memory_stats, reset_peak_memory_stats
from rebatch.torch.session.weak_methods import weakly

# Times that the peak of a callback is measured at each size, and whole steps in which it is. A
# measurement resets PyTorch's peak statistics, which programs read, so there are few of them; the
# first may count what is made once.
_MEASUREMENTS = 2
# After so many steps of a kind without an OOM the figures of a callback are read once in a step:
# PyTorch takes some 10 microseconds for all of them.
_ALIKE_STEPS = 8


class UnknownMeter:
    """For a CPU, whose memory is nobody's to count: nothing is measured, and nothing is refused."""

    def __init__(self) -> None:
        self.asked_bytes = self.promised_bytes = 0
        self.has_failed = False
        self.swallowed = 0
        self.live_at_begin = self.ooms_at_begin = 0
        self.struct = c.Meter(
            begin=lambda _phase, _size, _user: None,
            read=lambda _out, _user: c.Status.E_UNSUPPORTED,
            available=weakly(self._available, gone=c.Status.E_USER),
            release=lambda _user: 0,
        )

    def measure_again(self) -> None:
        pass

    def begin_step(self, kind: tuple[Any, ...]) -> None:
        pass

    def live_bytes(self) -> int:
        return 0

    def oom_count(self) -> int:
        return 0

    def available_bytes(self) -> int:
        """All that C can count to."""
        return int(C.c_uint64(-1).value)

    def _available(self, out: Any, _user: Any) -> int:
        out[0] = self.available_bytes()
        return c.Status.OK


class NativeMeter:
    """A rebatch_meter of torch.cuda's native allocator on one device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._measured: Dict[Tuple[int, int], int] = {}
        self._steps: Dict[tuple[Any, ...], int] = {}  # that were measured, by their kinds
        self._is_measuring = self._is_measuring_step = self._reads_once = False
        self._kept: Optional[dict[Any, Any]] = None  # the figures that were read last
        self._is_fresh = False  # in this step
        self._retries_at_begin = 0
        self.asked_bytes = 0
        self.has_failed = False  # the callback that runs
        self.swallowed = 0  # allocations that failed in callbacks that did not
        self.promised_bytes = 0  # of what is available: to an optimizer, whose state is yet to come
        self.live_at_begin = self.ooms_at_begin = 0  # of the callback that runs
        # Kept, because C holds their addresses.
        self.struct = c.Meter(
            begin=weakly(self._begin, gone=None),
            read=weakly(self._read, gone=c.Status.E_USER),
            available=weakly(self._available, gone=c.Status.E_USER),
            release=weakly(self._release, gone=0),
            outside=weakly(self._outside, gone=0),
        )

    def measure_again(self) -> None:
        """Sizes may need other memory than was measured: after an OOM, or at another level."""
        self._measured.clear()
        self._steps.clear()
        self._reads_once, self._kept = False, None

    def begin_step(self, kind: tuple[Any, ...]) -> None:
        """The first steps of a kind are measured whole: each of their callbacks. Another step has
        no peak, because a part of it is not measured."""
        times = self._steps.get(kind, 0)
        self._is_measuring_step = times < _MEASUREMENTS
        self._reads_once = times >= _ALIKE_STEPS
        if not (self._reads_once and self._is_fresh):
            self._kept = None
        self._is_fresh = False
        if not self._reads_once:
            self._steps[kind] = times + 1

    def _statistics(self) -> dict[Any, Any]:
        statistics: dict[Any, Any] = memory_stats(self._device.index)
        return statistics

    def live_bytes(self) -> int:
        return int(self._statistics()["allocated_bytes"]["all"]["current"])

    def oom_count(self) -> int:
        return int(self._statistics()["num_ooms"])

    def _begin(self, phase: int, size: int, _user: Any) -> None:
        self.asked_bytes, self.has_failed = 0, False
        self.live_at_begin = -1
        times = self._measured.get((phase, size), 0)
        self._is_measuring = self._is_measuring_step or times < _MEASUREMENTS
        if self._is_measuring:
            self._measured[phase, size] = times + 1
            reset_peak_memory_stats(self._device.index)

    def _read(self, out: Any, _user: Any) -> int:
        statistics = self._kept or self._statistics()
        retries = statistics["num_alloc_retries"]
        if self._reads_once and not self._is_measuring:
            self._kept = statistics
            self._is_fresh = True
        allocated = statistics["allocated_bytes"]["all"]
        out[0].live_bytes = allocated["current"]
        is_begin = self.live_at_begin < 0  # C reads the figures at once
        if is_begin:
            self.live_at_begin = allocated["current"]
            self.ooms_at_begin = statistics["num_ooms"]
        elif not self.has_failed:
            self.swallowed += max(0, statistics["num_ooms"] - self.ooms_at_begin)
            self.ooms_at_begin = statistics["num_ooms"]
        # Those of a step that reads once are counted in the next one.
        out[0].retries = 0 if is_begin else retries - self._retries_at_begin
        if not (is_begin and self._reads_once):
            self._retries_at_begin = retries
        out[0].peak_bytes = allocated["peak"] if self._is_measuring else 0
        reserved = statistics["reserved_bytes"]["all"]
        out[0].reserved_bytes = reserved["current"]
        out[0].reserved_peak_bytes = reserved["peak"] if self._is_measuring else 0
        out[0].asked_bytes = self.asked_bytes
        return c.Status.OK

    def _outside(self, _user: Any) -> int:
        """0 where the limit of this process comes first."""
        reserved = self._reserved_bytes()
        free, total = torch.cuda.mem_get_info(self._device)
        limit = int(total * memory_fraction(self._device.index))
        return 0 if limit <= free + reserved else total - free - reserved

    def available_bytes(self) -> int:
        """Memory that can be allocated, but for what is promised."""
        statistics = self._statistics()
        if self._reads_once:
            self._kept, self._is_fresh = statistics, True
        allocated = statistics["allocated_bytes"]["all"]["current"]
        reserved = statistics["reserved_bytes"]["all"]["current"]
        free, total = torch.cuda.mem_get_info(self._device)
        limit = int(total * memory_fraction(self._device.index))
        there = min(free + reserved - allocated, limit - allocated)
        return int(max(0, there - self.promised_bytes))

    def _available(self, out: Any, _user: Any) -> int:
        out[0] = self.available_bytes()
        return c.Status.OK

    def _release(self, _user: Any) -> int:
        before = self._reserved_bytes()
        torch.cuda.empty_cache()
        return before - self._reserved_bytes()

    def _reserved_bytes(self) -> int:
        return int(self._statistics()["reserved_bytes"]["all"]["current"])
