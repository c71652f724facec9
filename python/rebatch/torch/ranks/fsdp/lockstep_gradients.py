"""The gradients of an effective batch in lockstep: each micro-batch's are reduced already, and each
rank has its part. What is left is the loss and the norm."""

from __future__ import annotations

from typing import Any, Iterator, Sequence, Tuple

import torch

from rebatch.torch.ranks.fsdp.sharded_gradients import USED, ShardedAccumulators


class LockstepAccumulators(ShardedAccumulators):
    """Sums of this rank's parts of the gradients, outside of .grad until they are exposed. On the
    host, where a micro-batch does not fit beside them, they are added there, with the same bits."""

    is_on_host = False

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients in .grad."""
        if not self.is_on_host:
            super().add()
            return
        for i, p in enumerate(self._parameters):
            if p.grad is not None:
                gradient, p.grad = p.grad.to("cpu"), None
                self._sums[i] = self._sums[i].add_(gradient) if self._has_sum[i] else gradient
                self._has_sum[i] = True

    def finish(self, loss: torch.Tensor) -> None:
        """Sum the loss and the norm over the ranks. After an OOM it may be called again. Raises
        Lost."""
        if self._is_done:
            return
        if self.is_on_host:
            for i, total in enumerate(self._sums):
                self._sums[i] = None if total is None else total.to(loss.device)
        if not self._is_summed:
            self._numbers = torch.zeros(USED, dtype=torch.float64, device=loss.device)
            given: Iterator[Tuple[Any, bool]] = zip(self._sums, self._has_sum)
            self._note_parts([total.to_local() for total, has_sum in given if has_sum], loss, 1)
            self._sum_numbers()
        self._take_numbers(loss)
        self._is_done = True

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take part in that with zeros. May run out of memory. Raises Lost."""
        if not self._is_summed:
            self._numbers = torch.zeros(USED, dtype=torch.float64, device=parameters[0].device)
            self._sum_numbers()
