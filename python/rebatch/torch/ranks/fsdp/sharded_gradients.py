"""The gradients of a model of fully_shard(), of which each rank has a part: what the ranks sum
beside them, so that all clip alike, and a GradScaler decides alike, without more collectives."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from rebatch.torch.private import foreach_add_, foreach_mul_, foreach_norm
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
        self.norm = None

    def restore_earlier(self) -> None:
        for p in self._model.shards():
            p.grad = None
        super().restore_earlier()

    @torch.no_grad()
    def _with_earlier(self, gradients: List[Any]) -> List[Any]:
        """Those of this rank's parts, and what they are added to. May be called again."""
        kept: Dict[int, Any] = {id(p): gradient for p, gradient in self._earlier}
        earlier = [kept.get(id(p)) for p in self._model.shards()]
        both = [(g, e) for g, e in zip(gradients, earlier) if g is not None and e is not None]
        if both and not self._has_earlier:
            foreach_add_([g.to_local() for g, _ in both], [e.to_local() for _, e in both])
        self._has_earlier = True
        return [e if g is None else g for g, e in zip(gradients, earlier)]

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
        self.norm = self._numbers[SQUARES].sqrt() if self.has_norm else None

    def unscale(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Tell a GradScaler that finish() has unscaled the gradients, and what all ranks found: it
        then decides alike on all of them, without a collective. May be called again."""
        found = (self._numbers[INF] > 0).float()
        for optimizer in optimizers:
            state = scaler._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = {found.device: found.clone()}  # it adds to them
            state["stage"] = OptState.UNSCALED

    @torch.no_grad()
    def clip(self, _parameters: Sequence[torch.Tensor], largest: float) -> Any:
        """Scale the gradients so that their norm over all ranks is at most `largest`: the norm
        before. Makes no collective; a second call changes nothing, and returns None."""
        if self.norm is None:
            return None
        scale = (largest / (self.norm + 1e-6)).clamp(max=1.0)
        parts = [p.grad.to_local() for p in self._model.shards() if p.grad is not None]
        foreach_mul_(parts, [scale.to(part) for part in parts])  # allocates nothing
        found, self.norm = self.norm, None
        return found
