"""The command `rebatch fit`: its options, the program on the stand-in for CUDA, and the answer.
Must not know PyTorch."""

import argparse
import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

from rebatch import _library
from rebatch.fit import cards, compiled, table
from rebatch.fit.error import FitError
from rebatch.fit.rows import answer_of_tries, read_answer, read_tried
from rebatch.fit.search import Sizes
from rebatch.fit.standin_library import library, versions_of
from rebatch.fit.tried import BATCH, UNLIMITED, Request, Tried, with_size

_OK, _FAILED, _USAGE, _NOTHING_FITS = 0, 1, 2, 3
# Larger writes within a GPU, of kernels that would not run either, are left out: they would take
# memory of the host.
_FILL_MOST = 1 << 20
_CUDA = "13.0"  # of a compiled program's driver
_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


@dataclasses.dataclass(frozen=True)
class Given:
    """The options."""

    cards: list[cards.Card]
    memory: list[int]  # bytes; empty: all of each card
    is_json: bool
    installs: bool  # rebatch's allocator, where the program does not
    levels: bool  # of `lighten`
    ranks: int  # of which the program is one; 1: alone
    batch: int  # samples in place of {batch} in the command; 0: there is none
    program: list[str]


def _size(text: str) -> int:
    try:
        count, share = _library.parse_size(text)
    except _library.Error as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if share or not count:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 24GiB")
    return count


def _named(text: str) -> list[cards.Card]:
    try:
        return [cards.find(name) for name in text.split(",") if name.strip()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("rebatch: ")) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rebatch fit",
        usage="rebatch fit [OPTION]... -- PROGRAM [ARGUMENT]...",
        description="Finds the largest micro-batch of your own program that fits on a card, on a "
        "machine without a GPU. PROGRAM runs unchanged up to its first Step or rebatch_step(), or "
        "without one of PyTorch to its first training pass, with memory as on the card and without "
        "kernels; there sizes are tried, and the program ends. What it prints goes to standard "
        "error.",
        epilog="exit status: 0 a size was found, 1 failure, 2 wrong usage, 3 nothing fits, "
        "127 PROGRAM does not exist",
    )
    parser.add_argument("--gpu", type=_named, action="extend", default=[], metavar="CARD[,CARD]...",
                        help='for example "H100 80GB" or t4,l4,a100-40')  # fmt: skip
    parser.add_argument(
        "--memory",
        type=lambda text: [_size(part) for part in text.split(",")],
        action="extend",
        default=[],
        metavar="SIZE[,SIZE]...",
        help="memory that is free before the program starts, for example 24GiB; default: all",
    )
    parser.add_argument("--install", action="store_true", help="with rebatch's allocator, as after "
                        "install(), also where the program does not call it")  # fmt: skip
    parser.add_argument(
        "--lighten", action="store_true", help="a row for each way of the Step's `lighten` too"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="as one of N ranks, for "
                        "a Python program that torchrun would start")  # fmt: skip
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="of a program without a "
                        "Step that takes its batch size from an argument, written {batch}: its own "
                        "size")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--cards", action="store_true", help="list the cards, and end")
    return parser


def read(arguments: Sequence[str]) -> Optional[Given]:
    """The options; None: the cards were listed. Ends the process where they are wrong."""
    arguments = list(arguments)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    given = parser.parse_args(arguments[:at])
    if given.cards:
        print(table.of_cards(cards.CARDS))
        return None
    program = arguments[at + 1 :]
    if not program:
        parser.error('there is no program: expected "-- PROGRAM [ARGUMENT]..."')
    if not (given.gpu or given.memory):
        parser.error("there is no card: expected --gpu, or --memory for an H100 with less")
    chosen = given.gpu or [cards.find("h100")]
    for card in chosen:
        if max(given.memory, default=0) > card.memory_bytes:
            parser.error(
                f"argument --memory: {max(given.memory) / 2**30:.2f} GiB of the "
                f"{card.memory_bytes / 2**30:.2f} GiB of {card.short}: expected no more than it has"
            )
    if (given.install or given.lighten or given.ranks != 1) and compiled.find(program[0]):
        parser.error(
            f"--install, --lighten and --ranks are for Python: {program[0]} is a compiled program"
        )
    if given.ranks < 1:
        parser.error(f"argument --ranks: {given.ranks}: expected at least 1")
    if given.ranks > 1 and not _is_python_file(program):
        parser.error("--ranks needs a program such as python3 train.py, without torchrun")
    if given.batch < 0 or bool(given.batch) != any(BATCH in word for word in program):
        parser.error(
            f"argument --batch: {given.batch or 'not given'}: expected --batch N, at least 1, and "
            f"{BATCH} in the command, such as --batch 32 -- python3 train.py --batch-size {BATCH}"
        )
    return Given(
        cards=chosen,
        memory=given.memory,
        is_json=given.json,
        installs=given.install,
        levels=given.lighten,
        ranks=given.ranks,
        batch=given.batch,
        program=program,
    )


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[\d.]*", os.path.basename(word)) is not None


def _is_python_file(program: Sequence[str]) -> bool:
    """Whether Python runs a file or a module, without options of its own."""
    rest = program[1:]
    return _is_python(program[0]) and bool(rest) and (rest[0] == "-m" or rest[0][0] != "-")


def _python_of(program: Sequence[str]) -> str:
    """The Python whose PyTorch the program uses: itself, or the one that runs this."""
    found = shutil.which(program[0])
    return found if found and _is_python(program[0]) else sys.executable


def _environment(card: cards.Card, memory: list[int], preloaded: str, cuda: str) -> dict[str, str]:
    major, minor = (*cuda.split("."), "0")[:2]
    before = os.environ.get("LD_PRELOAD")
    return {
        **os.environ,
        "LD_PRELOAD": f"{preloaded}:{before}" if before else preloaded,
        "STANDIN_CARD": card.standin,
        "STANDIN_CUDNN": card.cudnn(int(major) * 1000 + int(minor) * 10),
        "STANDIN_MEMORY": str(card.memory_bytes),
        "STANDIN_LIMIT": str(max(memory)),
        "STANDIN_FILL_MOST": str(_FILL_MOST),
        "STANDIN_GPUS": "1",
        # PyTorch counts GPUs by NVML, which sees those of the machine.
        "CUDA_VISIBLE_DEVICES": "0",
        # Batches that the host makes take the memory of the last ones, whose pages are there.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    }


def _asked(card: cards.Card, given: Given) -> dict[str, Any]:
    return {
        "free": given.memory or [card.memory_bytes],
        "beside": dataclasses.asdict(card.beside),
        "installs": given.installs,
        "levels": given.levels,
        "sized": None,  # the try of a program as a whole
        "words": [],  # of a command in which {batch} is its size, where it may answer for all
    }


def _run(given: Given, environment: dict[str, str], asked: dict[str, Any]) -> dict[str, Any]:
    """What a PyTorch program answers. Raises FitError."""
    with tempfile.TemporaryDirectory(prefix="rebatch-fit-") as folder:
        answer = os.path.join(folder, "answer.json")
        environment = {
            **environment,
            "REBATCH_FIT": json.dumps({**asked, "answer": answer}),
            "PYTHONPATH": os.pathsep.join(filter(None, [_STARTUP, os.environ.get("PYTHONPATH")])),
            # What Inductor makes of a model does not run here.
            "TORCHDYNAMO_DISABLE": "1",
        }
        sys.stdout.flush()
        program = given.program
        if asked["sized"]:
            program = [with_size(word, asked["sized"]["size"]) for word in program]
        if given.ranks > 1:
            program = [program[0], "-m", "rebatch.fit.one_of", str(given.ranks), *program[1:]]
        done = subprocess.run(program, env=environment, stdout=sys.stderr)
        size = asked["sized"]["size"] if asked["sized"] else 0
        return read_answer(answer, program[0], done.returncode, size)


@dataclasses.dataclass(frozen=True)
class _Sized:
    """A program that takes its size where a copy of its process cannot change it, as from a
    variable of the environment: each try runs it from its start."""

    run: Callable[[Request], Tried]
    samples: int
    name, is_loop = "", True

    def sizes(self) -> Sizes:
        return Sizes()

    def tried(self, request: Request) -> Tried:
        return self.run(request)


def _run_sized(given: Given, environment: dict[str, str], asked: dict[str, Any]) -> dict[str, Any]:
    """What a program answers that takes its size from its command. Raises FitError."""
    began = time.perf_counter()

    def run(request: Request, words: Sequence[str] = ()) -> dict[str, Any]:
        sized = dataclasses.asdict(request)
        return _run(given, environment, {**asked, "sized": sized, "words": words})

    first = Request(given.batch, UNLIMITED, installs=given.installs)
    found = run(first, given.program)
    if "rows" in found:
        return found
    again = _Sized(lambda each: read_tried(found if each == first else run(each)), given.batch)
    return {**answer_of_tries(again, asked), "seconds": time.perf_counter() - began}


def _refused(program: str, error: OSError) -> int:
    print(f"rebatch: {program} cannot be run: {error.strerror}", file=sys.stderr)
    return 127 if isinstance(error, FileNotFoundError) else 126


def _fit_python(given: Given) -> dict[str, Any]:
    python = _python_of(given.program)
    torch, cuda = versions_of(python)
    preloaded = str(library(python, torch))
    rows: list[dict[str, Any]] = []
    for card in given.cards:
        memory = given.memory or [card.memory_bytes]
        environment = _environment(card, memory, preloaded, cuda)
        run = _run_sized if given.batch else _run
        answer = run(given, environment, _asked(card, given))
        rows += table.rows_of(card, memory, answer)
    return {"torch": torch, "cuda": cuda, "rows": rows}


def _fit_compiled(given: Given, path: str) -> dict[str, Any]:
    names = compiled.cuda_names(path)
    preloaded = str(library(path, " ".join(names)))
    rows: list[dict[str, Any]] = []
    for card in given.cards:
        memory = given.memory or [card.memory_bytes]
        environment = _environment(card, memory, preloaded, _CUDA)
        outside = compiled.outside(card.beside, names)
        answer = compiled.run(given.program, environment, outside, memory)
        # What a process takes beside its pool was measured of one program.
        rows += table.rows_of(dataclasses.replace(card, is_measured=False), memory, answer)
    return {"rows": rows}


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns its exit status."""
    given = read(arguments)
    if given is None:
        return _OK
    if not (shutil.which(given.program[0]) or os.path.exists(given.program[0])):
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return _refused(given.program[0], error)
    path = compiled.find(given.program[0])
    try:
        answer = _fit_compiled(given, path) if path else _fit_python(given)
    except FitError as error:
        print(error, file=sys.stderr)
        return _FAILED
    except OSError as error:
        return _refused(given.program[0], error)
    if given.is_json:
        print(json.dumps(answer, indent=1))
    else:
        print(table.of_rows(answer["rows"]))
    return _OK if all(row["micro"] for row in answer["rows"]) else _NOTHING_FITS
