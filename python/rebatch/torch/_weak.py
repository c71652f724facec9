"""Methods that others call, such as the C library, and that do not keep their objects. An object
that owns its callbacks is then in no cycle of references, and is freed when its last user lets go
of it."""

from __future__ import annotations

import weakref
from typing import Any, Callable


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method while its object is there, and returns 0, which C takes
    for success, when it is gone."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = found()
        return 0 if bound is None else bound(*arguments)

    return call
