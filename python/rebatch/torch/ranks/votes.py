"""Votes of the ranks that train one model: the C library's rebatch_group, on a gloo group of its
own, which needs no stream and outlives an NCCL group that has failed."""

from __future__ import annotations

import contextlib
import ctypes as C
import datetime
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, cast

import torch
import torch.distributed as dist

from rebatch import _library as c
from rebatch.torch.private import get_default_store
from rebatch.torch.session.weak_methods import weakly

# A rank that has seen a vote fail waits for the others to say that they have, which see it within
# the timeout; for the last one it waits so long.
_TELL_SECONDS = 2.0
_SIGN = 1 << 63
_NO_VALUE = {0: 0, 1: -1, 2: 0}  # by reduction: what changes no word, as a signed number
_MIN = 1
_OPS = {0: "SUM", 1: "MIN", 2: "MAX"}


class Votes:
    """All-reduces of a few words. Each rank adds its `values`, a fixed number of floats."""

    def __init__(self, parent: Any, timeout_seconds: float, values: int):
        self.rank, self.size = dist.get_rank(parent), dist.get_world_size(parent)
        self._is_fake = dist.get_backend(parent) == "fake"  # all ranks are as this one
        self.is_local = False  # so are they in a batch whose gradients stay on this rank
        ranks = dist.get_process_group_ranks(parent)
        group = cast(
            Any,
            dist.new_group(
                ranks,
                timeout=datetime.timedelta(seconds=timeout_seconds),
                backend="gloo",
                use_local_synchronization=len(ranks) < dist.get_world_size(),
            ),
        )
        # destroy_process_group() is to end its threads: one that runs while Python ends may abort
        # the process.
        self._group = weakref.ref(group)
        name = f"rebatch/{group.group_name}"
        self._store = dist.distributed_c10d.PrefixStore(name, get_default_store())
        self.timeout_seconds = timeout_seconds
        self.values = [0.0] * values
        self._received = [0.0] * values * self.size
        self.lost = ""  # what was wrong with the connection
        self.on_abort: Callable[[], Any] = lambda: None
        self.missing: Optional[int] = None  # who did not come, where it is known
        self._has_asked = self._has_aborted = False
        self._buffers: Dict[
            tuple[Any, ...], tuple[Any, ...]
        ] = {}  # by the number of words and the reduction
        self.table = c.Group(
            rank=self.rank,
            size=self.size,
            all_reduce=weakly(self._all_reduce, gone=c.Status.E_PEER),
            missing=weakly(self._get_missing, gone=self.size),
            abort=weakly(self._abort, gone=None),
        )

    @property
    def group(self) -> Any:
        """That of gloo; None once torch.distributed has destroyed it."""
        return self._group()

    def check(self) -> None:
        """Raises RuntimeError where the program has destroyed the group."""
        if self.group is None and not self.lost:
            raise RuntimeError(
                "rebatch: torch.distributed has destroyed its process groups: expected "
                "destroy_process_group() after the last call of a Step, and a new Step for new "
                "groups"
            )

    def received(self, which: int) -> List[float]:
        """That of the values of each rank, in the last vote."""
        return self._received[which :: len(self.values)]

    def smallest(self, words: Any) -> int:
        """Make each of these words the smallest of all ranks: a status."""
        return self._all_reduce(words, len(words), _MIN, 0, None)

    # ---- what C calls ----

    def _all_reduce(self, words: Any, count: int, reduction: int, _timeout_ms: int, _: Any) -> int:
        if self.lost:
            return c.Status.E_PEER
        try:
            self.check()
            tensor, numbers, floats, options = self._buffer(count, reduction)
            own, each = count + self.rank * len(self.values), len(self.values)
            is_alone = self._is_fake or self.is_local
            C.memmove(tensor.data_ptr(), words, 8 * count)
            numbers[count:] = [_NO_VALUE[reduction]] * (len(numbers) - count)
            floats[own : own + each] = self.values
            _flip(numbers, reduction)
            if is_alone:
                numbers[:count] = [n * (1 if reduction else self.size) for n in numbers[:count]]
            else:
                self.group.allreduce([tensor], options).wait()
            _flip(numbers, reduction)
            C.memmove(words, tensor.data_ptr(), 8 * count)
            self._received = self.values * self.size if is_alone else floats[count:]
            return c.Status.OK
        except BaseException as error:  # an interrupt, too, ends the group
            self.note_lost(error)
            return c.Status.E_PEER

    def _buffer(self, count: int, reduction: int) -> tuple[Any, ...]:
        if (count, reduction) not in self._buffers:
            length = count + self.size * len(self.values)
            numbers = (C.c_int64 * length)()  # not PyTorch's memory, which may run out
            floats = (C.c_double * length).from_buffer(numbers)
            tensor = torch.frombuffer(numbers, dtype=torch.int64)
            options = dist.AllreduceOptions()
            options.reduceOp = getattr(dist.ReduceOp, _OPS[reduction])
            options.asyncOp = False
            self._buffers[count, reduction] = tensor, numbers, floats, options
        return self._buffers[count, reduction]

    def note_lost(self, error: BaseException) -> None:
        """The connection to another rank is lost, in a vote or in a collective of the program."""
        self.lost = self.lost or (str(error).strip() or type(error).__name__).splitlines()[0]
        if self.group is not None and not self._has_asked:
            self._has_asked = True
            dist.destroy_process_group(self.group)  # ranks that wait in a vote see it at once
            self._abort(None)  # before NCCL's own timeout, which ends the process
            self.missing = self._who_is_missing()

    def _get_missing(self, _: Any) -> int:
        return self.size if self.missing is None else self.missing

    def _who_is_missing(self) -> Optional[int]:
        """Of those that have not said that the group has failed, if it is one."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self._store.set(f"lost/{self.rank}", "1")
            until, is_last = time.monotonic() + self.timeout_seconds + _TELL_SECONDS, False
            while others and time.monotonic() < until:
                if len(others) == 1 and not is_last:
                    until, is_last = time.monotonic() + _TELL_SECONDS, True
                others = [rank for rank in others if not self._store.check([f"lost/{rank}"])]
                time.sleep(0.01)
        except RuntimeError:  # the rank that has the store is gone
            others = [0] if self.rank else []
        return others[0] if len(others) == 1 else None

    def _abort(self, _: Any) -> None:
        if not self._has_aborted:
            self._has_aborted = True
            with contextlib.suppress(Exception):
                self.on_abort()


def _flip(numbers: Any, reduction: int) -> None:
    """Between unsigned numbers and signed ones in the same order."""
    if reduction:
        numbers[:] = [n ^ -_SIGN for n in numbers]
