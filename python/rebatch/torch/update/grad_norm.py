"""The norm of the gradients of one update, which is computed when it is first read."""

from __future__ import annotations

import weakref
from typing import Any, Optional

import torch

from rebatch.torch.update.double_updates import first_gradient


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class GradNorm:
    """`found` is the norm, where clipping has computed it. Else one gradient tells whether those of
    the update are there still."""

    def __init__(self, update: Any, found: Optional[torch.Tensor]):
        self._value: Any = found
        self._update = weakref.ref(update)
        first = None
        if found is None:
            first = next((g for g in map(first_gradient, update.optimizers) if g is not None), None)
        self._version = 0 if first is None else first._version
        self._first = None if first is None else weakref.ref(first)

    def __reduce__(self) -> Any:
        return _known, (self._value if self._value is None else float(self._value),)

    def read(self) -> float:
        """ValueError where the gradients are gone, or have changed."""
        if self._value is None:
            self._value = self._computed()
        return float(self._value)

    @torch.no_grad()
    def _computed(self) -> Any:
        update = self._update()
        every = [p.grad for p in update.parameters] if update else []
        gradients = [gradient for gradient in every if gradient is not None]
        is_there = bool(gradients) and self._first is not None and gradients[0] is self._first()
        if is_there and gradients[0]._version == self._version:
            norm: Any = torch.nn.utils.get_total_norm(list(map(_values, gradients)))
            return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        what = "changed" if is_there else "gone"
        raise ValueError(
            f"rebatch: the gradients of the update are {what}, and report.grad_norm is computed "
            "when it is first read: expected it to be read before the next step, zero_grad() and "
            "whatever else changes gradients, or clip=, which computes it"
        )


def _known(value: Optional[float]) -> GradNorm:
    """That of a report that was copied or stored."""
    norm = GradNorm.__new__(GradNorm)
    vars(norm).update(_value=value, _update=lambda: None, _first=None, _version=0)
    return norm
