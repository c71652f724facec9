"""Tensors that are sent as one: buckets of gradients, and the buffers of modules."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from rebatch.torch.private import foreach_copy_, foreach_zero_

_ALIGNMENT = 16  # bytes, for kernels that read several numbers at once
_WIDE = (torch.float32, torch.float64)  # can hold a loss


def put_flags(numbers: torch.Tensor, flags: Sequence[bool]) -> None:
    """Make each number 1 or 0. Allocates nothing, and waits for nothing: a copy from the host would
    wait for the stream, and so for other ranks, for ever if one is gone."""
    numbers.fill_(1)
    unset = [numbers[i] for i, flag in enumerate(flags) if not flag]
    if unset:
        foreach_zero_(unset)


def plan(parameters: Sequence[torch.Tensor], caps: Tuple[int, int]) -> List[List[int]]:
    """The indices of the parameters in each bucket: of one dtype and device, the last parameters
    first, because a backward pass mostly reaches these first. `caps` are the sizes in bytes of the
    first bucket and of the others, above which a bucket is closed."""
    closed: List[List[int]] = []
    open_ones: Dict[tuple[Any, ...], List[int]] = {}
    sizes: Dict[tuple[Any, ...], int] = {}
    for i in reversed(range(len(parameters))):
        p = parameters[i]
        key = p.dtype, p.device
        open_ones.setdefault(key, []).append(i)
        sizes[key] = sizes.get(key, 0) + p.numel() * p.element_size()
        if sizes[key] >= caps[bool(closed)]:
            closed.append(open_ones.pop(key))
            del sizes[key]
    return closed + list(open_ones.values())


class Layout:
    """Where the parameters `indices` lie in a bucket, which is worked out once for many steps."""

    def __init__(self, parameters: Sequence[torch.Tensor], indices: Sequence[int]):
        self.indices = list(indices)
        mine = [parameters[i] for i in self.indices]
        self.dtype, self.device = mine[0].dtype, mine[0].device
        step = max(1, _ALIGNMENT // self.dtype.itemsize)
        self._places: List[Tuple[torch.Size, Tuple[int, ...], int]] = []
        self.length = 0
        for p in mine:
            self._places.append((p.shape, _strides(p), self.length))
            self.length += -(-p.numel() // step) * step
        self._has_gaps = self.length > sum(p.numel() for p in mine)

    def empty(self, tail: int) -> torch.Tensor:
        """A tensor for them, and for `tail` numbers more. Gaps are zeros, since a communication
        library may be told to look for NaN."""
        make = torch.zeros if self._has_gaps else torch.empty
        return make(self.length + tail, dtype=self.dtype, device=self.device)

    def views(self, flat: torch.Tensor) -> List[torch.Tensor]:
        return [flat.as_strided(*place) for place in self._places]


def _strides(p: torch.Tensor) -> Tuple[int, ...]:
    """A gradient has the strides of its parameter, as autograd makes it."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(p)
    return p.stride() if is_dense else torch.empty(p.shape, device="meta").stride()


class Bucket:
    """Gradients in one tensor, of any contents at first. With a tail of `tail` numbers it has the
    loss of the batch, and for each parameter of the model whether there is a gradient. `sent` is
    what goes to the other ranks: `flat`, or a tensor of another dtype."""

    def __init__(self, layout: Layout, tail: int, sent: Optional[torch.dtype]):
        dtype = layout.dtype
        self.flat = layout.empty(tail)
        self.views = layout.views(self.flat)
        # Made here: what sends a bucket allocates nothing.
        end = self.flat[layout.length :]
        self.loss: Any = end[0] if tail else None
        self.used: Any = end[1:] if tail else None
        self.sent = self.flat
        if sent and dtype in _WIDE and not tail:
            self.sent = torch.empty_like(self.flat, dtype=sent)
        self.indices = layout.indices  # of the parameters
        self.waiting = 0  # gradients that are not there yet
        self.work: Any = None


class Layouts:
    """Those of the buckets, in the order in which they are sent. They are worked out again when the
    parameters are others."""

    def __init__(self, caps: Tuple[int, int], sent: Optional[torch.dtype]):
        self._caps, self._sent = caps, sent
        self._key: List[tuple[Any, ...]] = []
        self._layouts: List[Layout] = []

    def make_buckets(self, parameters: Sequence[torch.Tensor]) -> List[Bucket]:
        """The last one has a tail: a loss, and a number for each parameter."""
        key = [(p.shape, p.stride(), p.dtype, p.device) for p in parameters]
        if key != self._key:
            self._key, self._layouts = key, self._lay_out(parameters)
        tails = [0] * (len(self._layouts) - 1) + [1 + len(parameters)]
        return [Bucket(each, tail, self._sent) for each, tail in zip(self._layouts, tails)]

    def _lay_out(self, parameters: Sequence[torch.Tensor]) -> List[Layout]:
        layouts = [Layout(parameters, indices) for indices in plan(parameters, self._caps)]
        if layouts and (self._sent is not None or layouts[-1].dtype not in _WIDE):
            layouts.append(Layout([torch.empty(0, device=layouts[-1].device)], [0]))
            layouts[-1].indices = []
        return layouts


class Buffers:
    """The buffers of modules, in one tensor of each dtype."""

    def __init__(self, tables: Sequence[Dict[str, Optional[torch.Tensor]]]):
        self._places = [(table, name) for table in tables for name in table]
        self._like: List[Any] = [table[name] for table, name in self._places]
        keys = dict.fromkeys((b.dtype, b.device) for b in self._like if b is not None)
        self.flats: List[torch.Tensor] = []
        self._views: List[Optional[torch.Tensor]] = [None] * len(self._like)
        for dtype, device in keys:
            mine = [
                i
                for i, b in enumerate(self._like)
                if b is not None and (b.dtype, b.device) == (dtype, device)
            ]
            sizes = [self._like[i].numel() for i in mine]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self.flats.append(flat)
            for i, part in zip(mine, flat.split(sizes)):
                self._views[i] = part.view(self._like[i].shape)

    def _pairs(self) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        """Buffers and their places. One that has another size since the batch began is not sent:
        every rank's own stays."""
        now = [table.get(name) for table, name in self._places]
        pairs = [
            (b, view)
            for b, view in zip(now, self._views)
            if b is not None and view is not None and b.shape == view.shape
        ]
        return [b for b, _ in pairs], [view for _, view in pairs]

    @torch.no_grad()
    def pack(self) -> None:
        buffers, views = self._pairs()
        if buffers:
            foreach_copy_(views, buffers)

    @torch.no_grad()
    def unpack(self) -> None:
        buffers, views = self._pairs()
        if buffers:
            foreach_copy_(buffers, views)
