"""The answer for one card: a row for each size of memory, by the tries of a subject. Must not know
what a try runs, cards, nor PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, Callable, NoReturn, Optional, Protocol

from rebatch.fit.error import FitError, undecided
from rebatch.fit.search import EXACT, ROUGH, Line, Sizes, largest_size, line_of, steady_size
from rebatch.fit.tried import (
    CUBLAS,
    CUBLAS_EX,
    CUDNN,
    UNLIMITED,
    UNMEASURED,
    GoOn,
    Request,
    Tried,
)

_DONE, _FAILED = 0, 1
_PAGE = 2 << 20  # in which a driver gives memory
_SAME = 0.005  # how far peaks differ that are told as one
_UNMEASURED = (
    "The program uses cuFFT, cuSPARSE or cuSOLVER: cuFFT's workspaces are estimated, the others' "
    "do not count."
)


class Subject(Protocol):
    """What is tried."""

    @property
    def name(self) -> str: ...  # where there are several

    @property
    def samples(self) -> int: ...  # of the program's batch

    @property
    def is_loop(self) -> bool: ...  # of the program itself, which may not run all sizes

    def sizes(self) -> Sizes: ...

    def tried(self, request: Request, /) -> Tried: ...


@dataclasses.dataclass
class Row:
    """What was found for a room: the largest size that fits, and the next one."""

    room: int
    level: int  # of `lighten`
    best: Optional[Tried]
    next: Optional[Tried]  # with as much memory as it asks for
    tries: int = 0
    step: str = ""  # of several, the one whose size it is
    batch: int = 0  # samples of the program's batch


class Search:
    """Finds the rows of a subject."""

    def __init__(self, subject: Subject, installs: bool = False):
        self._subject, self._installs = subject, installs
        self._tried: dict[Request, Tried] = {}
        # By level, the last row's size by what the line said: fragments are alike in all rooms.
        self._found: dict[int, float] = {}
        self.libraries = 0  # that were used, in all tries
        self._step = 1  # of sizes
        self.remark = ""  # a sentence below the table

    def line(self, level: int = 0) -> Line:
        """The line on which peaks lie. Raises FitError."""
        sizes, seen = self._subject.sizes(), []

        def peak(size: int) -> int:
            seen.append(self.tried(size, UNLIMITED, level))
            return seen[-1].peak

        line = line_of(peak, sizes, self._subject.samples)
        cached = min(tried.reserved - tried.peak for tried in seen)
        return dataclasses.replace(line, fixed=line.fixed + cached)

    def row(self, room: int, line: Line, level: int = 0) -> Row:
        """The row of a room, which the allocator may hold. Raises FitError."""
        tries: dict[int, Tried] = {}
        sizes = self._subject.sizes()
        sizes = dataclasses.replace(sizes, step=max(sizes.step, self._step))

        # A peak that grows with the square begins far beyond, where a program may not be followed.
        refused: dict[int, FitError] = {}

        def fits(size: int) -> bool:
            try:
                tries[size] = self.tried(size, room, level)
            except FitError as error:
                refused[size] = error
            return size in tries and tries[size].fits

        def parts(low: int) -> int:
            return ROUGH if tries[low].refused else EXACT

        meets = line.meets(room)
        start = sizes.at_most(meets * self._found.get(level, 1.0))
        low, high = largest_size(fits, sizes, start, parts)
        if low and tries[low].refused:
            low, high = steady_size(fits, sizes, (low, high))
        if high in refused:
            if self._finds_step(high, sizes.step, level, refused[high]):
                return self.row(room, line, level)
            if not low or not self._subject.is_loop:
                raise refused[high]
            self._say(f"Larger sizes than {low} may fit: {_reason(refused[high])}.")
            high = 0
        best = tries.get(low)
        self._found[level] = low / meets or 1.0 if meets > 0 else 1.0
        if high and best and best.refused:
            after: Optional[Tried] = Tried(high, False)
        else:
            after = self.tried(high, UNLIMITED, level) if high else None
        return self._row(room, level, best, after, len(tries) + bool(high))

    def _finds_step(self, failed: int, step: int, level: int, error: FitError) -> bool:
        """Whether a size has failed as it is no multiple of a number, of which others are."""
        own = self._subject.samples if self._subject.is_loop else 0
        for more in (each for each in range(2 * step, own + 1, step) if own % each == 0):
            with contextlib.suppress(FitError):
                self.tried(-(-failed // more) * more, UNLIMITED, level)
                self._step = more
                self._say(f"Sizes are multiples of {more}: {_reason(error)}.")
                return True
        return False

    def _say(self, sentence: str) -> None:
        if sentence not in self.remark:
            self.remark = f"{self.remark} {sentence}".strip()

    def row_of_own(self, room: int) -> Row:
        """The row of the program's own size alone."""
        size = self._subject.samples
        tried = self.tried(size, room)
        if tried.fits:
            return self._row(room, 0, tried, None, 1)
        return self._row(room, 0, None, self.tried(size, UNLIMITED), 2)

    def _row(
        self, room: int, level: int, best: Optional[Tried], after: Optional[Tried], tries: int
    ) -> Row:
        if best:
            self._say(best.remark)
        if best and best.assumed:
            self._compare_choices(best, level)
        elif best and best.read_at:
            self._refuse_read_sizes(best, room, level)
        return Row(room, level, best, after, tries, self._subject.name, self._subject.samples)

    def _refuse_read_sizes(self, best: Tried, room: int, level: int) -> None:
        """A program that reads integers of a kernel may log them, or take a size from them."""
        try:
            other = self.tried(best.samples, room, level, reads_others=True)
        except FitError:
            other = None
        if other is None or other.asked != best.asked:
            raise FitError(
                f"rebatch: {best.read_at}: the program takes a size from integers that a kernel "
                "would compute, and none runs here: expected sizes that come from the host"
            )

    def _compare_choices(self, best: Tried, level: int) -> None:
        """Rows that a kernel chooses may matter to the peak, or be few beside all else."""
        own = self.tried(best.samples, UNLIMITED, level)
        try:
            other = self.tried(best.samples, UNLIMITED, level, reads_others=True)
        except FitError:
            other = None
        if other is None or abs(other.peak - own.peak) > _SAME * own.peak:
            raise undecided(best.assumed)
        change = abs(other.peak - own.peak) / own.peak
        self._say(
            f"{best.assumed}; with all that it may select, or none, the peak differs by "
            f"{change:.1%}."
        )

    def tried(self, size: int, room: int, level: int = 0, reads_others: bool = False) -> Tried:
        """The try of a size, which runs once."""
        request = Request(size, room, level, self._installs, reads_others)
        if request not in self._tried:
            self._tried[request] = self._subject.tried(request)
        found = self._tried[request]
        self.libraries |= found.libraries
        return found

    def outside(self, beside: dict[str, int]) -> int:
        """What the process takes beside the allocator, by the libraries that it has used."""
        has_kernels = self.libraries & (CUBLAS_EX | CUDNN)
        return (
            beside["context"]
            + beside["cublas"] * bool(self.libraries & CUBLAS)
            + beside["kernels"] * bool(has_kernels)
        )


def answer_of(
    rows: list[Row], outside: int, is_installed: bool, remark: str = ""
) -> dict[str, Any]:
    """As the command reads it. `remark` is a sentence below the table."""
    if any(tried.libraries & UNMEASURED for row in rows for tried in (row.best, row.next) if tried):
        remark = f"{remark} {_UNMEASURED}".strip()
    return {
        "outside_bytes": outside,
        "allocator": "rebatch" if is_installed else "native",
        "rows": [dataclasses.asdict(row) for row in rows],
        "remark": remark,
    }


def _reason(error: object) -> str:
    return str(error).removeprefix("rebatch: ")


def answer_of_tries(subject: Subject, request: dict[str, Any]) -> dict[str, Any]:
    """The rows of a subject. Raises FitError."""
    search = Search(subject, request["installs"])
    line = search.line()
    outside = search.outside(request["beside"])
    rooms = rooms_of(request["free"], outside)
    rows = [search.row(room, line) for room in rooms]
    return answer_of(rows, outside, request["installs"], search.remark)


def rooms_of(free: list[int], outside: int) -> list[int]:
    """What the allocator may hold, for each size of memory."""
    return [max(each - outside, 0) // _PAGE * _PAGE for each in free]


def answer_and_exit(asked: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Answers the command that started the program, and ends it. `asked` is JSON: where the answer
    goes, what memory is free, and what a process takes of it beside the allocator."""
    request = json.loads(asked)
    began = time.perf_counter()
    try:
        found = answer(request)
    except GoOn:
        raise
    except FitError as error:
        found = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"rebatch: {first_line(error)}"}
    found["seconds"] = time.perf_counter() - began
    sys.stdout.flush()
    sys.stderr.flush()
    with open(request["answer"], "w") as file:
        json.dump(found, file)
    os._exit(_FAILED if "error" in found else _DONE)


def read_answer(path: str, program: str, status: int, size: int = 0) -> dict[str, Any]:
    """What a program has answered, which has ended; or a try of it in a size. Raises FitError."""
    whose = f"with a batch of {size}, " if size else ""
    if os.path.exists(path):
        with open(path) as file:
            found = dict(json.load(file))
        if "error" in found:
            raise FitError(f"rebatch: {whose}{_reason(found['error'])}")
        return found
    how = f"ended with status {status}"
    if status < 0:
        how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
    end = "before its first Step" if status else "and never called a Step"
    raise FitError(f"rebatch: {whose}{program} {how} {end} or optimizer.step()")


def read_tried(found: dict[str, Any]) -> Tried:
    """Of a program that was tried as a whole. Raises FitError."""
    if "tried" not in found:
        raise FitError("rebatch: the program has a Step: expected a command without {batch}")
    return Tried(**found["tried"])


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
