"""Calls of optimizer.step() and scheduler.step() by a loop whose Step has called them already."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Callable, MutableMapping, Optional

import torch

from rebatch._user_code import user_stacklevel


def _first_gradient(optimizer: Any) -> Optional[torch.Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.grad for p in parameters if p.grad is not None), None)


class _Watch:
    """Sees each call of one optimizer's step(). A second one with gradients that a Step has applied
    is a warning; a loop that makes gradients of its own may step."""

    def __init__(self) -> None:
        self.is_own = self._has_warned = False
        self._applied: Optional[weakref.ref[torch.Tensor]] = (
            None  # the first gradient of the last update
        )

    def note_update(self, optimizer: Any) -> None:
        gradient = _first_gradient(optimizer)
        self._applied = None if gradient is None else weakref.ref(gradient)

    def before_step(
        self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[Any, Any]
    ) -> None:
        if self.is_own or self._has_warned or self._applied is None:
            return
        if len(arguments) > 1 or keywords:  # a closure makes the gradients
            return
        gradient = _first_gradient(optimizer)
        if gradient is not None and gradient is self._applied():
            self._has_warned = True
            warnings.warn(
                f"rebatch: {type(optimizer).__name__}.step() was called with gradients that a Step "
                "has applied already, so this update happens twice: expected step(batch) alone, "
                "which steps the optimizer",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )


_watches: MutableMapping[Any, _Watch] = weakref.WeakKeyDictionary()  # one for each optimizer


def _watch_of(optimizer: Any) -> _Watch:
    watch = _watches.get(optimizer)
    if watch is None:
        watch = _watches[optimizer] = _Watch()
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper may have none
            optimizer.register_step_pre_hook(watch.before_step)
    return watch


def own_step(optimizer: Any, step: Callable[[], Any]) -> None:
    """Call the step() of an optimizer for a Step."""
    watch = _watch_of(optimizer)
    watch.is_own = True
    try:
        step()
        watch.note_update(optimizer)
    finally:
        watch.is_own = False


class _Scheduler:
    """How far a Step has taken a scheduler."""

    last_epoch: Any = None
    has_warned = False


_schedulers: MutableMapping[Any, _Scheduler] = weakref.WeakKeyDictionary()


def step_scheduler(scheduler: Any) -> bool:
    """Step it. True once, where another step was made since the last one here: one that took it
    elsewhere was a checkpoint that was loaded."""
    known = _schedulers.setdefault(scheduler, _Scheduler())
    now = getattr(scheduler, "last_epoch", None)
    is_ahead = known.last_epoch is not None and now == known.last_epoch + 1
    scheduler.step()
    known.last_epoch = getattr(scheduler, "last_epoch", None)
    is_new = is_ahead and not known.has_warned
    known.has_warned = known.has_warned or is_new
    return is_new


def warn_of_scheduler(scheduler: Any) -> None:
    warnings.warn(
        f"rebatch: {type(scheduler).__name__}.step() was called between two updates of a Step that "
        "has it as lr_scheduler, so the learning rate moves twice for one update: expected "
        "step(batch) alone, which steps the scheduler",
        RuntimeWarning,
        stacklevel=user_stacklevel(),
    )
