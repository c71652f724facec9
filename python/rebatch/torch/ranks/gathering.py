"""The rows of all ranks' samples, for a loss over all of them.

A rank whose second pass runs out of memory embeds its samples again, at another cut, so that its
rows may be others: the ranks meet before the loss, and once more when their gradients are there,
until all of them have come to the end with the same rows."""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch

from rebatch.torch.program.embeddings import check_alike
from rebatch.torch.ranks.ranks import Ranks
from rebatch.torch.session.oom import is_oom

_EMBEDDED, _AT_END, _FAILED = range(3)  # what a rank says


class Gathering:
    """Of one batch after another."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.is_over = True  # all ranks are at the end, or one has failed

    @property
    def size(self) -> int:
        """Of the ranks."""
        return self._ranks.size

    def begin(self) -> None:
        """A batch begins."""
        self.is_over = False

    def fail(self) -> None:
        """This rank does not come to the end."""
        if not self.is_over:
            self._ranks.exchange(_FAILED, 0, "")
            self.is_over = True

    def meet(
        self, tensors: List[torch.Tensor], is_at_end: bool = False
    ) -> Optional[Tuple[List[torch.Tensor], int]]:
        """All ranks' rows, in their order, and where this one's begin; None where it is over. All
        ranks call this together. May run out of memory, and is then called again."""
        while not self.is_over:
            forms = [(tuple(t.shape[1:]), str(t.dtype)) for t in tensors]
            state = _AT_END if is_at_end else _EMBEDDED
            said = self._ranks.exchange(state, len(tensors[0]), str(forms))
            states, rows, numbers = zip(*said)
            self.is_over = _FAILED in states or _EMBEDDED not in states
            if self.is_over:
                break
            if len(set(numbers)) > 1:
                self.is_over = True  # on all ranks
                check_alike(self._ranks.everyones(forms))
            counts = list(map(int, rows))
            found = self._gather(tensors, counts)
            if found is not None:
                return found, sum(counts[: self._ranks.rank])
        return None

    def _gather(
        self, tensors: List[torch.Tensor], counts: List[int]
    ) -> Optional[List[torch.Tensor]]:
        """None where another rank has no memory for them."""
        try:
            places = [_Place(tensor.detach(), counts) for tensor in tensors]
        except Exception as error:
            if is_oom(error):
                self._ranks.are_all(False)
            raise
        if not self._ranks.are_all(True):
            return None
        for place in places:
            try:
                self._ranks.all_gather(place.every, place.own)
            except RuntimeError as error:
                raise self._ranks.lost(error) from error
        return [place.rows() for place in places]


class _Place:
    """For one tensor of all ranks, each padded to the longest."""

    def __init__(self, tensor: torch.Tensor, counts: List[int]):
        self._counts, most = counts, max(counts)
        self._all = tensor.new_empty((len(counts), most, *tensor.shape[1:]))
        self.every = list(self._all.unbind(0))
        self.own = tensor.contiguous()
        if len(tensor) < most:
            self.own = tensor.new_zeros((most, *tensor.shape[1:]))
            self.own[: len(tensor)] = tensor

    def rows(self) -> torch.Tensor:
        if len(set(self._counts)) == 1:
            return self._all.flatten(0, 1)
        return torch.cat([each[:count] for each, count in zip(self.every, self._counts)])
