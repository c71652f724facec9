"""The gradients of an effective batch, kept apart from those of the micro-batch that runs.

An OOM in a backward pass then costs one micro-batch: what was accumulated is untouched. Adding two
gradients afterwards gives the bits that autograd gives when it adds them itself.

The accumulators stay from one batch to the next, so every micro-batch but the first of all needs
the same memory, which makes it predictable. A batch that runs as a whole needs none: its gradients
are those of its only backward pass."""

from __future__ import annotations

from typing import Dict, Sequence

import torch


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


class Accumulators:
    """Sums of gradients. Between begin_batch() and finish(), .grad of the parameters is None."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self._parameters = list(parameters)
        self._sums: Dict[torch.nn.Parameter, torch.Tensor] = {}
        self._has_sum: set = set()  # parameters with a gradient in this batch

    def begin_batch(self, is_whole: bool) -> None:
        """An effective batch begins, or begins again. As a whole: in one micro-batch, if it fits."""
        self._has_sum.clear()
        if is_whole:
            self._sums.clear()
        self.clear()

    def clear(self) -> None:
        """Drop the gradients of the micro-batch that runs."""
        for p in self._parameters:
            p.grad = None

    def expose(self) -> None:
        """Put the sums into .grad, where autograd or an optimizer finds them."""
        for p in self._has_sum:
            p.grad = self._sums[p]

    def take_exposed(self) -> None:
        """After a backward pass that has added to the sums itself."""
        for p in self._parameters:
            if p.grad is not None:
                self._sums[p] = p.grad
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
        self._sums[p] = self._sums[p] + p.grad if p in self._has_sum else p.grad
