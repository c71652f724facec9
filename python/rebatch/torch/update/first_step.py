"""The first step of an optimizer that steps after the passes: whether it has run, whether it found
the gradients that they left, and whether these were cleared then. Must not know who calls it."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, List, Tuple

import torch

from rebatch._user_code import user_stacklevel
from rebatch.torch.session.threads import attempt
from rebatch.torch.undo.copies import own_part


def _is_gone(p: torch.nn.Parameter, version: int) -> bool:
    """Cleared, or set to zero. Waits for the GPU where the gradient was changed."""
    if p.grad is None:
        return True
    gradient = own_part(p.grad)
    return gradient._version != version and not bool(gradient.any())


def _refuse_within(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
    """ValueError for an update in the midst of a batch, which is made of the gradients of some
    samples, or of none, and cannot be taken back."""
    if attempt.runs:
        raise ValueError(
            f"rebatch: {type(optimizer).__name__}.step() was called within a loss_fn or a block of "
            "parts(), which runs for some samples at a time: expected step() and zero_grad() after "
            "backward(batch), or below the loop over backward.parts(batch)"
        )


class FirstStep:
    """Of one optimizer, which calls back once."""

    def __init__(self, optimizer: Any):
        self.has_run = False
        self._left: List[Tuple[torch.nn.Parameter, int]] = []  # with gradients, and their versions
        # With gradients that were applied, and their versions.
        self._applied: List[Tuple[torch.nn.Parameter, Any, int]] = []
        self.hooks = []
        if hasattr(optimizer, "register_step_post_hook"):  # of PyTorch
            self.hooks = [
                optimizer.register_step_pre_hook(_refuse_within),
                optimizer.register_step_post_hook(self._end),
            ]

    def passes_done(self, parameters: List[torch.nn.Parameter]) -> None:
        """The gradients of a batch are in .grad of these parameters, which the optimizer has."""
        if not self.has_run:
            self._left = [(p, own_part(p.grad)._version) for p in parameters if p.grad is not None]

    def let_go(self) -> None:
        """Remove the hooks, not within a step: there the optimizer goes through its hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def warn_if_kept(self, optimizer: Any) -> None:
        """Gradients are there when the batch after that step begins: those that it has applied, if
        nothing cleared or changed them."""
        applied, self._applied = self._applied, []
        gradients = [p.grad for p, *_ in applied]
        are_same = all(
            now is gradient() and now is not None and own_part(now)._version == version
            for now, (_, gradient, version) in zip(gradients, applied)
        )
        if are_same and any(bool(own_part(now).any()) for now in gradients if now is not None):
            warnings.warn(
                f"rebatch: the gradients that {type(optimizer).__name__}.step() has applied are "
                "still there, and those of this batch are added to them: expected zero_grad() "
                "before backward(batch) or the loop over its parts, or after step()",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )

    def _end(self, optimizer: Any, arguments: Tuple[Any, ...], keywords: Any) -> None:
        if self.has_run:
            return
        self.has_run = True
        left, self._left = self._left, []
        has_closure = len(arguments) > 1 or keywords  # which may have run the passes
        self._applied = [
            (p, weakref.ref(p.grad), own_part(p.grad)._version)
            for group in ([] if has_closure else optimizer.param_groups)
            for p in group["params"]
            if p.grad is not None
        ]
        if left and not has_closure and all(_is_gone(*each) for each in left):
            warnings.warn(
                f"rebatch: {type(optimizer).__name__}.step() has trained nothing: the gradients "
                "that backward(batch) had left were cleared before it: expected zero_grad() before "
                "backward(batch), or after step()",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
