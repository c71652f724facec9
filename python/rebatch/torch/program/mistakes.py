"""What a loss_fn must leave to the Step, which says so before any update. Must not know a session,
and how gradients are accumulated."""

from __future__ import annotations

import functools
import gc
from typing import Any, Container, Iterator, List, Sequence, Tuple

import torch

from rebatch._library import Status
from rebatch.torch.undo.undo import NotPutBackError


def check_loss_fn(function: Any) -> None:
    """TypeError for a criterion of PyTorch, which takes what a model returns."""
    inner = function.func if isinstance(function, functools.partial) else function
    kind = inner if hasattr(inner, "__qualname__") else type(inner)
    if kind.__module__ in ("torch.nn.modules.loss", "torch.nn.functional"):
        raise TypeError(
            f"rebatch: loss_fn is {getattr(inner, '__name__', inner)}, which does not run the "
            "model: expected a function of the model and samples, such as "
            "lambda model, samples: criterion(model(samples[0]), samples[1])"
        )


def refuse_gradients(
    loss_name: str, models: Sequence[torch.nn.Module], trained: Sequence[torch.nn.Parameter]
) -> None:
    """ValueError where one of these parameters, which had no gradient before loss_fn ran, has one
    now: it is not weighted by the part of the batch."""
    found = {id(p) for p in trained if p.grad is not None}
    if not found:
        return
    names = _names_of(models, found) or ["a parameter of the optimizer"]
    raise ValueError(
        f"rebatch: {names[0]} got a gradient while {loss_name} ran, which counts once in each "
        f"micro-batch, whatever its size: expected {loss_name} to return the sum of its losses and "
        "to call no backward(), since the Step calls it"
    )


def _names_of(models: Sequence[torch.nn.Module], wanted: Container[int]) -> List[str]:
    """The names of the parameters with these ids."""
    return [
        f"'model[{i}].{name}'" if len(models) > 1 else repr(name)
        for i, model in enumerate(models)
        for name, p in model.named_parameters()
        if id(p) in wanted
    ]


def hooked(parameters: Sequence[torch.nn.Parameter]) -> List[torch.nn.Parameter]:
    """Those with a hook that may step an optimizer within a backward pass."""
    return [p for p in parameters if p._post_accumulate_grad_hooks]


def refuse_stepped(
    models: Sequence[torch.nn.Module], noted: Sequence[Tuple[torch.nn.Parameter, int]]
) -> None:
    """Error where a hook has stepped, in the backward pass of a micro-batch that is no batch."""
    changed = {id(p) for p, version in noted if p._version != version}
    if changed:
        names = _names_of(models, changed)
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        raise NotPutBackError(
            f"rebatch: {', '.join(names[:3])}{more} changed within a backward pass, and each has a "
            "hook of register_post_accumulate_grad_hook(): an optimizer that steps there steps "
            "once a micro-batch, and its state cannot be put back: expected the optimizer to be "
            "given to the Step, which steps it once a batch",
            Status.E_STATE,
        )


def refuse_scaled(loss_name: str, loss: torch.Tensor) -> None:
    """ValueError for a loss from scale() of a GradScaler. Its weight would be another one once the
    scale changes, and the update that many times as large."""
    if any(map(_is_scale, _factors(loss))):
        raise ValueError(
            f"rebatch: {loss_name} returned a loss that a GradScaler has scaled: expected the loss "
            "itself, and the scaler as scaler= of the Step, which calls its scale(), step() and "
            "update()"
        )


def _factors(loss: torch.Tensor) -> Iterator[Any]:
    """Those of the last operations of which a loss is the result."""
    node = loss.grad_fn
    for _ in range(4):
        if node is None:
            return
        yield getattr(node, "_saved_other", None)
        node = node.next_functions[0][0] if node.next_functions else None


def _is_scale(factor: Any) -> bool:
    is_like_one = isinstance(factor, torch.Tensor) and factor.dtype == torch.float32
    if not is_like_one or factor.dim() or not factor.is_leaf or factor.requires_grad:
        return False
    holders = gc.get_referrers(factor)
    holders += gc.get_referrers(*(h for h in holders if isinstance(h, dict)))
    return any(isinstance(holder, torch.amp.GradScaler) for holder in holders)
