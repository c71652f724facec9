"""Backward: the gradients of an effective batch, in micro-batches that fit."""

from __future__ import annotations

import contextlib
import sys
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch

from rebatch.fit.again import Fit, run_again
from rebatch.torch.batches.cut import Batches
from rebatch.torch.batches.join_on_host import joined_where_it_fits
from rebatch.torch.batches.outputs import joined, kept
from rebatch.torch.batches.run_map import run_map
from rebatch.torch.check.findings import Check
from rebatch.torch.core.check_and_exit import fit_if_asked
from rebatch.torch.core.parts import Part, parts_of, refuse_left
from rebatch.torch.core.training import training_of
from rebatch.torch.core.whole_loss import evaluated
from rebatch.torch.program.left_backward import explain_left_backward
from rebatch.torch.program.mistakes import (
    check_loss_fn,
    divided_at,
    no_loss_fn,
    refuse_backward,
    refuse_fields,
    refuse_order,
)
from rebatch.torch.program.program import listed
from rebatch.torch.ranks.calls import Call
from rebatch.torch.session.probe import Probe
from rebatch.torch.session.report import MapReport, Report
from rebatch.torch.update.passes import Passes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rebatch.torch.session.options import PassOptions


class Backward:
    """Runs an effective batch forward and backward, and survives running out of memory::

        backward = rebatch.Backward(model, loss_fn)
        for batch in loader:
            loss = backward(batch)          # stood here: loss = ...; loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The batch is cut into micro-batches that fit, and their gradients are added to .grad, as by
    loss.backward() of the whole batch: what was there stays added. An OOM costs the micro-batch
    that it struck. After an exception .grad is as before. Clipping, optimizers, schedulers and
    zero_grad() are the program's.

    Args:
        model: a module, or a list of modules
        loss_fn: loss_fn(model, samples) -> the mean loss over the samples, a scalar; or a tuple of
            it and what you want to see of the samples, which `outputs` then has for the whole
            batch: a tensor or a list with an entry for each sample, Mean(value), Sum(value), or a
            dict or tuple of such. None: for parts() alone
        optimizer: an optimizer of the program, or several: memory for its first step is kept free.
            None: those in the process that have parameters of the model when the first batch runs
        backward: backward(loss), called instead of loss.backward(), such as accelerator.backward;
            or a torch.amp.GradScaler, which scales the loss
        embed: embed(model, samples) -> a tensor, or a tuple or dict of tensors, with a row for each
            sample, for a loss over the whole batch, such as a contrastive one. loss_fn is then
            loss_fn(model, embeddings, batch) -> the loss of the whole batch, whose rows of all
            samples `embeddings` has
        normalizer: normalizer(batch) -> what the sum of the losses is divided by, for example the
            tokens of the whole batch that bear a loss. loss_fn then returns a sum
        autocast: a dtype for torch.autocast, for example torch.bfloat16, a context manager, or a
            function that returns one
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
        graphs: True: the pass of a micro-batch is captured once in a CUDA graph and replayed, for
            up to two shapes; a number: for so many shapes
        on_event: on_event(text, event): called instead of writing to standard error
        group: the ranks that train the model together: True for all of torch.distributed, or a
            ProcessGroup; False for this rank alone. DistributedDataParallel and fully_shard() need
            none
        group_timeout: seconds, the longest wait for another rank; longer than the slowest batch
        window: of a model of fully_shard(): True keeps its parameters whole during a batch; with
            False micro-batches gather and reduce as PyTorch does, and all ranks run the same ones.
            None: True, and False from the first time that they do not fit whole

    Other keywords are limits and options of the session (docs/pytorch-reference.md): micro_start,
    micro_smallest, micro_largest, micro_multiple_of, micro_allowed, learn, on_oom, admission,
    growth, grow_after, grow_wait_max, max_attempts, max_ooms_in_row, oom_wait_ms, log_level,
    log_file, log_format.

    With several ranks, all of them make the Backward and call it together. Gradients are then of
    all ranks; within no_sync() of DistributedDataParallel they are local, and the next call outside
    of it averages what is in .grad over the ranks.

    Raises:
        Exhausted: not even the smallest micro-batch fits.
        PeerFailed: another rank failed or is missing.

    An exception of loss_fn comes out unchanged."""

    def __init__(
        self,
        model: Union[torch.nn.Module, Sequence[torch.nn.Module]],
        loss_fn: Optional[Callable[[Any, Any], Any]] = None,
        *more: NoReturn,
        optimizer: Union[None, torch.optim.Optimizer, Sequence[torch.optim.Optimizer]] = None,
        backward: Any = None,
        **options: Unpack[PassOptions],
    ) -> None:
        if more or hasattr(loss_fn, "param_groups"):
            refuse_order()

        def passes() -> Passes:
            return Passes(listed(model), listed(optimizer), backward)

        self._make(Backward, model, loss_fn or no_loss_fn, passes, options)

    def _make(
        self,
        kind: type,
        model: Any,
        loss_fn: Callable[[Any, Any], Any],
        make_passes: Callable[[], Passes],
        options: Any,
        shared: Optional[Dict[str, str]] = None,
    ) -> None:
        self._training = training_of(kind, model, loss_fn, make_passes, options, shared)
        self.evaluation_report = MapReport()
        self.evaluation_outputs: Any = None  # of the last evaluate(), as `outputs`
        self._is_made = True

    _is_made = False

    def __setattr__(self, name: str, value: Any) -> None:
        """What one is made with stays; loss_fn and what is reported may be assigned."""
        is_own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if self._is_made and (name == "model" or not is_own):
            kind = type(self).__name__
            raise AttributeError(
                f"rebatch: {kind}.{name} cannot be assigned: make a new {kind} with the {name} "
                "that it shall have, and give it state_dict() of this one to go on at its size"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self).__name__
        raise TypeError(
            f"rebatch: a {kind} cannot be copied or pickled: expected state_dict(), which another "
            f"{kind} loads"
        )

    def __repr__(self) -> str:
        micro = self.micro or "not known yet"
        return f"{type(self).__name__}(step {self._training.number}, micro {micro})"

    @property
    def model(self) -> Any:
        """Which it was made with."""
        return self._training.program.model

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any]:
        """May be assigned between two batches."""
        return self._training.program.loss_fn

    @loss_fn.setter
    def loss_fn(self, function: Callable[[Any, Any], Any]) -> None:
        check_loss_fn(function, self._training.program.embed is not None)
        if function is not self.loss_fn:
            self._training.program.loss_fn = function
            self._training.callbacks.begin_graphs()

    @property
    def device(self) -> torch.device:
        """That of the first parameter, now."""
        return self._training.program.device

    @property
    def micro(self) -> int:
        """The micro-batch with which the next batch begins, in samples; 0: not known yet."""
        return self._training.micro

    @property
    def report(self) -> Report:
        """What the last batch needed."""
        return self._training.report

    @report.setter
    def report(self, report: Report) -> None:
        self._training.report = report

    @property
    def outputs(self) -> Any:
        """What loss_fn returned beside the loss, for the last batch, joined or summed."""
        return self._training.outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self._training.outputs = outputs

    def numbers(self, prefix: str = "rebatch/") -> Dict[str, float]:
        """What was done since this was made, and its memory, as names and plain numbers for
        TensorBoard, W&B, MLflow and the like; docs/pytorch-reference.md describes each. What was
        not measured is left out. Waits for no work of the GPU."""
        return self._training.numbers(prefix)

    def __call__(
        self,
        batch: Any = None,
        *more: NoReturn,
        batches: Optional[Sequence[Any]] = None,
        **fields: NoReturn,
    ) -> torch.Tensor:
        """The passes of one batch. Returns its loss: a detached scalar, on the device.

        `batches` are several batches of a loader that make one effective batch. They run as they
        are, one after another, and are cut only where memory asks; normalizer gets the list."""
        if more or fields or (batches is not None and batch is not None):
            refuse_fields(type(self).__name__.lower())
        if batches is not None:
            batch = Batches.of(batches)
        refuse_left(self._training)
        if not self._training.report.samples:  # the first batch
            update, caller = self._training.program.update, sys._getframe(1)
            refuse_backward(caller, update.is_of_program)
            update.divided_at = divided_at(caller) if update.is_of_program else ""
            explain_left_backward()
        return self._training.run(batch)

    def parts(
        self, batch: Any = None, *, batches: Optional[Sequence[Any]] = None
    ) -> Iterator[Part]:
        """The passes of one batch in a block of the program, which runs once for each
        micro-batch::

            for part in backward.parts(batch):
                with part as samples:
                    logits = model(samples["x"])
                    loss = F.cross_entropy(logits, samples["y"])
                    part.backward(loss)

        An OOM ends the block, and its samples come again, fewer. Names to which the block assigned
        numbers, texts and other small values get back what they were before it. Other names that
        it assigned are None. A batch whose loop is left before its end is over, and .grad is as
        before."""
        return parts_of(self._training, batch if batches is None else Batches.of(batches))

    @property
    def loss(self) -> Optional[torch.Tensor]:
        """What the last batch has come to, as a call returns it; None before the first."""
        return self._training.running.loss

    def probe(self, batch: Any, reserve_bytes: int = 0) -> Probe:
        """Find the largest micro-batch that fits, before training; prints a table.

        Needs install(). The next batch starts with the size that was found. `reserve_bytes` is what
        is allocated later; what the optimizer keeps from its first step on is counted already."""
        self._refuse_alone("probe")
        found = self._training.probe(batch, reserve_bytes)
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
        return self._training.check(batch, accept)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of a batch without training, in as many parts as memory asks for, with the
        modules in evaluation mode: a scalar. `evaluation_report` says what the call did, and
        `evaluation_outputs` has what loss_fn returned beside the loss. When memory first cuts a
        batch, a result that depends on the cut is a CutWarning."""
        self._refuse_alone("evaluate")
        training = self._training
        training.open()
        with training.gathered(Call.EVALUATES):
            return self._evaluate_gathered(batch)

    def _evaluate_gathered(self, batch: Any) -> torch.Tensor:
        training, running, program = self._training, self._training.running, self._training.program
        with training.holding(batch, is_training=False) as session:
            weight, samples = running.weight, running.samples
            with _evaluating(program.modules), training.quiet():
                function = self._loss_of if program.embed is None else program.embedded_alone
                results, self.evaluation_report, status = run_map(
                    session,
                    function,
                    batch,
                    samples,
                    id(self),
                    program.cut,
                    training.callbacks.ran_out,
                )
                if program.embed is not None and not (status or session.error):
                    parts = [part for _, part in results]
                    results = [(samples, evaluated(program, batch, parts))]
                session.raise_failure(status)
                if self.evaluation_report.microbatches > 1:
                    training.compare_results(self.evaluation_report.micro)
        counts = [count for count, _ in results]
        losses: List[Any] = [loss for _, (loss, _) in results]
        extras = [extra for _, (_, extra) in results]
        results.clear()

        def mean() -> Any:
            if program.normalizer:
                return sum(losses) / weight
            return sum(loss * (count / samples) for count, loss in zip(counts, losses))

        dim = program.cut.dim
        self.evaluation_outputs = joined_where_it_fits(lambda: joined(extras, counts, dim), extras)
        mean_loss: torch.Tensor = joined_where_it_fits(mean, losses)
        return mean_loss

    def _loss_of(self, samples: Any) -> Tuple[torch.Tensor, Any]:
        loss, extras = self._training.program.loss_of(samples)
        return loss.detach(), kept(extras)

    def _refuse_alone(self, name: str) -> None:
        ranks = self._training.ranks
        if ranks and ranks.lockstep:
            raise ValueError(
                f"rebatch: {name}() runs micro-batches of this rank's own, and window is False: "
                "expected a loop of your own over batches of the same sizes on all ranks"
            )

    def fit(
        self,
        batch: Any,
        gpu: str,
        memory: Optional[str] = None,
        *,
        install: bool = False,
        lighten: bool = False,
    ) -> Fit:
        """The largest micro-batch that fits on a card, without a GPU.

        The program is run again from its start up to this call, on a stand-in for CUDA that has
        memory and no kernels, and this process goes on with the answer. docs/fit.md says more.

        Args:
            batch: a batch as it trains on
            gpu: a card, or several: "H100 80GB", "t4,l4,a100-40"
            memory: what is free of each card before the program starts, for example "24GiB";
                default: all
            install: with rebatch's allocator, also where the program does not call install()
            lighten: a row for each way of `lighten` too

        Raises ValueError for a card that is not known, and RuntimeError where there is no answer.
        """
        self._training.program.update.find()
        fit_if_asked(self._training, batch, is_alone=True)
        return run_again(gpu, memory, install, lighten)

    def state_dict(self) -> Dict[str, int]:
        """What a resumed training needs to go on at the size that was found: plain numbers."""
        return self._training.state_dict()

    def load_state_dict(self, state: Dict[str, int]) -> None:
        """Go on where state_dict() was taken, at its micro-batch size, and with the levels of
        `lighten` that were in use, as far as they are there."""
        self._training.load_state_dict(state)


@contextlib.contextmanager
def _evaluating(modules: torch.nn.Module) -> Iterator[None]:
    """Within it they are in evaluation mode; after it each has its own mode again."""
    modes = [(module, module.training) for module in modules.modules()]
    modules.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
