"""The gradients of an effective batch of a model of fully_shard(): sums over the micro-batches, of
whole parameters, and then over the ranks, of which each keeps its part."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from rebatch.torch._gradients import Accumulators
from rebatch.torch._waits import Work
from rebatch.torch._window import Window
from rebatch.torch._window_reduction import lost_if_failed

_SQUARES, _LOSS, _INF, _USED = range(4)  # of what the ranks sum beside the gradients


class WindowAccumulators(Accumulators):
    """Between begin_batch() and finish() the parameters are the window's whole ones; after it, the
    parts have their gradients."""

    def __init__(self, window: Window, timeout_seconds: float):
        super().__init__()
        self._window, self._timeout_seconds = window, timeout_seconds
        self.has_norm = False  # finish() finds the norm of all gradients
        self.scaler: Optional[Any] = None  # a GradScaler
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing is reduced yet."""
        self._is_summed = self._is_done = self._is_unscaled = False
        self._numbers: Optional[torch.Tensor] = None
        self._norm: Optional[torch.Tensor] = None

    def clear(self) -> None:
        super().clear()
        if self._window.is_open:
            self._window.attempt_failed()

    def expose(self, is_added_to: bool = False) -> None:
        """After finish() the gradients are where they belong."""
        if not self._is_done:
            super().expose(is_added_to)

    def _taking(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Sums are as wide as the reduction; a micro-batch's gradient need not be."""
        take, dtype = super()._taking(), self._window.sum_dtype
        return lambda gradient: take(gradient).to(torch.promote_types(gradient.dtype, dtype))

    # ---- the end ----

    def finish(self, loss: torch.Tensor) -> None:
        """Sum the gradients and the loss over the ranks. After an OOM it may be called again.
        Raises Lost."""
        if self._is_done:
            return
        if self._numbers is None:
            self._numbers = self._zeros()
        self._window.begin_reduction()
        while self._window.reduce_next(self._sums):
            pass
        gradients = self._window.reduced()
        if not self._is_summed:
            self._note(loss, gradients)
            self._sum_numbers()
        used = self._has_sum  # what is used here is used
        if not all(used):
            self.sums().wait(self._timeout_seconds)  # before they are read
            used = self._numbers[_USED:].tolist()
        loss.copy_(self._numbers[_LOSS])
        self._norm = self._numbers[_SQUARES].sqrt()
        for p, gradient, count in zip(self._window.shards(), gradients, used):
            p.grad = gradient if count else None
        self._is_done = True

    def sums(self) -> Work:
        """NCCL's collectives, which have only ordered streams."""
        return Work(self._numbers.device)

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take part in the collectives that are left, with zeros. May run out of memory. Raises
        Lost."""
        self._parameters = list(parameters)
        self._sums, self._has_sum = [None] * len(parameters), [False] * len(parameters)
        self.clear()
        if self._is_done:
            return
        if self._numbers is None:
            self._numbers = self._zeros()
        self._window.begin_reduction()
        while self._window.reduce_next(self._sums):
            pass
        if not self._is_summed:
            self._sum_numbers()

    def _zeros(self) -> torch.Tensor:
        device = self._parameters[0].device
        return torch.zeros(_USED + len(self._parameters), dtype=torch.float64, device=device)

    @torch.no_grad()
    def _note(self, loss: torch.Tensor, gradients: List[Optional[torch.Tensor]]) -> None:
        parts = [g.to_local() for g in gradients if g is not None]
        if self.scaler is not None:
            self._unscale(parts)
        if self.has_norm and parts:
            norms = torch._foreach_norm(parts)
            squares = torch.stack(norms).double().square().sum()
            self._numbers[_SQUARES].copy_(squares / self._window.replicas)
        self._numbers[_LOSS].copy_(loss)
        self._numbers[_USED:].copy_(torch.tensor(self._has_sum))

    def _unscale(self, parts: List[torch.Tensor]) -> None:
        """And note whether some value is not finite."""
        parts = [part for part in parts if part.numel()]
        if not parts:
            return
        if not self._is_unscaled:
            factor = self.scaler._scale.double().reciprocal().to(parts[0])
            torch._foreach_mul_(parts, factor)  # allocates nothing
            self._is_unscaled = True
        largest = torch.stack(torch._foreach_norm(parts, float("inf")))
        self._numbers[_INF].copy_(largest.isfinite().logical_not().any())

    def unscale(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Tell a GradScaler that finish() has unscaled the gradients, and what all ranks found: it
        then decides alike on all of them, without a collective. May be called again."""
        found = (self._numbers[_INF] > 0).float()
        for optimizer in optimizers:
            state = scaler._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = {found.device: found.clone()}  # it adds to them
            state["stage"] = OptState.UNSCALED

    def _sum_numbers(self) -> None:
        with lost_if_failed():
            dist.all_reduce(self._numbers, group=self._window.group)
        self._is_summed = True

    @torch.no_grad()
    def clip(self, _parameters: Sequence[torch.Tensor], largest: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most `largest`. Makes no
        collective; a second call changes nothing."""
        if self._norm is None:
            return
        scale = (largest / (self._norm + 1e-6)).clamp(max=1.0)
        parts = [p.grad.to_local() for p in self._window.shards() if p.grad is not None]
        scales = [scale.to(part) for part in parts]
        torch._foreach_mul_(parts, scales)  # allocates nothing
        self._norm = None
