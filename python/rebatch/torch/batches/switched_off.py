"""Modules that make one cut of a batch incomparable with another, and switching them off."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Set

import torch

from rebatch.torch.private import BatchNorm, Dropout, SpectralNorm, SpectralNormHook

BATCH_NORM = (BatchNorm,)
DROPOUT = (Dropout,)


def training_modules(root: torch.nn.Module, kinds: tuple[Any, ...]) -> List[torch.nn.Module]:
    """Modules of some kinds that are in training mode. BatchNorm also where its running statistics
    are not kept: it then normalizes by the micro-batch in evaluation mode too."""
    return [
        m
        for m in root.modules()
        if isinstance(m, kinds) and (m.training or (kinds is BATCH_NORM and m.running_mean is None))
    ]


def power_iterations(root: torch.nn.Module) -> List[torch.nn.Module]:
    """Modules of spectral_norm, of both kinds that PyTorch has, that improve their estimate in each
    forward pass."""
    return [
        m
        for m in root.modules()
        if m.training
        and (
            isinstance(m, SpectralNorm)
            or any(isinstance(h, SpectralNormHook) for h in m._forward_pre_hooks.values())
        )
    ]


class Ran:
    """Which of some modules run."""

    def __init__(self, modules: List[torch.nn.Module]):
        self.modules = modules
        self._seen: Set[torch.nn.Module] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        hooks = [m.register_forward_pre_hook(self._note) for m in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: torch.nn.Module, _arguments: Any) -> None:
        self._seen.add(module)

    def that_ran(self) -> List[torch.nn.Module]:
        return [m for m in self.modules if m in self._seen]


def name_of(root: torch.nn.Module, module: torch.nn.Module) -> str:
    return str(next(name for name, m in root.named_modules() if m is module))


@contextlib.contextmanager
def switched_off(modules: List[torch.nn.Module]) -> Iterator[None]:
    """Some modules in evaluation mode, whatever calls their train()."""
    was_training = [m.training for m in modules]
    for m in modules:
        m.training = False
        vars(m)["train"] = lambda mode=True, module=m: module
    try:
        yield
    finally:
        for m, training in zip(modules, was_training):
            vars(m).pop("train", None)
            m.training = training
