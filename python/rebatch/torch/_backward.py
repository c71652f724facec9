"""Backward: a Step without an update, for trainers that clip gradients and update by themselves."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from rebatch.torch._findings import accepted_kinds
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

    def with_gradients(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> Tuple[List[torch.nn.Parameter], List[torch.nn.Parameter]]:
        mine = self.parameters
        return mine, mine

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
    check         check the first batch, and print what was found; a mistake raises ValueError.
                  True, or the kinds of mistakes that are meant to be so, as Step.check's accept
    shared        the trainer's settings by name, which must be the same on all ranks

    The other arguments are those of Step."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        backward: Optional[Callable[[torch.Tensor], Any]] = None,
        check: Any = False,
        shared: Optional[Dict[str, Any]] = None,
        **options: Any,
    ):
        self._shared = {name: str(value) for name, value in (shared or {}).items()}
        super().__init__(model, optimizer, loss_fn, **options)
        if self._window:
            raise ValueError(
                "rebatch: the model is one of fully_shard(), whose gradients a trainer would clip "
                "by collectives: expected a loop with a Step, or DistributedDataParallel"
            )
        self._accepted = accepted_kinds(() if isinstance(check, bool) else check)
        self._is_to_check = check is not False
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

    def __call__(self, batch: Any) -> torch.Tensor:
        if self._is_to_check:
            self._check_first(batch)
        return super().__call__(batch)

    def _check_first(self, batch: Any) -> None:
        self._is_to_check = False
        found = self.check(batch, accept=self._accepted)
        print(found)
        if not found:
            raise ValueError(
                f"rebatch: the check of the first batch found {len(found.mistakes)} mistakes: "
                "expected none; check=[kind, ...] accepts those that are meant to be so\n"
                f"{found}"
            )
