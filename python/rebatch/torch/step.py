"""Step: one update of an effective batch, in micro-batches that fit."""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes as C
import os
import warnings
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Deque,
    Dict,
    List,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch

from rebatch import _library as c
from rebatch import plot as _plot
from rebatch._library import lib
from rebatch.torch import _allocator
from rebatch.torch._arguments import (
    check_arguments,
    check_match,
    named_modules,
    named_state,
    ranks_or_none,
)
from rebatch.torch._audit import Audit
from rebatch.torch._batch import Cut
from rebatch.torch._check import check_step
from rebatch.torch._findings import Check, accepted_kinds
from rebatch.torch._first_cut import FirstCut
from rebatch.torch._gradients import Accumulators
from rebatch.torch._host import joined_where_it_fits
from rebatch.torch._map import run_map
from rebatch.torch._oom import is_oom
from rebatch.torch._only_check import check_if_asked
from rebatch.torch._outputs import joined, kept
from rebatch.torch._probe import Probe, run_probe
from rebatch.torch._program import Program, Running, listed
from rebatch.torch._reached import Reached
from rebatch.torch._report import MapReport, Report, point_of, report_of
from rebatch.torch._session import Ended, Session, session_options, why_of
from rebatch.torch._state import Generators, cuda_devices_of
from rebatch.torch._tree import unique
from rebatch.torch._update import Update
from rebatch.torch._weak import weakly

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rebatch.torch._options import SessionOptions

_Lighten = Callable[[bool], None]

_HISTORY = 10000  # steps that are kept for plot()
_nothing: ContextManager[None] = contextlib.nullcontext()
_TRAINS, _EVALUATES, _PROBES = range(3)  # calls that all ranks of fully_shard() make together


def _set_modes(modes: List[Tuple[torch.nn.Module, bool]]) -> None:
    for module, is_training in modes:
        module.training = is_training


class Step:
    """Trains on one effective batch a call, and survives running out of memory::

        step = rebatch.Step(model, optimizer, loss_fn)
        for batch in loader:
            loss = step(batch)

    The batch is cut into micro-batches that fit; their gradients are accumulated, and the optimizer
    runs once. An OOM costs the micro-batch that it struck; the update stays the same.

    Args:
        model: a module, or a list of modules
        optimizer: an optimizer, or several: all of them step once for each batch
        loss_fn: loss_fn(model, samples) -> the mean loss over the samples, a scalar; or a tuple of
            it and what you want to see of the samples, which `outputs` then has for the whole
            batch: a tensor or a list with an entry for each sample, Sum(value), or a dict of such
        normalizer: normalizer(batch) -> what the sum of the losses is divided by, for example the
            tokens of the whole batch that bear a loss. loss_fn then returns a sum
        scaler: a torch.amp.GradScaler
        clip: largest norm of the gradients
        lr_scheduler: a scheduler, or several: they step after each update
        autocast: a dtype for torch.autocast, for example torch.bfloat16, or a context manager
        cost: cost(batch, first, count) -> memory of these samples in a unit of your choice, for
            example padded tokens: micro-batches are then cut by cost
        lighten: functions f(on) that switch something that saves memory on or off, in the order in
            which they are tried when one sample does not fit (rebatch.checkpointing(),
            rebatch.offload())
        slice: slice(batch, first, count) -> those samples, for batches of your own types
        length: length(batch) -> how many samples there are, with `slice`
        batch_dim: the dimension of the samples in the batch's tensors, for example 1 for sequences
            of shape (time, samples, features)
        generators: generators of your own that loss_fn uses, of PyTorch, NumPy or Python: a retry
            draws the same numbers
        state: what loss_fn changes outside of the model, and what is to be put back with it:
            tensors, modules, and objects with state_dict() and load_state_dict()
        gradients: "fresh": a micro-batch's gradients are kept apart until all of them are there, so
            an OOM costs one micro-batch. "inplace": autograd adds to .grad: an OOM in a backward
            pass runs the batch again, and no copy of the gradients is needed
        on_event: on_event(text, event): called instead of writing to standard error
        group: the ranks that train the model together: True for all of torch.distributed, or a
            ProcessGroup; False for this rank alone. DistributedDataParallel and fully_shard() need
            none
        group_timeout: seconds, the longest wait for another rank; longer than the slowest step
        window: of a model of fully_shard(): True keeps its parameters whole during a step; with
            False micro-batches gather and reduce as PyTorch does, and all ranks run the same ones.
            None: True, and False from the first time that they do not fit whole

    Other keywords are limits and options of the session, docs/pytorch.md: micro_start,
    micro_smallest, micro_largest, micro_multiple_of, micro_allowed, learn, on_oom, admission,
    growth, grow_after, grow_wait_max, max_attempts, max_ooms_in_row, log_level, log_file,
    log_format.

    With several ranks, all of them make the Step and call it together.

    Raises:
        Exhausted: not even the smallest micro-batch fits.
        Torn: memory ran out within the update.
        PeerFailed: another rank failed or is missing.

    An exception of loss_fn or the optimizer comes out unchanged."""

    def __init__(
        self,
        model: Union[torch.nn.Module, Sequence[torch.nn.Module]],
        optimizer: Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        normalizer: Optional[Callable[[Any], Any]] = None,
        scaler: Optional[Any] = None,
        clip: Optional[float] = None,
        lr_scheduler: Any = None,
        autocast: Any = None,
        cost: Optional[Callable[[Any, int, int], int]] = None,
        lighten: Union[_Lighten, Sequence[_Lighten]] = (),
        slice: Optional[Callable[[Any, int, int], Any]] = None,
        length: Optional[Callable[[Any], int]] = None,
        batch_dim: int = 0,
        generators: Sequence[Any] = (),
        state: Any = (),
        gradients: str = "fresh",
        on_event: Optional[Callable[[str, Any], None]] = None,
        group: Any = None,
        group_timeout: float = 300.0,
        window: Optional[bool] = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        if gradients not in ("fresh", "inplace"):
            raise ValueError(f"rebatch: gradients is {gradients!r}: expected 'fresh' or 'inplace'")
        self._program = Program(
            model,
            loss_fn,
            Update(listed(optimizer), listed(lr_scheduler), scaler, clip),
            Cut(batch_dim, slice, length),
            normalizer=normalizer,
            autocast=autocast,
            cost=cost,
            lighten=listed(lighten),
            generators=list(generators),
            is_fresh=gradients == "fresh",
            on_event=on_event,
            options={**options},
        )
        check_arguments(self._program)
        check_match(self._program.modules, self._update, state)
        self._make_batch(state)
        self._make_ranks(group, group_timeout, window)
        self._ops = self._make_ops()
        self._begin_at_zero()
        self._is_made = True

    def _make_batch(self, state: Any) -> None:
        """What puts the state of the program back, and the batch that runs."""
        program = self._program
        named = named_modules(program.model)
        self._audit = Audit(named, named_state(state), weakly(self._changed_by_updates))
        self._reached = Reached(
            program.functions_that_run, self._audit.handled, program.update.optimizers
        )
        self._running = Running(program, self._audit, self._reached)

    def _make_ranks(self, group: Any, timeout_seconds: float, window: Optional[bool]) -> None:
        """The other ranks, where there are some."""
        program, update = self._program, self._program.update
        own_sizes = "cost" if program.cost else "learn" if program.options.get("learn") else ""
        if window is None and own_sizes:
            window = True  # each rank has its own sizes
        shared = {
            "clip": str(update.clip),
            "scaler": type(update.scaler).__name__,
            "normalizer": "None" if program.normalizer is None else "given",
            **self._shared,
        }
        self._ranks = ranks_or_none(
            program.modules, group, timeout_seconds, window, update.parameters, shared
        )
        self._window: Any = self._ranks.window if self._ranks else None  # of fully_shard()
        self._lockstep: Any = self._ranks.lockstep if self._ranks else None
        self._running.has_ranks = self._ranks is not None
        self._running.has_window = self._window is not None
        if self._lockstep and own_sizes:
            raise ValueError(
                f"rebatch: {own_sizes} is given, and window is False: expected one of them, since "
                "all ranks have the same micro-batches without a window"
            )
        self._accumulators: Any = self._ranks.accumulators if self._ranks else Accumulators()
        if self._window:
            self._make_window()

    def _make_window(self) -> None:
        """The update of a model of fully_shard()."""
        update = self._program.update
        if not self._program.is_fresh:
            raise ValueError(
                "rebatch: gradients is 'inplace', and the model is one of fully_shard(): expected "
                "'fresh'"
            )
        self._window.check_match(update, update.scaler)
        self._accumulators.has_norm = update.clip is not None
        self._accumulators.scaler = update.scaler
        update.clip_gradients = self._accumulators.clip
        update.unscale_gradients = self._accumulators.unscale

    def _begin_at_zero(self) -> None:
        """No step has run, and no session is open."""
        self._level = 0  # rungs of lighten that are on
        self._saved_level = 0  # with which a session that is opened begins
        self._trained: List[torch.nn.Parameter] = []  # in this batch
        self._kept: List[torch.nn.Parameter] = []  # of these, in no optimizer of the Step
        self._loss_dtype = torch.float32  # or float64, once loss_fn has returned that
        self._session: Any = None  # a Session, once it is open
        self._number = 0  # of the next step
        self._micro: Optional[int] = None  # where a session that is opened begins
        self.report, self.evaluation_report = Report(), MapReport()
        # What loss_fn returned beside the loss, for the last batch: joined or summed.
        self.outputs: Any = None
        self.evaluation_outputs: Any = None
        self._extras: List[Any] = []  # of the micro-batches that are accumulated
        self._joined: Any = None
        self._history: Deque[_plot.Point] = collections.deque(maxlen=_HISTORY)
        self._cuts = FirstCut()

    _is_made = False
    _shared: Dict[str, str] = {}  # what else must be the same on all ranks

    def __setattr__(self, name: str, value: Any) -> None:
        """What a Step is made with stays; loss_fn and what it reports may be assigned."""
        is_own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if self._is_made and (name == "model" or not is_own):
            raise AttributeError(
                f"rebatch: Step.{name} cannot be assigned: make a new Step with the {name} that it "
                "shall have, and give it state_dict() of this one to go on at its size"
            )
        super().__setattr__(name, value)

    @property
    def model(self) -> Any:
        """Which it was made with."""
        return self._program.model

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any]:
        """May be assigned between two steps."""
        return self._program.loss_fn

    @loss_fn.setter
    def loss_fn(self, function: Callable[[Any, Any], Any]) -> None:
        self._program.loss_fn = function

    @property
    def _update(self) -> Update:
        return self._program.update

    # ---- the session ----

    @property
    def device(self) -> torch.device:
        """That of the first parameter, now."""
        return self._update.device

    def _open(self) -> Session:
        """The session, opened when a step first runs, and again when the allocator or the device is
        another."""
        device = self.device
        is_pooled = device.type == "cuda" and _allocator.installed()
        if _allocator.installed() and device.type == "cpu":
            raise ValueError(
                "rebatch: the model is on the CPU, and install() manages the GPU's memory: move "
                "the model to the GPU first"
            )
        now: Optional[Session] = self._session
        if now and now.is_pooled == is_pooled and now.device == device:
            return now
        if self._session:
            self._micro = self.micro
            self._session.close()
            self._session = None
            self._accumulators.forget()
        self._set_level(min(self._saved_level, len(self._program.lighten)))
        given = dict(self._program.options)
        if self._micro:
            given.update(micro_start=self._micro, learn=False)
        options = session_options(**given)
        if self._ranks:
            self._ranks.join(options, device)
        session = Session(
            device, options, guards=self._make_guards(), on_event=self._program.on_event
        )
        self._session = session
        c.check(lib.rebatch_set_lighten(session.rb, self._level))
        c.check(lib.rebatch_set_step(session.rb, self._number))
        return session

    def _changed_by_updates(self) -> List[torch.nn.Parameter]:
        return self._window.trained() if self._window else self._update.parameters

    def _make_guards(self) -> List[Any]:
        """What saves and restores the state that an attempt changes."""
        program = self._program
        tensors = program.update.parameters + list(program.modules.buffers())
        generators = Generators(cuda_devices_of(tensors), program.generators)
        self._running.generators = generators
        return [self._reached.guard(weakly(self._has_error)), generators, self._audit]

    def _has_error(self) -> bool:
        """Whether the program has raised an exception in the call of C that runs."""
        return self._session.error is not None

    def _make_ops(self) -> c.StepOps:
        ops = c.StepOps(flags=c.StepFlag.DECLARES_MUTATION)
        ops.zero_grad = c.ZeroGrad(weakly(self._call_zero_grad))
        ops.forward_backward = c.ForwardBackward(weakly(self._call_forward_backward))
        ops.optimizer_step = c.OptimizerStep(weakly(self._call_optimizer_step))
        if self._program.lighten:
            ops.lighten = c.Lighten(weakly(self._call_lighten))
        if self._program.cost:
            ops.cost = c.Cost(weakly(self._call_cost))
        if self._ranks:
            ops.reduce = c.Reduce(weakly(self._call_reduce))
        return ops

    # ---- callbacks ----

    def _run(self, body: Callable[..., Any], *arguments: Any) -> int:
        return int(self._session.run(body, *arguments))

    def _call_zero_grad(self, _user: Any) -> int:
        return self._run(self._zero_grad)

    def _call_optimizer_step(self, _user: Any) -> int:
        return self._run(self._optimizer_step)

    def _call_forward_backward(self, microbatch: Any, _user: Any) -> int:
        mb = microbatch[0]
        if mb.is_abandoned:
            return self._abandon(mb.first)
        if self._ranks and not mb.probing:
            self._running.total, self._running.divisor = mb.batch, self._ranks.weight()
        return self._run(self._forward_backward, mb.first, mb.count, mb.probing)

    def _call_reduce(self, is_abandoned: bool, _user: Any) -> int:
        if is_abandoned:
            return int(self._ranks.abandon(self._trained))
        return self._run(self._reduce)

    def _call_lighten(self, level: int, _user: Any) -> int:
        if level > len(self._program.lighten):
            return c.Status.E_UNSUPPORTED
        return self._run(self._set_level, level)

    def _call_cost(self, first: int, count: int, _user: Any) -> int:
        cost = self._program.cost
        assert cost is not None  # else C has no function to call
        try:
            return max(0, int(cost(self._running.batch, first, count)))
        except BaseException as error:
            self._session.keep_error(error)
            return 0

    def _zero_grad(self) -> None:
        self._accumulated, self._is_applied = 0, False
        if self._ranks:
            self._ranks.check_batches()
            self._ranks.restart()
        self._update.zero_grad()
        micro = lib.rebatch_get_micro(self._session.rb, self._running.samples)
        is_cut = self._program.is_fresh and micro < self._running.samples
        self._accumulators.begin_batch(self._trained, is_cut and self._session.is_pooled)
        self._extras.clear()
        if self._running.loss is not None:
            self._running.loss.zero_()

    def _set_level(self, level: int) -> None:
        if self._session and self._session.meter:
            self._session.meter.measure_again()
        lighten = self._program.lighten
        with self._audit.accepting():
            while self._level < level:
                lighten[self._level](True)
                self._level += 1
            while self._level > level:
                self._level -= 1
                lighten[self._level](False)
        self._saved_level = level

    def _forward_backward(self, first: int, count: int, is_trial: bool) -> None:
        is_last = first + count == self._running.samples
        self._audit.is_cut = count < self._running.samples
        # Without other ranks a sum of losses would be one more small block in the last pass.
        is_launching = bool(self._ranks) and is_last and self._program.is_fresh and not is_trial
        self._accumulate(first, count, is_launching)
        if is_last:
            if not self._ranks:
                self._finish_gradients()
            self._joined = self._join(self._extras)  # here, where an OOM is recovered from
        self._accumulated += count
        if self._ranks:
            self._ranks.note_micro(count)

    def _finish_gradients(self) -> None:
        self._accumulators.expose()
        self._update.finish_gradients()

    def _reduce(self) -> None:
        """Of all ranks. May run out of memory after its collectives: it then runs again."""
        self._ranks.finish(self._running.loss)
        self._finish_gradients()
        self._reserve_update()

    def _accumulate(self, first: int, count: int, is_launching: bool) -> None:
        running, loss, is_apart = self._running, None, self._program.is_fresh
        if self._lockstep:
            self._lockstep.begin_pass()
        try:
            if running.loss is None:
                running.loss = self._zero_loss()
            loss, extras = running.weighted_loss(first, count)
            if loss.dtype == torch.float64 != running.loss.dtype:
                self._loss_dtype, running.loss = loss.dtype, running.loss.double()
            if not is_apart:
                lib.rebatch_mutating(self._session.rb)
                self._accumulators.expose(is_added_to=True)
            total = running.loss + loss.detach().to(running.loss.device) if is_launching else None
            with _nothing if total is None else self._accumulators.launching(total):
                self._update.backward(loss)
            detached, extras, loss = loss.detach(), kept(extras), None
        except BaseException as error:
            if loss is not None and count == running.samples:
                self._cuts.note_failed(running, loss)
                loss = None
            self._accumulators.clear()
            self._audit.put_back(c.GuardPoint.ATTEMPT)
            if is_oom(error):
                self._reached.put_back(c.GuardPoint.ATTEMPT)
            raise
        self._declare()
        if is_apart:
            self._accumulators.add()
        else:
            self._accumulators.take_exposed()
        running.loss.add_(detached.to(running.loss.device))
        self._extras.append(extras)

    def _declare(self) -> None:
        """The accumulators are about to change. In lockstep: if all ranks have run the
        micro-batch."""
        if not self._lockstep:
            lib.rebatch_mutating(self._session.rb)
            return
        status = lib.rebatch_mutating_together(self._session.rb)
        self._lockstep.end_pass(status == c.Status.OK)
        if status == c.Status.OK:
            return
        self._accumulators.clear()
        self._audit.put_back(c.GuardPoint.ATTEMPT)
        raise Ended(status)

    def _abandon(self, first: int) -> int:
        """This rank's micro-batch has failed, and the others' goes on: the status for C."""
        smallest = max(1, self._program.options.get("micro_smallest", 0))
        count = min(smallest, self._running.samples - first)

        def run() -> None:
            loss, _ = self._running.weighted_loss(first, count)
            self._update.backward(loss)

        try:
            self._lockstep.issue_rest(run)
        except BaseException as error:  # the step has its error already
            return c.Status.OOM if is_oom(error) else c.Status.E_USER
        finally:
            self._lockstep.begin_pass()
            self._accumulators.clear()
            self._audit.put_back(c.GuardPoint.ATTEMPT)
        return c.Status.OK

    def _optimizer_step(self) -> None:
        samples = self._running.samples
        if self._accumulated != samples:  # a callback was left early, and nobody was told
            raise RuntimeError(
                f"rebatch: {self._accumulated} of {samples} samples are in the gradients: "
                "expected all of them; the parameters are as they were"
            )
        self._reserve_update()
        if self._ranks:
            self._ranks.begin_update(is_on_host=self._update.reads_gradients)
        lib.rebatch_mutating(self._session.rb)
        self._accumulators.put_buffers()
        with _allocator.tag("optimizer"):
            self._update.apply()
        self._is_applied = True

    def _reserve_update(self) -> None:
        needed = self._update.first_bytes()
        if self._session.meter:
            self._session.meter.promised_bytes = 0
        if needed and lib.rebatch_reserve(self._session.rb, needed) == c.Status.OOM:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {needed / (1 << 20):.2f} MiB for the "
                "optimizer's first step."
            )
        if needed and self._session.meter:
            self._update.rehearse()

    # ---- what users call ----

    def _begin(self, batch: Any, is_training: bool = True) -> None:
        running = self._running
        running.begin(batch)
        self._accumulated, self._is_applied = 0, False
        self._cuts.begin()
        # Made here, so that all micro-batches make the same calls; if that fails, where an OOM is
        # recovered from.
        try:
            running.loss = self._zero_loss()
        except torch.OutOfMemoryError:
            running.loss = None
        running.weigh()
        modules, tensors = self._reached.begin(self._audit.tree)
        self._audit.set_reached(modules)
        self._audit.begin(batch, is_training)
        known: List[Any] = [*self._audit.tree.parameters(), *tensors]
        if self._ranks:  # their gradients are this rank's own
            own = {id(p) for p in (*self._audit.tree.parameters_of_reached(), *tensors)}
            known = [p for p in known if id(p) not in own]
        self._trained, self._kept = self._update.with_gradients(unique(known))
        if self._window:
            self._trained, self._kept = self._window.trained(), []

    def _zero_loss(self) -> torch.Tensor:
        return torch.zeros((), device=self._session.device, dtype=self._loss_dtype)

    def _end(self) -> None:
        self._audit.end()
        self._reached.end()
        self._running.end()
        self._trained = self._kept = []
        self._extras.clear()

    def __call__(self, batch: Any) -> torch.Tensor:
        """One update. Returns the loss of the whole batch: a detached scalar, on the device."""
        check_if_asked(self, batch)
        return self._run_batch(batch)

    def _run_batch(self, batch: Any) -> torch.Tensor:
        session = self._open()
        try:
            with self._gathered(_TRAINS):
                return self._run_gathered(session, batch)
        except Exception as error:
            if not (self._window and self._ranks.is_to_leave(error)):
                raise
            self._leave_window(str(error))
        return self._run_batch(batch)

    def _leave_window(self, who: str) -> None:
        """On all ranks: the parameters are not whole from now on."""
        self._micro = self.micro
        self._session.close()
        self._session = None
        self._ranks.leave_window()
        self._window = self._lockstep = self._ranks.lockstep
        self._accumulators = self._ranks.accumulators
        self._update.clip_gradients = self._accumulators.clip
        self._update.unscale_gradients = self._accumulators.unscale
        warnings.warn(
            f"rebatch: {who} has no memory for the whole parameters of fully_shard(): from now "
            "on micro-batches gather them, on all ranks, and have the same sizes on all",
            RuntimeWarning,
            stacklevel=5,
        )

    def _gathered(self, call: int) -> ContextManager[Any]:
        """Around calls that run the model: parameters of fully_shard() are whole."""
        return self._ranks.gathered(call) if self._window else _nothing

    def _run_gathered(self, session: Session, batch: Any) -> torch.Tensor:
        self._begin_together(batch)
        running, samples, filled = self._running, self._running.samples, c.StepReport()
        self.outputs = None
        self._accumulators.keep_earlier(self._kept)
        if session.meter:
            micro = lib.rebatch_get_micro(session.rb, samples)
            session.meter.begin_step(("step", samples, micro))
            session.meter.promised_bytes = self._update.kept_bytes()
        try:
            with self._quiet():
                status = session.call(
                    lib.rebatch_step, C.byref(self._ops), samples, None, C.byref(filled)
                )
            ranks = self._ranks.micros() if self._ranks else ()
            self.report = report_of(filled, samples, ranks)
            if not status and self._is_applied:
                self._finish_step(filled)
            session.raise_failure(status)
            with self._quiet():
                self._cuts.compare(running, filled)
        except BaseException as error:
            if not self._is_applied:
                self._accumulators.restore_earlier()
            if self._ranks:
                self._ranks.explain(error)
            raise
        finally:
            self._end()
        assert running.loss is not None  # a step that succeeds has one
        return running.loss

    def _begin_together(self, batch: Any) -> None:
        """The other ranks hear of a failure, instead of waiting."""
        try:
            self._begin(batch)
            if self._ranks:
                self._ranks.begin(self._running.weight, batch)
        except BaseException as error:
            if self._ranks:
                lib.rebatch_abandon_step(self._session.rb, why_of(error))
            raise

    def _quiet(self) -> ContextManager[Any]:
        """Around what runs the model: it makes no collectives of its own."""
        return self._ranks.quiet() if self._ranks else _nothing

    def _finish_step(self, filled: c.StepReport) -> None:
        self._accumulators.drop_earlier()
        self.outputs = self._joined
        limit = _allocator.limit_of(self._session.device)
        self._history.append(point_of(filled, self._running.samples, limit))
        self._number += 1
        self._update.done()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "rebatch: a Step cannot be copied or pickled: expected state_dict(), which another "
            "Step loads"
        )

    def __repr__(self) -> str:
        return f"Step(step {self._number}, micro {self.micro or 'not known yet'})"

    @property
    def micro(self) -> int:
        """The micro-batch size with which the next step begins, in samples; 0: not known yet."""
        if not (self._session and self.report.samples):
            return int(self._micro or self._program.options.get("micro_start", 0))
        return int(lib.rebatch_get_micro(self._session.rb, self.report.samples))

    def probe(self, batch: Any, reserve_bytes: int = 0) -> Probe:
        """Find the largest micro-batch that fits, before training; prints a table.

        Needs install(). The next step starts with the size that was found. `reserve_bytes` is what
        is allocated later; what the optimizer keeps from its first step on is counted already."""
        self._refuse_alone("probe")
        session = self._open()
        with self._gathered(_PROBES):
            return self._probe_gathered(session, batch, reserve_bytes)

    def _probe_gathered(self, session: Session, batch: Any, reserve_bytes: int) -> Probe:
        self._begin(batch)
        try:
            reserve = reserve_bytes + self._update.first_bytes()
            with self._quiet():
                found = run_probe(session, self._ops, self._running.samples, reserve)
        finally:
            self._end()
        print(found)
        return found

    def check(self, batch: Any, accept: Union[str, Sequence[str]] = ()) -> Check:
        """Look for mistakes that make the result depend on the cut: a loss that is summed instead
        of averaged, BatchNorm, a mean over tokens; for what a failed attempt leaves behind; for
        NaN. Runs the batch several times without an update, at two sizes or more and with OOMs on
        purpose, and leaves everything as it was. Print the result, or test it: it is true when
        there is no mistake.

        `accept` has the kinds of mistakes that are meant to be so, for example "batch_norm": they
        become notes."""
        accepted = accepted_kinds(accept)
        if self._window:
            raise ValueError(
                "rebatch: the model is one of fully_shard(): expected a check of the model before "
                "fully_shard(), on one rank"
            )
        self._open()
        self._begin(batch)
        try:
            with self._program.aside(), self._quiet():
                return check_step(self._running, self._run_as, accepted)
        finally:
            self._end()

    def _run_as(self, program: Program) -> Tuple[float, int]:
        """Run the batch that runs as a Step of another program does, on this rank alone: the loss,
        and the size of the micro-batches at the end."""
        step = object.__new__(type(self))
        vars(step).update(vars(self))
        step._program, step._running = program, copy.copy(self._running)
        step._running.program, step._running.has_ranks = program, False
        step._ranks, step._accumulators = None, Accumulators()
        step._session = step._micro = None
        step._level = step._saved_level = 0
        step._extras, step._history = [], collections.deque(maxlen=1)
        step._cuts = FirstCut(is_done=True)
        step._ops = step._make_ops()
        try:
            return float(step._run_batch(self._running.batch)), step.report.micro
        finally:
            if step._session:
                step._session.close()

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of a batch without training, in as many parts as memory asks for, with the
        modules in evaluation mode: a scalar. `evaluation_report` says what the call did, and
        `evaluation_outputs` has what loss_fn returned beside the loss."""
        self._refuse_alone("evaluate")
        session = self._open()
        with self._gathered(_EVALUATES):
            return self._evaluate_gathered(session, batch)

    def _evaluate_gathered(self, session: Session, batch: Any) -> torch.Tensor:
        self._begin(batch, is_training=False)
        modes = self._modes()
        self._program.modules.eval()
        try:
            with self._quiet():
                results, self.evaluation_report, status = run_map(
                    session,
                    self._loss_of,
                    batch,
                    self._running.samples,
                    id(self),
                    self._program.cut,
                )
            session.raise_failure(status)
        finally:
            _set_modes(modes)
            weight, samples = self._running.weight, self._running.samples
            self._end()
        counts = [count for count, _ in results]
        losses: List[Any] = [loss for _, (loss, _) in results]
        extras = [extra for _, (_, extra) in results]
        results.clear()

        def mean() -> Any:
            if self._program.normalizer:
                return sum(losses) / weight
            return sum(loss * (count / samples) for count, loss in zip(counts, losses))

        self.evaluation_outputs = self._join(extras)
        mean_loss: torch.Tensor = joined_where_it_fits(mean, losses)
        return mean_loss

    @staticmethod
    def _join(extras: List[Any]) -> Any:
        return joined_where_it_fits(lambda: joined(extras), extras)

    def _modes(self) -> List[Tuple[torch.nn.Module, bool]]:
        return [(module, module.training) for module in self._program.modules.modules()]

    def _loss_of(self, samples: Any) -> Tuple[torch.Tensor, Any]:
        loss, extras = self._program.loss_of(samples)
        return loss.detach(), kept(extras)

    def _refuse_alone(self, name: str) -> None:
        if self._lockstep:
            raise ValueError(
                f"rebatch: {name}() runs micro-batches of this rank's own, and window is False: "
                "expected a loop of your own over batches of the same sizes on all ranks"
            )

    def plot(self, path: Union[str, os.PathLike[str]]) -> None:
        """Draw memory and micro-batch over the last 10,000 steps of this process into a file.

        The end of its name says the format, such as .svg or .png; it needs matplotlib. An OOM is
        drawn at the size with which its step began. rebatch.plot draws a log."""
        _plot.write(list(self._history), path)

    def state_dict(self) -> Dict[str, int]:
        """What a resumed training needs to go on at the size that was found: plain numbers."""
        return {"step": self._number, "micro": self.micro, "lighten_level": self._saved_level}

    def load_state_dict(self, state: Dict[str, int]) -> None:
        """Go on where state_dict() was taken, at its micro-batch size, and with the rungs of
        `lighten` that were in use, as far as this Step has them."""
        if self._session:
            self._session.close()
            self._session = None
        for name in ("step", "micro"):
            if name not in state:
                raise ValueError(f"rebatch: the state has no {name!r}: expected that of a Step")
        self._number, self._micro = int(state["step"]), int(state["micro"])
        self._saved_level = int(state.get("lighten_level", 0))
