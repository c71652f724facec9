"""The first step of an optimizer that steps after the passes: whether it has run, and whether it
found the gradients that they left. Must not know who calls it."""

from __future__ import annotations

import warnings
from typing import Any, List, Tuple

import torch

from rebatch._user_code import user_stacklevel
from rebatch.torch.undo.copies import own_part


def _is_gone(p: torch.nn.Parameter, version: int) -> bool:
    """Cleared, or set to zero. Waits for the GPU where the gradient was changed."""
    if p.grad is None:
        return True
    gradient = own_part(p.grad)
    return gradient._version != version and not bool(gradient.any())


class FirstStep:
    """Of one optimizer, which calls back once."""

    def __init__(self, optimizer: Any):
        self.has_run = False
        self._left: List[Tuple[torch.nn.Parameter, int]] = []  # with gradients, and their versions
        register = getattr(optimizer, "register_step_post_hook", None)  # of PyTorch's optimizers
        self.hook = register(self._end) if register else None

    def passes_done(self, parameters: List[torch.nn.Parameter]) -> None:
        """The gradients of a batch are in .grad of these parameters, which the optimizer has."""
        if not self.has_run:
            self._left = [(p, own_part(p.grad)._version) for p in parameters if p.grad is not None]

    def let_go(self) -> None:
        """Remove the hook, not within a step: there the optimizer goes through its hooks."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    def _end(self, optimizer: Any, arguments: Tuple[Any, ...], keywords: Any) -> None:
        if self.has_run:
            return
        self.has_run = True
        left, self._left = self._left, []
        has_closure = len(arguments) > 1 or keywords  # which may have run the passes
        if left and not has_closure and all(_is_gone(*each) for each in left):
            warnings.warn(
                f"rebatch: {type(optimizer).__name__}.step() has trained nothing: the gradients "
                "that backward(batch) had left were cleared before it: expected zero_grad() before "
                "backward(batch), or after step()",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
