"""The gradients of an effective batch, kept apart from those of the micro-batch that runs.

An OOM in a backward pass then costs one micro-batch: what was accumulated is untouched. Adding two
gradients afterwards gives the bits that autograd gives when it adds them itself.

The accumulators of a batch become .grad and are the program's from then on: the next batch has
others. They are the gradients of the first micro-batch. With a pool that plans they are made before
the batch begins, so every micro-batch but the first of all needs the same memory, which makes it
predictable. A batch that runs as a whole needs none: its gradients are those of its only backward
pass."""

from __future__ import annotations

import abc
import contextlib
import functools
import operator
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch

from rebatch.torch.private import foreach_add_, foreach_copy_, has_compiled_graphs
from rebatch.torch.session.oom import is_oom

if TYPE_CHECKING:
    from rebatch.torch.session.gpu_wait import Work  # needs a PyTorch with torch.distributed


_is_there = functools.partial(operator.is_not, None)
_strided = frozenset([torch.strided])


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


def _as_it_is(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def _is_overwritten(device: Optional[torch.device]) -> bool:
    """Whether a gradient stays only as a copy. The next run of a CUDA graph of torch.compile
    (mode="reduce-overhead") would write into the same memory; PyTorch's own accumulation is refused
    there."""
    return device is not None and has_compiled_graphs(device)


class Accumulators:
    """Sums of gradients. From begin_batch() until the sums are exposed, .grad of the parameters is
    None.

    Gradients of before the batch that keep_earlier() names are added to the sums when these are
    exposed. Until the batch has succeeded they stay as they are; then they get the sums, so that
    .grad has the tensors that it had, as autograd leaves it: they may be views of one buffer."""

    norm: Optional[torch.Tensor] = None  # of all gradients, where it is known
    may_have_graph = True  # gradients, of a backward pass of the program's own

    def __init__(self) -> None:
        self._parameters: List[torch.nn.Parameter] = []
        # In their order. A tensor's own hash is a function in Python, so there is no dict of them.
        self._sums: List[Any] = []  # tensors, and None where there is no gradient yet
        self._has_sum: List[bool] = []  # there is a gradient in this batch
        self._summed: Set[int] = set()  # ids of parameters with dense sums in the batch before
        self._makes_sums = self._keeps_sums = False  # as begin_batch() was told
        self._are_dense = False  # all sums, of which there is one for each parameter
        self._earlier: List[Tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._has_earlier = False  # the sums contain the earlier gradients
        self.are_lent = False  # the gradients of micro-batches, which the next one overwrites

    def launching(self, loss: torch.Tensor) -> ContextManager[Any]:
        """Around the backward pass of the last micro-batch of a batch whose loss is given."""
        return contextlib.nullcontext()

    def put_buffers(self) -> None:
        """The update begins."""

    def keep_earlier(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Before a batch whose gradients are to be added to what is in .grad: whether there is
        something."""
        self._earlier = [(p, p.grad) for p in parameters if p.grad is not None]
        return bool(self._earlier)

    def restore_earlier(self) -> None:
        """After a batch that failed."""
        self.clear()
        for p, gradient in self._earlier:
            p.grad = gradient
        self._earlier = []

    def end_batch(self) -> None:
        """After a batch that succeeded. The sums are the program's now: what it clears from .grad
        is free, but of a batch with keeps_sums."""
        if self._earlier:
            self._give_back_earlier()
        self._earlier = []
        if self._makes_sums and self._sums:
            self._summed = {key for key, _ in self._dense_sums()}
        if not self._keeps_sums:
            self._sums = []

    def begin_batch(
        self,
        parameters: Sequence[torch.nn.Parameter],
        makes_sums: bool = False,
        keeps_sums: bool = False,
    ) -> None:
        """An effective batch begins, or again. With makes_sums, it has several micro-batches whose
        gradients are kept apart, and the sums of those that had a gradient in the batch before are
        made now. With keeps_sums those of the batch before serve again."""
        self._makes_sums, self._keeps_sums = makes_sums, keeps_sums
        known = dict(self._dense_sums()) if keeps_sums else {}  # others are let go here
        self._parameters, keys = list(parameters), list(map(id, parameters))
        self._sums = list(map(known.get, keys))
        self._has_sum = [False] * len(keys)
        self._are_dense = False
        self._has_earlier = False
        self.clear()
        if makes_sums and self._summed and not keeps_sums:
            self._make_sums(map(self._summed.__contains__, keys))

    def _dense_sums(self) -> Iterator[Tuple[int, torch.Tensor]]:
        for p, total in zip(self._parameters, self._sums):
            if total is not None and total.layout is torch.strided and total.dtype is p.dtype:
                yield id(p), total

    def begin_whole(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """An effective batch begins that runs as a whole, with no gradients in .grad: those of its
        only backward pass stay there. False: they have to be taken."""
        device = parameters[0].device if parameters else None
        if self._earlier or _is_overwritten(device):
            return False
        self._parameters, self._sums, self._has_sum = list(parameters), [], []
        self._has_earlier, self._keeps_sums = True, False
        return True

    def _make_sums(self, are_wanted: Iterable[bool]) -> None:
        """An OOM is for the first micro-batch to meet: its gradients can be the sums too."""
        try:
            self._sums = [
                torch.empty_like(p, requires_grad=False) if is_wanted else None
                for p, is_wanted in zip(self._parameters, are_wanted)
            ]
        except Exception as error:
            if not is_oom(error):
                raise

    def forget(self) -> None:
        """Make new accumulators in the next batch, where the parameters then are."""
        self._parameters, self._sums, self._has_sum = [], [], []
        self._summed = set()

    def clear(self) -> None:
        """Drop the gradients of the micro-batch that runs."""
        for p in self._parameters:
            p.grad = None

    def expose(self, is_added_to: bool = False) -> None:
        """Put the sums into .grad, where an optimizer finds them, or autograd, which adds. Those of
        a whole batch are there."""
        if self._earlier and not self._has_earlier:
            have_graph = any(gradient.requires_grad for _, gradient in self._earlier)
            with torch.set_grad_enabled(have_graph):  # the sums then have it too
                self._add_earlier(is_added_to)
        self._has_earlier = True
        for p, total, has_sum in zip(self._parameters, self._sums, self._has_sum):
            if has_sum:
                p.grad = total

    def _add_earlier(self, is_added_to: bool) -> None:
        places = {id(p): i for i, p in enumerate(self._parameters)}
        dense, added = [], []
        for p, earlier in self._earlier:
            i = places.get(id(p))
            if i is None or not self._has_sum[i]:
                p.grad = earlier.clone() if is_added_to else earlier
            elif _is_dense(self._sums[i]) and _is_dense(earlier):
                dense.append(self._sums[i])
                added.append(earlier)
            else:
                self._sums[i] = self._sums[i] + earlier
        if dense:
            foreach_add_(dense, added)

    def _give_back_earlier(self) -> None:
        """Allocates nothing. A gradient with a graph is another tensor, as in autograd."""
        found, totals = [], []
        for p, earlier in self._earlier:
            total = p.grad
            if total is None or total is earlier or total.requires_grad or earlier.requires_grad:
                continue
            if _is_dense(earlier) and _is_dense(total) and total.dtype is earlier.dtype:
                found.append(earlier)
                totals.append(total)
                p.grad = earlier
        if found:
            foreach_copy_(found, totals)

    def given(self) -> List[torch.nn.Parameter]:
        """Those that have got a gradient in this batch."""
        return [p for p, has_sum in zip(self._parameters, self._has_sum) if has_sum]

    def take_exposed(self) -> None:
        """After a backward pass that has added to the sums itself."""
        take = self._taking() or _as_it_is
        for i, p in enumerate(self._parameters):
            gradient = p.grad
            if gradient is not None:
                self._sums[i] = gradient if self._has_sum[i] else take(gradient)
                self._has_sum[i] = True
                p.grad = None

    def add(self) -> None:
        """Add the gradients in .grad. Allocates nothing where they are dense."""
        if not self.may_have_graph:
            self._add()
            return
        with torch.no_grad():
            self._add()

    def _add(self) -> None:
        if not self._add_even():
            self._add_uneven()

    def _add_even(self) -> bool:
        """Whether each parameter has a gradient, and a dense sum or none has one, as in most
        micro-batches. The layouts of the sums are asked once; those that begin_batch() gives are
        dense."""
        found: List[Any] = [p.grad for p in self._parameters]
        if not all(map(_is_there, found)):
            return False
        if not self._are_dense and all(self._has_sum):
            self._are_dense = _strided.issuperset([total.layout for total in self._sums])
        if self._are_dense:
            self._add_each(self._sums, found)
        elif True in self._has_sum or not self._begin_sums(found):
            return False
        self.clear()
        return True

    def _begin_sums(self, found: List[torch.Tensor]) -> bool:
        """Take the first gradients of a batch. False: only some of the sums were made before."""
        if all(map(_is_there, self._sums)):
            if not _strided.issuperset([gradient.layout for gradient in found]):
                return False
            foreach_copy_(self._sums, found)
        elif any(map(_is_there, self._sums)) or self._taking():
            return False
        else:
            self._sums = found
        self._has_sum = [True] * len(found)
        return True

    def _add_uneven(self) -> None:
        sums, has_sum, take = self._sums, self._has_sum, self._taking() or _as_it_is
        totals, added, places, copied = [], [], [], []
        for i, p in enumerate(self._parameters):
            gradient = p.grad
            if gradient is None:
                continue
            total = sums[i]
            if total is None:
                sums[i] = take(gradient)
            elif not (_is_dense(total) and _is_dense(gradient)):
                sums[i] = total + gradient if has_sum[i] else take(gradient)
            elif has_sum[i]:
                totals.append(total)
                added.append(gradient)
            else:
                places.append(total)
                copied.append(gradient)
            has_sum[i] = True
            p.grad = None
        gradient = None  # all are freed in one order, by which a pool plans
        if added:
            self._add_each(totals, added)
        if copied:
            foreach_copy_(places, copied)

    def _add_each(self, totals: List[torch.Tensor], added: List[torch.Tensor]) -> None:
        foreach_add_(totals, added)

    def _taking(self) -> Optional[Callable[[torch.Tensor], torch.Tensor]]:
        """What makes a gradient one that stays; None: all stay as they are."""
        if self.are_lent:
            return torch.clone
        device = self._parameters[0].device if self._parameters else None
        return torch.clone if _is_overwritten(device) else None


class SharedAccumulators(Accumulators, abc.ABC):
    """Those of one rank among several, which sum what each has accumulated."""

    def _give_back_earlier(self) -> None:
        """.grad has views of what is summed."""

    @abc.abstractmethod
    def begin_step(self) -> None:
        """Nothing is summed over the ranks yet."""

    @abc.abstractmethod
    def finish(self, loss: torch.Tensor) -> None:
        """Sum the gradients and the loss over the ranks. After an OOM it may be called again.
        Raises Lost."""

    @abc.abstractmethod
    def sums(self) -> Work:
        """The collectives that finish() has started."""

    @abc.abstractmethod
    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take part in the collectives that are left as a rank that has failed. May run out of
        memory. Raises Lost."""
