"""Builds the stand-in for CUDA for a program, once, and finds it. Must not know what runs on it."""

import hashlib
import os
import pathlib
import re
import subprocess
import sys

from rebatch.fit.error import FitError

FOLDER = pathlib.Path(__file__).resolve().parent / "standin"


def _cache() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(root) / "rebatch"


# The version of PyTorch and of its CUDA, without an import of it, which takes seconds.
_VERSIONS = """
import importlib.util, pathlib
found = importlib.util.find_spec("torch")
folders = found.submodule_search_locations if found else []
print(*((pathlib.Path(folder) / "version.py").read_text() for folder in folders))
"""


def versions_of(python: str) -> tuple[str, str]:
    """The versions of PyTorch and of the CUDA that it is built with, of a Python."""
    try:
        done = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True)
    except OSError as error:
        raise FitError(f"rebatch: {python} cannot be run: {error.strerror}") from None
    found = dict(re.findall(r"^(\w+)(?:: [^=]+)? = ['\"]([^'\"]+)['\"]", done.stdout, re.MULTILINE))
    if "__version__" not in found:
        raise FitError(f"rebatch: {python} has no PyTorch: expected one with CUDA")
    if "cuda" not in found:
        raise FitError(
            f"rebatch: {python} has PyTorch {found['__version__']}, which is built without CUDA: "
            "expected a CUDA build, which needs no GPU here"
        )
    return found["__version__"], found["cuda"]


def library(program: str, needs: str) -> pathlib.Path:
    """The library to preload for a compiled program, or for a PyTorch, whichever Python has it:
    built if it is not there yet for what the program needs (about ten seconds). Raises FitError."""
    is_python = re.fullmatch(r"python[\d.]*", os.path.basename(program))
    whose = "" if is_python else os.path.realpath(program)
    digest = hashlib.sha256(repr((needs, whose)).encode())
    for file in sorted(FOLDER.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    target = _cache() / f"standin-{digest.hexdigest()[:16]}"
    if not (target / "libcuda.so.1").exists():
        print(f"rebatch: building the stand-in for {program}, once", file=sys.stderr)
        command = ["sh", str(FOLDER / "build"), program, str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it printed nothing"]
            raise FitError(f"rebatch: the stand-in cannot be built: {said[-1]}")
    return target / "libcuda.so.1"
