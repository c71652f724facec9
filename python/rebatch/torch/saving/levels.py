"""The functions of `lighten`: how many of them are on."""

from __future__ import annotations

from typing import Callable, List

from rebatch.torch.undo.undo import Undo


class Levels:
    """Functions f(on) that save memory, which are switched on in their order, and off in the
    opposite one. What they change in the model is no change of a micro-batch."""

    def __init__(self, functions: List[Callable[[bool], None]], undo: Undo):
        self._functions, self._undo = functions, undo
        self.level = 0  # functions that are on
        self.wanted = 0  # with which a session that is opened begins

    def __len__(self) -> int:
        return len(self._functions)

    def set_level(self, level: int) -> None:
        """Switch the first `level` functions on, and the others off."""
        with self._undo.accepting():
            while self.level < level:
                self._functions[self.level](True)
                self.level += 1
            while self.level > level:
                self.level -= 1
                self._functions[self.level](False)
        self.wanted = level
