"""Random draws that are the same for every sample, so that one cut of a batch can be compared with
another."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List

import torch

from rebatch.torch.private import TorchDispatchMode

_MOST_SCALARS = 256
_16_BIT = (torch.float16, torch.bfloat16)
_SUMS = ("aten::mean", "aten::sum")


def _pattern(out: torch.Tensor, middle: float, half_width: float) -> None:
    """Numbers that depend on the place within the last dimension alone, which samples do not
    have unless it is the only one."""
    if out.dim() < 2:
        out.fill_(middle)
        return
    places = torch.arange(out.shape[-1], device=out.device, dtype=torch.float32)
    out.copy_((middle + half_width * places.cos()).expand_as(out))


def _set_bernoulli(out: torch.Tensor, given: Dict[str, Any]) -> None:
    p = given.get("p")
    if p is None:
        p = given["self"]  # probabilities
    out.copy_(p > 0) if isinstance(p, torch.Tensor) else out.fill_(p > 0)


def _set_uniform(out: torch.Tensor, given: Dict[str, Any]) -> None:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    _pattern(out, (low + high) / 2, 0.4 * (high - low))


def _set_normal(out: torch.Tensor, given: Dict[str, Any]) -> None:
    _pattern(out, 0.5, 0.5)
    out.mul_(given.get("std", 1.0)).add_(given.get("mean", 0.0))


def _set_integer(out: torch.Tensor, given: Dict[str, Any]) -> None:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    out.fill_(low + (high - low) // 2 if high is not None else 1)


def _set_exponential(out: torch.Tensor, given: Dict[str, Any]) -> None:
    out.fill_(math.log(2) / given.get("lambd", 1.0))


def _set_multinomial(out: torch.Tensor, given: Dict[str, Any]) -> None:
    weights, count = given["self"], given["num_samples"]
    most = weights.topk(min(count, weights.shape[-1]), -1).indices
    repeats = -(-count // most.shape[-1])
    out.copy_(most.repeat(*([1] * (most.dim() - 1)), repeats)[..., :count])


def _set_permutation(out: torch.Tensor, given: Dict[str, Any]) -> None:
    out.copy_(torch.arange(len(out) - 1, -1, -1, device=out.device))


_SETTERS: Dict[str, Callable[[torch.Tensor, Dict[str, Any]], None]] = {
    "bernoulli": _set_bernoulli,
    "uniform": _set_uniform,
    "rand": _set_uniform,
    "rand_like": _set_uniform,
    "normal": _set_normal,
    "randn": _set_normal,
    "randn_like": _set_normal,
    "randint": _set_integer,
    "randint_like": _set_integer,
    "random": _set_integer,
    "exponential": _set_exponential,
    "multinomial": _set_multinomial,
    "randperm": _set_permutation,
}


def _given(function: Any, arguments: tuple[Any, ...], keywords: Dict[str, Any]) -> Dict[str, Any]:
    """Arguments by their names, defaults included."""
    given = {a.name: a.default_value for a in function._schema.arguments if a.has_default_value()}
    given.update(zip((a.name for a in function._schema.arguments), arguments))
    given.update(keywords)
    return given


def _without_dropout(
    function: Any, arguments: tuple[Any, ...], keywords: Dict[str, Any]
) -> tuple[Any, ...]:
    """Fused kernels, as those of attention, draw their dropout themselves."""
    changed = list(arguments)
    for i, argument in enumerate(function._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            if i < len(changed) and isinstance(changed[i], float):
                changed[i] = 0.0
            elif isinstance(keywords.get(argument.name), float):
                keywords = {**keywords, argument.name: 0.0}
    return tuple(changed), keywords


class FixedDraws(TorchDispatchMode):
    """PyTorch's random functions give the same numbers for every sample, and no dropout; unless
    is_fixed is False.

    `is_16_bit` is whether some operation computed in 16 bits; rounding() is that of the largest
    scalar, such as a mean that is one of the terms of a loss, or of its terms, which may cancel;
    `has_fixed` is whether numbers were drawn that are the same now."""

    supports_higher_order_operators = True  # they run as they are

    def __init__(self, is_fixed: bool = True):
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_fixed, self.is_16_bit, self.has_fixed = is_fixed, False, False
        self._scalars: List[torch.Tensor] = []

    def rounding(self) -> float:
        """An upper bound for a sum of a few such scalars."""
        finfo = torch.finfo
        found = [float(t.detach().abs()) * finfo(t.dtype).eps for t in self._scalars]
        return 4 * max((r for r in found if math.isfinite(r)), default=0.0)

    def _note(self, out: Any, function: Any, arguments: tuple[Any, ...]) -> None:
        if not isinstance(out, torch.Tensor):
            return
        self.is_16_bit |= out.dtype in _16_BIT
        if out.dim() == 0 and out.is_floating_point() and len(self._scalars) < _MOST_SCALARS:
            if function._schema.name in _SUMS and arguments[0].is_floating_point():
                out = function(arguments[0].abs(), *arguments[1:])
            self._scalars.append(out)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if not hasattr(function, "tags"):  # one of higher order, as flex_attention
            return function(*arguments, **keywords)
        if self._is_fixed:
            arguments, keywords = _without_dropout(function, arguments, keywords)
        if not self._is_fixed or torch.Tag.nondeterministic_seeded not in function.tags:
            out = function(*arguments, **keywords)
            self._note(out, function, arguments)
            return out
        return self._draw(function, arguments, keywords)

    def _draw(self, function: Any, arguments: tuple[Any, ...], keywords: Dict[str, Any]) -> Any:
        name = function._schema.name.split("::")[1].rstrip("_")
        given = _given(function, arguments, keywords)
        if name == "native_dropout":
            x, p = given["input"], float(given["p"])
            return x / (1 - p) if p < 1 else x * 0, torch.ones_like(x, dtype=torch.bool)
        out = function(*arguments, **keywords)
        self.has_fixed = True
        if name in _SETTERS and isinstance(out, torch.Tensor):
            _SETTERS[name](out, given)
        return out
