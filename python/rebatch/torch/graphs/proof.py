"""Whether a replay leaves what an eager pass of the same samples leaves, bit for bit; and where two
eager passes differ, whether it is as near."""

from __future__ import annotations

from typing import List, Sequence

import torch

from rebatch.torch.graphs.captured import LOSS, Result, tensors_of
from rebatch.torch.program.program import Running
from rebatch.torch.undo.copies import sums_of

# A replay may be so many times as far from an eager pass as two of these are from one another, and
# this part of a tensor's size further: two passes alone may agree by chance.
_MOST_TIMES, _MOST_BEYOND = 10.0, 1e-2
# Two eager passes whose loss differs by more do not differ by the order of their sums alone.
_MOST_OF_LOSS = 1e-2


class Mark:
    """Of what a pass has left: the sums of the bits of its results and of the tensors that it
    changes in place, and the states of the generators. Waits for the device."""

    def __init__(self, running: Running, result: Result, beside: Sequence[torch.Tensor] = ()):
        self._generators = running.generators
        found = tensors_of(result) + [("a buffer", t) for t in running.undo.changing()]
        found += [("a tensor that a pass changes in place", t) for t in beside]
        self.tensors = [(what, tensor) for what, tensor in found if tensor.numel()]
        self._sums = sums_of([tensor for _, tensor in self.tensors])
        self._states = self._generators.states()

    def difference(self, later: "Mark") -> str:
        """What is other than in `later`, of whose pass nothing has run since; "": nothing."""
        names = [name for name, _ in self.tensors]
        if names != [name for name, _ in later.tensors]:
            return "the results"
        if self._generators.have_moved(self._states):
            return "the state of a random generator"
        return next((names[i] for i in self.places(later)), "")

    def places(self, later: "Mark") -> List[int]:
        """Of the tensors that differ, or of which that cannot be known."""
        pairs = enumerate(zip(self._sums, later._sums))
        return [i for i, (a, b) in pairs if a is None or a != b]

    def let_go(self) -> "Mark":
        """The tensors are not held any more."""
        self.tensors = [(name, torch.empty(0)) for name, _ in self.tensors]
        return self

    def on_host(self) -> List[torch.Tensor]:
        """Copies of all tensors."""
        return [tensor.to("cpu", copy=True) for _, tensor in self.tensors]


class Noise:
    """Two eager passes of the same samples that differ, as copies on the host."""

    def __init__(self, first: List[torch.Tensor], second: List[torch.Tensor]):
        self._first, self._second = first, second

    def explains(self, replay: Mark) -> bool:
        """Whether a replay is as far from an eager pass as two of these are from one another."""
        names = [name for name, _ in replay.tensors]
        return all(map(_is_near, names, replay.on_host(), self._first, self._second))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).double()


def _is_near(name: str, replayed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    x, y, z = map(_numbers, (replayed, a, b))
    if torch.equal(y.isfinite(), z.isfinite()) and not torch.equal(x.isfinite(), y.isfinite()):
        return False
    x, y, z = (torch.nan_to_num(each, 0.0, 0.0, 0.0) for each in (x, y, z))
    size, noise, distance = float(y.norm()), float((z - y).norm()), float((x - y).norm())
    if name == LOSS and noise > _MOST_OF_LOSS * size:
        return False
    return distance <= _MOST_TIMES * noise + _MOST_BEYOND * size
