"""Modes of the process: those of PyTorch that a loss_fn may switch on by one call and off by
another. An exception between the two leaves them switched."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, List, Tuple

import torch

from rebatch.torch.private import (
    are_deterministic,
    default_device_context,
    empty_parametrizations,
    is_cudnn_deterministic,
    is_cudnn_enabled,
    is_cudnn_tuned,
    parametrize,
    warns_of_nondeterminism,
)

_Mode = Tuple[Callable[[], Any], Callable[[Any], Any]]  # to get and to set it


def _nesting() -> int:
    """How many contexts of torch.autocast are entered. The last one that is left empties its
    cache."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(depth: int) -> None:
    now = _nesting()
    while now > depth:
        now = torch.autocast_decrement_nesting()
    while now < depth:
        now = torch.autocast_increment_nesting()


def _set_default_device(context: Any) -> None:
    torch.set_default_device(None if context is None else context.device)


def _autocast(kind: str) -> List[_Mode]:
    """Of one kind of device."""
    part = functools.partial
    return [
        (part(torch.is_autocast_enabled, kind), part(torch.set_autocast_enabled, kind)),
        (part(torch.get_autocast_dtype, kind), part(torch.set_autocast_dtype, kind)),
    ]


_OF_ALL: List[_Mode] = [
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (default_device_context, _set_default_device),
    (_nesting, _set_nesting),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (are_deterministic, torch.use_deterministic_algorithms),
    (
        warns_of_nondeterminism,
        lambda warns: torch.use_deterministic_algorithms(are_deterministic(), warn_only=warns),
    ),
    (is_cudnn_enabled, functools.partial(setattr, torch.backends.cudnn, "enabled")),
    (is_cudnn_tuned, functools.partial(setattr, torch.backends.cudnn, "benchmark")),
    (is_cudnn_deterministic, functools.partial(setattr, torch.backends.cudnn, "deterministic")),
    (torch.get_num_threads, torch.set_num_threads),
    (
        functools.partial(getattr, parametrize, "_cache_enabled"),
        functools.partial(setattr, parametrize, "_cache_enabled"),
    ),
]


class Modes:
    """Those that matter to some kinds of devices, as save() found them."""

    def __init__(self, kinds: Tuple[str, ...]):
        self._modes = [*_OF_ALL, *(mode for kind in kinds for mode in _autocast(kind))]
        self._saved: List[Any] = []

    def now(self) -> List[Any]:
        """What they are."""
        return [get() for get, _ in self._modes]

    def save(self) -> List[Any]:
        """Returns what was saved before."""
        before, self._saved = self._saved, self.now()
        return before

    def put_back(self) -> None:
        """After a failure. What its casts and parametrizations left in caches is forgotten."""
        for (get, put), value in zip(self._modes, self._saved):
            if get() != value:
                put(value)
        torch.clear_autocast_cache()
        empty_parametrizations()

    def end(self, before: List[Any]) -> None:
        """What save() returned holds again."""
        self._saved = before

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around what is no part of a step: all are put back after it."""
        before = self.save()
        try:
            yield
        finally:
            self.put_back()
            self.end(before)
