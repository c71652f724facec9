"""The gradients of an effective batch, kept apart from those of the micro-batch that runs.

An OOM in a backward pass then costs one micro-batch: what was accumulated is untouched. Adding two
gradients afterwards gives the bits that autograd gives when it adds them itself.

The accumulators of a batch become .grad and are the program's from then on: the next batch has
others, which are made before it begins, so every micro-batch but the first of all needs the same
memory, which makes it predictable. A batch that runs as a whole needs none: its gradients are those
of its only backward pass."""

from __future__ import annotations

import sys
from typing import Dict, List, Sequence

import torch

from rebatch.torch._oom import is_oom


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


def _form(tensor: torch.Tensor) -> tuple:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


def _to_keep(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that stays. The next run of a CUDA graph of torch.compile (mode="reduce-overhead")
    would write into the same memory; PyTorch's own accumulation is refused there."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees and gradient.is_cuda and trees.get_manager(gradient.device.index, False):
        return gradient.clone()
    return gradient


class Accumulators:
    """Sums of gradients. From begin_batch() until the sums are exposed, .grad of the parameters is
    None.

    Gradients of before the batch that keep_earlier() names are added to the sums when these are
    exposed. Until then they stay as they are."""

    def __init__(self) -> None:
        self._parameters: List[torch.nn.Parameter] = []
        self._sums: Dict[torch.nn.Parameter, torch.Tensor] = {}
        self._has_sum: set = set()  # parameters with a gradient in this batch
        self._earlier: Dict[torch.nn.Parameter, torch.Tensor] = {}
        self._has_earlier = False  # the sums contain the earlier gradients

    def keep_earlier(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Before a batch whose gradients are to be added to what is in .grad."""
        self._earlier = {p: p.grad for p in parameters if p.grad is not None}

    def restore_earlier(self) -> None:
        """After a batch that failed."""
        self.clear()
        for p, gradient in self._earlier.items():
            p.grad = gradient
        self._earlier = {}

    def drop_earlier(self) -> None:
        """After a batch that succeeded."""
        self._earlier = {}

    def begin_batch(self, parameters: Sequence[torch.nn.Parameter], is_cut: bool) -> None:
        """An effective batch begins, or again. It is cut: it has several micro-batches whose
        gradients are kept apart."""
        self._parameters = list(parameters)
        self._has_sum.clear()
        self._has_earlier = False
        self.clear()
        self._make_sums(is_cut)

    def _make_sums(self, is_cut: bool) -> None:
        """In the place of those that the batch before has handed out. An OOM is for the first
        micro-batch to meet: its gradients can be the sums too."""
        mine = {id(p) for p in self._parameters}
        forms = {p: _form(t) for p, t in self._sums.items() if id(p) in mine and _is_dense(t)}
        self._sums.clear()
        if not is_cut:
            return
        try:
            for p, (size, stride, dtype, device) in forms.items():
                self._sums[p] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        except Exception as error:
            if not is_oom(error):
                raise
            self._sums.clear()

    def forget(self) -> None:
        """Make new accumulators in the next batch, where the parameters then are."""
        self._sums.clear()
        self._has_sum.clear()

    def clear(self) -> None:
        """Drop the gradients of the micro-batch that runs."""
        for p in self._parameters:
            p.grad = None

    @torch.no_grad()
    def expose(self, is_added_to: bool = False) -> None:
        """Put the sums into .grad, where an optimizer finds them, or autograd, which adds."""
        if not self._has_earlier:
            self._add_earlier(is_added_to)
        for p in self._has_sum:
            p.grad = self._sums[p]

    def _add_earlier(self, is_added_to: bool) -> None:
        for p, earlier in self._earlier.items():
            if p not in self._has_sum:
                p.grad = earlier.clone() if is_added_to else earlier
            elif _is_dense(self._sums[p]):
                self._sums[p].add_(earlier)
            else:
                self._sums[p] = self._sums[p] + earlier
        self._has_earlier = True

    def take_exposed(self) -> None:
        """After a backward pass that has added to the sums itself."""
        for p in self._parameters:
            if p.grad is not None:
                self._sums[p] = p.grad if p in self._has_sum else _to_keep(p.grad)
                self._has_sum.add(p)
        self.clear()

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients in .grad. Allocates nothing where they are dense."""
        new = [p for p in self._parameters if p.grad is not None]
        added, copied = [], []
        for p in new:
            total = self._sums.get(p)
            if total is None or not (_is_dense(total) and _is_dense(p.grad)):
                self._add_alone(p)
            elif p in self._has_sum:
                added.append((total, p.grad))
            else:
                copied.append((total, p.grad))
        if added:
            torch._foreach_add_(*map(list, zip(*added)))
        if copied:
            torch._foreach_copy_(*map(list, zip(*copied)))
        self._has_sum.update(new)
        self.clear()

    def _add_alone(self, p: torch.nn.Parameter) -> None:
        """The first gradient of all, or one that is sparse."""
        self._sums[p] = self._sums[p] + p.grad if p in self._has_sum else _to_keep(p.grad)
