"""Figures of PyTorch's native CUDA allocator for a session that does not use a rebatch pool."""

from __future__ import annotations

import ctypes as C
from typing import Any, Dict, Optional, Tuple

import torch

from rebatch import _library as c
from rebatch.torch.private import (
    mem_get_info,
    memory_fraction,
    memory_stats,
    reset_peak_memory_stats,
)
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
        self._was_asked = False  # in this step, what is available: _kept is of now
        self._most = 0  # that could be allocated in all when the device was asked in this step
        self._reading = c.MeterReading()
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
        if not (self._reads_once and self._was_asked):
            self._kept = None
        self._was_asked, self._most = False, 0
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
        statistics = self._kept
        if statistics is None or self._is_measuring:
            statistics = self._statistics()
            self._kept = statistics if self._reads_once and not self._is_measuring else None
            self._fill(statistics, self._is_measuring)
        ooms, retries = statistics["num_ooms"], statistics["num_alloc_retries"]
        out[0] = self._reading
        if self.live_at_begin < 0:  # C reads the figures at once
            self.live_at_begin, self.ooms_at_begin = self._reading.live_bytes, ooms
            if not self._reads_once:  # else those of a step are counted in the next one
                self._retries_at_begin = retries
            return 0
        if not self.has_failed:
            self.swallowed += max(0, ooms - self.ooms_at_begin)
            self.ooms_at_begin = ooms
        if retries != self._retries_at_begin or self.asked_bytes:
            out[0].retries, out[0].asked_bytes = retries - self._retries_at_begin, self.asked_bytes
            self._retries_at_begin = retries
        return 0

    def _fill(self, statistics: dict[Any, Any], has_peak: bool) -> None:
        """What C is to read."""
        allocated, reserved = statistics["allocated_bytes"]["all"], statistics["reserved_bytes"]
        reading, reserved = self._reading, reserved["all"]
        reading.live_bytes, reading.reserved_bytes = allocated["current"], reserved["current"]
        reading.peak_bytes = allocated["peak"] if has_peak else 0
        reading.reserved_peak_bytes = reserved["peak"] if has_peak else 0

    def _outside(self, _user: Any) -> int:
        """0 where the limit of this process comes first."""
        reserved = self._reserved_bytes()
        free, total = mem_get_info(self._device)
        limit = int(total * memory_fraction(self._device.index))
        return 0 if limit <= free + reserved else total - free - reserved

    def available_bytes(self) -> int:
        """Memory that can be allocated, but for what is promised."""
        statistics = self._statistics()
        return self._left(statistics, self._most_bytes(statistics))

    def _most_bytes(self, statistics: dict[Any, Any]) -> int:
        """That can be allocated in all, by what the device has."""
        free, total = mem_get_info(self._device)
        reserved = int(statistics["reserved_bytes"]["all"]["current"])
        return min(free + reserved, int(total * memory_fraction(self._device.index)))

    def _left(self, statistics: dict[Any, Any], most: int) -> int:
        allocated = statistics["allocated_bytes"]["all"]["current"]
        return int(max(0, most - allocated - self.promised_bytes))

    def _available(self, out: Any, _user: Any) -> int:
        """A step that reads once asks the device once too: PyTorch's figures change with each
        micro-batch, and the device's with other processes."""
        statistics = self._statistics()
        if not (self._reads_once and self._most):
            self._most = self._most_bytes(statistics)
        out[0] = self._left(statistics, self._most)
        if self._reads_once:
            self._kept, self._was_asked = statistics, True
            self._fill(statistics, has_peak=False)
        return 0

    def _release(self, _user: Any) -> int:
        before = self._reserved_bytes()
        torch.cuda.empty_cache()
        return before - self._reserved_bytes()

    def _reserved_bytes(self) -> int:
        return int(self._statistics()["reserved_bytes"]["all"]["current"])
