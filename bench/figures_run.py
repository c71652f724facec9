"""How a part of bench/figures.py runs programs: within its bound, several times. What they said, as
numbers."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time
import typing

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass
class Part:
    make_rows: typing.Callable
    paths: list
    gpus: int = 0
    seconds: int = 600


class PartFails(Exception):
    pass


def number(word):
    try:
        return float(word)
    except ValueError:
        return word


def read(text):
    """The lines of a program: JSON objects; those of `name: key=value ...`; else words."""
    for line in text.splitlines():
        if line.startswith("{"):
            yield json.loads(line)
        elif re.match(r"\w+: .*\b\w+=", line):
            name, _, rest = line.partition(": ")
            pairs = (word.partition("=") for word in rest.split() if "=" in word)
            yield {"line": name, **{key: number(value) for key, _, value in pairs}}
        elif line.strip():
            yield {"words": [number(word) for word in line.split()]}


def median_of(values):
    """Of each number in values of the same form."""
    first = values[0]
    if isinstance(first, dict):
        return {key: median_of([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [median_of(list(each)) for each in zip(*values)]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return statistics.median(values)
    return first


class Run:
    """What a part runs programs with, until its bound."""

    def __init__(self, log, seconds, is_try=False, is_once=False):
        self.log, self.seconds, self.is_try = log, seconds, is_try
        self.is_once = is_once or is_try
        self.until = time.monotonic() + seconds

    def lines(self, command, times=1, has_words=True):
        """Of a command: each number is the median of so many runs."""
        found = [list(read(self.output(command))) for _ in range(1 if self.is_once else times)]
        if not has_words:
            found = [[line for line in lines if "words" not in line] for lines in found]
        if len({len(lines) for lines in found}) > 1:
            raise PartFails(
                f"{command} printed {[len(lines) for lines in found]} lines in its runs"
            )
        return [median_of(each) for each in zip(*found)]

    def output(self, command):
        self.log.write(f"\n$ {command}\n")
        self.log.flush()
        process = subprocess.Popen(
            ["sh", "-c", command], stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT,
            env={**os.environ, "MAKEFLAGS": ""}, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=max(0, self.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise PartFails(
                f"{command} ran beyond the {self.seconds:g} seconds of the part"
            ) from None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind, too
            except ProcessLookupError:
                pass
            process.wait()
        self.log.write(said)
        if process.returncode:
            raise PartFails(f"{command} ended with status {process.returncode}: see figures.log")
        return said

    def make(self, target, times=1):
        return self.lines(f"make -s --no-print-directory {target}", times)

    def python(self, program, small="", times=1, ranks=0, has_words=False):
        """Its JSON objects. `small` are the flags of --try, in place of the program's own."""
        if self.is_try:
            program = f"{program.split()[0]} {small}"
        launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} " if ranks else ""
        return self.lines(f"{sys.executable} {launch}bench/{program}", times, has_words)
