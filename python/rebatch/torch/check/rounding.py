"""How far two results may lie apart that differ by rounding alone."""

from __future__ import annotations

from typing import Any

import torch

# Relative differences of gradients, and of losses, that are no more than rounding, by what is
# computed in: the floors of what is measured. TF32 has 11 bits, bfloat16 has 8.
_FLOORS = {"fp32": (1e-3, 1e-4), "tf32": (1e-2, 2e-3), "16 bits": (3e-2, 4e-3)}
# What is measured raises them by no more than this.
_MOST = 10
# With these other random numbers are drawn, where draws could not be fixed.
SEEDS = (7, 8)


def floors(is_16_bit: bool, device: torch.device) -> tuple[Any, ...]:
    """(of gradients, of losses)"""
    if is_16_bit:
        return _FLOORS["16 bits"]
    if device.type == "cuda" and _uses_tf32():
        return _FLOORS["tf32"]
    return _FLOORS["fp32"]


def are_exact(is_16_bit: bool, device: torch.device) -> bool:
    """Whether the floors are those of float32."""
    return floors(is_16_bit, device) == _FLOORS["fp32"]


def _uses_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32


def tolerance(floor: float, measured: float) -> float:
    """From the difference between two orders of the same samples."""
    return min(max(floor, 4 * measured), _MOST * floor)
