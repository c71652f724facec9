"""The functions by which the stand-in for CUDA is controlled. Must not know who does."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from rebatch.fit.error import FitError

_size = ctypes.c_size_t
# What they return, and their arguments: the stand-in's README.md says what they do.
_FUNCTIONS = {
    "standin_set_memory": (None, [_size, _size]),
    "standin_peak": (_size, [_size, ctypes.c_bool]),
    "standin_libraries": (ctypes.c_uint, []),
    "standin_allocations": (_size, []),
    "standin_leave_out": (None, [ctypes.c_bool]),
    "standin_hide_modes": (None, [ctypes.c_long]),
}


@functools.lru_cache(maxsize=None)
def standin() -> Any:
    """Its library."""
    library = ctypes.CDLL("libcuda.so.1")
    try:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError:
        raise FitError("rebatch: libcuda.so.1 is a GPU's driver: expected the stand-in") from None
    return library
