"""Exceptions that ctypes would drop. A signal's handler may raise one in a callback of C before its
`try` is entered, or after it is left: ctypes prints it, and C is told that the callback succeeded.

Python's hook for dropped exceptions finds them. It stays once it is set, and passes on what other
threads and others than ctypes drop."""

from __future__ import annotations

import sys
import threading
from typing import Any, Callable, List

_running = threading.local()  # .takers: those of the calls of C that this thread is in
_previous: Callable[..., Any] = sys.__unraisablehook__


def _hook(unraisable: Any) -> None:
    takers = getattr(_running, "takers", None)
    if takers and "ctypes" in (unraisable.err_msg or ""):
        takers[-1](unraisable.exc_value)
    elif getattr(_running, "is_passing", False):  # the previous hook has called this one
        sys.__unraisablehook__(unraisable)
    else:
        _running.is_passing = True
        try:
            _previous(unraisable)
        finally:
            _running.is_passing = False


def call(
    take: Callable[[BaseException], None], function: Callable[..., Any], *arguments: Any
) -> Any:
    """Call a function of C. take(error) is called with what a callback of it raises and ctypes
    would drop."""
    global _previous
    takers: List[Callable[..., Any]] = _running.__dict__.setdefault("takers", [])
    depth = len(takers)
    try:
        takers.append(take)
        if sys.unraisablehook is not _hook:
            _previous, sys.unraisablehook = sys.unraisablehook, _hook
        return function(*arguments)
    finally:
        del takers[depth:]
