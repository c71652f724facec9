"""The gradients of an effective batch in lockstep: each micro-batch's are reduced already, and each
rank has its part. What is left is the loss and the norm."""

from __future__ import annotations

from typing import Any, Iterable, List, Sequence

import torch
from torch.distributed.tensor import DTensor

from rebatch.torch.private import foreach_add_
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
        copies = {i: _on_host(p.grad) for i, p in enumerate(self._parameters) if p.grad is not None}
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.clear()
        for i, copy in copies.items():
            self._sums[i] = self._sums[i].add_(copy) if self._has_sum[i] else copy
            self._has_sum[i] = True

    def _add_each(self, totals: List[torch.Tensor], added: List[torch.Tensor]) -> None:
        foreach_add_(_parts(totals), _parts(added))  # which PyTorch dispatches once, not each

    def _from_host(self, device: torch.device) -> None:
        """After an OOM it may be called again."""
        for i, (p, total) in enumerate(zip(self._parameters, self._sums)):
            if total is not None and not isinstance(total, DTensor):
                self._sums[i] = _like(p, total.to(device))

    def finish(self, loss: torch.Tensor) -> None:
        """Sum the loss and the norm over the ranks. After an OOM it may be called again. Raises
        Lost."""
        if self._is_done:
            return
        if self.is_on_host:
            self._from_host(loss.device)
        given = [total if has_sum else None for total, has_sum in zip(self._sums, self._has_sum)]
        self._sums = self._with_earlier(given)
        self._has_sum = [total is not None for total in self._sums]
        if not self._is_summed:
            self._numbers = torch.zeros(USED, dtype=torch.float64, device=loss.device)
            parts = _parts(total for total in self._sums if total is not None)
            self._note_parts(parts, loss, self._model.replicas)
            self._sum_numbers()
        self._take_numbers(loss)
        self._is_done = True

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take part in that with zeros. May run out of memory. Raises Lost."""
        if not self._is_summed:
            self._numbers = torch.zeros(USED, dtype=torch.float64, device=parameters[0].device)
            self._sum_numbers()


def _parts(tensors: Iterable[Any]) -> List[torch.Tensor]:
    """Those of this rank."""
    return [tensor.to_local() for tensor in tensors]


def _on_host(gradient: Any) -> torch.Tensor:
    """A copy of this rank's part, which the stream makes."""
    part = gradient.to_local()
    copy = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
    return copy.copy_(part, non_blocking=True)


def _like(p: Any, part: torch.Tensor) -> DTensor:
    """This rank's part, as a gradient of a parameter."""
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
