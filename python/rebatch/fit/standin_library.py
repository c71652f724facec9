"""Builds the stand-in for CUDA for the PyTorch of a Python, once, and finds it. Must not know what
runs on it."""

import hashlib
import os
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent / "standin"


class StandinError(RuntimeError):
    """It cannot be built; the message says what to do."""


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
        raise StandinError(f"rebatch: {python} cannot be run: {error.strerror}") from None
    found = dict(re.findall(r"^(\w+)(?:: [^=]+)? = ['\"]([^'\"]+)['\"]", done.stdout, re.MULTILINE))
    if "__version__" not in found:
        raise StandinError(f"rebatch: {python} has no PyTorch: expected one with CUDA")
    if "cuda" not in found:
        raise StandinError(
            f"rebatch: {python} has PyTorch {found['__version__']}, which is built without CUDA: "
            "expected a CUDA build, which needs no GPU here"
        )
    return found["__version__"], found["cuda"]


def library(python: str, torch_version: str) -> pathlib.Path:
    """The library to preload, built if it is not there yet (about ten seconds). Raises
    StandinError."""
    digest = hashlib.sha256(repr((torch_version, os.path.realpath(python))).encode())
    for file in sorted(FOLDER.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    target = _cache() / f"standin-torch{torch_version}-{digest.hexdigest()[:16]}"
    if not (target / "libcuda.so.1").exists():
        print(f"rebatch: building the stand-in for PyTorch {torch_version}, once", file=sys.stderr)
        command = ["sh", str(FOLDER / "build"), python, str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it printed nothing"]
            raise StandinError(f"rebatch: the stand-in cannot be built: {said[-1]}")
    return target / "libcuda.so.1"
