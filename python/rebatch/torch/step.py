"""Step: one update of an effective batch, in micro-batches that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence, Union

import torch

from rebatch.torch.backward import Backward
from rebatch.torch.program.program import listed
from rebatch.torch.update.update import Update

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rebatch.torch.session.options import PassOptions


class Step(Backward):
    """Trains on one effective batch a call, and survives running out of memory: a Backward, and the
    update after it::

        train_step = rebatch.Step(model, optimizer, loss_fn)
        for batch in loader:
            loss = train_step(batch)

    The batch is cut into micro-batches that fit; their gradients are accumulated, and the optimizer
    runs once. An OOM costs the micro-batch that it struck; the update stays the same.

    Args:
        model: a module, or a list of modules
        optimizer: an optimizer, or several: all of them step once for each batch
        loss_fn: loss_fn(model, samples) -> the mean loss over the samples, a scalar, and what else
            a Backward takes
        scaler: a torch.amp.GradScaler
        clip: largest norm of the gradients
        lr_scheduler: a scheduler, or several: they step after each update
        before_update: before_update(): called once a batch when the gradients are there, unscaled,
            and not clipped yet, for example to clip by value or to log them. An OOM in it makes the
            batch run again

    All other keywords are those of a Backward: embed, normalizer, autocast, cost, lighten, slice,
    length, batch_dim, generators, state, gradients, graphs, on_event, group, group_timeout, window,
    and the options of the session.

    With several ranks, all of them make the Step and call it together.

    Raises:
        Exhausted: not even the smallest micro-batch fits.
        Torn: memory ran out within the update.
        PeerFailed: another rank failed or is missing.

    An exception of loss_fn or the optimizer comes out unchanged."""

    def __init__(
        self,
        model: Union[torch.nn.Module, Sequence[torch.nn.Module]],
        optimizer: Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]],
        loss_fn: Callable[[Any, Any], Any],
        *,
        scaler: Optional[Any] = None,
        clip: Optional[float] = None,
        lr_scheduler: Any = None,
        before_update: Optional[Callable[[], Any]] = None,
        **options: Unpack[PassOptions],
    ) -> None:
        def update() -> Update:
            return Update(listed(optimizer), listed(lr_scheduler), scaler, clip, before_update)

        self._make(Step, model, loss_fn, update, options)
