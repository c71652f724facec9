"""The options of a session as type checkers see them: Step(micro_strat=4) is underlined.

session_options() in session.py has their defaults, docs/pytorch.md says what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class SessionOptions(TypedDict, total=False):
    """Keywords of a Step beside its own."""

    micro_start: int
    micro_smallest: int
    micro_largest: int
    micro_multiple_of: int
    micro_allowed: Sequence[int]
    learn: bool
    on_oom: Literal["default", "halve", "fit", "stop"]
    admission: bool | None
    growth: bool | None
    grow_after: int
    grow_wait_max: int
    max_attempts: int
    max_ooms_in_row: int
    oom_wait_ms: int
    log_level: Literal["default", "quiet", "error", "warn", "info", "debug"]
    log_file: str | None
    log_format: Literal["text", "json"]
