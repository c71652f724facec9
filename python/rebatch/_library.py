"""librebatch.so, loaded with ctypes. Its enums, structs and functions are those of the headers in
include/rebatch, from which python/bindings.py makes _headers.py when the package is built.
"""

import ctypes
import os
from ctypes import c_size_t, c_uint32
from typing import Any, Callable

from rebatch._headers import *  # noqa: F403
from rebatch._headers import FUNCTIONS, Status

# ---- loading ----

NAME = "librebatch.so"


def library_path() -> str:
    """Where the library is.

    The path in the environment variable REBATCH_LIBRARY, else the library beside this file.
    """
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), NAME)
    return os.environ.get("REBATCH_LIBRARY") or beside


def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"rebatch: the library {path} cannot be loaded ({error}): install the package, which "
            "builds it, or set REBATCH_LIBRARY to its path"
        ) from None
    for name, result, arguments in FUNCTIONS:
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


lib = _load()


# ---- errors and texts ----


class Error(RuntimeError):
    """A call of the library failed. `status` is a Status, or a callback's own number."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def status_of(number: int) -> int:
    """The Status of that number; the number itself when it is a callback's own."""
    try:
        return Status(number)
    except ValueError:
        return number


# What users of this package call, by the name of what it calls.
_CALLED = {
    "rebatch_step()": "step(batch)",
    "rebatch_map()": "rebatch.map() or step.evaluate()",
    "rebatch_probe()": "step.probe()",
}


def last_error() -> str:
    """The message of this thread's last call that failed; "" when none has failed."""
    text: str = lib.rebatch_last_error().decode(errors="replace")
    for name, called in _CALLED.items():
        text = text.replace(name, called)
    return text


def check(status: int) -> None:
    """Raise Error with the message of the library when `status` is not OK."""
    if status != Status.OK:
        status = status_of(status)
        text = last_error() or lib.rebatch_status_text(status).decode()
        raise Error(f"rebatch: {text}", status)


def text_of(format_function: Callable[..., int], *arguments: Any) -> str:
    """The whole text that a function such as rebatch_pool_format_summary() writes."""
    size = format_function(None, 0, *arguments)
    while True:
        buffer = ctypes.create_string_buffer(size + 1)
        length = format_function(buffer, size + 1, *arguments)
        if length <= size:
            return buffer.value.decode(errors="replace")
        size = length


def parse_size(size: object) -> tuple[int, int]:
    """Bytes and share of a size.

    `size` is a number of bytes, or a text such as "22GiB", "512 MiB", "1048576" or "90%".
    Returns (bytes, 0), or (0, share in 1/1000) for a text with "%". None gives (0, 0).
    Raises Error for a text that is not a size, ValueError for a negative number and TypeError for
    anything else.
    """
    if size is None:
        return 0, 0
    if isinstance(size, str):
        count, share = c_size_t(), c_uint32()
        text = size.encode()
        check(lib.rebatch_config_parse_size(ctypes.byref(count), ctypes.byref(share), text))
        return count.value, share.value
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(
            f'rebatch: a size is {size!r}: expected bytes as an int, or a text such as "22GiB"'
        )
    if not 0 <= size < 1 << 63:
        raise ValueError(f"rebatch: a size is {size}: expected 0 to 2^63 - 1 bytes")
    return size, 0
