"""Tensors that are sent as one: buckets of gradients, and the buffers of modules."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

_ALIGNMENT = 16  # bytes, for kernels that read several numbers at once
_WIDE = (torch.float32, torch.float64)  # can hold a loss


def plan(parameters: Sequence[torch.Tensor], caps: Tuple[int, int]) -> List[List[int]]:
    """The indices of the parameters in each bucket: of one dtype and device, the last parameters
    first, because a backward pass mostly reaches these first. `caps` are the sizes in bytes of the
    first bucket and of the others, above which a bucket is closed."""
    closed: List[List[int]] = []
    open_ones: Dict[tuple, List[int]] = {}
    sizes: Dict[tuple, int] = {}
    for i in reversed(range(len(parameters))):
        p = parameters[i]
        key = p.dtype, p.device
        open_ones.setdefault(key, []).append(i)
        sizes[key] = sizes.get(key, 0) + p.numel() * p.element_size()
        if sizes[key] >= caps[bool(closed)]:
            closed.append(open_ones.pop(key))
            del sizes[key]
    return closed + list(open_ones.values())


class Bucket:
    """Gradients in one tensor, zeros at first. With a tail of so many numbers it has the loss of
    the batch, and for each parameter of the model whether there is a gradient. `sent` is what goes
    to the other ranks: `flat`, or a tensor of another dtype."""

    def __init__(self, parameters: Sequence[torch.Tensor], tail: int, sent: Optional[torch.dtype]):
        dtype = parameters[0].dtype
        step = max(1, _ALIGNMENT // dtype.itemsize)
        offsets, length = [], 0
        for p in parameters:
            offsets.append(length)
            length += -(-p.numel() // step) * step
        self.flat = torch.zeros(length + tail, dtype=dtype, device=parameters[0].device)
        self.views = [_view(self.flat, p, at) for p, at in zip(parameters, offsets)]
        # Made here: what sends a bucket allocates nothing.
        end = self.flat[length:]
        self.loss, self.used = (end[0], end[1:]) if tail else (None, None)
        self.sent = self.flat
        if sent and dtype in _WIDE and not tail:
            self.sent = torch.empty_like(self.flat, dtype=sent)
        self.indices: List[int] = []  # of the parameters
        self.waiting = 0  # for so many gradients
        self.work: Any = None


def _view(flat: torch.Tensor, p: torch.Tensor, offset: int) -> torch.Tensor:
    """A gradient has the strides of its parameter, as autograd makes it."""
    if torch.ops.aten.is_non_overlapping_and_dense(p):
        return flat.as_strided(p.shape, p.stride(), offset)
    return flat[offset : offset + p.numel()].view(p.shape)


def make_buckets(
    parameters: Sequence[torch.Tensor],
    caps: Tuple[int, int],
    tail: int,
    sent: Optional[torch.dtype],
) -> List[Bucket]:
    """In the order in which they are sent. The last one has the tail."""
    planned = plan(parameters, caps)
    if not planned:
        return []
    has_own = sent is not None or parameters[planned[-1][0]].dtype not in _WIDE
    buckets = []
    for number, indices in enumerate(planned):
        is_last = number == len(planned) - 1 and not has_own
        bucket = Bucket([parameters[i] for i in indices], tail if is_last else 0, sent)
        bucket.indices = indices
        buckets.append(bucket)
    if has_own:
        device = parameters[planned[-1][0]].device
        buckets.append(Bucket([torch.empty(0, device=device)], tail, None))
        buckets[-1].views = []
    return buckets


class Buffers:
    """The buffers of modules, in one tensor of each dtype."""

    def __init__(self, tables: Sequence[Dict[str, Optional[torch.Tensor]]]):
        self._places = [(table, name) for table in tables for name in table]
        self._like = [table[name] for table, name in self._places]
        keys = dict.fromkeys((b.dtype, b.device) for b in self._like if b is not None)
        self.flats, self._views = [], [None] * len(self._like)
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
            torch._foreach_copy_(views, buffers)

    @torch.no_grad()
    def unpack(self) -> None:
        buffers, views = self._pairs()
        if buffers:
            torch._foreach_copy_(buffers, views)
