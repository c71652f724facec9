"""The options of a Backward and a Step, each spelt once: type checkers underline
Step(micro_strat=4).

session_options() in session.py has the defaults of a session's options, and training_of() those of
the passes. docs/pytorch-reference.md says what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict


class SessionOptions(TypedDict, total=False):
    """Limits of the session, and what it says."""

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


class PassOptions(SessionOptions, total=False):
    """All of the passes."""

    embed: Callable[[Any, Any], Any] | None
    normalizer: Callable[[Any], Any] | None
    autocast: Any
    cost: Callable[[Any, int, int], int] | None
    lighten: Callable[[bool], None] | Sequence[Callable[[bool], None]]
    slice: Callable[[Any, int, int], Any] | None
    length: Callable[[Any], int] | None
    batch_dim: int
    generators: Sequence[Any]
    state: Any
    gradients: Literal["fresh", "inplace"]
    graphs: bool | int
    on_event: Callable[[str, Any], None] | None
    group: Any
    group_timeout: float
    window: bool | None
