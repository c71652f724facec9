"""Whose code runs: where a warning points."""

from __future__ import annotations

import sys

_PACKAGES = ("rebatch", "torch", "lightning", "pytorch_lightning", "transformers", "accelerate")


def user_stacklevel() -> int:
    """The stacklevel, for warn() in the function that calls this, of the program's own line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).split(".")[0] in _PACKAGES:
        level, frame = level + 1, frame.f_back
    return level
