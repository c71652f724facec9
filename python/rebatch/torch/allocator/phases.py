"""Marks the phases of a training loop that Step does not run, so that the pool can plan them. A
phase begins with the first allocation after an optimizer's step, so that gradients that
`zero_grad()` frees before that are of the phase that made them. Within an optimizer's step, which
cannot be undone, allocations must not fail."""

import itertools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rebatch import _library

_numbers = itertools.count(1 << 63)  # sessions have keys of their own
_keys: weakref.WeakKeyDictionary[Any, int] = (
    weakref.WeakKeyDictionary()
)  # a kind of phase for each optimizer
_others = 0  # who mark phases themselves
_update: FrameType | None = None  # the call of an optimizer's step that overflow is open for


class _MarkedBySession:
    """Within its block a session marks the phases of its callbacks."""

    def __enter__(self) -> None:
        global _others
        _others += 1

    def __exit__(self, *_error: Any) -> None:
        global _others
        _others -= 1


marked_by_session = _MarkedBySession()


def _is_none_of_ours() -> bool:
    return bool(
        _others or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
    )


def _devices(optimizer: Any) -> set[torch.device]:
    parameters = [p for group in optimizer.param_groups for p in group["params"][:1]]
    return {p.device for p in parameters if p.is_cuda}


def _is_part(call: FrameType) -> bool:
    """Whether an optimizer's step is called by the step of another, or of its own subclass, whose
    end is the update's. A step that raised, and so never ended, calls nothing any more."""
    caller = call.f_back if _update else None
    while caller and caller is not _update:
        caller = caller.f_back
    return caller is not None


def allow_overflow(pool: int, may: bool) -> None:
    """Whether allocations of a pool take host memory rather than fail. When they no longer do, what
    lies there moves to the GPU, as far as there is room."""
    _library.check(_library.lib.rebatch_pool_allow_overflow(pool, may))


def watch_optimizers(pool_of: Callable[[torch.device], int]) -> None:
    """Mark phases from now on. pool_of: gives the handle of the pool of a torch.device."""

    def begin(optimizer: Any, arguments: Any, keywords: Any) -> None:
        global _update
        # What a closure does within the step, a forward and a backward pass, is no update.
        given = [*arguments[1:], keywords.get("closure")]
        if any(closure is not None for closure in given) or _is_none_of_ours():
            return
        if _is_part(sys._getframe(1)):
            return
        _update = sys._getframe(1)
        for device in _devices(optimizer):
            allow_overflow(pool_of(device), True)

    def mark(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        global _update
        if _is_none_of_ours() or _is_part(sys._getframe(1)):
            return
        _update = None
        if optimizer not in _keys:
            _keys[optimizer] = next(_numbers)
        for device in _devices(optimizer):
            allow_overflow(pool_of(device), False)
            _library.lib.rebatch_pool_mark(pool_of(device), _keys[optimizer])

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(mark)
