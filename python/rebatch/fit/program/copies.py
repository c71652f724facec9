"""Tries in copies of the program's process (fork), on the stand-in for CUDA, and what is read there
of its memory. Must not know what a try runs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import traceback
from typing import Any, Callable, Dict, Iterable, NoReturn, Optional

import torch

from rebatch.fit import integers
from rebatch.fit.controls import standin
from rebatch.fit.error import FitError, undecided
from rebatch.fit.program.live import freeze
from rebatch.fit.tried import GoOn, Request, Tried
from rebatch.torch.batches.kinds import plain_parts
from rebatch.torch.undo.copies import own_part

# The first makes the optimizer's state, and the others run beside it.
_UPDATES = 3
# What the allocator holds may go on changing.
_MOST_UPDATES = 10


# ---- in a copy ----


class Reply:
    """To the process that waits for a try. Each of these ends the copy."""

    def __init__(self, end: int):
        self._end = end

    def tried(self, tried: Tried) -> NoReturn:
        self.says(dataclasses.asdict(tried))

    def says(self, found: Any) -> NoReturn:
        """What JSON can have."""
        self._say(found, 0)

    def failed(self, text: str) -> NoReturn:
        """`text` is a traceback."""
        own = integers.start()
        self._say([text, own.read_at, own.assumed], 1)

    def _say(self, what: Any, code: int) -> NoReturn:
        try:
            with os.fdopen(self._end, "w") as file:
                json.dump(what, file)
        finally:
            os._exit(code)


def become_copy() -> None:
    """After a fork: the stand-in has no driver that would mind, and no other thread is left."""
    torch.cuda._is_in_bad_fork = lambda: False
    torch.set_num_threads(1)
    integers.start()


def _become_silent() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def limit(device: torch.device, request: Request) -> None:
    """From now on the process has the memory and reads the integers that are asked for, and takes
    rows that a kernel would choose."""
    integers.start().reads_others = request.reads_others
    integers.start().assumes = True
    standin().standin_set_memory(device.index or 0, request.room)
    if request.installs:
        from rebatch.torch.allocator.install import install

        install()


def restart(device: torch.device) -> None:
    """Peaks are those from now on."""
    standin().standin_peak(device.index or 0, True)
    torch.cuda.reset_peak_memory_stats(device)


class Updates:
    """Of a try: some, and then others until one has asked for no memory and kept no more."""

    def __init__(self) -> None:
        self._count = self._asked = self._kept = 0

    def suffice(self) -> bool:
        """At the end of each."""
        asked, kept = standin().standin_allocations(), torch.cuda.memory_allocated()
        is_settled = asked == self._asked and kept <= self._kept
        self._asked, self._kept = asked, max(kept, self._kept)
        self._count += 1
        return self._count >= (_UPDATES if is_settled else _MOST_UPDATES)


def is_installed() -> bool:
    """Whether the allocator is rebatch's."""
    allocator = sys.modules.get("rebatch.torch.allocator.install")
    return allocator is not None and allocator.installed()


def ooms(device: torch.device) -> int:
    """Allocations that have failed."""
    native = int(torch.cuda.memory_stats(device)["num_ooms"])
    if not is_installed():
        return native
    from rebatch.torch.allocator.install import stats

    return native + int(stats(device)["ooms"])


def taken(device: torch.device, peak: int = 0) -> Dict[str, Any]:
    """What a try has taken of memory, and where it has taken what only a kernel would know: members
    of Tried. `peak` is the highest of updates after which PyTorch counted anew."""
    library, own = standin(), integers.start()
    reserved = int(library.standin_peak(device.index or 0, False))
    asked = int(torch.cuda.memory_stats(device)["requested_bytes.all.allocated"])
    if is_installed():
        from rebatch.torch.allocator.install import stats

        asked += int(stats(device)["allocated_total_bytes"])
    # After install() it is the sum of two peaks, which may be at different times.
    peak = max(peak, torch.cuda.max_memory_allocated(device))
    return {
        "peak": min(peak, reserved),
        "reserved": reserved,
        "libraries": library.standin_libraries(),
        "asked": asked,
        "read_at": own.read_at,
        "assumed": own.assumed,
    }


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """What they occupy: storages in blocks of the allocator."""
    storages = {}
    for part in (part for tensor in tensors for part in plain_parts(own_part(tensor))):
        storage = part.untyped_storage()
        storages[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
    return sum(storages.values())


# ---- in the program's process ----


def in_copy(work: Callable[[Reply], None], size: int) -> Tried:
    """A try in a copy of this process, as asked()."""
    return Tried(**asked(work, size))


def asked(work: Callable[[Reply], None], size: int) -> Any:
    """What a copy of this process replies, where `work` runs; it may raise GoOn. Raises
    FitError."""
    freeze()
    end, write_end = os.pipe()
    copy = os.fork()
    if copy == 0:
        os.close(end)
        reply = Reply(write_end)
        try:
            become_copy()
            _become_silent()
            work(reply)
        except GoOn:
            raise
        except BaseException:
            reply.failed(traceback.format_exc())
    os.close(write_end)
    with os.fdopen(end) as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    if status == 0 and text:
        return json.loads(text)
    if not text:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise FitError(
            f"rebatch: a micro-batch of {size} ended {how}: expected a training that runs on the "
            "stand-in for CUDA"
        )
    said, read_at, assumed = json.loads(text)
    raise _failure(said, read_at, assumed, size)


def refused_gpu(said: str) -> Optional[FitError]:
    """Where a traceback is of a program that asks for another GPU."""
    if "invalid device ordinal" not in said:
        return None
    lines = re.findall(r'File "(.+)", line (\d+)', said)
    path, line = next((p for p in reversed(lines) if not integers.is_of_packages(p[0])), lines[-1])
    return FitError(
        f"rebatch: {integers.place(path, line)}: the program asks for another GPU than cuda:0: "
        "expected one process on one GPU; with --ranks N it is one of N"
    )


def _failure(said: str, read_at: str, assumed: str, size: int) -> FitError:
    refused = refused_gpu(said)
    if refused:
        return refused
    sys.stderr.write(said)
    if assumed:
        return undecided(assumed)
    lines = said.strip().splitlines()
    last = next((line for line in reversed(lines) if not line.startswith("rebatch: ")), lines[-1])
    if "fork-based multiprocessing" in last:
        return FitError(
            "rebatch: the program ran a backward pass before its first Step: expected the Step's "
            "to be the first, since sizes are tried in copies of the process"
        )
    kind, _, sentence = last.partition(": ")
    if kind.endswith(f".{FitError.__name__}"):
        return FitError(sentence)
    return FitError(
        f"rebatch: a micro-batch of {size} failed: {last}; kernels compute nothing here, so what "
        "is on the GPU is 0" + f"; {read_at} has read integers of it" * bool(read_at)
    )
