"""A session of the C library for PyTorch code: its options, its callbacks, and what an exception
in a callback becomes."""

from __future__ import annotations

import contextlib
import ctypes as C
import gc
import operator
import os
import re
import time
import warnings
import weakref
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple, Union

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch._user_code import user_stacklevel
from rebatch.torch.allocator import install as allocator
from rebatch.torch.allocator import phases
from rebatch.torch.session import interrupts, threads
from rebatch.torch.session.modes import Modes
from rebatch.torch.session.native_meter import NativeMeter, UnknownMeter
from rebatch.torch.session.oom import asked_bytes, is_oom, let_go, raised_by_program
from rebatch.torch.session.weak_methods import weakly

# A thread of autograd may hold an attempt's last tensors for so long after the exception is out.
_LET_GO_SECONDS = 0.005
# So little may stay.
_LEFT_BYTES = 1 << 20
# So much may be workspaces, which libraries keep from their first use on. To collect all of a
# program's garbage takes some 0.2 s.
_WORKSPACES_BYTES = 64 << 20

_STEP = int(c.GuardPoint.STEP)
_log_levels = {level.name.lower(): level for level in c.LogLevel}
_on_oom = {answer.name.lower(): answer for answer in c.OnOom}


_NOBODY_CAN_ASK = (
    "rebatch: REBATCH_YIELD is set, and there is no socket: only rebatch's allocator gives memory "
    "to others. On a GPU call rebatch.install() before the first Step, Backward or Map"
)
_RAISED_BY_PROGRAM = (
    "\nThe program raised this OOM itself ({}). To fail once use rebatch.testing.fail_once(): an "
    "attribute of the model that says so is put back after each attempt, and so are generators of "
    "random numbers, so that a draw that says so is drawn again."
)


class Exhausted(torch.OutOfMemoryError):
    """Memory has run out, and nothing smaller or lighter is left to try. Parameters, and what else
    a failed attempt changed, are as before the step."""


class Torn(RuntimeError):
    """Memory ran out while the optimizer was changing parameters: some may be new, some old. The
    message says how many have changed. Restore a checkpoint."""


class PeerFailed(RuntimeError):
    """Another rank failed or is missing, so no rank has updated its parameters in this step. `rank`
    is its number in the group, or None where that is not known. `is_torn` is true where the rank
    that is missing died before NCCL had its part of the gradients of an earlier update: then the
    parameters are of no use, and a checkpoint is."""

    def __init__(self, message: str, rank: Optional[int] = None):
        super().__init__(message)
        self.rank = rank
        self.is_torn = False


class Lost(RuntimeError):
    """A collective has failed: another rank is gone, or late. `rank` is the one, where that is
    known."""

    rank: Optional[int] = None


class Ended(RuntimeError):
    """A callback ends with a status that the C library has given it, and has said why."""

    def __init__(self, status: int):
        super().__init__(f"status {status}")
        self.status = status


def why_of(error: BaseException) -> bytes:
    """An exception as one sentence for the other ranks."""
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return (f"{name}: {lines[0]}" if lines else name).encode(errors="replace")


def _toggle(name: str, value: Optional[bool]) -> int:
    if value is not None and not (isinstance(value, (bool, int)) and value in (0, 1)):
        raise TypeError(f"rebatch: {name} is {value!r}: expected True or False")
    return c.Toggle.DEFAULT if value is None else c.Toggle.ON if value else c.Toggle.OFF


def _named(name: str, value: Any, known: dict[Any, Any]) -> int:
    if value in known:
        return int(known[value])
    raise ValueError(f"rebatch: {name} is {value!r}: expected one of {', '.join(known)}")


def _count(name: str, value: Any, least: int = 0, bits: int = 63) -> int:
    """A number for C, which would take a negative one for a large one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"rebatch: {name} is {value!r}: expected an int") from None
    if not least <= number < 1 << bits:
        raise ValueError(f"rebatch: {name} is {number}: expected {least} to 2^{bits} - 1")
    return number


def _sizes(name: str, values: Any) -> list[Any]:
    if not hasattr(values, "__iter__"):
        raise TypeError(f"rebatch: {name} is {values!r}: expected a list of sizes")
    return [_count(f"{name}[{i}]", value, least=1) for i, value in enumerate(values)]


def session_options(
    *,
    micro_start: int = 0,
    micro_smallest: int = 0,
    micro_largest: int = 0,
    micro_multiple_of: int = 0,
    micro_allowed: Sequence[int] = (),
    learn: bool = False,
    on_oom: str = "default",
    admission: Optional[bool] = None,
    growth: Optional[bool] = None,
    grow_after: int = 0,
    grow_wait_max: int = 0,
    max_attempts: int = 0,
    max_ooms_in_row: int = 0,
    oom_wait_ms: int = 0,
    log_level: str = "default",
    log_file: Optional[str] = None,
    log_format: str = "text",
) -> c.Options:
    """The C library's options. docs/pytorch-reference.md describes each."""
    options = c.Options(
        micro_start=_count("micro_start", micro_start),
        micro_smallest=_count("micro_smallest", micro_smallest),
        micro_largest=_count("micro_largest", micro_largest),
        micro_multiple_of=_count("micro_multiple_of", micro_multiple_of),
        learn=_toggle("learn", learn),
        on_oom=_named("on_oom", on_oom, _on_oom),
        admission=_toggle("admission", admission),
        growth=_toggle("growth", growth),
        grow_after=_count("grow_after", grow_after, bits=32),
        grow_wait_max=_count("grow_wait_max", grow_wait_max, bits=32),
        max_attempts=_count("max_attempts", max_attempts, bits=32),
        max_ooms_in_row=_count("max_ooms_in_row", max_ooms_in_row, bits=32),
        oom_wait_ms=_count("oom_wait_ms", oom_wait_ms, bits=32),
        log_level=_named("log_level", log_level, _log_levels),
        log_format=_named("log_format", log_format, {"text": 0, "json": 1}),
        log_file=os.fsencode(log_file) if log_file else None,
        reclaim=c.Toggle.OFF,
    )
    micro_allowed = _sizes("micro_allowed", micro_allowed)
    if len(micro_allowed) > len(options.micro_allowed):
        raise ValueError(
            f"rebatch: micro_allowed has {len(micro_allowed)} sizes: expected at most "
            f"{len(options.micro_allowed)}"
        )
    for i, size in enumerate(micro_allowed):
        options.micro_allowed[i] = size
    return options


class Session:
    """A session on one device, with guards: objects whose save(point) and restore(point) save and
    restore state. Callbacks are Python functions without a status: they return None,
    and what they raise becomes a status here. Nothing leaves a callback of C."""

    def __init__(
        self,
        device: torch.device,
        options: c.Options,
        *,
        guards: Sequence[Any] = (),
        on_event: Optional[Callable[[str, c.Event], None]] = None,
    ):
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.is_pooled = self.is_cuda and allocator.installed()
        self.error: Optional[BaseException] = None  # of a callback, and no OOM
        self.oom_text = ""  # of the last OOM
        self._raised_at = ""  # where the program itself raised it
        self.torn_text = ""  # of an update that ran out of memory
        self._lost: Optional[Lost] = None  # in the call of C
        self._said = ""  # by the C library, before the guards ran last
        self._begun = (0, 0)  # figures() of the callback that runs
        self._guards, self._on_event = list(guards), on_event
        self._list_calls()
        self.saves_attempts = True  # False: nothing that guards save changes in the next callback
        self.modes = Modes(tuple({"cpu", device.type}))
        self._is_saved = True  # what there was before the callback that runs
        self.meter: Optional[Union[NativeMeter, UnknownMeter]] = None
        if not self.is_pooled:
            if self.is_cuda:
                allocator.limit_native(device)
            self.meter = NativeMeter(device) if self.is_cuda else UnknownMeter()
            if os.environ.get("REBATCH_YIELD", "").lower() not in ("", "0", "none", "false"):
                warnings.warn(_NOBODY_CAN_ASK, RuntimeWarning, stacklevel=user_stacklevel())
        threads.note(self, device)
        self._open(options)
        if guards:
            self._guard()

    # ---- opening and closing ----

    def _open(self, options: c.Options) -> None:
        dry, opened = C.c_void_p(), C.c_void_p()
        if self._on_event:
            options.on_event = weakly(self._pass_event, gone=None)
        if self.meter:
            options.meter = C.pointer(self.meter.struct)
        if self.is_pooled:
            options.existing_pool = allocator.pool(self.device)
            device = lib.rebatch_pool_device(options.existing_pool)
        else:
            c.check(lib.rebatch_device_open_dry(C.byref(dry), C.c_size_t(-1).value, 0))
            device = dry
        status = interrupts.call(
            self.keep_error, lib.rebatch_open, C.byref(opened), device, C.byref(options)
        )
        self.rb = opened.value
        self._close = weakref.finalize(self, close_session, self.rb, dry.value, options)
        self.raise_failure(status)
        self._pool, self._stats = lib.rebatch_get_pool(self.rb), c.PoolStats()

    def close(self) -> None:
        threads.forget(self)
        self._close()

    def _guard(self) -> None:
        self._guard_ops = c.GuardOps(
            save=weakly(self._save, gone=c.Status.E_USER),
            restore=weakly(self._restore, gone=c.Status.E_USER),
        )
        c.check(lib.rebatch_guard_with(self.rb, C.byref(self._guard_ops), None))

    # ---- what C calls ----

    def _pass_event(self, event: Any, _user: Any) -> None:
        try:
            assert self._on_event is not None  # else C has no function to call
            self._on_event(c.text_of(lib.rebatch_event_format, event), event[0])
        except BaseException as error:  # its next callback ends the step
            self.keep_error(error)

    def _save(self, point: int, _user: Any) -> int:
        self._is_saved = self.saves_attempts or point == _STEP
        return self._run_guards(self._saves, point) if self._is_saved else 0

    def _restore(self, point: int, _user: Any) -> int:
        if not (self._is_saved or point == _STEP):
            return 0
        self._said = c.last_error()  # a guard may fail to allocate
        return self._run_guards([guard.restore for guard in self._guards], point)

    def _run_guards(self, calls: Sequence[Callable[[int], Any]], point: int) -> int:
        status = 0
        for call in calls:  # each gets its try
            try:
                call(point)
            except BaseException as error:
                is_new = self.error is not None and str(error) != str(self.error)
                if is_new and isinstance(error, c.Error):
                    warnings.warn(str(error), RuntimeWarning, stacklevel=user_stacklevel())
                self.keep_error(error)
                status = int(c.Status.E_USER)
        return status

    def _list_calls(self) -> None:
        self._saves = [guard.save for guard in self._guards]
        # Where nothing is learned, there is no such function.
        learning = (getattr(guard, "succeeded", None) for guard in self._guards)
        self._succeeded = [succeeded for succeeded in learning if succeeded]

    def succeeded(self) -> None:
        """An attempt has: the guards learn what it changed."""
        for call in self._succeeded:
            call()

    @contextlib.contextmanager
    def guarding(self, guard: Any) -> Iterator[None]:
        """Within it there is one guard more, the last."""
        self._guards.append(guard)
        self._list_calls()
        try:
            yield
        finally:
            self._guards.remove(guard)
            self._list_calls()

    def keep_error(self, error: BaseException) -> None:
        """Of a callback: it ends the call of C, and comes out of it."""
        self.error = self.error or error

    def begin_call(self) -> None:
        """Nothing has failed yet."""
        self.error, self._lost, self._said, self.torn_text = None, None, "", ""

    def enter(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of C that runs callbacks, as a part of a call: what it returns."""
        with phases.marked_by_session:
            return interrupts.call(self.keep_error, function, self.rb, *arguments)

    def call(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Call a function of C that runs callbacks: its status."""
        self.begin_call()
        before, status = self.modes.save(), int(c.Status.E_USER)
        try:
            status = int(self.enter(function, *arguments))
            return status
        finally:
            if status or self.error:  # an interrupt may have kept a torch.no_grad() from ending
                self.modes.put_back()
            self.modes.end(before)

    def run(self, body: Callable[..., Any], *arguments: Any) -> int:
        """Run a callback's body: the status for C."""
        if self.error is not None:
            return c.Status.E_USER
        self._said = ""
        self._begun = self.figures()
        try:
            try:
                body(*arguments)
            except BaseException as error:
                self.modes.put_back()
                status = self.status_of(error, self._begun)
            else:
                return 0
            if status == c.Status.OOM:
                self.collect(self._begun[0])  # here, where no exception is being handled
        except BaseException as error:
            self.error = error
            return c.Status.E_USER
        return status

    def keep_made(self) -> None:
        """What the callback that runs has allocated so far stays, also where it fails."""
        self._begun = self.live_bytes(), self._begun[1]

    def status_of(self, error: BaseException, begun: Tuple[int, int]) -> int:
        """What C is told of an exception, and what is kept of it; `begun` is figures() before."""
        if isinstance(error, Ended):
            return int(error.status)
        if isinstance(error, Lost):
            self._lost = error
            return c.Status.E_PEER
        if is_oom(error, self._oom_count() > begun[1]):
            self._note_oom(error)
            return c.Status.OOM
        self.error = error
        lib.rebatch_explain(self.rb, why_of(error))
        return c.Status.E_USER

    def figures(self) -> Tuple[int, int]:
        """Memory in use where the callback begins, and the allocations that have failed."""
        if self.meter:
            return self.meter.live_at_begin, self.meter.ooms_at_begin
        if not self.is_pooled:
            return 0, 0
        stats = self._pool_stats()
        return stats.live_bytes, stats.ooms

    # ---- after an OOM ----

    def _note_oom(self, error: BaseException) -> None:
        self.oom_text = str(error)
        self._raised_at = raised_by_program(error)
        if self.meter:
            self.meter.asked_bytes, self.meter.has_failed = asked_bytes(error), True
            self.meter.measure_again()
        let_go(error)

    def live_bytes(self) -> int:
        """Memory in use on the device, in bytes; 0 on a CPU, where it is not known."""
        if self.meter:
            return self.meter.live_bytes()
        return self._pool_stats().live_bytes if self.is_pooled else 0

    def _pool_stats(self) -> c.PoolStats:
        stats = self._stats
        lib.rebatch_pool_get_stats(stats, self._pool)
        return stats

    def _oom_count(self) -> int:
        """Allocations on the device that have failed, whoever coped with it."""
        if self.meter:
            return self.meter.oom_count()
        return self._pool_stats().ooms if self.is_pooled else 0

    def available_bytes(self) -> int:
        """Memory that can be allocated; all of it on a CPU, where it is not known."""
        if self.meter:
            return self.meter.available_bytes()
        available = C.c_size_t()
        c.check(lib.rebatch_pool_available(C.byref(available), self._pool))
        return available.value

    def collect(self, live_before: int, seconds: float = _LET_GO_SECONDS) -> None:
        """What was made since so much memory was in use is to be gone: first what autograd's
        threads still hold, then what only the garbage collector finds."""
        until = time.perf_counter() + seconds
        while self.live_bytes() > live_before + _LEFT_BYTES:
            if time.perf_counter() > until:
                break
            time.sleep(0.0001)
        else:
            return
        gc.collect(1)  # what is young
        if self.live_bytes() > live_before + _WORKSPACES_BYTES:
            gc.collect()

    # ---- results ----

    def raise_failure(self, status: int) -> None:
        """Raise what a call of C ended with; nothing when it was Status.OK."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if not status:
            return
        text = self._said or c.last_error()
        if status in (c.Status.E_EXHAUSTED, c.Status.E_TORN):
            if status == c.Status.E_TORN and self.torn_text:
                text = text.partition(" in optimizer_step")[0] + self.torn_text
            said = f"{text}\n{self.oom_text}" if self.oom_text else text
            if status == c.Status.E_TORN:
                raise Torn(said)
            raise Exhausted(
                said + _RAISED_BY_PROGRAM.format(self._raised_at) if self._raised_at else said
            )
        if self._lost:
            who = "another rank" if self._lost.rank is None else f"rank {self._lost.rank}"
            raise PeerFailed(
                f"rebatch: {who} did not take part in a collective: {self._lost}", self._lost.rank
            )
        if status == c.Status.E_PEER:
            found = re.search(r"\brank (\d+) (?:ended|did not)", text)
            raise PeerFailed(f"rebatch: {text}", int(found[1]) if found else None)
        raise c.Error(text, status)


def close_session(rb: Optional[int], dry: Optional[int], _options: c.Options) -> None:
    """The options have the tables of functions that C may call until then."""
    lib.rebatch_close(rb)
    lib.rebatch_device_close(dry)
