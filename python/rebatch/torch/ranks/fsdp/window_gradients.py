"""The gradients of an effective batch of a model of fully_shard(): sums over the micro-batches, of
whole parameters, and then over the ranks, of which each keeps its part."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import torch

from rebatch.torch.ranks.buckets import put_flags
from rebatch.torch.ranks.fsdp.sharded_gradients import USED, ShardedAccumulators


class WindowAccumulators(ShardedAccumulators):
    """Between begin_batch() and finish() the parameters are the window's whole ones; after it, the
    parts have their gradients."""

    def clear(self) -> None:
        super().clear()
        if self._model.is_open:
            self._model.attempt_failed()

    def expose(self, is_added_to: bool = False) -> None:
        """After finish() the gradients are where they belong."""
        if not self._is_done:
            super().expose(is_added_to)

    def _taking(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Sums are as wide as the reduction; a micro-batch's gradient need not be."""
        plain, dtype = super()._taking(), self._model.sum_dtype

        def take(gradient: torch.Tensor) -> torch.Tensor:
            own = plain(gradient) if plain else gradient
            return own.to(torch.promote_types(gradient.dtype, dtype))

        return take

    # ---- the end ----

    def finish(self, loss: torch.Tensor) -> None:
        """Sum the gradients and the loss over the ranks. After an OOM it may be called again.
        Raises Lost."""
        if self._is_done:
            return
        self._reduce_all()
        gradients = self._with_earlier(self._model.reduced())
        if not self._is_summed:
            self._note(loss, gradients)
            self._sum_numbers()
        used = self._has_sum  # what is used here is used
        if not all(used):
            self.sums().wait(self._timeout_seconds)  # before they are read
            used = self._numbers[USED:].tolist()
        self._take_numbers(loss)
        kept = {id(p) for p, _ in self._earlier}
        for p, gradient, count in zip(self._model.shards(), gradients, used):
            p.grad = gradient if count or id(p) in kept else None
        self._is_done = True

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take part in the collectives that are left, with zeros. May run out of memory. Raises
        Lost."""
        self._parameters = list(parameters)
        self._sums, self._has_sum = [None] * len(parameters), [False] * len(parameters)
        self.clear()
        if self._is_done:
            return
        self._reduce_all()
        if not self._is_summed:
            self._sum_numbers()

    def _reduce_all(self) -> None:
        """Sum the gradients over the ranks, group by group."""
        if self._numbers is None:
            self._numbers = self._zeros()
        self._model.begin_reduction()
        while self._model.reduce_next(self._sums):
            pass

    def _zeros(self) -> torch.Tensor:
        device = self._parameters[0].device
        return torch.zeros(USED + len(self._parameters), dtype=torch.float64, device=device)

    @torch.no_grad()
    def _note(self, loss: torch.Tensor, gradients: List[Any]) -> None:
        parts = [g.to_local() for g in gradients if g is not None]
        self._note_parts(parts, loss, self._model.replicas)
        put_flags(self._numbers[USED:], self._has_sum)
