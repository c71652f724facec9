"""Training: runs the effective batches of a program. A Backward has one, and a Step has one with an
update."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch._user_code import user_stacklevel
from rebatch.torch.allocator import install as allocator
from rebatch.torch.batches.batch_norm import batch_norms, keep_pairs, train_any
from rebatch.torch.batches.cut import Batches, cut_of
from rebatch.torch.check.check import check_step
from rebatch.torch.check.cut_comparison import OF_EVALUATION, FirstCut, tell
from rebatch.torch.check.findings import Check, accepted_kinds
from rebatch.torch.check.without_warnings import without_warnings
from rebatch.torch.core.arguments import (
    check_arguments,
    check_match,
    check_names,
    graphs_kept,
    named_modules,
    named_state,
    ranks_or_none,
    tell_ranks,
)
from rebatch.torch.core.callbacks import Callbacks
from rebatch.torch.core.earlier import Found, found_earlier
from rebatch.torch.core.check_and_exit import check_if_asked, fit_if_asked, probe_if_asked
from rebatch.torch.program.program import Program, Running, listed, refuse_update_in_loss_fn
from rebatch.torch.ranks.calls import Call
from rebatch.torch.session.probe import Probe, run_probe
from rebatch.torch.session.report import Report, Totals, report_of
from rebatch.torch.session.session import Session, session_options, why_of
from rebatch.torch.session.swallowed import swallowing_line
from rebatch.torch.undo.changes_outside import Told
from rebatch.torch.undo.undo import Undo
from rebatch.torch.update.passes import Passes

if TYPE_CHECKING:
    from rebatch.torch.ranks.ranks import Ranks  # needs a PyTorch with torch.distributed

_ANY_BATCH = 1 << 62  # samples: more than any has
_nothing: ContextManager[None] = contextlib.nullcontext()


class Training:
    """The updates of a program, with its session, and with the other ranks where there are some.
    `number` is that of the next update."""

    def __init__(
        self,
        running: Running,
        ranks: Optional[Ranks] = None,
        cuts: Optional[FirstCut] = None,
        number: int = 0,
        found: Optional[Found] = None,
    ):
        self.running, self.ranks = running, ranks
        self.program = running.program  # whose batches run
        self._filled = c.StepReport()
        self._found = found or Found()  # by those before it, and by this one
        self.callbacks = Callbacks(running, ranks, cuts or self._found.cuts)
        self.session: Optional[Session] = None  # once it is open
        self.number = number
        self.report, self.totals = Report(), Totals()
        self.outputs: Any = None  # what loss_fn returned beside the loss, for the last batch
        self.left_parts = False  # the last batch was left within its parts
        self.told_parts: Set[str] = set()  # what blocks change, and is not put back
        self._clean_samples = 0  # of the last step without an OOM
        self._longest = 0  # samples of a batch of the last step
        self._micro = 0  # where a session that is opened begins; 0: where the options say
        self._batch_norms: List[torch.nn.Module] = []  # of the model, once a session was open
        if found:
            self._go_on()

    def _go_on(self) -> None:
        """Where an earlier one with this model has left off."""
        found, self.running.told.is_done = self._found, self._found.is_told
        self.callbacks.levels.wanted = found.level
        if not self.program.options.get("micro_start"):
            self._micro = found.micro

    @property
    def micro(self) -> int:
        """The micro-batch size with which the next batch begins, in samples; 0: not known yet."""
        if not (self.session and self.report.samples):
            return int(self._micro or self.program.options.get("micro_start", 0))
        return int(lib.rebatch_get_micro(self.session.rb, self._longest))

    # ---- the session ----

    def open(self) -> Session:
        """The session, opened when a batch first runs, and again when the allocator or the device
        is another, or BatchNorm trains from now on."""
        device, session = self.program.device, self.session
        is_pooled = device.type == "cuda" and allocator.installed()
        if allocator.installed() and device.type == "cpu":
            raise ValueError(
                "rebatch: the model is on the CPU, and install() manages the GPU's memory: move "
                "the model to the GPU first"
            )
        is_same = session and session.is_pooled == is_pooled and session.device == device
        if session and is_same and (self.program.keeps_pairs or not train_any(self._batch_norms)):
            return session
        if session:
            self.close()
            self.callbacks.accumulators.forget()
        return self._open(device)

    def _open(self, device: torch.device) -> Session:
        program, callbacks = self.program, self.callbacks
        callbacks.set_level(min(callbacks.levels.wanted, len(callbacks.levels)))
        given = dict(program.options)
        if self._micro:
            given.update(micro_start=self._micro, learn=False)
        self._batch_norms = batch_norms(program.modules)
        program.keeps_pairs |= train_any(self._batch_norms)
        if program.keeps_pairs:
            given = keep_pairs(given)
        options = session_options(**given)
        if self.ranks:
            self.ranks.join(options, device)
        session = Session(device, options, guards=callbacks.guards(), on_event=program.on_event)
        self.session = session
        callbacks.use(session)
        c.check(lib.rebatch_set_lighten(session.rb, callbacks.levels.level))
        c.check(lib.rebatch_set_step(session.rb, self.number))
        return session

    def close(self) -> None:
        """The next batch opens another session, which begins at the size of this one."""
        if self.session:
            self._micro = self.micro
            self.session.close()
            self.session = None
            self.callbacks.use(None)

    # ---- around what runs ----

    def gathered(self, call: Call) -> ContextManager[None]:
        """Around calls that run the model: parameters of fully_shard() are whole."""
        return self.ranks.gathered(call) if self.ranks else _nothing

    def quiet(self) -> ContextManager[Any]:
        """Around what runs the model: it makes no collectives of its own."""
        return self.ranks.quiet() if self.ranks else _nothing

    @contextlib.contextmanager
    def holding(self, batch: Any, is_training: bool = True) -> Iterator[Session]:
        """Within it the batch is `running`, for a call that updates nothing."""
        session = self.open()
        self.callbacks.begin(batch, is_training)
        try:
            yield session
        finally:
            self.callbacks.end()

    def compare_results(self, micro: int) -> None:
        """The batch was evaluated in parts of so many samples: whether the result depends on it,
        unless an update does, which was told."""
        if not self.callbacks.cuts.has_told:
            self._found.results.compare(self.running, OF_EVALUATION, micro)

    # ---- an update ----

    def run(self, batch: Any) -> torch.Tensor:
        """One update. Returns the loss of the whole batch: a detached scalar, on the device."""
        refuse_update_in_loss_fn()
        if not self.report.samples:  # the first batch
            self.program.update.find()
            one = batch[0] if isinstance(batch, Batches) else batch
            check_if_asked(self, one)
            probe_if_asked(self, one)
            fit_if_asked(self, one)
        try:
            return self._run(batch)
        except Exception as error:
            if self.ranks or not self.callbacks.failed_in_part:
                raise
            return self._run_otherwise(batch, error)

    def _run_otherwise(self, batch: Any, error: Exception) -> torch.Tensor:
        """The lists of a batch may have been cut where they must not be: cut them elsewhere."""
        cut, usual = self.program.cut, self.program.cut.reading
        for reading in cut.other_readings():
            expected = cut.read_as(reading)
            try:
                loss = self._run(batch)
            except Exception:
                continue
            warnings.warn(
                f"rebatch: step {self.report.step}: loss_fn failed for a part of the batch, whose "
                f"lists are cut otherwise from now on: expected {expected}",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
            return loss
        cut.read_as(usual)
        raise error

    def _run(self, batch: Any) -> torch.Tensor:
        if not self.ranks:
            return self._run_gathered(self.open(), batch)
        if self.ranks.lockstep and isinstance(batch, Batches):
            raise ValueError(
                "rebatch: batches= is given, and the model's parameters are not whole during a "
                "step, so all ranks run the same micro-batches: expected one batch a call"
            )
        if self.ranks.come_back(self.number, self._beside_bytes):
            self.close()
        session = self.open()
        micro, level = self.micro, self.callbacks.levels.wanted
        try:
            with self.gathered(Call.TRAINS):
                return self._run_gathered(session, batch)
        except Exception as error:
            said = self.ranks.go_on(error, self.number)
            if not said:
                raise
        self.close()
        # Not what was left of them when memory ran out.
        self._micro, self.callbacks.levels.wanted = micro, level
        warnings.warn(said, RuntimeWarning, stacklevel=user_stacklevel())
        return self._run(batch)

    def _beside_bytes(self) -> int:
        """What a step takes beside what stays between two steps; 0 where that is not known."""
        live = self.session.live_bytes() if self.session else 0
        return max(0, self.report.peak_bytes - live)

    def _run_gathered(self, session: Session, batch: Any) -> torch.Tensor:
        with self.batch_runs(session, batch):
            if self.ranks or self._compares():
                with self._comparing(session), self.quiet():
                    status, filled = self._call(session)
            else:
                status, filled = self._call(session)
            self.note_call(session, status, filled)
            self.callbacks.cuts.end()
        assert self.running.loss is not None  # a batch that succeeds has one
        return self.running.loss

    @contextlib.contextmanager
    def batch_runs(self, session: Session, batch: Any) -> Iterator[None]:
        """Around the call of C for a batch that trains. After a failure .grad is as before it."""
        self._begin_together(session, batch)
        callbacks = self.callbacks
        try:
            yield
        except BaseException as error:
            if not callbacks.is_applied:
                callbacks.failed()
            if self.ranks:
                self.ranks.explain(error)
                if self.ranks.is_local:  # the other ranks do not hear of it, and count theirs
                    self.number += 1
                    lib.rebatch_set_step(session.rb, self.number)
            raise
        finally:
            callbacks.end()

    def note_call(self, session: Session, status: int, filled: c.StepReport) -> None:
        """That call has ended, with this status and report. Raises what it failed with."""
        running, callbacks = self.running, self.callbacks
        micros = self.ranks.micros() if self.ranks else ()
        samples, self._longest = running.samples, running.longest
        graphs, is_known = callbacks.graphs, samples == self._clean_samples
        replayed = graphs.replayed if graphs else 0
        short = lib.rebatch_short_of_memory(session.rb)
        self.report = report_of(filled, samples, micros, is_known, replayed, short)
        if not (status or filled.ooms):
            self._clean_samples = samples
        self.totals.add(self.report, not status and callbacks.is_applied)
        if not status and callbacks.is_applied:
            self._finish()
        session.raise_failure(status)
        if callbacks.whole_loss and (said := callbacks.whole_loss.passes.found()):
            tell(running, self.report.step, self.report.micro, said)
        if session.meter and session.meter.swallowed:
            self._tell_swallowed(session.meter)

    def _compares(self) -> bool:
        """Once a batch was cut, cuts are compared beside the micro-batches."""
        is_done = self.callbacks.cuts.is_done or self.report.microbatches < 2
        return not (is_done or self.running.are_several)

    def _comparing(self, session: Session) -> ContextManager[None]:
        """Around a call."""
        cuts = self.callbacks.cuts
        if not self._compares():
            return _nothing
        micro = int(lib.rebatch_get_micro(session.rb, self.running.samples))
        cuts.begin(self.running, self.number, self.report.micro, micro)
        return session.guarding(cuts) if cuts.comparison else _nothing

    def _begin_together(self, session: Session, batch: Any) -> None:
        """The other ranks hear of a failure, instead of waiting."""
        if self.ranks:
            self.ranks.choose_sync(self.program.update)
        try:
            self.callbacks.begin(batch)
            if self.ranks:
                one = batch[0] if isinstance(batch, Batches) else batch
                self.ranks.begin(self.running.weight, one)
        except BaseException as error:
            if self.ranks:
                lib.rebatch_abandon_step(session.rb, why_of(error))
            raise
        self.outputs = None
        self.callbacks.begin_step()
        if session.meter:
            samples = self.running.samples
            micro = lib.rebatch_get_micro(session.rb, self.running.longest)
            session.meter.begin_step(("step", samples, micro))
            session.meter.promised_bytes = self.program.update.kept_bytes()

    def _tell_swallowed(self, meter: Any) -> None:
        """Allocations have failed, and no attempt: whose samples then count in no update."""
        number, meter.swallowed = meter.swallowed, 0
        modules, program = self.running.undo.tree.modules, self.program
        line = swallowing_line(program.functions_that_run(), modules)
        if not line or line in self._found.swallowed:
            return
        self._found.swallowed.add(line)
        warnings.warn(
            f"rebatch: PyTorch ran out of memory {number} time{'s' * (number > 1)} in "
            f"{program.loss_name}(), which kept that to itself, so that samples may count in no "
            f"update: remove the handler at {line}, and they run again in smaller micro-batches",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )

    def _call(self, session: Session) -> Tuple[int, c.StepReport]:
        ops, samples, filled = self.callbacks.ops, self.running.samples, self._filled
        return session.call(lib.rebatch_step, ops, samples, None, filled), filled

    def _finish(self) -> None:
        self.outputs = self.callbacks.outputs
        self.number += 1
        self._note_found()
        self.program.update.done()
        self.report.take_norm(self.program.update.norm)

    def _note_found(self) -> None:
        assert self.session is not None  # it has run a step
        found, micro = self._found, int(lib.rebatch_get_micro(self.session.rb, _ANY_BATCH))
        found.micro = 0 if micro > _ANY_BATCH // 2 else micro
        found.level, found.is_told = self.callbacks.levels.wanted, self.running.told.is_done

    # ---- for those who watch ----

    def numbers(self, prefix: str = "rebatch/") -> Dict[str, float]:
        """Backward.numbers()."""
        return self.totals.numbers(self.report, self._room_bytes(), prefix)

    def _room_bytes(self) -> Optional[int]:
        """What may be allocated now beyond the last peak; None where that is not known."""
        peak = self.totals.peak_bytes
        if not (self.session and peak):
            return None
        there = self.session.live_bytes() + self.session.available_bytes()
        return max(0, there - peak)

    # ---- a probe, a check ----

    def probe(self, batch: Any, reserve_bytes: int = 0) -> Probe:
        """Backward.probe(), without the table."""
        self.open()
        self.program.update.find()
        with self.gathered(Call.PROBES), self.holding(batch) as session, self.quiet():
            reserve = reserve_bytes + self.program.update.first_bytes()
            return run_probe(session, self.callbacks.ops, self.running.samples, reserve)

    def check(self, batch: Any, accept: Union[str, Sequence[str]] = ()) -> Check:
        """Backward.check()."""
        accepted = accepted_kinds(accept)
        if self.ranks and self.ranks.window:
            raise ValueError(
                "rebatch: the model is one of fully_shard(): expected a check of the model before "
                "fully_shard(), on one rank"
            )
        with (
            self.holding(batch) as session,
            session.modes.kept(),
            self.program.aside(),
            self.quiet(),
            without_warnings(),
        ):
            return check_step(self.running, self._run_as, accepted)

    def _run_as(self, program: Program) -> Tuple[float, int]:
        """Run the batch that runs as that of another program, on this rank alone: the loss, and the
        size of the micro-batches at the end."""
        training = self.alone(program)
        try:
            return float(training._run(self.running.batch)), training.report.micro
        finally:
            training.close()

    def alone(self, program: Program) -> Training:
        """The training of another program with the same model, on this rank alone."""
        training = self.like(program, None)
        training.running.has_ranks = False
        return training

    def like(self, program: Program, ranks: Optional[Ranks]) -> Training:
        """The training of another program with the same model."""
        running = copy.copy(self.running)
        running.program = dataclasses.replace(program, graphs=0)
        running.told = Told(tuple, set, lambda: "")  # whoever asks says what is found
        return Training(running, ranks, FirstCut(is_done=True), self.number)

    # ---- a checkpoint ----

    def state_dict(self) -> Dict[str, int]:
        """What a resumed training needs to go on at the size that was found: plain numbers."""
        level = self.callbacks.levels.wanted
        return {"step": self.number, "micro": self.micro, "lighten_level": level}

    def load_state_dict(self, state: Dict[str, int]) -> None:
        """Go on where state_dict() was taken."""
        self.close()
        for name in ("step", "micro"):
            if name not in state:
                raise ValueError(f"rebatch: the state has no {name!r}: expected that of a Step")
        self.number, self._micro = int(state["step"]), int(state["micro"])
        self.callbacks.levels.wanted = int(state.get("lighten_level", 0))


def training_of(
    kind: type,
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    make_passes: Callable[[], Passes],
    options: Dict[str, Any],
    shared: Optional[Dict[str, str]] = None,
) -> Training:
    """That of the arguments of a Step or a Backward, the `kind`, which are checked. `options` are
    PassOptions, and `shared` is what else must be the same on all ranks. All ranks call this
    together."""
    rest = dict(options)
    group, group_timeout = rest.pop("group", None), rest.pop("group_timeout", 300.0)
    window, state = rest.pop("window", None), rest.pop("state", ())
    try:
        check_names(kind, options)
        gradients = rest.pop("gradients", "fresh")
        if gradients not in ("fresh", "inplace"):
            raise ValueError(f"rebatch: gradients is {gradients!r}: expected 'fresh' or 'inplace'")
        program = Program(
            model,
            loss_fn,
            make_passes(),
            cut_of(rest),
            normalizer=rest.pop("normalizer", None),
            autocast=rest.pop("autocast", None),
            cost=rest.pop("cost", None),
            lighten=listed(rest.pop("lighten", None)),
            generators=list(rest.pop("generators", ())),
            is_fresh=gradients == "fresh",
            graphs=graphs_kept(rest.pop("graphs", False), gradients),
            on_event=rest.pop("on_event", None),
            embed=rest.pop("embed", None),
            options=rest,
        )
        check_arguments(program)
        check_match(program.modules, program.update, state)
        parts = named_state(state)
    except (TypeError, ValueError) as error:
        tell_ranks(model, group, group_timeout, window, error)
        raise
    ranks = ranks_or_none(program, group, group_timeout, window, shared or {})
    if ranks and ranks.window and program.graphs:
        warnings.warn(
            f"rebatch: graphs={program.graphs} has no effect, since the model is one of "
            "fully_shard(), whose parameters are gathered to other memory in each step",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )

    def changed_by_updates() -> List[torch.nn.Parameter]:
        return ranks.window.trained() if ranks and ranks.window else program.update.parameters

    undo = Undo(
        named_modules(model), parts, changed_by_updates, updated_by=program.update.named_parts()
    )
    told = Told(
        program.functions_of_an_attempt,
        lambda: undo.handled() | program.handled(),
        lambda: program.loss_name,
        modules=lambda: undo.tree.modules,
    )
    running = Running(program, undo, told)
    running.has_ranks = ranks is not None
    running.has_window = ranks is not None and ranks.window is not None
    return Training(running, ranks, found=found_earlier(kind, program))
