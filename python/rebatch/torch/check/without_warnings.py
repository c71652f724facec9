"""Passes that are no part of a training warn of nothing: a few samples have warnings that a batch
has not, as of a deviation of one."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Iterator


class _OfThread(threading.local):
    """In the place of a pattern for texts. `warnings.catch_warnings` would take the filters from
    other threads too, and forget which warnings were given already."""

    runs = False

    def match(self, _text: str) -> bool:
        return self.runs


_of_thread = _OfThread()
_FILTER = ("ignore", _of_thread, Warning, None, 0)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Within it this thread gives none."""
    filters = warnings.filters
    filters.insert(0, _FILTER)  # type: ignore[attr-defined]
    was_running, _of_thread.runs = _of_thread.runs, True
    try:
        yield
    finally:
        _of_thread.runs = was_running
        with contextlib.suppress(ValueError):
            filters.remove(_FILTER)  # type: ignore[attr-defined]
