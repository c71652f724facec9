"""The update that a Step makes at the end of an effective batch."""

from __future__ import annotations

import functools
import numbers
import operator
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch
from torch.amp.grad_scaler import OptState

from rebatch._library import Status
from rebatch.torch.undo.undo import NotPutBackError
from rebatch.torch.update.double_updates import (
    AppliedGradient,
    applied_gradient,
    own_step,
    own_zero_grad,
    step_scheduler,
    warn_if_idle,
    warn_of_clipping,
    warn_of_scheduler,
)
from rebatch.torch.update.grad_norm import GradNorm
from rebatch.torch.update.passes import Passes, check_has, inner_optimizer, parameters_of

version_of = operator.attrgetter("_version")


def torn_text(parameters: Sequence[torch.Tensor], versions: Sequence[int]) -> str:
    """What an update has changed that ran out of memory: "out of memory" and this is a sentence.
    `versions` are those of before it."""
    changed = sum(now != then for now, then in zip(map(version_of, parameters), versions))
    if changed:
        return (
            f" in the optimizer's step, which had changed {changed} of {len(parameters)} "
            "parameters: restore a checkpoint"
        )
    return (
        " in the optimizer's step, before it changed a parameter: they are as they were, unless it "
        "writes through .data, which PyTorch does not count: then restore a checkpoint"
    )


def check_above_zero(name: str, value: Any, what: str) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"rebatch: {name} is {value!r}: expected {what} above 0")
    if not float(value) > 0:
        raise ValueError(f"rebatch: {name} is {value!r}: expected {what} above 0")


def _refuse_accumulation(state: Any) -> None:
    """ValueError where the program has accelerate accumulate gradients around a step."""
    if not state.sync_gradients:
        raise ValueError(
            "rebatch: a Step was called within accelerate's accumulate(), which keeps gradients "
            f"for {state.num_steps} iterations, and each call of a Step is an update: expected "
            "step(batch) without it, and all samples of an update in the batch"
        )


# What before_update did since gradients were last cleared.
_NOT_CALLED, _RUNS, _DONE = range(3)
# After so many updates of a Step the loop is known.
_WATCHED_UPDATES = 3


class Update(Passes):
    """The optimizers' step, with a GradScaler, clipping and schedulers."""

    is_of_program = False
    scaler_option = "scaler=scaler"

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        scaler: Optional[Any],
        clip: Optional[float],
        before_update: Optional[Callable[[], Any]] = None,
    ):
        super().__init__((), optimizers)
        self.schedulers = list(schedulers)
        self._accelerated: List[Any] = [
            o for o, inner in zip(self.given, self.optimizers) if o is not inner
        ]
        if scaler is None:
            scaler = next((o.scaler for o in self._accelerated if o.scaler is not None), None)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "rebatch: the optimizer is LBFGS, whose step runs the model again: expected "
                    "one whose step takes no closure"
                )
        for scheduler in self.schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ValueError(
                    "rebatch: lr_scheduler is ReduceLROnPlateau, which needs a metric: call its "
                    "step(metric) yourself after evaluation"
                )
            check_has("lr_scheduler", scheduler, "step", "a scheduler of torch.optim")
        if scaler is not None:
            check_has("scaler", scaler, "scale", "a torch.amp.GradScaler")
            if hasattr(scaler, "is_enabled") and not scaler.is_enabled():
                scaler = None
        if clip is not None:
            check_above_zero("clip", clip, "a norm")
        self.scaler = scaler
        self.take_backward(scaler)
        self.clip, self.wants_norm = clip, clip is not None
        if not (before_update is None or callable(before_update)):
            raise TypeError(f"rebatch: before_update is {before_update!r}: expected a function")
        self.before_update, self._before = before_update, _NOT_CALLED
        self._clipped: Optional[torch.Tensor] = None  # the norm before it
        self.reads_gradients = scaler is not None
        self._watched_updates = _WATCHED_UPDATES
        self._idle: List[Any] = []  # optimizers whose step() did nothing in the last of them
        self._has_told_idle = False
        self._applied: Optional[AppliedGradient] = None  # by the last of them

    def shared(self) -> Dict[str, str]:
        before = "None" if self.before_update is None else "given"
        scaler = type(self.scaler).__name__
        return {"clip": str(self.clip), "scaler": scaler, "before_update": before}

    def every_parameter(self) -> Iterator[torch.nn.Parameter]:
        return (p for o in self.optimizers for group in o.param_groups for p in group["params"])

    def _cleared(self) -> List[torch.nn.Parameter]:
        return parameters_of(self.optimizers)

    def zero_grad(self) -> None:
        for wrapper in self._accelerated:
            _refuse_accumulation(wrapper.gradient_state)
        for optimizer in self.optimizers:
            own_zero_grad(optimizer)
        self._before, self._clipped = _NOT_CALLED, None
        if self.scaler is not None:  # it may have unscaled gradients that are gone now
            self.scaler._per_optimizer_states.clear()

    def note_earlier(self) -> None:
        """Gradients of others are there: the next zero_grad() clears its own."""

    def finish_gradients(self) -> None:
        """When the last micro-batch is accumulated: unscale, before_update, clip. This changes
        gradients, so an OOM here makes the effective batch run again, or, with several ranks, this
        function alone."""
        if self.scaler is not None and self.unscale_gradients:
            self.unscale_gradients(self.scaler, self.optimizers)
        if self.clip is None and self.before_update is None:
            return
        if self.scaler is not None:
            states = self.scaler._per_optimizer_states
            for optimizer in self.optimizers:
                if states[id(optimizer)]["stage"] is not OptState.UNSCALED:  # by an earlier try
                    self.scaler.unscale_(optimizer)
        if self.before_update is not None:
            self._call_before_update(self.before_update)
        if self.clip is not None:
            norm = self.clip_gradients(self.parameters, self.clip)
            self._clipped = norm if self._clipped is None else self._clipped

    def _call_before_update(self, function: Callable[[], Any]) -> None:
        if self._before == _RUNS:
            raise NotPutBackError(
                "rebatch: before_update failed for lack of memory after all ranks had summed their "
                "gradients, which it may have changed: expected one that needs less memory; the "
                "parameters are as they were",
                Status.E_STATE,
            )
        if self._before == _NOT_CALLED:
            self._before = _RUNS
            function()
            self._before = _DONE

    def apply(self) -> None:
        self._idle = []
        for optimizer in self.optimizers:
            step = optimizer.step
            if self.scaler is not None:
                step = functools.partial(self.scaler.step, optimizer)
            if not own_step(optimizer, step):
                self._idle.append(optimizer)

    def _look_at_idle(self) -> None:
        """A GradScaler skips a step for an inf, and then so does a scheduler of accelerate."""
        skipped = [optimizer for optimizer in self._idle if self._has_inf(optimizer)]
        for wrapper in self._accelerated:
            if wrapper.scaler is not None:
                wrapper._is_overflow = any(inner_optimizer(wrapper) is o for o in skipped)
        for optimizer in self._idle:
            if not (self._has_told_idle or any(optimizer is o for o in skipped)):
                self._has_told_idle = warn_if_idle(optimizer)

    def _has_inf(self, optimizer: Any) -> bool:
        """As the scaler has read, which has stepped."""
        if self.scaler is None:
            return False
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(bool(value) for value in found.values())

    def done(self) -> None:
        """The update was applied."""
        self.norm = GradNorm(self, self._clipped)
        self._look_at_idle()
        if self._watched_updates:
            self._watched_updates -= 1
            self._applied = applied_gradient(self.parameters)
        if self.scaler is not None:
            self.scaler.update()
        for scheduler in [s for s in self.schedulers if step_scheduler(s)]:
            warn_of_scheduler(scheduler)  # here, where all of them have stepped

    def begin(self) -> None:
        """The loop comes back: look at what it did with gradients that were applied."""
        applied, self._applied = self._applied, None
        if not applied:
            return
        states = self.scaler._per_optimizer_states.values() if self.scaler is not None else ()
        is_unscaled = any(state["stage"] is OptState.UNSCALED for state in states)
        if is_unscaled or applied.is_scaled():
            self._watched_updates = 0
            warn_of_clipping()
