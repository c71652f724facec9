"""TrainerBackward: what an adapter needs of a Backward beside its passes."""

from __future__ import annotations

from typing import Any, Callable, ContextManager, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from rebatch.torch.backward import Backward
from rebatch.torch.batches.cut import Cut
from rebatch.torch.check.findings import accepted_kinds
from rebatch.torch.program.program import listed
from rebatch.torch.update.passes import Passes


class TrainerBackward(Backward):
    """A Backward within a trainer that clips gradients and updates by itself. With a model of
    fully_shard() clip() scales its gradients.

    Args:
        check: check the first batch, and print what was found; a mistake raises ValueError. True,
            or the kinds of mistakes that are meant to be so, as Backward.check's accept
        shared: the trainer's settings by name, which must be the same on all ranks
        loss_name: what users call loss_fn, in what is said of it
        functions: those of the program that loss_fn runs
        hooks: those that the backward pass of a micro-batch runs beside
        owners: objects beside the model that loss_fn may change
        aside: a context manager around runs of loss_fn that are no part of a batch
        within: the Cut that `slice` cuts by

    The other arguments are those of Backward."""

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        optimizer: Any = None,
        backward: Any = None,
        check: Any = False,
        shared: Optional[Dict[str, Any]] = None,
        loss_name: str = "loss_fn",
        functions: Optional[Sequence[Any]] = None,
        hooks: Sequence[Any] = (),
        owners: Sequence[Any] = (),
        aside: Optional[Callable[[], ContextManager[Any]]] = None,
        within: Optional[Cut] = None,
        **options: Any,
    ):
        def passes() -> Passes:
            made = Passes(listed(model), listed(optimizer), backward)
            made.wants_norm = True
            made.functions = list(hooks)
            return made

        named = {name: str(value) for name, value in (shared or {}).items()}
        self._summed: List[Tuple[torch.Tensor, int]] = []  # gradients of which the norm is known
        self._accepted = accepted_kinds(() if isinstance(check, bool) else check)
        self._is_to_check = check is not False
        self._make(Backward, model, loss_fn, passes, options, named)
        program = self._training.program
        program.loss_name, program.owners = loss_name, list(owners)
        program.functions = None if functions is None else list(functions)
        program.aside, program.cut.within = aside or program.aside, within

    @property
    def is_sharded(self) -> bool:
        """The model is one of fully_shard()."""
        return self._training.running.has_window

    @property
    def has_graphs(self) -> bool:
        """Passes may be replays of CUDA graphs."""
        return self._training.callbacks.graphs is not None

    @property
    def is_captured(self) -> bool:
        """The pass that runs."""
        return self._training.running.is_captured

    def ran_out(self) -> None:
        """Of memory, beside the batches."""
        self._training.callbacks.ran_out()

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
        return self._training.callbacks.levels.level, sum(p.numel() for p in with_gradients)

    def available_bytes(self) -> int:
        """The memory that can be allocated now."""
        return self._training.open().available_bytes()

    def __call__(self, batch: Any = None, *_: Any, **__: Any) -> torch.Tensor:
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
