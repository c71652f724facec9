"""In the program, on the stand-in for CUDA: which sizes fit. Each is tried in a copy of the process
(fork), which trains for three updates as the program would and ends; so each try begins where the
program is at its first Step. Must not know cards."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
import time
import traceback
from typing import Any, Optional, Protocol

import torch

from rebatch.fit.error import FitError
from rebatch.fit.integers import Integers
from rebatch.fit.search import Line, Sizes, largest_size, line_of

# Libraries that take memory of a GPU, as the stand-in has them.
_CUBLAS, _CUBLAS_EX, _CUDNN = 1, 2, 4

# The first makes the optimizer's state, and the others run beside it.
_UPDATES = 3
_DONE, _FAILED = 0, 1


class _Training(Protocol):
    """What is used of a Step's training."""

    program: Any
    running: Any
    ranks: Any
    callbacks: Any
    report: Any

    def like(self, program: Any, ranks: Any, /) -> Any: ...


def _standin() -> Any:
    """The functions by which the stand-in is controlled."""
    library = ctypes.CDLL("libcuda.so.1")
    try:
        library.standin_set_memory.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        library.standin_set_memory.restype = None
        library.standin_peak.argtypes = [ctypes.c_size_t, ctypes.c_bool]
        library.standin_peak.restype = ctypes.c_size_t
        library.standin_libraries.argtypes = []
        library.standin_libraries.restype = ctypes.c_uint
    except AttributeError:
        raise FitError("rebatch: libcuda.so.1 is a GPU's driver: expected the stand-in") from None
    return library


@dataclasses.dataclass(frozen=True)
class Tried:
    """A size that was tried. Memory is in bytes."""

    samples: int
    fits: bool
    peak: int = 0  # in use, of PyTorch's allocator
    reserved: int = 0  # held by it
    libraries: int = 0  # that were used: bits
    held: dict[str, int] = dataclasses.field(default_factory=dict)  # at the peak, by what holds it
    tags: dict[str, int] = dataclasses.field(default_factory=dict)  # and of activations, by tag


@dataclasses.dataclass(frozen=True)
class _Request:
    size: int
    room: int  # bytes that the allocator may hold
    level: int = 0  # of `lighten`
    installs: bool = False  # rebatch's allocator


# ---- in a copy of the process ----


class _Attempt:
    """A training of some updates in micro-batches of one size."""

    def __init__(self, training: _Training, batch: Any, samples: int, size: int, level: int):
        self._samples, self._size = samples, size
        program = training.program
        options = dict(program.options)
        for name in ("micro_allowed", "micro_multiple_of", "learn", "log_file"):
            options.pop(name, None)
        options.update(
            micro_start=size,
            micro_smallest=0,
            micro_largest=size,
            on_oom="stop",
            growth=False,
            admission=False,
            log_level="quiet",
        )
        self._cut = program.cut
        self._training = training.like(
            dataclasses.replace(program, options=options, cost=None, on_event=None), training.ranks
        )
        self._training.running.undo.compares_contents = False  # kernels write none
        if level:
            self._training.callbacks.levels.wanted = level
        self._batch = self._batch_of(batch)

    def _batch_of(self, batch: Any) -> Any:
        """Some micro-batches of the program's batch; or one larger than it, in its place."""
        size, samples = self._size, self._samples
        if size == samples:
            return batch
        if size < samples:
            return self._cut.part(batch, 0, min(samples, _UPDATES * size), samples)
        whole, rest = divmod(size, samples)
        spans = [(0, samples)] * whole + [(0, rest)] * bool(rest)
        larger = self._cut.arranged(batch, spans, samples)
        for tensor in _device_tensors(batch):  # the other one is in its place
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        return larger

    def run(self) -> Tried:
        """Raises what the program raises, but for OOMs."""
        from rebatch.torch.session.oom import is_oom

        peak, device = 0, self._training.program.device
        ooms, tagged = _ooms(device), _tagged(device)
        try:
            for _ in range(_UPDATES):
                self._training._run(self._batch)
                report = self._training.report
                if report.ooms:
                    return Tried(self._size, False)
                if self._training.program.update.is_of_program:
                    self._update()
                peak = max(peak, report.peak_bytes)
        except Exception as error:
            # Where memory ran out, what is said of contents is not so: no kernel compared them.
            if not is_oom(error) and _ooms(device) == ooms:
                raise
            return Tried(self._size, False)
        library = _standin()
        return Tried(
            self._size,
            True,
            peak=max(peak, torch.cuda.max_memory_allocated(device)),
            reserved=library.standin_peak(device.index or 0, False),
            libraries=library.standin_libraries(),
            held=self._held(device),
            tags=_grown(tagged, _tagged(device)),
        )

    def _update(self) -> None:
        """What the program does between two batches."""
        update = self._training.program.update
        for optimizer in update.known_optimizers():
            type(optimizer).step(optimizer)
        for p in update.parameters:
            p.grad = None

    def _held(self, device: torch.device) -> dict[str, int]:
        """What stays between two updates, by kind."""
        from rebatch.torch.batches.cut import batch_tensors

        program = self._training.program
        parameters = [p for p in program.modules.parameters() if p.device == device]
        states = [
            value
            for optimizer in program.update.known_optimizers()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.device == device
        ]
        buffers = [b for b in program.modules.buffers() if b.device == device]
        batch = [t for _, t in batch_tensors(self._batch) if t.device == device]
        return {
            "parameters": _bytes_of([*parameters, *buffers]),
            "gradients": _bytes_of([p for p in parameters if p.requires_grad]),
            "optimizer": _bytes_of(states),
            "batch": _bytes_of(batch),
        }


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _ooms(device: torch.device) -> int:
    """Allocations that have failed."""
    from rebatch.torch.allocator.install import stats

    native = int(torch.cuda.memory_stats(device)["num_ooms"])
    return native + (stats(device)["ooms"] if _is_installed() else 0)


def _tagged(device: torch.device) -> dict[str, Any]:
    """The memory of each tag, by its name: a TagUsage."""
    from rebatch import _library
    from rebatch.torch.allocator.install import pool

    found: dict[str, Any] = {}
    while _is_installed():
        usage = _library.TagUsage()
        number = len(found) + 1  # 0 is what has no tag
        if _library.lib.rebatch_pool_get_tag_usage(ctypes.byref(usage), pool(device), number):
            break
        found[usage.name.decode()] = usage
    return found


def _grown(before: dict[str, Any], now: dict[str, Any]) -> dict[str, int]:
    """By tag, bytes at the peak that there were not before. An optimizer's state, which a Step
    tags, is told by itself."""
    grown = {
        name: usage.at_peak_bytes - (before[name].live_bytes if name in before else 0)
        for name, usage in now.items()
        if name != "optimizer"
    }
    return {name: size for name, size in grown.items() if size > 0}


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    """What they occupy: storages in blocks of the allocator."""
    from rebatch.torch.batches.kinds import plain_parts
    from rebatch.torch.undo.copies import own_part

    storages = {}
    for part in (part for tensor in tensors for part in plain_parts(own_part(tensor))):
        storage = part.untyped_storage()
        storages[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
    return sum(storages.values())


def _device_tensors(batch: Any) -> list[torch.Tensor]:
    from rebatch.torch.batches.cut import batch_tensors

    return [tensor for _, tensor in batch_tensors(batch) if tensor.is_cuda]


def _work(training: _Training, batch: Any, samples: int, request: _Request) -> Tried:
    """A try, in this process."""
    library = _standin()
    device = training.program.device
    library.standin_set_memory(device.index or 0, request.room)
    if request.installs:
        from rebatch.torch.allocator.install import install

        install()
    with Integers():
        attempt = _Attempt(training, batch, samples, request.size, request.level)
        library.standin_peak(device.index or 0, True)
        torch.cuda.reset_peak_memory_stats(device)
        return attempt.run()


# ---- in the program's process ----


def _become_copy() -> None:
    """After a fork: the stand-in has no driver that would mind, and no other thread is left."""
    torch.cuda._is_in_bad_fork = lambda: False
    torch.set_num_threads(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _try_in_copy(training: _Training, batch: Any, samples: int, request: _Request) -> Tried:
    """A try in a copy of this process. Raises FitError."""
    end, write_end = os.pipe()
    copy = os.fork()
    if copy == 0:
        code = 1
        try:
            os.close(end)
            _become_copy()
            answer: Any = dataclasses.asdict(_work(training, batch, samples, request))
            code = 0
        except BaseException:
            answer = traceback.format_exc()
        finally:
            with os.fdopen(write_end, "w") as file:
                json.dump(answer, file)
            os._exit(code)
    os.close(write_end)
    with os.fdopen(end) as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    if status == 0:
        return Tried(**json.loads(text))
    if status < 0 or not text:
        raise FitError(
            f"rebatch: a micro-batch of {request.size} ended by signal {-status}: expected a "
            "training that runs on the stand-in for CUDA"
        )
    said = json.loads(text)
    sys.stderr.write(said)
    lines = said.strip().splitlines()
    last = next((line for line in reversed(lines) if not line.startswith("rebatch: ")), lines[-1])
    if "fork-based multiprocessing" in last:
        raise FitError(
            "rebatch: the program ran a backward pass before its first Step: expected the Step's "
            "to be the first, since sizes are tried in copies of the process"
        )
    kind, _, sentence = last.partition(": ")
    if kind.endswith(f".{FitError.__name__}"):
        raise FitError(sentence)
    raise FitError(
        f"rebatch: a micro-batch of {request.size} failed: {last}; kernels compute nothing here, "
        "so what is on the GPU is 0"
    )


@dataclasses.dataclass
class Row:
    """What was found for a room: the largest size that fits, and the next one."""

    room: int
    level: int  # of `lighten`
    best: Optional[Tried]
    next: Optional[Tried]  # with as much memory as it asks for
    tries: int = 0


_PAGE = 2 << 20  # in which a driver gives memory
# More than any card has: what a size takes without a limit.
_UNLIMITED = 1 << 50


class Search:
    """Finds the rows of a training, whose tries it remembers."""

    def __init__(self, training: _Training, batch: Any, installs: bool = False):
        self._training, self._batch, self._installs = training, batch, installs
        self.libraries = 0  # that were used, in all tries
        self._cut = training.program.cut
        self.samples: int = self._cut.length(batch)

    def sizes(self) -> Sizes:
        """Those that the options allow, and of which there can be a batch."""
        program = self._training.program
        limits = {} if program.cost else program.limits
        is_own_type = self._cut.arranged(self._batch, [(0, 1)], self.samples) is None
        return Sizes(
            smallest=limits.get("micro_smallest") or 1,
            largest=min(
                limits.get("micro_largest") or Sizes.largest,
                self.samples if is_own_type else Sizes.largest,
            ),
            step=limits.get("micro_multiple_of") or 1,
        )

    def line(self, level: int = 0) -> Line:
        """The line on which peaks lie. Raises FitError."""
        return line_of(lambda size: self._try(size, _UNLIMITED, level).peak, self.sizes())

    def row(self, room: int, line: Line, level: int = 0) -> Row:
        """The row of a room, which the allocator may hold. Raises FitError."""
        tries: dict[int, Tried] = {}
        sizes = self.sizes()

        def fits(size: int) -> bool:
            tries[size] = self._try(size, room, level)
            return tries[size].fits

        low, high = largest_size(fits, sizes, sizes.at_most(line.meets(room)))
        after = self._try(high, _UNLIMITED, level) if high else None
        return Row(room, level, tries.get(low), after, len(tries) + bool(high))

    def _try(self, size: int, room: int, level: int) -> Tried:
        request = _Request(size, room, level, self._installs)
        tried = _try_in_copy(self._training, self._batch, self.samples, request)
        self.libraries |= tried.libraries
        return tried

    def outside(self, beside: dict[str, int]) -> int:
        """What the process takes beside the allocator, by the libraries that it has used."""
        has_kernels = self.libraries & (_CUBLAS_EX | _CUDNN)
        return (
            beside["context"]
            + beside["cublas"] * bool(self.libraries & _CUBLAS)
            + beside["kernels"] * bool(has_kernels)
        )


def fit_and_exit(training: _Training, batch: Any, asked: str) -> None:
    """Answers the command that started the program, and ends it. `asked` is JSON: where the answer
    goes, what memory is free, and what a process takes of it beside the allocator."""
    request = json.loads(asked)
    began = time.perf_counter()
    answer: dict[str, Any] = {}
    try:
        answer = _answer(training, batch, request)
    except FitError as error:
        answer = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"rebatch: {_first_line(error)}"}
    answer["seconds"] = time.perf_counter() - began
    sys.stdout.flush()
    sys.stderr.flush()
    with open(request["answer"], "w") as file:
        json.dump(answer, file)
    os._exit(_FAILED if "error" in answer else _DONE)


def _answer(training: _Training, batch: Any, request: dict[str, Any]) -> dict[str, Any]:
    device = training.program.device
    if device.type != "cuda":
        raise FitError(
            f"rebatch: the model is on {device}: expected it on cuda, which is there for a fit"
        )
    if training.ranks and torch.distributed.get_backend() != "fake":
        raise FitError(
            "rebatch: the program trains on several ranks: expected --ranks N and the program "
            "itself, without torchrun"
        )
    search = Search(training, batch, request["installs"])
    levels = range(1 + (len(training.callbacks.levels) if request["levels"] else 0))
    lines = [search.line(level) for level in levels]
    outside = search.outside(request["beside"])
    rooms = [max(free - outside, 0) // _PAGE * _PAGE for free in request["free"]]
    rows = [search.row(room, lines[level], level) for room in rooms for level in levels]
    return {
        "batch": search.samples,
        "outside_bytes": outside,
        "allocator": "rebatch" if request["installs"] or _is_installed() else "native",
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _is_installed() -> bool:
    from rebatch.torch.allocator.install import installed

    return installed()
