"""Gradients of one micro-batch, kept apart from those of the micro-batches before it.

An OOM in a backward pass then costs one micro-batch: what was accumulated is untouched. Adding two
gradients afterwards gives the bits that autograd gives when it adds them itself."""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch


class FreshGradients:
    """Takes the gradients of parameters away for a backward pass, and adds the new ones to them."""

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self._parameters = parameters
        self._before: List[Optional[torch.Tensor]] = []

    def begin(self) -> None:
        """From here on .grad is None."""
        self._before = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None

    def undo(self) -> None:
        """Drop the new gradients: .grad is as it was before begin()."""
        for p, before in zip(self._parameters, self._before):
            p.grad = before
        self._before = []

    def add(self) -> None:
        """.grad is the sum of both. Allocates nothing where both are dense."""
        pairs = [
            (before, p.grad)
            for p, before in zip(self._parameters, self._before)
            if before is not None and p.grad is not None
        ]
        dense = [(b, g) for b, g in pairs if b.layout == g.layout == torch.strided]
        with torch.no_grad():
            if dense:
                torch._foreach_add_([b for b, _ in dense], [g for _, g in dense])
            for b, g in pairs:
                if not b.layout == g.layout == torch.strided:
                    b.add_(g)
        for p, before in zip(self._parameters, self._before):
            if before is not None:
                p.grad = before
        self._before = []
