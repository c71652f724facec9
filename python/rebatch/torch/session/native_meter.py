"""Figures of PyTorch's native CUDA allocator for a session that does not use a rebatch pool."""

from __future__ import annotations

import ctypes as C
from typing import Any, Dict, Tuple

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
# After so many steps of a kind without an OOM C calls nothing before and after a callback, and the
# figures of its micro-batches are those of when C asks what is available.
_ALIKE_STEPS = 8


class UnknownMeter:
    """For a CPU, whose memory is nobody's to count: nothing is measured, and nothing is refused."""

    def __init__(self) -> None:
        self.asked_bytes = self.promised_bytes = 0
        self.has_failed = False
        self.swallowed = self.micros = 0
        self.live_at_begin = self.ooms_at_begin = 0
        self._settled = c.MeterReading()
        self._settled_size = C.c_size_t(-1)  # C calls neither begin nor read
        self.struct = c.Meter(
            settled=C.pointer(self._settled),
            settled_size=C.pointer(self._settled_size),
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
        self._sizes: Dict[tuple[Any, ...], int] = {}  # of their largest micro-batches
        self._kind: tuple[Any, ...] = ()
        self._is_measuring = self._is_measuring_step = self._is_alike = False
        self._settled = c.MeterReading()  # what C takes in place of a call
        self._settled_size = C.c_size_t()  # of micro-batches for which it does
        self.micros = 0  # that this step has accumulated
        self._was_asked = False  # in this step, what is available: _settled is of now
        self._was_asked_with_sums = False  # and after its first micro-batch
        self._most = 0  # that could be allocated in all when the device was asked in this step
        self._unused = 0  # of that, when PyTorch was asked last
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
            settled=C.pointer(self._settled),
            settled_size=C.pointer(self._settled_size),
        )

    def measure_again(self) -> None:
        """Sizes may need other memory than was measured: after an OOM, or at another level."""
        self._measured.clear()
        self._steps.clear()
        self._sizes.clear()
        self._is_alike, self._settled_size.value = False, 0

    def begin_step(self, kind: tuple[Any, ...]) -> None:
        """The first steps of a kind are measured whole: each of their callbacks. Another step has
        no peak, because a part of it is not measured."""
        times = self._steps.get(kind, 0)
        self._kind, self._is_measuring = kind, False
        self._is_measuring_step = times < _MEASUREMENTS
        self._is_alike = times >= _ALIKE_STEPS
        self._settled_size.value = self._sizes.get(kind, 0) if self._is_alike else 0
        if not self._is_alike:
            self._steps[kind] = times + 1
        elif not self._was_asked:
            self._settle(self._statistics())
        self._was_asked = self._was_asked_with_sums = False
        self._most = self.micros = 0

    def _settle(self, statistics: dict[Any, Any]) -> None:
        """What C takes from now on, unless an allocation has failed, or nearly, of which it is to
        be told."""
        failed = statistics["num_ooms"], statistics["num_alloc_retries"]
        if failed != (self.ooms_at_begin, self._retries_at_begin):
            self._settled_size.value = 0
            return
        self.live_at_begin = statistics["allocated_bytes"]["all"]["current"]
        self._settled.live_bytes = self.live_at_begin
        self._settled.reserved_bytes = statistics["reserved_bytes"]["all"]["current"]

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
        if size > self._sizes.get(self._kind, 0):
            self._sizes[self._kind] = size
        times = self._measured.get((phase, size), 0)
        self._is_measuring = self._is_measuring_step or times < _MEASUREMENTS
        if self._is_measuring:
            self._measured[phase, size] = times + 1
            reset_peak_memory_stats(self._device.index)

    def _read(self, out: Any, _user: Any) -> int:
        statistics, reading = self._statistics(), out[0]
        allocated = statistics["allocated_bytes"]["all"]
        reserved = statistics["reserved_bytes"]["all"]
        ooms, retries = statistics["num_ooms"], statistics["num_alloc_retries"]
        reading.live_bytes, reading.reserved_bytes = allocated["current"], reserved["current"]
        if self._is_measuring:
            reading.peak_bytes = allocated["peak"]
            reading.reserved_peak_bytes = reserved["peak"]
        if self.live_at_begin < 0:  # C reads the figures at once
            self.live_at_begin, self.ooms_at_begin = allocated["current"], ooms
            if not self._is_alike:  # else those of the last step are counted in this one
                self._retries_at_begin = retries
            return 0
        self._is_measuring = False
        if not self.has_failed:
            self.swallowed += max(0, ooms - self.ooms_at_begin)
        self.ooms_at_begin = ooms
        reading.retries, reading.asked_bytes = retries - self._retries_at_begin, self.asked_bytes
        self._retries_at_begin = retries
        return 0

    def _outside(self, _user: Any) -> int:
        """0 where the limit of this process comes first."""
        reserved = self._reserved_bytes()
        free, total = mem_get_info(self._device.index)
        limit = int(total * memory_fraction(self._device.index))
        return 0 if limit <= free + reserved else total - free - reserved

    def available_bytes(self) -> int:
        """Memory that can be allocated, but for what is promised."""
        statistics = self._statistics()
        allocated = statistics["allocated_bytes"]["all"]["current"]
        return int(max(0, self._most_bytes(statistics) - allocated - self.promised_bytes))

    def _most_bytes(self, statistics: dict[Any, Any]) -> int:
        """That can be allocated in all, by what the device has."""
        free, total = mem_get_info(self._device.index)
        reserved = int(statistics["reserved_bytes"]["all"]["current"])
        return min(free + reserved, int(total * memory_fraction(self._device.index)))

    def _available(self, out: Any, _user: Any) -> int:
        """A step like those before it asks the device once, whose figures change with other
        processes, and PyTorch before the first micro-batch and the second one, which finds the sums
        of the first: those after it find what it found."""
        is_settled = bool(self._settled_size.value)
        if not (is_settled and self._was_asked_with_sums):
            statistics = self._statistics()
            if not (self._is_alike and self._most):
                self._most = self._most_bytes(statistics)
            self._unused = self._most - statistics["allocated_bytes"]["all"]["current"]
            if is_settled:
                self._was_asked, self._was_asked_with_sums = True, self.micros > 0
                self._settle(statistics)
        out[0] = max(0, self._unused - self.promised_bytes)
        return 0

    def _release(self, _user: Any) -> int:
        before = self._reserved_bytes()
        torch.cuda.empty_cache()
        return before - self._reserved_bytes()

    def _reserved_bytes(self) -> int:
        return int(self._statistics()["reserved_bytes"]["all"]["current"])
