"""Work in a process of its own: its program is bench/fit.py, and its answer the object that it
prints."""

import importlib
import json
import pathlib
import subprocess
import sys

FIT = str(pathlib.Path(__file__).parents[1] / "fit.py")


def command(module, function, *arguments):
    """That of a process which calls a function of a module here with strings."""
    return [sys.executable, FIT, "child", module, function, *map(str, arguments)]


def child(arguments):
    module, function, *rest = arguments
    getattr(importlib.import_module(f"fit_parts.{module}"), function)(*rest)


def answer_of(command):
    """The object that a command prints last, or an error."""
    done = subprocess.run(command, capture_output=True, text=True)
    start = done.stdout.find("{")
    if start < 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": " | ".join(said[-3:]) or f"exit {done.returncode}"}
    return json.loads(done.stdout[start:])
