"""Methods that others call, such as the C library, and that do not keep their objects. An object
that owns its callbacks is then in no cycle of references, and is freed when its last user lets go
of it."""

from __future__ import annotations

import weakref
from typing import Any, Callable

_RAISES = object()


def weakly(method: Callable[..., Any], gone: Any = _RAISES) -> Callable[..., Any]:
    """A function that calls a bound method while its object is there. Once it is gone, the function
    raises ReferenceError, or returns `gone`.

    C needs `gone`: no exception passes through it, and the 0 that ctypes makes of one is success
    for a callback with a status. A call of C that runs callbacks holds their object, so this is met
    only where somebody has kept a table of callbacks for longer."""
    bound: Any = method
    owner, function = weakref.ref(bound.__self__), bound.__func__
    name = getattr(method, "__qualname__", repr(method))
    del bound, method

    def call(*arguments: Any) -> Any:
        found = owner()
        if found is not None:
            return function(found, *arguments)
        if gone is _RAISES:
            raise ReferenceError(
                f"rebatch: {name}() was called when its object was gone: expected an owner that "
                "outlives its callers"
            )
        return gone

    return call
