"""The ranks that train one model together with a Step: how they vote, how their gradients are
summed, and what each tells the others."""

from __future__ import annotations

import contextlib
import ctypes as C
import gc
import threading
import weakref
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from rebatch import _library as c
from rebatch.torch.private import sync_module_states
from rebatch.torch.program.gradients import SharedAccumulators
from rebatch.torch.ranks import agreement
from rebatch.torch.ranks.calls import Call
from rebatch.torch.ranks.ddp_gradients import (
    LocalAccumulators,
    ReducedAccumulators,
    backend_of,
)
from rebatch.torch.ranks.ddp_wrapper import (
    Quiet,
    buffers_of,
    caps_of,
    check_modules,
    compression_of,
    group_of,
    keeps_local,
    warn_if_alone,
    wrappers_in,
)
from rebatch.torch.ranks.fsdp.lockstep import Lockstep, why_not
from rebatch.torch.ranks.fsdp.lockstep_gradients import LockstepAccumulators
from rebatch.torch.ranks.fsdp.sharded_gradients import ShardedAccumulators
from rebatch.torch.ranks.fsdp.window import Window, process_groups, window_of
from rebatch.torch.ranks.fsdp.window_gradients import WindowAccumulators
from rebatch.torch.ranks.votes import Votes
from rebatch.torch.ranks.ways import Event, Way, Ways
from rebatch.torch.session.gpu_wait import Work
from rebatch.torch.session.oom import is_oom, let_go
from rebatch.torch.session.session import Exhausted, Lost, PeerFailed
from rebatch.torch.session.weak_methods import weakly
from rebatch.torch.update.passes import Passes
from rebatch.torch.update.update import check_above_zero

# What each rank's votes say beside the C library's words.
_WEIGHT, _MICRO, _KEYS, _FAILURE, _STATE, _ROWS, _FORM = range(7)
_RAN_OUT, _FAILED = 1.0, 2.0  # a rank's batch: out of memory, or for another reason
_MOST = 1 << 32  # calls have smaller numbers
_TRIES = 3  # at what is needed after an OOM
_SYNC_BYTES = 250 << 20  # of a broadcast of parameters, as DistributedDataParallel has it


def ranks_of(
    modules: torch.nn.ModuleList,
    group: Any,
    timeout_seconds: float,
    has_window: Optional[bool],
    trained: Sequence[torch.nn.Parameter],
    options: Dict[str, Any],
) -> Optional["Ranks"]:
    """None where a Step trains on this rank alone. Without a window, models of fully_shard() are
    trained in lockstep; with None they are where whole parameters do not fit. `options` are those
    that must be the same on all ranks. All ranks call this together."""
    check_above_zero("group_timeout", timeout_seconds, "seconds")
    wrappers = wrappers_in(modules)
    window = window_of(modules, group, Lockstep if has_window is False else Window)
    process_group = window.group if window else group_of(wrappers, group)
    if process_group is None:
        if group is None:
            warn_if_alone(modules)
        return None
    ranks = Ranks(modules, wrappers, process_group, timeout_seconds, window, has_window)
    ranks.agree(trained, options)
    return ranks


class NoRoom(Exception):
    """A rank has no memory for the whole parameters, and all are to go on in lockstep."""


class Ranks:
    """Those of a process group."""

    def __init__(
        self,
        modules: torch.nn.ModuleList,
        wrappers: List[Any],
        group: Any,
        timeout_seconds: float,
        window: Optional[Window] = None,
        has_window: Optional[bool] = True,
    ):
        check_modules(modules)
        self._modules, self._wrappers = modules, wrappers
        # destroy_process_group() is to end its threads
        self._group: Callable[[], Any] = weakref.ref(group)
        self._quiet, self._timeout_seconds = Quiet(wrappers), timeout_seconds
        if has_window is None and window and why_not(window):
            has_window = True
        self._has_window = has_window
        # Of a model of fully_shard(). Where the way may change both, made now, as memory is there.
        self._whole = None if isinstance(window, Lockstep) else window
        self._cut = window if isinstance(window, Lockstep) else None
        if window and has_window is None:
            self._cut = Lockstep(window.root)
        self._ways = Ways(Way.WINDOW if self._whole else Way.LOCKSTEP) if window else None
        sent = compression_of(wrappers)
        self._votes = Votes(group, timeout_seconds, values=7)
        self._votes.on_abort = weakly(self._abort)
        self._sums: Optional[Work] = None  # that the last update uses
        self._is_torn = False  # they never came
        self._has_compared, self._keys = False, ""  # those of the first batch
        self._update: Optional[Passes] = None  # of a model of fully_shard()
        self._local = LocalAccumulators()
        self._reduced: SharedAccumulators = self._local
        if self._ways:
            self._go(self._ways.way)
        else:
            self._reduced = ReducedAccumulators(
                group, timeout_seconds, caps_of(wrappers), sent, weakly(self._buffers)
            )

    @property
    def lockstep(self) -> Optional[Lockstep]:
        """What runs the model's collectives where micro-batches gather the parameters."""
        return self._cut if self._ways and self._ways.way is not Way.WINDOW else None

    @property
    def window(self) -> Optional[Window]:
        """What gathers the parameters of a model of fully_shard(), whoever runs it."""
        return self.lockstep or self._whole

    def _go(self, way: Way) -> None:
        """That way from now on."""
        if way is Way.WINDOW:
            assert self._whole is not None
            self._reduced = WindowAccumulators(self._whole, self._timeout_seconds)
        elif not isinstance(self._reduced, LockstepAccumulators):
            assert self._cut is not None
            self._cut.set_timeout(self._timeout_seconds)
            self._cut.on_lost = weakly(self._note_lost)
            self._reduced = LockstepAccumulators(self._cut, self._timeout_seconds)
        if isinstance(self._reduced, LockstepAccumulators):
            self._reduced.is_on_host = way is Way.ON_HOST
        self._join_update()

    def go_on(self, error: Exception, number: int) -> str:
        """What all ranks do about an error that ended step `number`, so that it can run again: a
        warning; "" where there is nothing. All ranks call this together."""
        if isinstance(error, NoRoom):
            return self._leave(number, str(error))
        failures = self._votes.received(_FAILURE)
        is_short = isinstance(error, (Exhausted, PeerFailed)) and max(failures) == _RAN_OUT
        if not self._ways or not is_short or self._votes.lost:
            return ""
        if self._ways.way is Way.ON_HOST or not self._cut:
            return ""
        who = f"rank {failures.index(_RAN_OUT)}"
        return self._leave(number, f"{who} ran out of memory beside the whole parameters")

    def _leave(self, number: int, why: str) -> str:
        assert self._ways is not None
        self._go(self._ways.happens(Event.LEAVE, number))
        if self._ways.way is Way.LOCKSTEP:
            return (
                f"rebatch: {why} of fully_shard(): micro-batches gather the parameters from now "
                "on, and have the same sizes on all ranks"
            )
        return (  # in lockstep a micro-batch fails on all ranks, so none is named
            "rebatch: the smallest micro-batch of fully_shard() ran out of memory in lockstep: "
            "gradients are summed in host memory from now on"
        )

    def come_back(self, number: int, beside_bytes: Callable[[], int]) -> bool:
        """Some steps after go_on(): where all ranks have memory for the whole parameters, their
        gradients, and `beside_bytes`, the parameters are whole from step `number` on; else sums are
        on the device again. Returns whether they are whole. All ranks call this together."""
        if not self._ways or not self._ways.is_return_due(number):
            return False
        may_return = self._whole is not None and self._can_gather(self._whole, beside_bytes)
        way = self._ways.happens(Event.RETURN if may_return else Event.STAY, number)
        self._go(way)
        return may_return

    def _can_gather(self, window: Window, beside_bytes: Callable[[], int]) -> bool:
        self._check_connection()
        why = self._prepare(lambda: window.prepare(beside_bytes()))
        return self._vote_on(Call.RETURNS, why)[0] == self.size

    def take_update(self, update: Passes) -> None:
        """From now on an update of a model of fully_shard() clips by the norm that all ranks have
        found, and its GradScaler skips what all of them skip. ValueError for one that cannot."""
        if self.window:
            self.window.check_match(update, update.scaler)
            if update.wants_norm and getattr(update, "before_update", None):
                raise ValueError(
                    "rebatch: clip and before_update are given, and the model is one of "
                    "fully_shard(), whose norm is found before either: expected a before_update "
                    "that clips"
                )
            self._update = update
            self._join_update()

    def _join_update(self) -> None:
        sums, update = self._reduced, self._update
        if update and isinstance(sums, ShardedAccumulators):
            sums.has_norm = update.wants_norm
            sums.scaler = update.scaler
            update.clip_gradients, update.unscale_gradients = sums.clip, sums.unscale

    @property
    def accumulators(self) -> SharedAccumulators:
        """Of the gradients of the batch that runs."""
        return self._local if self.is_local else self._reduced

    @property
    def is_local(self) -> bool:
        """The gradients of the batch that runs stay on this rank, and no vote waits for another."""
        return self._votes.is_local

    def choose_sync(self, update: Passes) -> None:
        """A batch begins: within no_sync() a program that updates by itself gets local gradients.
        All ranks call this together."""
        self._votes.is_local = keeps_local(self._wrappers) and update.is_of_program

    @property
    def size(self) -> int:
        return self._votes.size

    @property
    def rank(self) -> int:
        return self._votes.rank

    def agree(self, trained: Sequence[torch.nn.Parameter], options: Dict[str, Any]) -> None:
        """Raises ValueError on all ranks where their models or options differ. A plain model's
        parameters become those of rank 0, as DistributedDataParallel's do."""
        mine = agreement.of_model(self._modules, trained)
        if self.window:
            mine["window"] = str(self._has_window)
        else:
            mine["buckets of bytes"] = str(caps_of(self._wrappers))
            mine["gradients sent as"] = str(compression_of(self._wrappers))
        agreement.check(self.everyones({**mine, **options}))
        if self.window:
            self.window.connect()
            return
        self._take_parameters()

    def everyones(self, mine: Any) -> List[Any]:
        """What each rank has; all ranks call this together."""
        said: List[Any] = [None] * self.size
        dist.all_gather_object(said, mine, group=self._votes.group)
        return said

    def all_gather(self, every: List[torch.Tensor], own: torch.Tensor) -> None:
        """The tensors of all ranks, on the device; all ranks call this together."""
        dist.all_gather(every, own, group=self._group())

    def _take_parameters(self) -> None:
        plain = [m for m in self._modules if not any(w in self._wrappers for w in m.modules())]
        for module in plain:
            devices = {
                t.device.type
                for t in module.state_dict(keep_vars=True).values()
                if isinstance(t, torch.Tensor)
            }
            sync_group = self._votes.group if devices <= {"cpu"} else self._group()
            root = dist.get_process_group_ranks(self._group())[0]
            sync_module_states(module, sync_group, _SYNC_BYTES, root, ())

    def _buffers(self) -> List[dict[Any, Any]]:
        tables = [module._buffers for module in self._modules.modules() if module._buffers]
        if not tables:
            return []
        wanted = {id(b) for b in buffers_of(self._modules, self._wrappers)}
        return [t for t in tables if any(id(b) in wanted for b in t.values())]

    def _abort(self) -> None:
        """End NCCL's collectives: their kernels would wait for the other rank for ever. Those of
        an update that is enqueued may be among them."""
        groups = [self._group(), *(process_groups(self.window.groups) if self.window else ())]
        backends = [backend_of(group, self._device) for group in dict.fromkeys(groups)]
        backends = [backend for backend in backends if backend.name() == "nccl"]
        if backends:
            has_sums = self._sums is None or self._sums.is_done_within(self._timeout_seconds)
            self._is_torn = not has_sums
        abort_all(backends)

    # ---- for a Step ----

    def join(self, options: c.Options, device: torch.device) -> None:
        """Make a session one of this group. Raises ValueError where the process group cannot reduce
        gradients on a device."""
        self._votes.check()
        try:
            backend_of(self._group(), device)
        except RuntimeError:
            raise ValueError(
                f"rebatch: the model is on {device}, and the process group, of the backend "
                f"{dist.get_backend(self._group())!r}, has none for it: expected the model on the "
                "backend's device, or init_process_group('cpu:gloo,cuda:nccl')"
            ) from None
        self._device = device
        options.group = C.pointer(self._votes.table)
        options.lockstep = c.Toggle.ON if self.lockstep else c.Toggle.OFF
        options.group_timeout_ms = max(1, int(1000 * self._timeout_seconds))

    def quiet(self) -> ContextManager[Any]:
        """Within it DistributedDataParallel runs without collectives."""
        return self._quiet.quiet()

    @contextlib.contextmanager
    def gathered(self, call: Call) -> Iterator[None]:
        """Within it the parameters of fully_shard() are whole, unless in lockstep. Raises NoRoom on
        all ranks, where that is an answer. All ranks enter it together, with
        the same `call`. Raises Exhausted where this rank has no memory for them, and PeerFailed
        where another one has none."""
        if not self.window:
            yield
            return
        self._check_connection()
        window, beside_bytes = self.window, None
        if self._update and call is Call.TRAINS:
            self._update.zero_grad()  # gradients of the last step make room
            # Before the first step there is to be room for what the later ones hold.
            beside_bytes = self._update.first_bytes() or None
        if not self.lockstep:
            why = self._prepare(lambda: window.prepare(beside_bytes))
            self._vote_to_gather(call, why)
        try:
            self._gather(window)
            yield
        finally:
            window.close()

    def _check_connection(self) -> None:
        self._votes.check()
        if self._votes.lost:
            raise PeerFailed(
                f"rebatch: another rank is missing: {self._votes.lost}", self._votes.missing
            )

    def _prepare(self, prepare: Callable[[], None]) -> str:
        """Why there is no memory for the whole parameters, or nothing."""
        why = ""
        for _ in range(2):
            try:
                prepare()
                return ""
            except Exception as error:
                if not is_oom(error):
                    raise
                why = str(error)
                let_go(error)
            _release()
        return why

    def _vote_on(self, call: Call, why: str) -> Tuple[int, bool]:
        """The lowest rank that has said why not, or the number of ranks; and whether all make the
        same call."""
        words = (C.c_uint64 * 3)(call, _MOST - call, self._votes.rank if why else self.size)
        if self._votes.smallest(words) != c.Status.OK:
            self._check_connection()
        return words[2], words[0] == _MOST - words[1]

    def _vote_to_gather(self, call: Call, why: str) -> None:
        failed, is_same = self._vote_on(call, why)
        if failed < self.size and is_same and self._cut:
            raise NoRoom(f"rank {failed} has no memory for the whole parameters and gradients")
        if why:
            raise Exhausted(
                "out of memory when the parameters of fully_shard() were gathered; they are as "
                f"they were: free memory, raise the limit, or use more ranks\n{why}"
            )
        if failed < self.size:
            raise PeerFailed(
                f"rebatch: rank {failed} has no memory for the whole parameters of fully_shard()",
                failed,
            )
        if not is_same:
            raise ValueError(
                "rebatch: one rank trains and another evaluates: expected the same call of the "
                "Step on all ranks, since fully_shard() gathers parameters from all of them"
            )

    def _gather(self, window: Window) -> None:
        """The memory was there a moment ago."""
        for left in reversed(range(_TRIES)):
            try:
                window.open()
                return
            except Lost as error:
                self._votes.note_lost(error)
                self._check_connection()
            except Exception as error:
                if not is_oom(error) or not left:
                    raise
                let_go(error)
            _release()

    def begin(self, weight: Any, batch: Any) -> None:
        """A step begins. `weight` is what this rank's losses are divided by, if it is not the
        number of samples. Raises RuntimeError where the process group is destroyed."""
        self._votes.check()
        self._keys = "" if self._is_compared() else agreement.keys_of(batch)
        compression_of(self._wrappers)  # a hook may be registered at any time
        self.accumulators.begin_step()
        keys = agreement.number_of(self._keys)
        self._votes.values[:4] = [0.0 if weight is None else float(weight), 0.0, keys, 0.0]

    def _is_compared(self) -> bool:
        return self._has_compared or self.is_local

    def check_batches(self) -> None:
        """After the first vote of a step. Raises ValueError on all ranks where the first batch has
        other keys on some: each rank has the digests of all, so all come here or none."""
        if self._is_compared():
            return
        if len(set(self._votes.received(_KEYS))) > 1:
            agreement.check_keys(self.everyones(self._keys))
        self._has_compared = True

    def weight(self) -> float:
        """The sum of all ranks' weights, in the order of the ranks."""
        return sum(self._votes.received(_WEIGHT))

    def note_micro(self, count: int) -> None:
        """A micro-batch of `count` samples has run."""
        self._votes.values[_MICRO] = max(self._votes.values[_MICRO], count)

    def restart(self) -> None:
        self._votes.values[_MICRO] = 0.0

    def micros(self) -> Tuple[int, ...]:
        """The size of each rank's micro-batches in the last step; () where it was local."""
        return () if self.is_local else tuple(int(count) for count in self._votes.received(_MICRO))

    def finish(self, loss: torch.Tensor) -> None:
        """Sum the gradients and the loss over the ranks. Raises Lost."""
        try:
            self.accumulators.finish(loss)
        except Lost as error:
            self._note_lost(error)
            raise

    def begin_update(self, is_on_host: bool) -> None:
        """All have voted for the update, which NCCL's sums may still precede on the stream. An
        update that reads them on the host waits for them first. Raises Lost."""
        self._sums = sums = self.accumulators.sums()
        if not is_on_host:
            return
        try:
            sums.wait(self._timeout_seconds)
        except Lost as error:
            self._sums = None  # nothing has used them
            self._note_lost(error)
            raise

    def exchange(self, state: float, rows: int, form: str) -> List[Tuple[float, ...]]:
        """Of each rank: its state, how many rows it has for a loss over all samples, and a number
        of their form. All ranks call this together. Raises Lost."""
        self._votes.values[_STATE:] = [state, rows, agreement.number_of(form)]
        if self._votes.smallest((C.c_uint64 * 1)()) != c.Status.OK:
            raise self.lost(RuntimeError(self._votes.lost))
        return list(zip(*map(self._votes.received, (_STATE, _ROWS, _FORM))))

    def lost(self, error: RuntimeError) -> Lost:
        """A collective has failed: what is raised for it."""
        found = Lost(str(error))
        self._note_lost(found)
        return found

    def _note_lost(self, error: Lost) -> None:
        self._votes.note_lost(error)
        error.rank = self._votes.missing

    def explain(self, error: BaseException) -> None:
        """Say how parameters of fully_shard() were held, and that this rank has updated with sums
        that were never there, where that is so."""
        if isinstance(error, Exhausted) and self.window:
            how = "in lockstep" if self.lockstep else "with the whole parameters (window)"
            error.args = (f"{error}\nThe step of fully_shard() ran {how}.",)
        if self._is_torn and isinstance(error, PeerFailed):
            error.is_torn = True
            error.args = (
                f"{error}; before that, this rank has updated its parameters with gradients of "
                "which the missing rank's part never came: restore a checkpoint",
            )

    def note_status(self, status: int) -> None:
        """A callback has ended: the next votes say how, until another one has."""
        how = {int(c.Status.OK): 0.0, int(c.Status.OOM): _RAN_OUT}
        self._votes.values[_FAILURE] = how.get(status, _FAILED)

    def are_all(self, is_well: bool) -> bool:
        """Whether it is well on all ranks, which call this together within a micro-batch."""
        words = (C.c_uint64 * 1)(is_well)
        return self._votes.smallest(words) == c.Status.OK and words[0] == 1

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Take part in the reduction as a rank that has failed: the status for C."""
        for _ in range(_TRIES):
            try:
                self.accumulators.abandon(parameters)
                return c.Status.OK
            except Lost as error:
                self._votes.note_lost(error)
                return c.Status.E_PEER
            except BaseException as error:  # the step has its error already
                if not is_oom(error):
                    return c.Status.E_USER
                let_go(error)
            _release()
        return c.Status.OOM


def _release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def abort_all(backends: Sequence[Any]) -> None:
    """At once: an abort waits for the GPU, where kernels of the other groups wait as well."""
    aborts = [getattr(b, "abort" if hasattr(b, "abort") else "_abort") for b in backends]
    threads = [threading.Thread(target=abort) for abort in aborts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
