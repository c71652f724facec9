"""The gradients of an effective batch in lockstep: each micro-batch's are reduced already, and each
rank has its part. What is left is the loss and the norm."""

from __future__ import annotations

from typing import Any, Iterator, Sequence, Tuple

import torch

from rebatch.torch.ranks.fsdp.sharded_gradients import USED, ShardedAccumulators


class LockstepAccumulators(ShardedAccumulators):
    """Sums of this rank's parts of the gradients, outside of .grad until they are exposed."""

    def finish(self, loss: torch.Tensor) -> None:
        """Sum the loss and the norm over the ranks. After an OOM it may be called again. Raises
        Lost."""
        if self._is_done:
            return
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
