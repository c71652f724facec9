"""Backward: the passes of a batch without an update, for trainers that clip gradients and update by
themselves."""

from __future__ import annotations

from typing import Any, Callable, ContextManager, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from rebatch.torch.batches.cut import Cut
from rebatch.torch.check.findings import accepted_kinds
from rebatch.torch.core.training import training_of
from rebatch.torch.program.update import Update
from rebatch.torch.session.report import Report


class _NoUpdate(Update):
    """The gradients of all parameters that a trainer may update, and the memory of its update."""

    is_of_trainer = True

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        backward: Optional[Callable[[torch.Tensor], Any]],
    ):
        super().__init__([optimizer], [], None, None)
        self._all_parameters, self._given_backward = parameters, backward

    def backward(self, loss: torch.Tensor) -> None:
        if self._given_backward:
            self._given_backward(loss)
        else:
            super().backward(loss)

    @property
    def parameters(self) -> List[torch.nn.Parameter]:
        return [p for p in self._all_parameters() if p.requires_grad]

    @property
    def device(self) -> torch.device:
        """That of the first parameter that trains, or of the first one."""
        every = [*self.parameters, *self._all_parameters()]
        return every[0].device if every else torch.device("cpu")

    def with_gradients(
        self, parameters: Sequence[Optional[torch.nn.Parameter]]
    ) -> Tuple[List[torch.nn.Parameter], List[torch.nn.Parameter]]:
        mine = self.parameters
        return mine, mine

    def zero_grad(self) -> None:
        pass

    def apply(self) -> None:
        pass


class Backward:
    """Runs an effective batch forward and backward, in micro-batches that fit, and adds its
    gradients to .grad, as loss.backward() does. Returns the loss of the batch.

    An OOM leads to smaller micro-batches; what was in .grad is added once. Memory for the
    optimizer's first step is made free. After an exception .grad is as it was before.

    With a model of fully_shard() the gradients in .grad are those of all ranks, and clip() scales
    them.

    Args:
        backward: backward(loss), instead of loss.backward(), for example to scale the loss
        check: check the first batch, and print what was found; a mistake raises ValueError. True,
            or the kinds of mistakes that are meant to be so, as Step.check's accept
        shared: the trainer's settings by name, which must be the same on all ranks
        loss_name: what users call loss_fn, in what is said of it
        functions: those of the program that loss_fn runs
        owners: objects beside the model that loss_fn may change
        aside: a context manager around runs of loss_fn that are no part of a batch
        within: the Cut that `slice` cuts by

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
        loss_name: str = "loss_fn",
        functions: Optional[Sequence[Any]] = None,
        owners: Sequence[Any] = (),
        aside: Optional[Callable[[], ContextManager[Any]]] = None,
        within: Optional[Cut] = None,
        **options: Any,
    ):
        named = {name: str(value) for name, value in (shared or {}).items()}
        update = _NoUpdate(model.parameters, optimizer, backward)
        self._training = training_of(
            model, optimizer, loss_fn, shared=named, update=update, **options
        )
        self._summed: List[Tuple[torch.Tensor, int]] = []  # gradients of which the norm is known
        self._accepted = accepted_kinds(() if isinstance(check, bool) else check)
        self._is_to_check = check is not False
        program = self._training.program
        program.loss_name, program.owners = loss_name, list(owners)
        program.functions = None if functions is None else list(functions)
        program.aside, program.cut.within = aside or program.aside, within

    @property
    def model(self) -> Any:
        """Which it was made with."""
        return self._training.program.model

    @property
    def device(self) -> torch.device:
        """That of the first parameter, now."""
        return self._training.program.device

    @property
    def is_sharded(self) -> bool:
        """The model is one of fully_shard()."""
        return self._training.running.has_window

    @property
    def report(self) -> Report:
        """What the last batch needed."""
        return self._training.report

    def numbers(self, prefix: str = "rebatch/") -> Dict[str, float]:
        """Those of a Step."""
        return self._training.numbers(prefix)

    @property
    def outputs(self) -> Any:
        """What loss_fn returned beside the loss, for the last batch."""
        return self._training.outputs

    @property
    def samples(self) -> int:
        """Of the batch that runs."""
        return self._training.running.samples

    @property
    def parameters(self) -> List[torch.nn.Parameter]:
        """Those with gradients."""
        return self._training.program.update.parameters

    def kind_of_update(self) -> Tuple[int, int]:
        """Updates of one kind need the same memory."""
        with_gradients = [p for p in self.parameters if p.grad is not None]
        return self._training.callbacks.rungs.level, sum(p.numel() for p in with_gradients)

    def available_bytes(self) -> int:
        """The memory that can be allocated now."""
        return self._training.open().available_bytes()

    def state_dict(self) -> Dict[str, int]:
        """Of a Step: a resumed training goes on at the size that was found."""
        return self._training.state_dict()

    def load_state_dict(self, state: Dict[str, int]) -> None:
        """Go on where state_dict() was taken."""
        self._training.load_state_dict(state)

    def __call__(self, batch: Any) -> torch.Tensor:
        """The passes of one batch. Returns its loss: a detached scalar, on the device."""
        if self._is_to_check:
            self._check_first(batch)
        self._summed = []
        loss = self._training.run(batch)
        if self.is_sharded:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self._summed = [(g, _version_of(g)) for g in gradients]
        return loss

    # ---- clipping a model of fully_shard() ----

    def knows_norm(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the batch has found the norm of their gradients, which are as it left them."""
        if self._training.callbacks.accumulators.norm is None:
            return False
        now = {id(p.grad) for p in parameters if p.grad is not None}
        return now == {id(g) for g, version in self._summed if version == _version_of(g)}

    def clip(self, largest: float) -> torch.Tensor:
        """Scale gradients whose norm is known so that it is at most `largest`: the norm before.
        Makes no collective; after an OOM it may be called again."""
        norm = self._training.callbacks.accumulators.norm
        assert norm is not None
        found = norm.float()
        self._training.program.update.clip_gradients(self.parameters, largest)
        return found

    def _check_first(self, batch: Any) -> None:
        self._is_to_check = False
        found = self._training.check(batch, accept=sorted(self._accepted))
        print(found)
        if not found:
            raise ValueError(
                f"rebatch: the check of the first batch found {len(found.mistakes)} mistakes: "
                "expected none; check=[kind, ...] accepts those that are meant to be so\n"
                f"{found}"
            )


def _version_of(gradient: Any) -> int:
    """Another one after each operation that has changed it, or this rank's part of it, in place."""
    version: int = gradient._version + gradient.to_local()._version
    return version
