"""The search for the largest size that fits, by tries. Must not know what a try runs."""

from __future__ import annotations

import dataclasses
from typing import Callable

# A size is searched to one in so many; the next larger one may fit too.
EXACT = 2000
# The same where fragments decide, and how far below a size others are looked at.
ROUGH, _BELOW = 64, (0.12, 0.09, 0.06, 0.03)
# Twice the samples need so much more: most of a peak is theirs.
_STEEP = 1.5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that a search may name: multiples of `step` from `smallest` to `largest`."""

    smallest: int = 1
    largest: int = 1 << 20
    step: int = 1

    def at_most(self, size: float) -> int:
        """The largest of them up to `size`, or the smallest."""
        size = int(min(size, self.largest))
        return max(size // self.step * self.step, self.first)

    @property
    def first(self) -> int:
        """The smallest."""
        return -(-max(self.smallest, 1) // self.step) * self.step


@dataclasses.dataclass(frozen=True)
class Line:
    """Peaks in bytes: `fixed`, and `each` for a sample."""

    fixed: float
    each: float

    def meets(self, room: int) -> float:
        """The size whose peak is as much as the room."""
        return (room - self.fixed) / self.each if self.each > 0 else float("inf")


def line_of(peak_at: Callable[[int], int], sizes: Sizes, start: int = 1) -> Line:
    """The line on which peaks lie, by two sizes: from `start` on, and twice that. With few samples
    the peak may be where the optimizer steps, whatever their number; then by a size that needs
    twice that, at whose half it no longer is."""
    low, most = sizes.at_most(start), sizes.at_most(sizes.largest)
    high = sizes.at_most(2 * low) if low < most else low
    peaks = {size: peak_at(size) for size in sorted({low, high})}
    smallest = peaks[low]
    if peaks[high] < _STEEP * smallest:
        while peaks[high] < 2 * smallest and high < most:
            high = sizes.at_most(high * 4)
            peaks[high] = peak_at(high)
        low = sizes.at_most(high / 2)
    if low == high:
        return Line(peaks[high], 0.0)
    peak_low = peaks[low] if low in peaks else peak_at(low)
    each = (peaks[high] - peak_low) / (high - low)
    return Line(peaks[high] - each * high, each)


def largest_size(
    fits: Callable[[int], bool],
    sizes: Sizes,
    start: int,
    parts: Callable[[int], int] = lambda _: EXACT,
) -> tuple[int, int]:
    """The largest size that fits, to one in `parts` of it, and the smallest one that was seen not
    to; 0: none. From `start` on each step is twice the last until a size fits and one does not,
    which are then halved."""
    size = start
    step = max(sizes.step, start // 100 // sizes.step * sizes.step)
    low = high = 0
    while True:
        if fits(size):
            low = size
        else:
            high = size
        if high == sizes.first or low == sizes.at_most(sizes.largest):
            return low, high
        if low and high:
            if high - low <= max(sizes.step, low // parts(low)):
                return low, high
            size = sizes.at_most((low + high) / 2)
            if size == low:  # not all sizes between are multiples
                return low, high
        else:
            size = sizes.at_most(low + step if low else high - step)
            step *= 2


def steady_size(
    fits: Callable[[int], bool], sizes: Sizes, found: tuple[int, int]
) -> tuple[int, int]:
    """What was found, where a size may fit although smaller ones do not: the largest below which
    others fit too."""
    for share in _BELOW:
        size = sizes.at_most(found[0] * (1 - share))
        if size < found[0] and not fits(size):
            below = dataclasses.replace(sizes, largest=size - 1)
            start = sizes.at_most(size * (1 - _BELOW[-1]))
            low, high = largest_size(fits, below, start, lambda _: ROUGH)
            return low, high or size
    return found
