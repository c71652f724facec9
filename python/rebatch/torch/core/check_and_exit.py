"""The check, the probe or the fit that runs instead of the training: whoever starts the program
asks for it with REBATCH_CHECK=1 or `rebatch run --check`, with REBATCH_PROBE_ONLY=1 or `rebatch
probe`, and with `rebatch fit`. Must not know how a step is checked, probed or fitted."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import Any, Protocol

from rebatch.torch.session.oom import is_oom

_CLEAN, _FAILED, _NOTHING_FITS, _MISTAKES = 0, 1, 3, 4  # as C programs end


class _Training(Protocol):
    def open(self) -> Any: ...

    def check(self, batch: Any, /) -> Any: ...

    def probe(self, batch: Any, /) -> Any: ...


def check_if_asked(training: _Training, batch: Any) -> None:
    """Where the environment asks for it, check this first batch, say what was found, and end the
    process."""
    if os.environ.get("REBATCH_CHECK", "0") == "0":
        return
    training.open()  # which says so where the variable is neither 0 nor 1
    del os.environ["REBATCH_CHECK"]  # the runs of the check are no first step,
    command = os.environ.pop("REBATCH_REPORT_FD", "")  # and nothing to report
    try:
        found = training.check(batch)
    except Exception as error:
        traceback.print_exc()
        _end(_NOTHING_FITS if is_oom(error) else _FAILED, f"rebatch: {error}\n", "", command)
    _end(_CLEAN if found else _MISTAKES, "", f"{found}\n", command)


def probe_if_asked(training: _Training, batch: Any) -> None:
    """The same for a probe. The library says what was found, and ends the process."""
    if os.environ.get("REBATCH_PROBE_ONLY", "0") == "0":
        return
    command = os.environ.get("REBATCH_REPORT_FD", "")
    try:
        training.probe(batch)
    except Exception as error:  # before the library's part
        _end(_FAILED, f"{error}\n", "", command)


def fit_if_asked(training: Any, batch: Any, is_alone: bool = False) -> None:
    """The same for a fit, on the stand-in for CUDA; `is_alone`: of this one of several Steps."""
    asked = os.environ.pop("REBATCH_FIT", "")
    if asked:
        from rebatch.fit.program.steps import fit_and_exit  # which no training needs

        fit_and_exit(training, batch, asked, is_alone)


def _end(code: int, complaint: str, text: str, command: str) -> None:
    """As the library ends a C program: nothing that is registered for the end of the program
    runs, because its other threads are at work still."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not _tell(command, code, complaint, text):
        sys.stderr.write(complaint)
        sys.stdout.write(text)
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code)


def _tell(command: str, code: int, complaint: str, text: str) -> bool:
    """Whether a `rebatch` command waits for the answer, at the socket that it has named."""
    number, _, inode = command.partition(":")
    try:
        if os.fstat(int(number)).st_ino != int(inode):
            return False
        with socket.socket(fileno=os.dup(int(number))) as waiting:
            said = complaint.encode()
            waiting.send(b"answer %d %d\n" % (code, len(said)) + said + text.encode())
        return True
    except (ValueError, OSError):
        return False
