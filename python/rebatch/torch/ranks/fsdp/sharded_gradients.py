"""The gradients of a model of fully_shard(), of which each rank has a part: what the ranks sum
beside them, so that all clip alike, and a GradScaler decides alike, without more collectives."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from rebatch.torch.private import foreach_mul_, foreach_norm
from rebatch.torch.program.gradients import SharedAccumulators
from rebatch.torch.ranks.fsdp.window_reduction import lost_if_failed
from rebatch.torch.session.gpu_wait import Work

SQUARES, LOSS, INF, USED = range(4)  # of the numbers; from USED on, one for each parameter


class ShardedAccumulators(SharedAccumulators):
    """`model` is a Window or Lockstep."""

    def __init__(self, model: Any, timeout_seconds: float):
        super().__init__()
        self._model, self._timeout_seconds = model, timeout_seconds
        self.has_norm = False  # finish() finds the norm of all gradients
        self.scaler: Any = None  # a GradScaler
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing is summed over the ranks yet."""
        self._is_summed = self._is_done = self._is_unscaled = False
        self._numbers: Any = None  # a tensor, once it is needed
        self._norm: Optional[torch.Tensor] = None

    def sums(self) -> Work:
        """NCCL's collectives, which have only ordered streams."""
        return Work(self._numbers.device)

    @torch.no_grad()
    def _note_parts(self, parts: List[torch.Tensor], loss: torch.Tensor, replicas: int) -> None:
        """Of the gradients of this rank, each of which `replicas` ranks have."""
        if self.scaler is not None:
            self._unscale(parts)
        if self.has_norm and parts:
            norms = foreach_norm(parts)
            self._numbers[SQUARES].copy_(torch.stack(norms).double().square().sum() / replicas)
        self._numbers[LOSS].copy_(loss)

    def _unscale(self, parts: List[torch.Tensor]) -> None:
        """And note whether some value is not finite."""
        parts = [part for part in parts if part.numel()]
        if not parts:
            return
        if not self._is_unscaled:
            factor = self.scaler._scale.double().reciprocal().to(parts[0])
            foreach_mul_(parts, factor)  # allocates nothing
            self._is_unscaled = True
        largest = torch.stack(foreach_norm(parts, float("inf")))
        self._numbers[INF].copy_(largest.isfinite().logical_not().any())

    def _sum_numbers(self) -> None:
        with lost_if_failed():
            dist.all_reduce(self._numbers, group=self._model.group)
        self._is_summed = True

    def _take_numbers(self, loss: torch.Tensor) -> None:
        loss.copy_(self._numbers[LOSS])
        self._norm = self._numbers[SQUARES].sqrt()

    def unscale(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Tell a GradScaler that finish() has unscaled the gradients, and what all ranks found: it
        then decides alike on all of them, without a collective. May be called again."""
        found = (self._numbers[INF] > 0).float()
        for optimizer in optimizers:
            state = scaler._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = {found.device: found.clone()}  # it adds to them
            state["stage"] = OptState.UNSCALED

    @torch.no_grad()
    def clip(self, _parameters: Sequence[torch.Tensor], largest: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most `largest`. Makes no
        collective; a second call changes nothing."""
        if self._norm is None:
            return
        scale = (largest / (self._norm + 1e-6)).clamp(max=1.0)
        parts = [p.grad.to_local() for p in self._model.shards() if p.grad is not None]
        foreach_mul_(parts, [scale.to(part) for part in parts])  # allocates nothing
        self._norm = None
