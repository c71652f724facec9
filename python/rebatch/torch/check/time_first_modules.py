"""Batches that are cut through time: modules of PyTorch that take the first dimension of their
input for time, and get one that follows the cut."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Tuple

import torch

# Those of nn.Transformer have attention in them.
_TIME_FIRST = (torch.nn.RNNBase, torch.nn.MultiheadAttention)


class Sequences:
    """Watches the inputs of such modules while parts of several sizes run. A module whose samples
    are along the second dimension gets as many time steps from a part of any size; so the first
    dimension of an input follows the size of the part only where time, or the samples in its place,
    was cut."""

    def __init__(self, root: torch.nn.Module):
        self._modules = {
            name: module
            for name, module in root.named_modules()
            if isinstance(module, _TIME_FIRST) and not module.batch_first
        }
        self.count = 0  # samples of the part that runs
        # Of the module of a name: the count, and the shape of the input.
        self._seen: Dict[str, List[Tuple[int, Tuple[int, ...]]]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        hooks = [
            module.register_forward_pre_hook(self._hook_of(name), with_kwargs=True)
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook_of(self, name: str) -> Any:
        def hook(_module: Any, arguments: tuple[Any, ...], keywords: Dict[str, Any]) -> None:
            given = arguments[0] if arguments else keywords.get("input", keywords.get("query"))
            if isinstance(given, torch.Tensor) and given.dim() == 3:
                self._seen.setdefault(name, []).append((self.count, tuple(given.shape)))

        return hook

    def found(self) -> Tuple[str, str]:
        """Why such a module makes a difference, and what to do; or two empty texts."""
        for name, seen in self._seen.items():
            follows = all(shape[0] == count for count, shape in seen)
            are_others = any(shape[1] != count for count, shape in seen)
            if len({count for count, _ in seen}) < 2 or not follows or not are_others:
                continue
            count, shape = max(seen)
            return (
                f"{name!r}, of type {type(self._modules[name]).__name__} with batch_first=False, "
                f"takes the first dimension of its input for time, and that was cut: the input for "
                f"{count} samples has the shape {shape}",
                "for a batch of the shape (time, samples, features) give batch_dim=1; "
                "where the samples come first, make the module with batch_first=True",
            )
        return "", ""
