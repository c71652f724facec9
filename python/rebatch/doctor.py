"""python3 -m rebatch.doctor: what of this machine to paste into an issue, and what would not work
here and why. The exit status is 0 if a PyTorch training could use a GPU, and 1 if not."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

from rebatch import _library

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def _trouble(what: str) -> str:
    return f"not here      {what}"


def _gpu_of(torch: Any) -> tuple[bool, list[str]]:
    """Whether PyTorch can use a GPU, and why it cannot: often the driver is too old for it."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        first = str(error).strip().split("\n")[0]
        return False, [_trouble(f"PyTorch: {first}")]
    return True, []


def _torch_lines() -> tuple[list[str], list[str], bool]:
    """What there is, what would not work, and whether PyTorch has a GPU."""
    try:
        import rebatch.torch  # noqa: F401  # which says which PyTorch it needs

        import torch
        from rebatch.torch.allocator import front_library
        from rebatch.torch.allocator.front_build import FrontError
    except ImportError as error:
        return ["PyTorch       cannot be used"], [_trouble(str(error))], False
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    has_gpu, troubles = _gpu_of(torch)
    lines = [f"PyTorch       {torch.__version__}, {built}, sees {'a' if has_gpu else 'no'} GPU"]
    lines += [
        f"allocator     {name}={os.environ[name]}" for name in _VARIABLES if name in os.environ
    ]
    if not torch.version.cuda:
        why = "install(): this PyTorch is built without CUDA"
        return lines, [_trouble(why)], has_gpu
    backend = torch.cuda.get_allocator_backend()
    lines.append(f"allocator     {backend}")
    if backend != "native":
        troubles.append(_trouble(f"install(): PyTorch uses {backend}, not its native allocator"))
    try:
        source = front_library.source_of(front_library.this_torch())
    except FrontError as error:
        troubles.append(_trouble(f"install(): {str(error).removeprefix('rebatch: ')}"))
        return lines, troubles, has_gpu
    return [*lines, f"install()     {source}"], troubles, has_gpu


def report() -> tuple[str, bool]:
    """The text, and whether a training could use a GPU."""
    lines, troubles, has_gpu = _torch_lines()
    can = ctypes.c_bool()
    machine = _library.text_of(_library.lib.rebatch_doctor_format, ctypes.byref(can))
    python = f"python        {platform.python_version()}, {sys.executable}"
    text = "\n".join([machine.rstrip(), *troubles])
    first, _, rest = text.partition("\n")
    return "\n".join([first, python, *lines, rest]), has_gpu and can.value


def main() -> int:
    """Prints the report. Returns the exit status."""
    text, can = report()
    print(text)
    return 0 if can else 1


if __name__ == "__main__":
    sys.exit(main())
