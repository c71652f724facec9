"""What C calls in a step: the start of a batch, its micro-batches, their sum over the ranks, and
the update. Must not know how a session is opened, and what is said of a step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, ContextManager, List, Optional

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch.torch import _allocator
from rebatch.torch._first_cut import FirstCut
from rebatch.torch._gradients import Accumulators
from rebatch.torch._host import joined_where_it_fits, once_more
from rebatch.torch._mistakes import hooked, refuse_stepped
from rebatch.torch._oom import is_oom
from rebatch.torch._outputs import joined, kept
from rebatch.torch._program import Running, listed
from rebatch.torch._rungs import Rungs
from rebatch.torch._session import Ended, Session
from rebatch.torch._state import Generators, cuda_devices_of
from rebatch.torch._tree import unique
from rebatch.torch._update import Update
from rebatch.torch._weak import weakly

if TYPE_CHECKING:
    from rebatch.torch._lockstep import Lockstep  # need a PyTorch with torch.distributed
    from rebatch.torch._ranks import Ranks

_nothing: ContextManager[None] = contextlib.nullcontext()


class Callbacks:
    """Those of one training, whose batch is `running`. Each has a status for C, which the session
    makes of what it raises."""

    def __init__(self, running: Running, ranks: Optional[Ranks], cuts: FirstCut):
        self.cuts = cuts
        self.rungs = Rungs(running.program.lighten, running.audit)
        self.outputs: Any = None  # what loss_fn returned beside the loss, joined or summed
        self.is_applied = False  # the update of this batch
        self._running, self._ranks = running, ranks
        self._session: Optional[Session] = None
        self._own_accumulators = Accumulators()  # of a rank that trains alone
        self._trained: List[torch.nn.Parameter] = []  # in this batch
        self._kept: List[torch.nn.Parameter] = []  # of these, in no optimizer of the Step
        self._hooked: List[torch.nn.Parameter] = []  # of these, where the batch is cut
        self._loss_dtype = torch.float32  # or float64, once loss_fn has returned that
        self._accumulated = 0  # samples
        self._extras: List[Any] = []  # of the micro-batches that are accumulated
        self.ops = self._make_ops()

    def _make_ops(self) -> c.StepOps:
        program, gone = self._running.program, c.Status.E_USER
        ops = c.StepOps(flags=c.StepFlag.DECLARES_MUTATION)
        ops.zero_grad = c.ZeroGrad(weakly(self._call_zero_grad, gone))
        ops.forward_backward = c.ForwardBackward(weakly(self._call_forward_backward, gone))
        ops.optimizer_step = c.OptimizerStep(weakly(self._call_optimizer_step, gone))
        if program.lighten:
            ops.lighten = c.Lighten(weakly(self._call_lighten, gone))
        if program.cost:
            ops.cost = c.Cost(weakly(self._call_cost, gone=0))  # the next callback fails
        if self._ranks:
            ops.reduce = c.Reduce(weakly(self._call_reduce, gone))
        return ops

    # ---- who takes part ----

    @property
    def session(self) -> Session:
        """The one that calls these."""
        assert self._session is not None  # C calls within one
        return self._session

    def use(self, session: Optional[Session]) -> None:
        """From now on this one calls them; None: it is closed."""
        self._session = session

    def guards(self) -> List[Any]:
        """What saves and restores the state that an attempt changes."""
        running, program = self._running, self._running.program
        tensors = program.update.parameters + list(program.modules.buffers())
        running.generators = Generators(cuda_devices_of(tensors), program.generators)
        reached = running.reached.guard(weakly(self._has_error))
        return [reached, running.generators, self._update, running.audit]

    def _has_error(self) -> bool:
        """Whether the program has raised an exception in the call of C that runs."""
        return self.session.error is not None

    @property
    def accumulators(self) -> Accumulators:
        """Of the gradients: other ones once a window is left."""
        return self._ranks.accumulators if self._ranks else self._own_accumulators

    @property
    def _lockstep(self) -> Optional[Lockstep]:
        return self._ranks.lockstep if self._ranks else None

    @property
    def _update(self) -> Update:
        return self._running.program.update

    # ---- a batch ----

    def begin(self, batch: Any, is_training: bool = True) -> None:
        """A batch runs from now on: it is checked, and what it may change is looked for."""
        running = self._running
        once_more("length", running.begin, batch)
        self._accumulated, self.is_applied = 0, False
        self.cuts.begin()
        # Made here, so that all micro-batches make the same calls; if that fails, where an OOM is
        # recovered from.
        try:
            running.loss = self._zero_loss()
        except torch.OutOfMemoryError:
            running.loss = None
        once_more("normalizer", running.weigh)
        audit = running.audit
        modules, tensors = running.reached.begin(audit.tree)
        audit.set_reached(modules)
        audit.begin(batch, is_training)
        known: List[Any] = [*audit.tree.parameters(), *tensors]
        if self._ranks:  # their gradients are this rank's own
            own = {id(p) for p in (*audit.tree.parameters_of_reached(), *tensors)}
            known = [p for p in known if id(p) not in own]
        self._trained, self._kept = self._update.with_gradients(unique(known))
        if self._ranks and self._ranks.window:
            self._trained, self._kept = self._ranks.window.trained(), []

    def begin_step(self) -> None:
        """The batch trains."""
        self.accumulators.keep_earlier(self._kept)

    def _zero_loss(self) -> torch.Tensor:
        return torch.zeros((), device=self.session.device, dtype=self._loss_dtype)

    def end(self) -> None:
        """Nothing of the batch is held."""
        running = self._running
        running.audit.end()
        running.reached.end()
        running.end()
        self._trained = self._kept = self._hooked = []
        self._extras.clear()

    # ---- what C calls ----

    def _run(self, body: Callable[..., Any], *arguments: Any) -> int:
        return self.session.run(body, *arguments)

    def _call_zero_grad(self, _user: Any) -> int:
        return self._run(self._zero_grad)

    def _call_optimizer_step(self, _user: Any) -> int:
        return self._run(self._optimizer_step)

    def _call_forward_backward(self, microbatch: Any, _user: Any) -> int:
        mb = microbatch[0]
        if mb.is_abandoned:
            assert self._lockstep is not None  # no other group abandons a micro-batch
            return self._abandon(self._lockstep, mb.first)
        if self._ranks and not mb.probing:
            self._running.total, self._running.divisor = mb.batch, self._ranks.weight()
        return self._run(self._forward_backward, mb.first, mb.count, mb.probing)

    def _call_reduce(self, is_abandoned: bool, _user: Any) -> int:
        assert self._ranks is not None  # else C has no function to call
        if is_abandoned:
            return self._ranks.abandon(self._trained)
        return self._run(self._reduce, self._ranks)

    def _call_lighten(self, level: int, _user: Any) -> int:
        if level > len(self.rungs):
            return c.Status.E_UNSUPPORTED
        return self._run(self.set_level, level)

    def _call_cost(self, first: int, count: int, _user: Any) -> int:
        cost = self._running.program.cost
        assert cost is not None  # else C has no function to call
        try:
            return max(0, int(once_more("cost", cost, self._running.batch, first, count)))
        except BaseException as error:
            self.session.keep_error(error)
            return 0

    # ---- what they do ----

    def _zero_grad(self) -> None:
        running = self._running
        self._accumulated, self.is_applied = 0, False
        if self._ranks:
            self._ranks.check_batches()
            self._ranks.restart()
        self._update.zero_grad()
        micro = lib.rebatch_get_micro(self.session.rb, running.samples)
        is_cut = running.program.is_fresh and micro < running.samples
        self.accumulators.begin_batch(self._trained, is_cut and self.session.is_pooled)
        self._extras.clear()
        if running.loss is not None:
            running.loss.zero_()

    def set_level(self, level: int) -> None:
        """Of `lighten`."""
        if self._session and self._session.meter:
            self._session.meter.measure_again()
        self.rungs.set_level(level)

    def _forward_backward(self, first: int, count: int, is_trial: bool) -> None:
        running = self._running
        is_last = first + count == running.samples
        running.audit.is_cut = count < running.samples
        # Without other ranks a sum of losses would be one more small block in the last pass.
        is_launching = bool(self._ranks) and is_last and running.program.is_fresh and not is_trial
        self._accumulate(first, count, is_launching)
        if is_last:
            if not self._ranks:
                self._finish_gradients()
            # Here, where an OOM is recovered from.
            self.outputs = joined_where_it_fits(lambda: joined(self._extras), self._extras)
        self._accumulated += count
        if self._ranks:
            self._ranks.note_micro(count)

    def _finish_gradients(self) -> None:
        self.accumulators.expose()
        self._update.finish_gradients()

    def _reduce(self, ranks: Ranks) -> None:
        """Of all ranks. May run out of memory after its collectives: it then runs again."""
        assert self._running.loss is not None  # all samples are accumulated
        ranks.finish(self._running.loss)
        self._finish_gradients()
        self._reserve_update()

    def _accumulate(self, first: int, count: int, is_launching: bool) -> None:
        running, is_apart = self._running, self._running.program.is_fresh
        loss: Optional[torch.Tensor] = None
        if self._lockstep:
            self._lockstep.begin_pass()
        try:
            if running.loss is None:
                running.loss = self._zero_loss()
            loss, extras = running.weighted_loss(first, count, self._looked_at(first))
            if loss.dtype == torch.float64 != running.loss.dtype:
                self._loss_dtype, running.loss = loss.dtype, running.loss.double()
            if not is_apart:
                lib.rebatch_mutating(self.session.rb)
                self.accumulators.expose(is_added_to=True)
            total = running.loss + loss.detach().to(running.loss.device) if is_launching else None
            if first == 0:
                self._hooked = hooked(self._trained) if count < running.samples else []
            versions = [p._version for p in self._hooked]
            with _nothing if total is None else self.accumulators.launching(total):
                self._update.backward(loss)
            if versions:
                refuse_stepped(listed(running.program.model), self._hooked, versions)
            detached, extras, loss = loss.detach(), kept(extras), None
        except BaseException as error:
            if loss is not None and count == running.samples:
                self.cuts.note_failed(running, loss)
                loss = None
            self._put_back()
            if is_oom(error):
                running.reached.put_back(c.GuardPoint.ATTEMPT)
            raise
        self._declare()
        if is_apart:
            self.accumulators.add()
        else:
            self.accumulators.take_exposed()
        running.loss.add_(detached.to(running.loss.device))
        self._extras.append(extras)

    def _looked_at(self, first: int) -> List[torch.nn.Parameter]:
        """Parameters to which loss_fn must give no gradient: not those in no optimizer of the Step,
        which may be another's that loss_fn steps. All are looked at once in a batch."""
        own = self._trained[: len(self._trained) - len(self._kept)] or self._trained
        return own[:1] if first else own

    def _put_back(self) -> None:
        """The gradients and the modules of a micro-batch that is not accumulated."""
        self.accumulators.clear()
        self._running.audit.put_back(c.GuardPoint.ATTEMPT)

    def _declare(self) -> None:
        """The accumulators are about to change. In lockstep: if all ranks have run the
        micro-batch."""
        if not self._lockstep:
            lib.rebatch_mutating(self.session.rb)
            return
        status = lib.rebatch_mutating_together(self.session.rb)
        self._lockstep.end_pass(status == c.Status.OK)
        if status == c.Status.OK:
            return
        self._put_back()
        raise Ended(status)

    def _abandon(self, lockstep: Lockstep, first: int) -> int:
        """This rank's micro-batch has failed, and the others' goes on: the status for C."""
        smallest = max(1, self._running.program.options.get("micro_smallest", 0))
        count = min(smallest, self._running.samples - first)

        def run() -> None:
            loss, _ = self._running.weighted_loss(first, count)
            self._update.backward(loss)

        try:
            lockstep.issue_rest(run)
        except BaseException as error:  # the step has its error already
            return c.Status.OOM if is_oom(error) else c.Status.E_USER
        finally:
            lockstep.begin_pass()
            self._put_back()
        return c.Status.OK

    # ---- the update ----

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
        lib.rebatch_mutating(self.session.rb)
        self.accumulators.put_buffers()
        with _allocator.tag("optimizer"):
            self._update.apply()
        self.is_applied = True

    def _reserve_update(self) -> None:
        needed, meter = self._update.first_bytes(), self.session.meter
        if meter:
            meter.promised_bytes = 0
        if needed and lib.rebatch_reserve(self.session.rb, needed) == c.Status.OOM:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {needed / (1 << 20):.2f} MiB for the "
                "optimizer's first step."
            )
        if needed and meter:
            self._update.rehearse()
