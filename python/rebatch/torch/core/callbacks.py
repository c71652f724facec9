"""What C calls in a step: the start of a batch, its micro-batches, their sum over the ranks, and
the update. Must not know how a session is opened, and what is said of a step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Tuple, Union, cast

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch.torch.allocator import install as allocator
from rebatch.torch.batches.join_on_host import joined_where_it_fits, once_more
from rebatch.torch.batches.outputs import joined, kept
from rebatch.torch.check.cut_comparison import FirstCut
from rebatch.torch.check.two_passes import TwoPasses
from rebatch.torch.core.rehearsal import rehearse
from rebatch.torch.core.whole_loss import Rows, WholeLoss
from rebatch.torch.graphs.graphs import Graphs
from rebatch.torch.program.gradients import Accumulators
from rebatch.torch.program.left_backward import add_sentence
from rebatch.torch.program.mistakes import (
    hooked,
    marks_of_gradients,
    refuse_changed,
    refuse_graphs,
    refuse_stepped,
)
from rebatch.torch.program.program import Running, listed
from rebatch.torch.saving.levels import Levels
from rebatch.torch.session.oom import is_oom
from rebatch.torch.session.session import Ended, Session
from rebatch.torch.session.weak_methods import weakly
from rebatch.torch.undo.generators import Generators, cuda_devices_of
from rebatch.torch.undo.gradients_outside import leaves_outside
from rebatch.torch.undo.module_tree import unique
from rebatch.torch.update.passes import Passes
from rebatch.torch.update.update import torn_text, version_of

if TYPE_CHECKING:
    from rebatch.torch.ranks.fsdp.lockstep import Lockstep  # need a PyTorch with torch.distributed
    from rebatch.torch.ranks.ranks import Ranks

# Batches in which all that loss_fn names is taken to get gradients.
_LOOKS = 3
# What PyTorch raises, or an unpacking or assertion of the program.
_MAY_BE_OF_THE_CUT = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


class Callbacks:
    """Those of one training, whose batch is `running`. Each has a status for C, which the session
    makes of what it raises."""

    def __init__(self, running: Running, ranks: Optional[Ranks], cuts: FirstCut):
        self.cuts = cuts
        self.levels = Levels(running.program.lighten, running.undo)
        self.outputs: Any = None  # what loss_fn returned beside the loss, joined or summed
        self.is_applied = False  # the update of this batch
        self.failed_in_part = False  # loss_fn, for some of its samples, and not for memory
        self._running, self._ranks = running, ranks
        self.session = cast(Session, None)  # the one that calls these
        self._own_accumulators = Accumulators()  # of a rank that trains alone
        # Of the gradients, and what runs collectives: others once a window is left.
        self.accumulators: Accumulators = self._own_accumulators
        self._lockstep: Optional[Lockstep] = None
        self._update: Passes = running.program.update
        self._trained: List[torch.nn.Parameter] = []  # in this batch
        self._hooked: List[torch.nn.Parameter] = []  # of these, with hooks of the backward pass
        self._of_block: List[Any] = []  # marks of the gradients that it has made
        self._kept: List[torch.nn.Parameter] = []  # of these, in no optimizer of the Step
        self._own: List[torch.nn.Parameter] = []  # and the others, or all of them
        self.outside: List[
            Any
        ] = []  # what loss_fn gives gradients too, and the Step does not train
        self._others = Accumulators()  # of these
        self._seen_outside: List[Any] = []  # those that have got some
        self._looks_outside = 0
        self._loss_dtype = torch.float32  # or float64, once loss_fn has returned that
        self._accumulated = 0  # samples
        self._last_count = 0  # those of the last micro-batch that succeeded
        self._is_whole = False  # the batch runs as one micro-batch, whose gradients stay in .grad
        self.graphs: Optional[Graphs] = None
        self.begin_graphs()
        self.whole_loss: Optional[WholeLoss] = None  # of a program with embed
        if running.program.embed is not None:
            self.whole_loss = self._make_whole_loss()
        self._is_trial = False  # the micro-batch that runs belongs to no batch
        # Of the micro-batches that are accumulated: what was beside their losses, and samples.
        self._extras: List[Any] = []
        self._counts: List[int] = []
        self.ops = self._make_ops()

    def _make_whole_loss(self) -> WholeLoss:
        gathering = None
        if self._ranks:
            from rebatch.torch.ranks.gathering import Gathering

            gathering = Gathering(self._ranks)
        put_back, passes = weakly(self._put_back_pass), TwoPasses(self.cuts.is_done)
        return WholeLoss(self._running, gathering, put_back, passes)

    def _make_ops(self) -> c.StepOps:
        program, gone = self._running.program, c.Status.E_USER
        ops = c.StepOps(flags=c.StepFlags.DECLARES_MUTATION)
        ops.zero_grad = weakly(self._call_zero_grad, gone)
        ops.forward_backward = weakly(self._call_forward_backward, gone)
        ops.optimizer_step = weakly(self._call_optimizer_step, gone)
        self._part = type(ops.part)(weakly(self._call_part, gone=1))
        if program.lighten:
            ops.lighten = weakly(self._call_lighten, gone)
        if program.cost:
            ops.cost = weakly(self._call_cost, gone=0)  # the next callback fails
        if self._ranks:
            ops.reduce = weakly(self._call_reduce, gone)
        return ops

    # ---- who takes part ----

    def use(self, session: Optional[Session]) -> None:
        """From now on this one calls them; None: it is closed."""
        self.session = cast(Session, session)  # C calls within one

    def begin_graphs(self) -> None:
        """Of what runs, nothing is known and captured yet: loss_fn may be another."""
        if self.graphs:
            self.graphs.drop()
        self._looks_outside, self._seen_outside = _LOOKS, []
        most = 0 if self._running.has_window else self._running.program.graphs
        self.graphs = Graphs(self._running, most, weakly(self._put_back_pass)) if most else None

    def guards(self) -> List[Any]:
        """What saves and restores the state that an attempt changes."""
        running, program = self._running, self._running.program
        tensors = program.update.parameters + list(program.modules.buffers())
        running.generators = Generators(cuda_devices_of(tensors), program.generators)
        return [running.told, running.generators, self._update, running.undo]

    # ---- a batch ----

    def begin(self, batch: Any, is_training: bool = True) -> None:
        """A batch runs from now on: it is checked, and what it may change is looked for."""
        running = self._running
        self.failed_in_part = False
        if self._ranks:
            self.accumulators, self._lockstep = self._ranks.accumulators, self._ranks.lockstep
        for each in (self.accumulators, self._others):
            each.may_have_graph = self._update.may_keep_graph
        self._update.begin()
        once_more("length", running.begin, batch)
        self._accumulated, self.is_applied = 0, False
        self.session.saves_attempts = True
        running.loss = None
        if self.whole_loss:
            self._refuse_local()
            self.whole_loss.begin()
        if running.program.normalizer:
            once_more("normalizer", running.weigh)
        else:
            running.weigh()
        undo = running.undo
        running.told.begin()
        undo.begin(batch, is_training)
        self._trained, self._kept = self._update.with_gradients(undo.parameters, undo.need_gradient)
        window = self._ranks.window if self._ranks else None
        if window:
            self._trained = window.trained()
            self._kept = window.shards() if self._update.is_of_program else []
        self._own = self._trained[: len(self._trained) - len(self._kept)] or self._trained
        if is_training and self._looks_outside:
            self._looks_outside -= 1
            own, block = set(map(id, self._trained)), running.told.block
            places = block.places() if block else ()
            self.outside = leaves_outside(running.program.functions_that_run(), own, places)
        running.told.apart = self._trained, self.outside

    def _refuse_local(self) -> None:
        if self._ranks and self._ranks.is_local:
            raise ValueError(
                "rebatch: a loss over the whole batch (embed) was called within no_sync(), and "
                "that batch has the samples of all ranks: expected all samples of the update in "
                "one call, outside of no_sync()"
            )

    def failed(self) -> None:
        """It has not updated: gradients that are not the Step's are as before it."""
        self.accumulators.restore_earlier()
        self._others.restore_earlier()

    def _end_batch(self) -> None:
        """It has. What was in .grad before is not needed when the step ends."""
        self.accumulators.end_batch()
        self._others.end_batch()
        if len(self._seen_outside) < len(self.outside):
            self._seen_outside = unique([*self._seen_outside, *self._others.given()])
            if not self._looks_outside:
                self.outside = self._seen_outside

    def begin_step(self) -> None:
        """The batch trains."""
        if self.graphs:
            with self._ranks.quiet() if self._ranks else contextlib.nullcontext():  # as passes run
                self.graphs.begin(self.session.device, [*self._trained, *self.outside])
            self.accumulators.are_lent = self._others.are_lent = False
        if bool(self.ops.part) is not self._running.are_several:
            self.ops.part = self._part if self._running.are_several else type(self._part)()
        if self.accumulators.keep_earlier(self._kept):
            self._update.note_earlier()
        if self.outside:
            self._others.keep_earlier(self.outside)

    def _zero_loss(self) -> torch.Tensor:
        return torch.zeros((), device=self.session.device, dtype=self._loss_dtype)

    def end(self) -> None:
        """Nothing of the batch is held."""
        running = self._running
        running.undo.end()
        running.end()
        if self.whole_loss:
            self.whole_loss.drop()
        self._trained = self._kept = self._own = self._hooked = self._of_block = []
        self._extras, self._counts = [], []
        running.told.apart = ()

    # ---- what C calls ----

    def _run(self, body: Callable[..., Any], *arguments: Any) -> int:
        status = self.session.run(body, *arguments)
        if status == c.Status.OOM:
            self.ran_out()
        if self._ranks:
            self._ranks.note_status(status)
        return status

    def ran_out(self) -> None:
        """Of memory: graphs give theirs back, before fewer samples run."""
        if self.graphs:
            self.graphs.ran_out()

    def _call_zero_grad(self, _user: Any) -> int:
        return self._run(self._zero_grad)

    def _call_optimizer_step(self, _user: Any) -> int:
        return self._run(self._optimizer_step)

    def _call_forward_backward(self, microbatch: Any, _user: Any) -> int:
        mb = microbatch[0]
        if mb.is_abandoned:
            assert self._lockstep is not None  # no other group abandons a micro-batch
            return self._abandon(self._lockstep)
        if self._ranks and not (mb.probing or self._ranks.is_local):
            self._running.total, self._running.divisor = mb.batch, self._ranks.weight()
        return self._run(self._forward_backward, mb.first, mb.count, mb.probing)

    def _call_reduce(self, is_abandoned: bool, _user: Any) -> int:
        assert self._ranks is not None  # else C has no function to call
        if is_abandoned:
            if self.whole_loss and self.whole_loss.gathering:
                self.whole_loss.gathering.fail()
            return self._ranks.abandon(self._trained)
        return self._run(self._reduce, self._ranks)

    def _call_lighten(self, level: int, _user: Any) -> int:
        if level > len(self.levels):
            return c.Status.E_UNSUPPORTED
        return self._run(self.set_level, level)

    def _call_cost(self, first: int, count: int, _user: Any) -> int:
        try:
            cost: int = once_more("cost", self._running.cost, first, count)
            return max(0, cost)
        except BaseException as error:
            self.session.keep_error(error)
            return 0

    def _call_part(self, first: int, _user: Any) -> int:
        _, start, length = self._running.place(first)
        return start + length - first

    # ---- what they do ----

    def _zero_grad(self) -> None:
        running = self._running
        self._accumulated, self.is_applied = 0, False
        self.session.saves_attempts = True
        if self.graphs:
            self.graphs.replayed = 0
        if self._ranks:
            self._ranks.check_batches()
            self._ranks.restart()
        if self.whole_loss:
            self.whole_loss.voted()
        self._update.zero_grad()
        self._extras, self._counts = [], []
        if self.outside:
            self._others.begin_batch(self.outside)
        running.loss, self._is_whole = None, False
        micro = lib.rebatch_get_micro(self.session.rb, running.samples)
        # The program keeps gradients that the Step does not clear, and a graph would write there
        # again.
        is_lent = self.graphs is not None and bool(self._kept)
        if micro >= running.samples and not (self._ranks or is_lent):
            self._is_whole = self._own_accumulators.begin_whole(self._trained)
        if not self._is_whole:
            self._begin_cut(micro < running.samples)

    def _begin_cut(self, is_cut: bool) -> None:
        """The gradients and losses of this batch are accumulated."""
        is_apart = is_cut and self._running.program.is_fresh
        self._is_whole, self._hooked = False, hooked(self._trained)
        # A graph's own gradients cannot be the sums; where the Step clears .grad, older sums can.
        is_kept = self.graphs is not None and self.graphs.lends and not self._kept
        makes_sums = is_apart and self.session.is_pooled
        self.accumulators.begin_batch(self._trained, makes_sums, is_kept)
        # Made here, so that all micro-batches make the same calls; if that fails, where an OOM is
        # recovered from.
        with contextlib.suppress(torch.OutOfMemoryError):
            self._running.loss = self._zero_loss()

    def _cut_after_all(self) -> None:
        """The whole batch did not fit. What is made here stays if the micro-batch that runs fails,
        so that no garbage is collected for it."""
        self._begin_cut(True)
        self.session.keep_made()

    def set_level(self, level: int) -> None:
        """Of `lighten`."""
        if self.session and self.session.meter:
            self.session.meter.measure_again()
        if self.graphs:
            self.graphs.drop()
        self.levels.set_level(level)

    def _forward_backward(self, first: int, count: int, is_trial: bool) -> None:
        running = self._running
        self._is_trial = is_trial
        count = count if is_trial else running.with_rest(first, count)
        if count == 0:
            self._run_nothing()
            return
        is_last = first + count == running.samples
        if self._is_whole and count < running.samples:
            self._cut_after_all()
        # Without other ranks a sum of losses would be one more small block in the last pass.
        is_launching = bool(self._ranks) and is_last and running.program.is_fresh and not is_trial
        is_launching = is_launching and not self.whole_loss  # another rank may ask for all again
        self._accumulate(first, count, is_launching)
        self._end_micro(first, count)

    def _end_micro(self, first: int, count: int) -> None:
        """It is accumulated."""
        if first + count == self._running.samples:
            if not self._ranks:
                self._finish_gradients()
            self._join_outputs()
            if self.whole_loss:
                self._meet_at_end(self.whole_loss)
            # The update begins without calling the program.
            self.session.saves_attempts = self._ranks is not None
        self._accumulated += count
        if self.session.meter:
            self.session.meter.micros += 1
        if self.cuts.comparison:
            self.cuts.comparison.ran = self._accumulated
        if self._ranks:
            self._ranks.note_micro(count)

    def _join_outputs(self) -> None:
        """Within a micro-batch, where an OOM is recovered from."""
        self.outputs = None
        if [extras for extras in self._extras if extras is not None]:
            dim = self._running.program.cut.dim
            self.outputs = joined_where_it_fits(
                lambda: joined(self._extras, self._counts, dim), self._extras
            )

    def _run_nothing(self) -> None:
        """A micro-batch without samples. Lockstep keeps the collectives of the one before it."""
        if not self._lockstep:
            lib.rebatch_mutating(self.session.rb)
            return
        status = lib.rebatch_mutating_together(self.session.rb)
        if status != c.Status.OK:
            raise Ended(status)

    def _finish_gradients(self) -> None:
        self.accumulators.expose()
        if self.outside:
            self._others.expose()
        self._update.finish_gradients()

    def _reduce(self, ranks: Ranks) -> None:
        """Of all ranks. May run out of memory after its collectives: it then runs again."""
        assert self._running.loss is not None  # all samples are accumulated
        ranks.finish(self._running.loss)
        self._finish_gradients()
        self._reserve_update()

    def _accumulate(self, first: int, count: int, is_launching: bool) -> None:
        if self._lockstep and not self._lockstep.is_known:
            self._rehearse(self._lockstep)
        try:
            loss, extras = self._pass(first, count, is_launching)
        except BaseException as error:
            self.put_back()
            self.explain_cut(error, first, count)
            raise
        self._take(loss, extras, count)

    def _take(self, loss: torch.Tensor, extras: Any, count: int) -> None:
        """A micro-batch has run, whose gradients are apart until here."""
        self._last_count = count
        if self._lockstep:
            self._declare_together(self._lockstep)
        else:
            lib.rebatch_mutating(self.session.rb)
        self.session.succeeded()
        self._add(loss)
        if extras is not None or not self.whole_loss:  # which has one loss, of all samples
            self._extras += (extras,)
            self._counts += (count,)

    # ---- the same of a block of the program ----

    def begin_block(self, first: int, count: int, give: Callable[[Tuple[int, Any]], Any]) -> None:
        """Gives how many samples it has, and these; nothing where they ran with those before."""
        count = self._running.with_rest(first, count)
        if count == 0:
            self._run_nothing()
            return
        if self._is_whole and count < self._running.samples:
            self._cut_after_all()
        self._begin_loss()
        give((count, self._running.part(first, count)))

    def backward_of_block(self, loss: Any, first: int, count: int) -> torch.Tensor:
        """Returns the block's part of the loss."""
        weighted = self._running.weighted(loss, count, self._looked_at(first))
        self._go_backward(weighted, first, count)
        self._of_block = marks_of_gradients(self._looked_at(first))
        return weighted.detach()

    def end_block(self, loss: torch.Tensor, first: int, count: int) -> None:
        refuse_changed(listed(self._running.program.model), self._of_block)
        self._take(loss, None, count)
        self._end_micro(first, count)

    def _rehearse(self, lockstep: Lockstep) -> None:
        """In the first micro-batch of all: none has a collective before all ranks know them."""
        assert self._ranks is not None
        try:
            rehearse(self._running, lockstep)
        finally:
            self.put_back()
        if self._ranks.are_all(True):
            lockstep.end_rehearsal()
        else:
            self._declare_together(lockstep)  # a rank that has failed says so in this vote

    def explain_cut(self, error: BaseException, first: int, count: int) -> None:
        """A sentence after that of an exception which a pass of these samples has raised."""
        is_other = isinstance(error, _MAY_BE_OF_THE_CUT) and not isinstance(error, Ended)
        is_other = is_other and not (self.whole_loss and self.whole_loss.is_in_loss)
        if is_other and not is_oom(error):
            with contextlib.suppress(Exception):  # the program's own is what comes out
                self._explain(error, first, count)

    def _explain(self, error: BaseException, first: int, count: int) -> None:
        """Where the micro-batch may be why: a state that modules carry on may have a row for each
        sample of another one, and a tensor that has no samples is cut all the same."""
        running, before = self._running, self._last_count
        carried = running.undo.carried(before) if count != before else []
        note = ""
        if carried:
            note = (
                f"rebatch: {carried[0]!r} of the model has a dimension of {before}, as many as the "
                f"samples of the micro-batch before, and this one has {count}: expected a state "
                "that does not depend on the micro-batch, or micro_allowed=[N] with a size that "
                "stays"
            )
        elif self.whole_loss and not self.whole_loss.has_graph and "grad" in str(error):
            note = (
                "rebatch: a batch that is cut is embedded twice, and the first pass has no graph: "
                "expected `with torch.enable_grad():` around what takes gradients in embed"
            )
        elif count < running.place(first)[2] and not str(error).startswith("rebatch"):
            self.failed_in_part = True
            batch, _, _ = running.place(first)
            note = (
                f"rebatch: this is the micro-batch of samples {first}-{first + count - 1} of "
                f"{running.samples}, which is cut {running.program.cut.described(batch)}"
            )
        if note:
            add_sentence(error, note)

    def _pass(self, first: int, count: int, is_launching: bool) -> Tuple[torch.Tensor, Any]:
        """Forward and backward. Returns the micro-batch's part of the loss, and what was beside
        it."""
        running = self._running
        if self._lockstep:
            self._lockstep.begin_pass()
        if self.whole_loss and first and not self._is_trial:
            # After an OOM the batch runs again from the first pass, whose cut is another then.
            lib.rebatch_mutating(self.session.rb)
        self._begin_loss()
        if self.graphs and not (self._is_trial or self.graphs.is_off):
            return self._pass_by_graph(self.graphs, first, count)
        if self.whole_loss and not self._is_trial:
            return self._pass_over_batch(self.whole_loss, first, count)
        loss, extras = running.weighted_loss(first, count, self._looked_at(first))
        self._go_backward(loss, first, count, is_launching)
        return loss.detach(), extras if extras is None else kept(extras)

    def _pass_by_graph(self, graphs: Graphs, first: int, count: int) -> Tuple[torch.Tensor, Any]:
        """The same: a replay, or a run without a graph."""
        running = self._running
        samples = running.part(first, count)

        def eager() -> Tuple[torch.Tensor, Any]:
            looked_at = self._looked_at(first)
            loss, extras = running.weighted_loss(first, count, looked_at, samples)
            self._go_backward(loss, first, count)
            return loss.detach(), kept(extras)

        # A comparison of cuts has gradients of its own, which have no room beside a graph's.
        loss, extras = graphs.run(samples, count, eager, not self.cuts.comparison)
        self.accumulators.are_lent = self._others.are_lent = graphs.lends
        if graphs.lends:
            lib.rebatch_works_in_kept_memory(self.session.rb, graphs.new_bytes)
        return loss, extras

    def _pass_over_batch(
        self, whole: WholeLoss, first: int, count: int
    ) -> Tuple[torch.Tensor, Any]:
        """The second pass of these samples; before that of the first ones, the first pass and the
        loss of all of them."""
        loss, extras = self._zero_loss(), None
        if first == 0:
            whole.first_pass(count)
            loss, extras = self._loss_over_batch(whole, loss)
        for rows in whole.second_pass(first, count):
            self._go_backward(rows, first, count)
        return loss, extras

    def _loss_over_batch(self, whole: WholeLoss, none: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        with whole.over_the_batch(self.session):
            found = whole.loss(self._own)
            if found is None:
                return none, None
            self._go_backward(found[0], 0, self._running.samples)
            whole.take_gradients()
        return found[0].detach(), found[1]

    def _meet_at_end(self, whole: WholeLoss) -> None:
        """The last in a batch that may run out of memory: no rank comes back from here."""
        running = self._running
        while whole.is_asked_again():
            for guard in (running.undo, running.generators):
                guard.restore(c.GuardPoint.STEP, has_failed=False)
            self._begin_cut(True)
            if self.outside:
                self._others.begin_batch(self.outside)
            self._extras, self._counts = [], []
            loss, extras = self._loss_over_batch(whole, self._zero_loss())
            for rows in whole.second_pass_again():
                self._go_backward(rows, 0, running.samples)
            self._add(loss)
            self._extras, self._counts = [extras], [running.samples]
            self._join_outputs()

    def _put_back_pass(self) -> None:
        """A pass that has succeeded is to leave nothing."""
        self.accumulators.clear()
        self._others.clear()
        self._running.undo.restore(c.GuardPoint.ATTEMPT, has_failed=False)
        self._running.generators.restore(c.GuardPoint.ATTEMPT, has_failed=False)

    def _begin_loss(self) -> None:
        if self._running.loss is None and not self._is_whole:
            self._running.loss = self._zero_loss()

    def _go_backward(
        self, loss: Union[torch.Tensor, Rows], first: int, count: int, is_launching: bool = False
    ) -> None:
        """Of a loss, or of rows for a loss over the whole batch, whose gradients are scaled."""
        running = self._running
        if not (running.program.is_fresh or self._is_whole):
            lib.rebatch_mutating(self.session.rb)
            self.accumulators.expose(is_added_to=True)
        noted = [(p, p._version) for p in self._hooked] if count < running.samples else []
        if isinstance(loss, tuple):
            torch.autograd.backward(*loss)
        elif is_launching:
            with self.accumulators.launching(self._with(loss.detach())):
                self._update.backward(loss)
        else:
            self._update.backward(loss)
        if noted:
            refuse_stepped(listed(running.program.model), noted)
        if (
            self._update.may_keep_graph
            and first == 0
            and not self._is_whole
            and (running.program.is_fresh or self._ranks)
        ):
            refuse_graphs(self._trained, self._ranks is not None)

    def _with(self, loss: torch.Tensor) -> torch.Tensor:
        """The losses of the batch so far, with that of a micro-batch."""
        if self._loss_dtype != torch.float64 == loss.dtype:
            self._loss_dtype = loss.dtype
        loss = loss.to(self.session.device, self._loss_dtype)
        so_far = self._running.loss
        return loss if so_far is None else so_far.to(loss.dtype) + loss

    def _add(self, loss: torch.Tensor) -> None:
        """A micro-batch is accumulated."""
        so_far = self._running.loss
        if so_far is None or torch.float64 == loss.dtype != so_far.dtype:
            self._running.loss = self._with(loss)
        else:
            so_far.add_(loss if loss.device == so_far.device else loss.to(so_far.device))
        if self.outside:
            self._others.add()
        if self._is_whole:
            return
        if self._running.program.is_fresh:
            self.accumulators.add()
        else:
            self.accumulators.take_exposed()

    def _looked_at(self, first: int) -> List[torch.nn.Parameter]:
        """Parameters to which loss_fn must give no gradient: not those in no optimizer of the Step,
        which may be another's that loss_fn steps. All are looked at once in a batch."""
        return self._own[:1] if first else self._own

    def put_back(self) -> None:
        """The gradients and the modules of a micro-batch that is not accumulated."""
        self.accumulators.clear()
        self._others.clear()
        if self.whole_loss:
            self.whole_loss.drop()
        self._running.undo.put_back(c.GuardPoint.ATTEMPT)

    def _declare_together(self, lockstep: Lockstep) -> None:
        """The accumulators are about to change, if all ranks have run the micro-batch."""
        status = lib.rebatch_mutating_together(self.session.rb)
        lockstep.end_pass(status == c.Status.OK)
        if status == c.Status.OK:
            return
        self.put_back()
        raise Ended(status)

    def _abandon(self, lockstep: Lockstep) -> int:
        """This rank's micro-batch has failed, and the others' goes on: the status for C."""
        assert self._ranks is not None
        try:
            if lockstep.is_known:
                lockstep.issue_rest()
            else:
                self._ranks.are_all(False)  # nor will another rank go on
        except BaseException as error:  # the step has its error already
            return c.Status.OOM if is_oom(error) else c.Status.E_USER
        finally:
            lockstep.begin_pass()
            self.put_back()
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
        versions = list(map(version_of, self._trained))
        try:
            with allocator.tag("optimizer"):
                self._update.apply()
        except Exception:
            self.session.torn_text = torn_text(self._trained, versions)
            raise
        self.is_applied = True
        self._end_batch()

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
            if self._ranks and self._ranks.window:  # what stays is to lie in memory of its own
                torch.cuda.empty_cache()
            self._update.warm_up()
