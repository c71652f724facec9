"""What a loop does once more, or too late, whose Step has done it already: optimizer.step(),
scheduler.step(), clipping. And what an optimizer does not do that a Step asks it to, or a Backward
that the loop asks for another backward()."""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any, Callable, Iterable, Iterator, MutableMapping, Optional

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rebatch._user_code import user_stacklevel
from rebatch.torch.session.weak_methods import weakly


def _with_gradients(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return (p for p in parameters if p.grad is not None)


def _first_with_gradient(optimizer: Any) -> Optional[torch.nn.Parameter]:
    """The first of its parameters that has one."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                found: torch.nn.Parameter = p
                return found
    return None


def first_gradient(optimizer: Any) -> Optional[torch.Tensor]:
    first = _first_with_gradient(optimizer)
    return None if first is None else first.grad


class _Watch:
    """Sees each call of one optimizer's step(). A second one with gradients that a Step has applied
    is a warning; a loop that makes gradients of its own may step."""

    def __init__(self) -> None:
        self.is_own = self.has_stepped = self._has_warned = False
        self._applied: Optional[weakref.ref[torch.Tensor]] = (
            None  # the first gradient of the last update
        )

    def note_update(self, optimizer: Any) -> None:
        gradient = first_gradient(optimizer)
        self._applied = None if gradient is None else weakref.ref(gradient)

    def before_step_within(self, *_: Any) -> None:
        """An optimizer of PyTorch steps."""
        self.has_stepped |= self.is_own

    def before_step(
        self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[Any, Any]
    ) -> None:
        self.before_step_within()
        if self.is_own or self._has_warned or self._applied is None:
            return
        given = [*arguments[1:], *keywords.values()]
        if any(value is not None for value in given):  # a closure makes the gradients
            return
        gradient = first_gradient(optimizer)
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
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            optimizer.register_step_pre_hook(watch.before_step)
        else:  # a wrapper, whose own ones run within its step()
            note = weakly(watch.before_step_within, gone=None)
            weakref.finalize(watch, register_optimizer_step_pre_hook(note).remove)
    return watch


def own_step(optimizer: Any, step: Callable[[], Any]) -> bool:
    """Call the step() of an optimizer for a Step. Whether it did anything: a parameter has changed,
    or PyTorch's own step() has run, which may write through .data."""
    watch = _watch_of(optimizer)
    first = _first_with_gradient(optimizer)
    version = None if first is None else first._version
    watch.is_own, watch.has_stepped = True, False
    try:
        step()
        watch.note_update(optimizer)
    finally:
        watch.is_own = False
    return watch.has_stepped or first is None or first._version != version


def own_zero_grad(optimizer: Any) -> None:
    """Call its zero_grad(). ValueError where that did nothing."""
    parameter = _first_with_gradient(optimizer)
    first = None if parameter is None else parameter.grad
    version = None if first is None else first._version
    optimizer.zero_grad(set_to_none=True)
    if parameter is None or first is None or parameter.grad is not first:
        return
    if first._version == version:
        raise ValueError(
            f"rebatch: zero_grad() of {_kind_of(optimizer)} left its gradients as they were, and "
            f"each call of a Step is an update: expected {_WRAPPED}"
        )


_WRAPPED = (
    "the optimizer that it wraps, or rebatch.Backward(model, loss_fn) in a loop that steps it"
)


def _kind_of(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


@torch.no_grad()
def warn_if_idle(optimizer: Any) -> bool:
    """Of an optimizer whose step() did nothing: a warning, unless a gradient is not finite."""
    gradients = [p.grad for p in _with_gradients(optimizer)]
    are_finite = all(bool(torch.isfinite(_part_of(g)).all()) for g in gradients)
    if are_finite:
        warnings.warn(
            f"rebatch: step() of {_kind_of(optimizer)} changed no parameter, though all gradients "
            f"are finite, so this batch is in no update: expected {_WRAPPED}",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
    return are_finite


def _part_of(gradient: Any) -> torch.Tensor:
    """What this rank has of it."""
    part: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part.coalesce().values() if part.is_sparse else part


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


class AppliedGradient:
    """One that an update has applied. A clipping or unscaling that the loop does after it changes
    nothing but this."""

    def __init__(self, parameter: torch.nn.Parameter, gradient: torch.Tensor):
        self._parameter, self._version = parameter, gradient._version
        self._gradient, self._copy = weakref.ref(gradient), gradient.detach().double()

    @torch.no_grad()
    def is_scaled(self) -> bool:
        """Whether it was multiplied by a number up to 1, or clamped: what another backward() adds
        is neither, and zero_grad() leaves zeros."""
        now, then = self._parameter.grad, self._copy
        if now is None or now is not self._gradient() or now._version == self._version:
            return False
        now = now.double()
        factor = (now * then).sum() / (then * then).sum()
        if not 0 < factor < 1.01:
            return False
        limit = now.abs().max()
        is_clamped = torch.equal(now, then.clamp(-limit, limit))
        return is_clamped or torch.allclose(now, then * factor, rtol=0.01, atol=0)


def applied_gradient(parameters: Iterable[torch.nn.Parameter]) -> Optional[AppliedGradient]:
    """The smallest that tells; None where there is none, or no memory for its copy."""
    plain = [p for p in parameters if type(p.grad) is torch.Tensor and not p.grad.is_sparse]
    several = [p for p in plain if p.grad is not None and p.grad.numel() > 1]
    if not several:
        return None
    smallest = min(several, key=torch.Tensor.numel)
    assert smallest.grad is not None
    try:
        return AppliedGradient(smallest, smallest.grad)
    except RuntimeError:
        return None


def warn_of_clipping() -> None:
    warnings.warn(
        "rebatch: the gradients were scaled or clipped after a Step had applied them, as by "
        "clip_grad_norm_(), clip_grad_value_() or unscale_() after step(batch), which changes "
        "nothing: expected clip=<largest norm> and scaler= of the Step, or for another clipping "
        "before_update=<a function that clips>",
        RuntimeWarning,
        stacklevel=user_stacklevel(),
    )


def warn_of_accumulation() -> bool:
    """Where a Backward that goes backward by itself was called within accelerate's accumulate().
    Returns whether it was."""
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if kind is None or kind().sync_gradients:  # what all its objects share
        return False
    warnings.warn(
        "rebatch: backward(batch) was called within accelerate's accumulate(), and nothing divides "
        "its loss by the number of iterations, as accelerator.backward() does: expected "
        "Backward(model, loss_fn, backward=accelerator.backward), unless loss_fn divides",
        RuntimeWarning,
        stacklevel=user_stacklevel(),
    )
    return True
