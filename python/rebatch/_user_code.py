"""What is the program's own, and what of an installed package; and where a warning points."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch

# Packages whose objects are not inspected.
_OTHERS = frozenset(
    (*sys.builtin_module_names, *sys.stdlib_module_names, "torch", "numpy", "rebatch")
) - {"__main__"}
# Packages that call this one.
_CALLERS = (
    "rebatch",
    "torch",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
    "contextlib",
)


@functools.lru_cache(maxsize=None)
def is_own(package: str) -> bool:
    """Whether a package is the program's own, and not one that was installed."""
    if package in _OTHERS:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return not any(folder in file for folder in ("site-packages", "dist-packages"))


class _AreObjects(dict[type, bool]):
    """Whether a type is a class of the program with attributes, and neither a module nor a
    function; or one of PyTorch's schedulers, which others hold."""

    def __missing__(self, kind: type) -> bool:
        skipped = (torch.nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType)
        package = (getattr(kind, "__module__", None) or "builtins").split(".")[0]
        is_container = issubclass(kind, (list, dict, tuple, set))
        is_scheduler = issubclass(kind, torch.optim.lr_scheduler.LRScheduler)
        is_looked_at = is_scheduler or is_own(package)
        self[kind] = not issubclass(kind, skipped) and not is_container and is_looked_at
        return self[kind]


_are_objects = _AreObjects()


def is_object(value: Any) -> bool:
    """Of a class of the program that is no module and no container, or a scheduler."""
    return _are_objects[type(value)]


def user_stacklevel() -> int:
    """The stacklevel, for warn() in the function that calls this, of the program's own line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).split(".")[0] in _CALLERS:
        level, frame = level + 1, frame.f_back
    return level


def line_of(error: BaseException) -> str:
    """Where the program was when PyTorch raised it: " at train.py:12"; "": within PyTorch."""
    found, at = "", error.__traceback__
    while at:
        frame = at.tb_frame
        if is_own(str(frame.f_globals.get("__name__", "")).split(".")[0]):
            found = f" at {frame.f_code.co_filename}:{at.tb_lineno}"
        at = at.tb_next
    return found
