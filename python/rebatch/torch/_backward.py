"""Backward: a Step without an update, for trainers that clip gradients and update by themselves."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, Optional, Sequence

import torch

from rebatch.torch._update import Update
from rebatch.torch.step import Step


class _NoUpdate(Update):
    """The gradients of all parameters that a trainer may update, and the memory of its update."""

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        backward: Optional[Callable[[torch.Tensor], Any]],
    ):
        super().__init__([optimizer], [], None, None)
        self._all_parameters = parameters
        if backward:
            self.backward = backward

    @property
    def parameters(self) -> List[torch.nn.Parameter]:
        return [p for p in self._all_parameters() if p.requires_grad]

    def keeps(self, parameters: Sequence[torch.nn.Parameter]) -> List[torch.nn.Parameter]:
        return self.parameters

    def zero_grad(self) -> None:
        pass

    def apply(self) -> None:
        pass


class Backward(Step):
    """Runs an effective batch forward and backward, in micro-batches that fit, and adds its
    gradients to .grad, as loss.backward() does. Returns the loss of the batch.

    An OOM leads to smaller micro-batches; what was in .grad is added once. Memory for the
    optimizer's first step is made free. After an exception .grad is as it was before.

    backward      backward(loss), instead of loss.backward(), for example to scale the loss

    The other arguments are those of Step."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        backward: Optional[Callable[[torch.Tensor], Any]] = None,
        **options: Any,
    ):
        super().__init__(model, optimizer, loss_fn, **options)
        self._update = _NoUpdate(model.parameters, optimizer, backward)

    @property
    def parameters(self) -> List[torch.nn.Parameter]:
        """Those with gradients."""
        return self._update.parameters

    def kind_of_update(self) -> tuple:
        """Updates of one kind need the same memory."""
        return self._level, sum(p.numel() for p in self.parameters if p.grad is not None)

    def available_bytes(self) -> int:
        """The memory that can be allocated now."""
        return self._open().available_bytes()
