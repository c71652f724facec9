"""The gradients of an effective batch in lockstep: each micro-batch's are reduced already, and each
rank has its part. What is left is the loss and the norm."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
import torch.distributed as dist

from rebatch.torch._gradients import Accumulators
from rebatch.torch._lockstep import Lockstep
from rebatch.torch._waits import Work
from rebatch.torch._window import lost_if_failed

_SQUARES, _LOSS = range(2)  # of what the ranks sum


class LockstepAccumulators(Accumulators):
    """Sums of this rank's parts of the gradients, outside of .grad until they are exposed."""

    def __init__(self, lockstep: Lockstep, timeout_seconds: float):
        super().__init__()
        self._lockstep, self._timeout_seconds = lockstep, timeout_seconds
        self.has_norm = False  # finish() finds the norm of all gradients
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing is summed over the ranks yet."""
        self._is_summed = self._is_done = False
        self._numbers: Optional[torch.Tensor] = None
        self._norm: Optional[torch.Tensor] = None

    def finish(self, loss: torch.Tensor) -> None:
        """Sum the loss and the norm over the ranks. After an OOM it may be called again. Raises
        Lost."""
        if self._is_done:
            return
        if not self._is_summed:
            self._note(loss)
            self._sum()
        loss.copy_(self._numbers[_LOSS])
        self._norm = self._numbers[_SQUARES].sqrt()
        self._is_done = True

    def sums(self) -> Work:
        """NCCL's collectives, which have only ordered streams."""
        return Work(self._numbers.device)

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take part in that with zeros. May run out of memory. Raises Lost."""
        if not self._is_summed:
            self._numbers = torch.zeros(2, dtype=torch.float64, device=parameters[0].device)
            self._sum()

    @torch.no_grad()
    def _note(self, loss: torch.Tensor) -> None:
        self._numbers = torch.zeros(2, dtype=torch.float64, device=loss.device)
        given = zip(self._sums, self._has_sum)
        parts = [total.to_local() for total, has_sum in given if has_sum]
        if self.has_norm and parts:
            norms = torch._foreach_norm(parts)
            self._numbers[_SQUARES].copy_(torch.stack(norms).double().square().sum())
        self._numbers[_LOSS].copy_(loss)

    def _sum(self) -> None:
        with lost_if_failed():
            dist.all_reduce(self._numbers, group=self._lockstep.group)
        self._is_summed = True

    @torch.no_grad()
    def clip(self, _parameters: Sequence[torch.Tensor], largest: float) -> None:
        """Scale the gradients so that their norm over all ranks is at most `largest`. Makes no
        collective; a second call changes nothing."""
        if self._norm is None:
            return
        scale = (largest / (self._norm + 1e-6)).clamp(max=1.0)
        parts = [p.grad.to_local() for p in self._lockstep.shards() if p.grad is not None]
        torch._foreach_mul_(parts, [scale.to(part) for part in parts])
        self._norm = None
