"""What must be the same on all ranks before they train one model together: what a Step is made
with, and the keys of its first batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Dict, List, Sequence

import torch

from rebatch import __version__

REFUSED = "refused"  # what a rank says, with why, whose arguments are wrong
# A mapping with more keys than these may have one for each sample.
_MOST_KEYS = 64
_MOST_CHARACTERS = 200  # of a batch's keys in a sentence


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def of_model(modules: torch.nn.Module, trained: Sequence[torch.Tensor]) -> Dict[str, str]:
    """A model, the parameters that an optimizer trains, and the version."""
    named = modules.named_parameters()
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in named]
    updated = [(tuple(p.shape), str(p.dtype)) for p in trained]
    return {
        "a model": f"of {len(shapes)} parameters ({_digest(shapes)})",
        "an optimizer": f"of {len(updated)} parameters ({_digest(updated)})",
        "rebatch": __version__,
    }


def check(said: Sequence[Dict[str, Any]]) -> None:
    """ValueError where ranks differ in what each has said, by name."""
    for rank, its in enumerate(said):
        if REFUSED in its:
            raise ValueError(f"rebatch: rank {rank} makes no Step: {its[REFUSED]}")
    first = said[0]
    for rank, its in enumerate(said):
        names = [n for n in {**first, **its} if first.get(n) != its.get(n)]
        if names:
            raise ValueError(
                f"rebatch: rank 0 has {_named(first, names)}, and rank {rank} has "
                f"{_named(its, names)}: expected the same model, version and options on all ranks"
            )


def _named(said: Dict[str, Any], names: List[str]) -> str:
    return ", ".join(f"{name} {said.get(name)}" for name in names)


def keys_of(batch: Any) -> str:
    """The keys of a batch, of which the order is no matter."""
    if not isinstance(batch, Mapping) or len(batch) > _MOST_KEYS:
        return "..."
    entries = sorted(f"{key!r}: {keys_of(value)}" for key, value in batch.items())
    return "{" + ", ".join(entries) + "}"


def number_of(keys: str) -> float:
    """A digest that a float holds exactly."""
    return float(int.from_bytes(hashlib.sha256(keys.encode()).digest()[:6], "big"))


def check_keys(said: Sequence[str]) -> None:
    """ValueError where the batches of ranks have other keys."""
    for rank, its in enumerate(said):
        if its != said[0]:
            raise ValueError(
                f"rebatch: the batch of rank 0 is {_short(said[0])}, and that of rank {rank} is "
                f"{_short(its)}: expected the same keys on all ranks"
            )


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."
