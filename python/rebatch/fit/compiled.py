"""A compiled program, whose session is the C library's: its own probe runs on the stand-in for
CUDA. Must not know PyTorch."""

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any, Optional

from rebatch.fit.cards import Beside
from rebatch.fit.error import FitError

_PAGE = 2 << 20  # in which a driver gives memory
_CUBLAS = 35 << 20  # bytes that its kernels, and its own, took of an H200 in examples/gpt


def find(word: str) -> Optional[str]:
    """The path of the program that a command's first word names, where it is a compiled one."""
    path = shutil.which(word)
    if not path or re.fullmatch(r"python[\d.]*", os.path.basename(path)):
        return None
    with open(path, "rb") as file:
        return path if file.read(4) == b"\x7fELF" else None


def cuda_names(path: str) -> list[str]:
    """The functions of CUDA and its libraries that a program takes. Raises FitError."""
    try:
        linked = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        own = [name for name in re.findall(r"=> (/\S+)", linked) if not _is_cuda(name)]
        command = ["nm", "-D", "--undefined-only", path, *own]
        found = subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise FitError(f"rebatch: there is no {error.filename}: install binutils") from None
    names = sorted(set(re.findall(r" U ((?:__)?cu[A-Za-z0-9_]+)", found)))
    if not names:
        raise FitError(
            f"rebatch: {path} calls no shared library of CUDA: expected a program that is linked "
            "with nvcc's -cudart shared, or a Python program"
        )
    return names


def _is_cuda(library: str) -> bool:
    return os.path.basename(library).startswith(("libcu", "libnv"))


def outside(beside: Beside, names: list[str]) -> int:
    """What a program that takes these functions has of the card beside its pool."""
    return beside.bare + _CUBLAS * any(name.startswith("cublas") for name in names)


def run(
    program: list[str], environment: dict[str, str], outside_bytes: int, memory: list[int]
) -> dict[str, Any]:
    """What the program answers for a card, as a PyTorch program does. Raises FitError."""
    rows = []
    for free in memory:
        room = max(free - outside_bytes, 0) // _PAGE * _PAGE
        answer = probe_on(program, {**environment, "STANDIN_LIMIT": str(room)})
        rows.append(_row(answer, room))
    return {
        "outside_bytes": outside_bytes,
        "allocator": "rebatch",
        "rows": rows,
        "remark": "",
        "seconds": answer["seconds"],
    }


def probe_on(program: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What the program prints in place of its training; the rest goes to standard error. Raises
    FitError."""
    environment = {**environment, "REBATCH_PROBE_ONLY": "json"}
    done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = {}
    for line in done.stdout.splitlines(keepends=True):
        if line.startswith('{"status":'):
            answer = json.loads(line)
        else:
            sys.stderr.write(line)
    if not answer:
        raise FitError(
            f"rebatch: {program[0]} ended with status {done.returncode} and never called "
            "rebatch_step()"
        )
    if answer["status"] not in ("REBATCH_OK", "REBATCH_E_EXHAUSTED"):
        raise FitError(f"rebatch: {answer['error']}")
    return answer


def _row(answer: dict[str, Any], room: int) -> dict[str, Any]:
    size = answer["size"]
    after = [row for row in answer["sizes"] if row["size"] > size and not row["fits"]]
    return {
        "room": room,
        "level": 0,
        "step": "",
        "batch": answer["batch"],
        "best": size and _tried(size, answer["measured_peak_bytes"]),
        "next": after and _tried(after[0]["size"], after[0]["predicted_peak_bytes"]),
        "tries": answer["microbatches"],
    }


def _tried(size: int, peak: int) -> dict[str, Any]:
    return {"samples": size, "peak": peak, "reserved": peak, "held": {"pool": peak}}
