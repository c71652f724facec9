"""The gradients of an effective batch on several ranks: sums in buckets, which are all-reduced in
one fixed order.

The backward pass of the last micro-batch launches a bucket when its gradients are there and all
buckets before it are launched, so that communication runs beside computation. A bucket that is
launched is complete. When that backward pass fails, what was launched stays, and the rest is
launched when the samples have run again, at the latest in finish(): the other ranks wait there."""

from __future__ import annotations

import contextlib
import datetime
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
import torch.distributed as dist

from rebatch.torch.private import foreach_add_, foreach_copy_, foreach_mul_, foreach_zero_
from rebatch.torch.program.gradients import SharedAccumulators
from rebatch.torch.ranks.buckets import Bucket, Buffers, Layouts, put_flags
from rebatch.torch.session.gpu_wait import Work
from rebatch.torch.session.session import Lost


class ReducedAccumulators(SharedAccumulators):
    """Sums of gradients over the micro-batches, and then over the ranks. `buffers` gives the tables
    of the buffers that all ranks have from rank 0."""

    def __init__(
        self,
        group: Any,
        timeout_seconds: float,
        caps: Tuple[int, int],
        sent: Optional[torch.dtype],
        buffers: Callable[[], List[dict[Any, Any]]],
    ):
        super().__init__()
        self._group = weakref.ref(group)  # destroy_process_group() is to end its threads
        self._tables = buffers
        self._layouts = Layouts(caps, sent)
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._device = torch.device("cpu")  # of the gradients
        self._root = dist.get_process_group_ranks(group)[0]
        self._is_root = dist.get_rank(group) == 0
        self._size = dist.get_world_size(group)
        self._lock = threading.Lock()  # autograd has a thread for each device
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing is launched yet."""
        self._buckets: List[Bucket] = []
        self._buffers: Any = None  # Buffers, once they are made
        self._launched = 0  # buckets
        self._is_done = False
        self._error: Optional[BaseException] = None  # of a collective
        self._places: Dict[int, Tuple[int, Bucket]] = {}  # of a parameter, by its id

    # ---- the batch ----

    def begin_batch(
        self,
        parameters: Sequence[torch.nn.Parameter],
        makes_sums: bool = False,
        keeps_sums: bool = False,
    ) -> None:
        """An effective batch begins, or again: what is launched stays."""
        had = self._has_sum
        super().begin_batch(parameters)
        self._make_buckets()
        for number, bucket in enumerate(self._buckets):
            is_launched = number < self._launched
            for i, view in zip(bucket.indices, bucket.views):
                self._sums[i] = view
                self._has_sum[i] = is_launched and had[i]
        self._begin_with_earlier()

    @torch.no_grad()
    def _begin_with_earlier(self) -> None:
        """What was in .grad is averaged over the ranks, as DistributedDataParallel has it: a local
        gradient is reduced, and one that was reduced before stays the same."""
        views, gradients = [], []
        for p, gradient in self._earlier:
            i, _ = self._places[id(p)]
            if not self._is_launched(p):
                views.append(self._sums[i])
                gradients.append(_dense(p, gradient))
                self._has_sum[i] = True
        if views:
            foreach_copy_(views, gradients)
            foreach_mul_(views, 1.0 / self._size)
        self._has_earlier = True

    def _make_buckets(self) -> None:
        if self._buckets:
            return
        buckets = self._layouts.make_buckets(self._parameters)
        self._buffers = Buffers(self._tables())
        self._buckets = buckets
        self._places = {
            id(self._parameters[i]): (i, bucket) for bucket in buckets for i in bucket.indices
        }

    def add(self) -> None:
        self._check_and_drop()
        super().add()

    def take_exposed(self) -> None:
        self._check_and_drop()
        with torch.no_grad():
            for i, p in enumerate(self._parameters):
                if p.grad is not None and p.grad.data_ptr() != self._sums[i].data_ptr():
                    self._sums[i].copy_(p.grad)
                self._has_sum[i] |= p.grad is not None
                p.grad = None

    def _check_and_drop(self) -> None:
        """A gradient that is launched has been counted."""
        for p in self._parameters:
            if p.grad is None:
                continue
            _dense(p, p.grad)
            if self._is_launched(p):
                p.grad = None

    def _is_launched(self, p: torch.Tensor) -> bool:
        return self._places[id(p)][1] in self._buckets[: self._launched]

    def expose(self, is_added_to: bool = False) -> None:
        if not is_added_to:
            super().expose()
            return
        for p, total, has_sum in zip(self._parameters, self._sums, self._has_sum):
            if has_sum and not self._is_launched(p):
                p.grad = total

    # ---- launching ----

    @contextlib.contextmanager
    def launching(self, loss: torch.Tensor) -> Iterator[None]:
        """Within the block the backward pass of the last micro-batch runs. `loss` is that of the
        batch."""
        rest = self._buckets[self._launched :]
        devices = {bucket.flat.device for bucket in self._buckets}
        if len(devices) > 1:  # a thread would launch what another thread's stream computes
            yield
            return
        for bucket in rest:
            bucket.waiting = len(bucket.indices)
        self._ready: Set[int] = set()
        self._loss = loss.detach()
        hooks = [
            self._parameters[i].register_post_accumulate_grad_hook(self._note_ready)
            for bucket in rest
            for i in bucket.indices
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            del self._loss

    def _note_ready(self, p: torch.Tensor) -> None:
        i, bucket = self._places[id(p)]
        with self._lock:
            if i in self._ready:
                self._check_not_launched(p)
                return
            self._ready.add(i)
            bucket.waiting -= 1
            while self._launched < len(self._buckets):
                if self._buckets[self._launched].waiting:
                    return
                self._fill(self._buckets[self._launched])
                self._launch_next(self._loss)

    def _check_not_launched(self, p: torch.Tensor) -> None:
        if self._is_launched(p):
            raise ValueError(
                f"rebatch: a parameter of shape {tuple(p.shape)} has a second gradient in one "
                "backward pass, and its first one is on its way to the other ranks: expected "
                "checkpointing with use_reentrant=False"
            )

    @torch.no_grad()
    def _fill(self, bucket: Bucket) -> None:
        """Add the gradients of the last micro-batch, all of which are there."""
        # By whether there is a sum to add to.
        pairs: Dict[bool, Tuple[List[torch.Tensor], List[torch.Tensor]]]
        pairs = {True: ([], []), False: ([], [])}
        for i, view in zip(bucket.indices, bucket.views):
            views, gradients = pairs[self._has_sum[i]]
            views.append(view)
            gradients.append(_dense(self._parameters[i], self._parameters[i].grad))
        for has_sum, (views, gradients) in pairs.items():
            if views:
                (foreach_add_ if has_sum else foreach_copy_)(views, gradients)
        for i in bucket.indices:
            self._has_sum[i] = True
            self._parameters[i].grad = None

    @torch.no_grad()
    def _launch_next(self, loss: Optional[torch.Tensor]) -> None:
        bucket = self._buckets[self._launched]
        self._zero_missing(bucket)
        if bucket.loss is not None and loss is None:
            bucket.loss.zero_()
            bucket.used.zero_()
        elif bucket.loss is not None:
            bucket.loss.copy_(loss)
            put_flags(bucket.used, self._has_sum)
        if bucket.sent is not bucket.flat:
            bucket.sent.copy_(bucket.flat)
        self._launched += 1
        bucket.work = self._start(dist.all_reduce, bucket.sent)

    def _zero_missing(self, bucket: Bucket) -> None:
        """What no micro-batch has written."""
        pairs = zip(bucket.indices, bucket.views)
        missing = [view for i, view in pairs if not self._has_sum[i]]
        if missing:
            foreach_zero_(missing)

    def _start(self, collective: Callable[..., Any], tensor: torch.Tensor, *arguments: Any) -> Any:
        """After an error no collective is started: the other ranks' ones fail too, or end by their
        own timeout."""
        if self._error is not None:
            return None
        try:
            return collective(tensor, *arguments, group=self._group(), async_op=True)
        except RuntimeError as error:
            self._error = error
            return None

    # ---- the end ----

    def finish(self, loss: torch.Tensor) -> None:
        """Launch what is left, and wait for all. The loss becomes that of all ranks. May be called
        again. Raises Lost."""
        if not self._is_done:
            if self._buffers and self._is_root:
                self._buffers.pack()
            self._launch_rest(loss)
            self._wait()
            self._is_done = True
        if not self._buckets:
            return
        loss.copy_(self._buckets[-1].loss)
        if not all(self._has_sum):  # on some other rank there may be a gradient
            self.sums().wait(self._timeout.total_seconds())  # before they are read
            self._has_sum = [count > 0 for count in self._buckets[-1].used.tolist()]

    def sums(self) -> Work:
        """NCCL's collectives, which have only ordered streams."""
        return Work(self._device)

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take part in the collectives that are left, with any values. May run out of memory before
        the first one. Raises Lost."""
        self._parameters = list(parameters)
        self.clear()
        if not self._buckets:
            self._has_sum = [False] * len(self._parameters)
        self._make_buckets()
        self._launch_rest(None)
        self._wait()

    def _launch_rest(self, loss: Optional[torch.Tensor]) -> None:
        while self._launched < len(self._buckets):
            self._launch_next(loss)
        self._works = [
            self._start(dist.broadcast, flat, self._root) for flat in self._buffers.flats
        ]

    def _wait(self) -> None:
        if self._buckets:
            self._device = self._buckets[0].flat.device
        self._is_on_host = backend_of(self._group(), self._device).name() == "gloo"
        for work in [bucket.work for bucket in self._buckets] + self._works:
            if work is None or self._error is not None:
                continue
            try:
                self._wait_for(work)
            except RuntimeError as error:
                self._error = error
        if self._error is not None:
            raise Lost(str(self._error)) from self._error
        with torch.no_grad():
            for bucket in self._buckets:
                if bucket.sent is not bucket.flat:
                    bucket.flat.copy_(bucket.sent)

    def _wait_for(self, work: Any) -> None:
        """On the host, where the collective runs there: NCCL's ones only order streams."""
        if self._is_on_host:
            work.wait(self._timeout)
        else:
            work.wait()

    def put_buffers(self) -> None:
        """Those of rank 0 become this rank's."""
        if self._buffers and not self._is_root:
            self._buffers.unpack()


class LocalAccumulators(SharedAccumulators):
    """Of a batch whose gradients stay on this rank, as within no_sync()."""

    def begin_step(self) -> None:
        """Nothing is summed over the ranks."""

    def finish(self, loss: torch.Tensor) -> None:
        """The loss is that of this rank."""

    def sums(self) -> Work:
        """None."""
        return Work(torch.device("cpu"))

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """No other rank waits."""


def backend_of(group: Any, device: torch.device) -> Any:
    """What runs a group's collectives on a device. The group itself may have several."""
    return group._get_backend(device)


def _dense(p: torch.Tensor, gradient: Optional[torch.Tensor]) -> torch.Tensor:
    """Its gradient. Raises ValueError for a sparse one."""
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ValueError(
            f"rebatch: a parameter of shape {tuple(p.shape)} has a sparse gradient, which is not "
            "summed over ranks: expected sparse=False"
        )
    return gradient
