"""Whether both passes of an `embed` make the same rows: the loss is of those of the first, and the
gradients are of those of the second. Must not know when a pass runs."""

from __future__ import annotations

import math
from typing import List, Optional, Tuple

import torch

from rebatch.torch.check.rounding import floors

_LOOKS = 3  # at batches that are cut


class TwoPasses:
    """Of one training."""

    def __init__(self, is_done: bool):
        self._looks = 0 if is_done else _LOOKS
        self.begin()

    def begin(self) -> None:
        """A batch does, or does so again."""
        self._squares: Optional[torch.Tensor] = None  # of norms of differences, and of rows

    def note(self, pairs: List[Tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Rows of a part: those of the second pass, and of the first one."""
        if self._looks:
            with torch.no_grad():
                for now, then in pairs:
                    squares = _squares_of(now, then)
                    so_far = self._squares
                    self._squares = squares if so_far is None else so_far + squares

    def found(self) -> str:
        """The batch has succeeded: what is wrong, or nothing. Waits for the device where it was
        looked at."""
        if self._squares is None:
            return ""
        difference, norm = map(math.sqrt, self._squares.tolist())  # which takes no memory
        floor, _ = floors(True, self._squares.device)  # as embed may compute in 16 bits
        self.begin()
        self._looks -= 1
        if not difference > floor * norm:  # nor where one is no finite number
            return ""
        self._looks = 0
        return (
            "embed made other rows of the same samples in its second pass, by "
            f"{difference / norm if norm else 1:.1%}, so the gradients are not those of the loss: "
            "expected the same rows of each call (generators=[...] for generators of your own, no "
            "state outside of the model that a call changes, and the same with and without a graph)"
        )


def _squares_of(now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    """Of the norms of a difference and of a tensor."""
    wide = torch.promote_types(then.dtype, torch.float32)
    now, then = now.to(wide), then.to(wide)
    return torch.stack([each.abs().square().sum().double() for each in (now - then, then)])
