"""BatchNorm that trains: no micro-batch may have one sample, whose statistics say nothing and which
PyTorch refuses. Must not know how micro-batches run."""

from __future__ import annotations

from typing import Any, Dict, List

import torch

from rebatch.torch.batches.switched_off import BATCH_NORM, training_modules


def batch_norms(modules: torch.nn.Module) -> List[torch.nn.Module]:
    """All of them, in training mode or not."""
    return [m for m in modules.modules() if isinstance(m, BATCH_NORM)]


def train_any(found: List[torch.nn.Module]) -> bool:
    """Whether one of these modules normalizes by the statistics of a micro-batch now."""
    return any(training_modules(m, BATCH_NORM) for m in found)


def keep_pairs(options: Dict[str, Any]) -> Dict[str, Any]:
    """Options of a session with two samples or more in a micro-batch, unless they say themselves
    how few there may be, or that there is always one."""
    allowed = options.get("micro_allowed") or [2]
    if options.get("micro_smallest") or options.get("micro_largest") == 1 or max(allowed) == 1:
        return options
    pairs = {**options, "micro_smallest": 2}
    if options.get("micro_start"):
        pairs["micro_start"] = max(2, options["micro_start"])
    return pairs


def with_rest(first: int, count: int, samples: int) -> int:
    """How many samples run from `first` on, for a micro-batch of `count`: the last sample of the
    batch runs with those before it where it is left alone, and its own micro-batch has none."""
    left = samples - first - count
    if left == 1:
        return count + 1
    return 0 if left == 0 and count == 1 and first else count
