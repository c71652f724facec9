"""Micro-batches that fit, for PyTorch Lightning: a callback for its Trainer.

A Trainer with it::

    from rebatch.lightning import Rebatch

    trainer = Trainer(callbacks=[Rebatch()])
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torchmetrics import Metric

from rebatch.torch.batches.cut import cut_of
from rebatch.torch.batches.join import join_results, joined_both
from rebatch.torch.batches.outputs import Mean, Sum
from rebatch.torch.batches.kinds import are_same
from rebatch.torch.check.cut_comparison import Subject
from rebatch.torch.check.first_results import FirstResults
from rebatch.torch.graphs.inputs import NotCapturedError
from rebatch.torch.program.program import Program
from rebatch.torch.session.report import Report, numbers_of_trainer
from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.torch.trainers.captured import Unread
from rebatch.torch.trainers.evaluation_parts import Parts
from rebatch.torch.trainers.update import TrainerUpdate
from rebatch.torch.trainers.whole_batches import CutOrWhole
from rebatch.torch.undo.looks import mark_of
from rebatch.torch.update.passes import Passes

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment]

# Names of Lightning that are private to it and used here, by what has them (_owners_of). No other
# private name is.
PRIVATE = {
    "trainer": ("_logger_connector",),
    "module": ("_current_fx_name",),
    "epoch_loop": ("_batches_that_stepped",),
    "optimization": (
        "_make_backward_fn",
        "_make_closure",
        "_make_zero_grad_fn",
        "_skip_backward",
        "_training_step",
    ),
    "precision_plugin": ("_after_closure",),
}
# Arguments of Step that a Trainer has too.
_OF_THE_TRAINER = ("autocast", "clip", "lr_scheduler", "normalizer", "scaler")
# Settings of a Trainer that must be the same on all ranks.
_SHARED = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "precision")
# Base classes of strategies that Rebatch can train with.
_SHARDING = "ModelParallelStrategy"
_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy", _SHARDING}
# Methods of a precision plugin that update the parameters.
_OF_THE_UPDATE = ("optimizer_step", "clip_gradients", "_after_closure")
# The name of the hook that runs when a pass begins, in batches that update and in others.
_IN_A_PASS = "training_step"
# Methods of a module and of callbacks that run in a backward pass.
_OF_BACKWARD = ("backward", "on_before_backward", "on_after_backward")
# Methods of a strategy that run a batch without training.
_OF_EVALUATION = ("validation_step", "test_step", "predict_step")


class Rebatch(Callback):
    """Runs training_step on micro-batches that fit, and the optimizer once for each batch.

    training_step(batch, batch_idx) returns the mean loss over the samples of its batch, alone or as
    "loss" of a dict. An OOM leads to smaller micro-batches; the update stays the same. Precision,
    clipping, schedulers, accumulate_grad_batches and the hooks of the update work as without
    Rebatch. What is different:

    - training_step, on_before_backward and on_after_backward run for each micro-batch;
      on_before_zero_grad runs before them
    - clipping that runs out of memory is tried once more where no gradient was changed; the
      optimizer's step does not begin without the memory that an earlier one needed (Exhausted), and
      an OOM within it raises Torn
    - values of self.log() are combined: the mean over the samples, or the sum, minimum or maximum
      that reduce_fx names. A Metric counts each sample once; its value for the step is that of the
      last micro-batch
    - of what training_step returns beside the loss, on_train_batch_end sees tensors and lists
      joined, scalars averaged, and of other values the last one; tensors are detached

    A batch that cannot be cut, such as one without tensors, runs as a whole; it is Exhausted when
    memory runs out. Where training_step returns None for a micro-batch, that adds nothing, and
    where it does so for all of them, Lightning skips the batch.

    It refuses manual optimization, and strategies other than one device, DDP, and
    ModelParallelStrategy where configure_model() calls fully_shard() (FSDP2) alone. Each rank has
    its own micro-batches, and the gradients of each batch are reduced once, also where
    accumulate_grad_batches is more than 1. Where whole parameters do not fit, fully_shard() reduces
    those of each micro-batch.

    With check=True the first batch is checked before it trains, as by rebatch.torch.Step.check:
    what was found is printed, and a mistake raises ValueError. check=["batch_norm"] accepts
    mistakes of that kind.

    validation_step, test_step and predict_step run on parts of their batch after an OOM, in one
    process. What they log and return is combined as above, and what predict_step returns is joined
    along the samples; a batch that cannot be cut, and a batch of several processes, stays whole.

    Rebatch takes the arguments of rebatch.torch.Step except those that the Trainer has. The size of
    the micro-batches, the OOMs so far and the peak of memory go to the Trainer's loggers as
    rebatch/micro, rebatch/ooms_total and rebatch/peak_bytes, with its other values and after each
    OOM; with log_report=True all that numbers() has. Its checkpoints keep the micro-batch size."""

    def __init__(self, **options: Any):
        for name in _OF_THE_TRAINER:
            if name in options:
                raise ValueError(
                    f"rebatch: {name} is an argument of Rebatch: expected it to be left to the "
                    "Trainer and the LightningModule"
                )
        self._options = options
        self._logs_report = self._options.pop("log_report", False)
        self._step: Optional[_TrainingStep] = None
        self._evaluation: Optional[_Evaluation] = None
        self._state: Dict[str, int] = {}  # of a checkpoint

    @property
    def report(self) -> Report:
        """What the last batch needed, as rebatch.torch.Step.report has it."""
        return self._step.backward.report if self._step else Report()

    def numbers(self, prefix: str = "rebatch/") -> Dict[str, float]:
        """What all batches of the training needed: rebatch.torch.Step.numbers()."""
        return self._step.backward.numbers(prefix) if self._step else {}

    # ---- hooks of Lightning ----

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            _refuse_what_cannot_work(trainer, pl_module)
        if trainer.world_size == 1 and trainer.strategy.root_device.type in ("cpu", "cuda"):
            self._evaluation = _Evaluation(trainer, self._options, self._ran_out)
            self._evaluation.attach()

    def _ran_out(self) -> None:
        if self._step:
            self._step.backward.ran_out()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        if self._evaluation:
            self._evaluation.detach()
        self._evaluation = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _refuse_without_shards(trainer, pl_module)
        self._step = _TrainingStep(trainer, self._options)
        if self._state:
            self._step.backward.load_state_dict(self._state)
        self._step.attach()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not (self.report.ooms or trainer._logger_connector.should_update_logs):
            return
        for logger in trainer.loggers:
            logger.log_metrics(
                numbers_of_trainer(self.numbers(), self._logs_report),
                step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._step:
            self._step.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._step:
            self._step.detach()
        self._end_evaluation()

    def state_dict(self) -> Dict[str, Any]:
        return self._step.backward.state_dict() if self._step else self._state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self._state = dict(state_dict)


def _refuse_what_cannot_work(trainer: Any, module: Any) -> None:
    name, strategy = type(module).__name__, trainer.strategy
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    if not module.automatic_optimization:
        raise ValueError(
            f"rebatch: {name} optimizes manually: expected automatic optimization, or a "
            "rebatch.torch.Step in training_step"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"rebatch: training_step of {name} takes dataloader_iter: expected it to take a batch"
        )
    if "DeepSpeedStrategy" in kinds or not _STRATEGIES.intersection(kinds):
        raise ValueError(
            f"rebatch: the strategy is a {kinds[0]}: expected a single device, DDP, or "
            "ModelParallelStrategy with fully_shard() (FSDP2)"
        )
    if _SHARDING in kinds:
        _refuse_what_cannot_be_sharded(trainer)
    if strategy.root_device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"rebatch: the device is of type {strategy.root_device.type!r}: expected 'cuda' or "
            "'cpu'"
        )
    missing = missing_names(trainer, module)
    if missing:
        raise ValueError(
            f"rebatch: this version of Lightning has no {', '.join(missing)}: expected one of the "
            "versions 2.2 to 2.6"
        )


def _refuse_what_cannot_be_sharded(trainer: Any) -> None:
    parallel = trainer.strategy.device_mesh["tensor_parallel"].size()
    if parallel > 1:
        raise ValueError(
            f"rebatch: ModelParallelStrategy has a tensor_parallel_size of {parallel}: expected "
            "ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1) with N processes"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            "rebatch: ModelParallelStrategy has a GradScaler: expected the precision 'bf16-mixed', "
            "'bf16-true' or '32-true'"
        )


def _refuse_without_shards(trainer: Any, module: Any) -> None:
    is_sharding = any(kind.__name__ == _SHARDING for kind in type(trainer.strategy).__mro__)
    if is_sharding and not any(hasattr(m, "set_requires_gradient_sync") for m in module.modules()):
        raise ValueError(
            f"rebatch: configure_model of {type(module).__name__} calls no fully_shard(): expected "
            "fully_shard() of all that is trained, or DDP"
        )


def _owners_of(trainer: Any, module: Any) -> Dict[str, Any]:
    epoch_loop = trainer.fit_loop.epoch_loop
    return {
        "trainer": trainer,
        "module": module,
        "epoch_loop": epoch_loop,
        "optimization": epoch_loop.automatic_optimization,
        "precision_plugin": trainer.precision_plugin,
    }


def missing_names(trainer: Any, module: Any) -> List[str]:
    """The names of PRIVATE that this version of Lightning does not have."""
    owners = _owners_of(trainer, module)
    return [
        f"{type(owners[owner]).__name__}.{name}"
        for owner, names in PRIVATE.items()
        for name in names
        if not hasattr(owners[owner], name)
    ]


def _hooks_of(trainer: Any) -> List[Any]:
    """Those that run in the backward pass of a micro-batch, and are not Lightning's own."""
    owners = [trainer.lightning_module, *trainer.callbacks]
    found = [getattr(owner, name, None) for owner in owners for name in _OF_BACKWARD]
    ours = ("lightning", "pytorch_lightning", "rebatch")
    return [h for h in found if h and getattr(h, "__module__", "").split(".")[0] not in ours]


class _TrainingStep:
    """Takes the place of what a Trainer runs for one batch: training_step, zero_grad, backward.

    Lightning hands these to optimizer_step as one function, the closure, and does the rest of the
    update after it. The closure is made by _make_closure() of its loop."""

    def __init__(self, trainer: Any, options: Dict[str, Any]):
        self._trainer, self._module = trainer, trainer.lightning_module
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._lightning = sys.modules[type(self._loop).__module__]  # Closure is there
        self._make_plain_closure = self._loop._make_closure
        self._records = _Records(self._module)
        options = dict(options)
        self._cut = CutOrWhole(options)
        self._optimizer = trainer.optimizers[0]
        self.backward = TrainerBackward(
            trainer.strategy.model,
            self._loss,
            optimizer=self._optimizer,
            backward=self._run_backward,
            slice=self._part,
            length=self._cut.length,
            within=self._cut.cut,
            shared={name: getattr(trainer, name) for name in _SHARED},
            loss_name="training_step",
            functions=[self._module.training_step],
            hooks=_hooks_of(trainer),
            aside=self._records.aside,
            **options,
        )
        self._update = TrainerUpdate(self.backward)

    def attach(self) -> None:
        self._loop._make_closure = self._make_closure
        self._precision = self._trainer.precision_plugin
        self._plain = {name: getattr(self._precision, name) for name in _OF_THE_UPDATE}
        for name in _OF_THE_UPDATE:
            setattr(self._precision, name, getattr(self, name))

    def detach(self) -> None:
        vars(self._loop).pop("_make_closure", None)
        for name in _OF_THE_UPDATE:
            vars(self._precision).pop(name, None)

    # ---- in the place of methods of the precision plugin ----

    def optimizer_step(self, *arguments: Any, **keywords: Any) -> Any:
        return self._update.run(lambda: self._plain["optimizer_step"](*arguments, **keywords))

    def clip_gradients(self, *arguments: Any, **keywords: Any) -> None:
        plain = functools.partial(self._plain["clip_gradients"], *arguments, **keywords)
        given = inspect.signature(self._plain["clip_gradients"]).bind(*arguments, **keywords)
        given.apply_defaults()
        optimizer, largest, kind = given.args
        if kind == "norm" and largest > 0:
            parameters = [*self._precision.main_params(optimizer)]
            self._update.clip_norm(parameters, largest, 2, plain)
        else:
            self._update.clip(plain)

    def _after_closure(self, *arguments: Any, **keywords: Any) -> None:
        """Hooks and clipping. The optimizer's step comes next."""
        self._plain["_after_closure"](*arguments, **keywords)
        self._update.begin()

    def _make_closure(self, kwargs: Dict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        if self._loop._skip_backward:  # weight averaging runs batches for BatchNorm's statistics
            return self._make_plain_closure(kwargs, optimizer, batch_idx)
        zero_grad = self._loop._make_zero_grad_fn(batch_idx, optimizer)
        return self._lightning.Closure(step_fn=lambda: self._run(kwargs, zero_grad))

    def _run(self, kwargs: Dict[str, Any], zero_grad: Any) -> Any:
        self._kwargs, hook = kwargs, self._module._current_fx_name
        if zero_grad:
            zero_grad()
        try:
            self._module._current_fx_name = _IN_A_PASS
            with self._records.replacing_log(), self._cut.saying_why():
                loss: Any = self.backward(kwargs["batch"])
            if self.backward.has_graphs:
                self._records.put_parts(self.backward.outputs)
                self.backward.outputs = None
            loss = loss if self._records.have_loss() else None
            extra = self._records.extra()
            self._records.log_all()
        finally:
            self._records.clear()
            self._module._current_fx_name = hook
            del self._kwargs
        return self._loop.output_result_cls(loss, extra=extra)

    def _part(self, batch: Any, first: int, count: int) -> Any:
        self._module._current_fx_name = _IN_A_PASS  # an exception leaves another
        self._records.begin(first, count)
        part = self._cut.part(batch, first, count, self.backward.samples)
        # A graph serves other batches with the same number.
        return (part, self._trainer.accumulate_grad_batches) if self.backward.has_graphs else part

    def _loss(self, _model: Any, part: Any) -> Any:
        if not self.backward.has_graphs:
            return self._loss_of({**self._kwargs, "batch": part})
        kwargs = {**self._kwargs, "batch": part[0]}
        if self.backward.is_captured and "batch_idx" in kwargs:
            kwargs["batch_idx"] = Unread("batch_idx")
        self._parts: List[Any] = []  # filled once the pass has gone backward
        return self._loss_of(kwargs), self._parts

    def _loss_of(self, kwargs: Dict[str, Any]) -> torch.Tensor:
        result = self._loop._training_step(kwargs)
        self._records.keep(result)
        if result.closure_loss is None:  # it has no backward pass
            return torch.zeros((), device=self.backward.device, requires_grad=True)
        loss: torch.Tensor = result.closure_loss
        return loss

    def _run_backward(self, loss: torch.Tensor) -> None:
        if self._records.has_loss():
            self._loop._make_backward_fn(self._optimizer)(loss)
        if self.backward.has_graphs:
            self._parts += self._records.parts(self.backward.is_captured)


_ADVICE = (
    "self.log() averages over the samples: expected a mean over them, or reduce_fx='sum'; a score, "
    "or a mean over tokens or a mask, as a Metric of torchmetrics"
)
_ROWS = "an entry for each sample"


class _Evaluated(Program):
    """A step of an evaluation with a few samples, in the place of a loss_fn: what it logs, or what
    predict_step returns, is beside a loss of 0."""

    records: Any = None
    logs = True  # else it returns what counts

    def loss_of(self, samples: Any) -> Tuple[Any, Any]:
        """Leaves nothing in the records."""
        with self.records.aside(), self.records.replacing_log():
            self.records.begin(0, self.cut.length(samples))
            result = self.loss_fn(self.model, samples)
            numbers = self.records.numbers()
        return torch.zeros((), device=self.device), numbers if self.logs else result

    def kept(self, beside: Any) -> Any:
        """All of it."""
        return beside

    def results_of(self, whole: Any, parts: List[Any], count: int) -> Tuple[Any, Any]:
        """Combined as those of a batch."""
        if self.logs:
            return super().results_of(whole, parts, count)
        return joined_both(whole, parts, count)


class _Evaluation:
    """Takes the place of what a Trainer runs for a batch without training."""

    def __init__(self, trainer: Any, options: Dict[str, Any], ran_out: Callable[[], None]):
        self._strategy, self._module = trainer.strategy, trainer.lightning_module
        self._cut = cut_of(dict(options))
        self._parts, self.length = Parts(self, options, ran_out), self._cut.length
        self._records: Any = None
        self._results = {name: FirstResults() for name in _OF_EVALUATION}

    def attach(self) -> None:
        for key, name in enumerate(_OF_EVALUATION, 1):
            plain = getattr(self._strategy, name)
            setattr(self._strategy, name, functools.partial(self._run, plain, name, key))

    def detach(self) -> None:
        for name in _OF_EVALUATION:
            vars(self._strategy).pop(name, None)

    def _run(
        self, plain: Callable[..., Any], name: str, key: int, batch: Any, *arguments: Any
    ) -> Any:
        if self._records is None:
            self._records = _Records(self._module)
        self._hook = self._module._current_fx_name

        def run(part: Any) -> Any:
            return plain(part, *arguments)

        try:
            self._records.begin(0, 1)  # for a batch that cannot be cut
            with self._records.replacing_log():
                results = self._parts(self._strategy.root_device, run, batch, key)
            self._records.log_all()
            self._module._current_fx_name = self._hook
            is_cut = len(results) > 1
            if name == "predict_step" and is_cut:
                result = join_results(results, other=lambda: self._one(run, batch))
            else:
                result = _result_of(results)
            if is_cut and not (self._results[name].is_done or self._cut.has_slice):
                self._compare(name, run, batch)
        finally:
            self._records.clear()
            self._module._current_fx_name = self._hook
        return result

    def _compare(self, name: str, run: Callable[[Any], Any], batch: Any) -> None:
        """It was cut: whether the result depends on that."""
        program = _Evaluated(
            self._module,
            lambda _module, samples: run(samples),
            Passes([self._module]),
            self._cut,
            loss_name=name,
            functions=[getattr(self._module, name)],
            options=self._parts.options,
        )
        program.records, program.logs = self._records, name != "predict_step"
        what = "what is logged" if program.logs else "the result"
        subject = Subject(name, "the result", what, _ROWS, False, _ADVICE)
        self._parts.compare(batch, self._results[name], subject, program)

    def part(self, batch: Any, first: int, count: int, samples: int) -> Any:
        """Begins a part: as a Cut's, for Parts."""
        self._module._current_fx_name = self._hook  # an exception leaves another
        self._records.begin(first, count)
        return self._cut.part(batch, first, count, samples)

    def _one(self, run: Callable[..., Any], batch: Any) -> Any:
        with self._records.aside(), self._records.replacing_log():
            return self._parts.one(run, batch)


def _result_of(results: List[tuple[Any, ...]]) -> Any:
    """What the parts of a batch return, combined."""
    values, counts = [value for _, value in results], [count for count, _ in results]
    if len(values) > 1 and all(isinstance(value, dict) for value in values):
        return {name: _joined([value.get(name) for value in values], counts) for name in values[-1]}
    return _joined(values, counts)


class _Record:
    """Of one micro-batch."""

    def __init__(self, count: int, metrics: List[dict[Any, Any]]):
        self.count, self.metrics = count, metrics
        self.logged: Dict[tuple[Any, ...], dict[Any, Any]] = {}
        self.extra: Dict[str, Any] = {}
        self.has_loss = False


class _Parts(NamedTuple):
    """What a record has, with _TENSOR in the places of tensors."""

    logged: Dict[tuple[Any, ...], dict[Any, Any]]
    extra: Dict[str, Any]
    has_loss: bool


class _Records:
    """What the micro-batches of a batch log and return, and the Metrics before each of them. The
    record of a micro-batch that failed is dropped when its first sample runs again."""

    def __init__(self, module: Any):
        self._module, self._log = module, module.log
        self._signature = inspect.signature(module.log)
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._records: Dict[int, _Record] = {}
        self._is_done = False

    def begin(self, first: int, count: int) -> None:
        if first in self._records:
            self._restore_metrics(first)
        for later in [f for f in self._records if f >= first]:
            del self._records[later]
        self._current = _Record(count, [_states_of(metric) for metric in self._metrics])
        self._records[first] = self._current

    def _restore_metrics(self, first: int) -> None:
        self._put_metrics(self._records[first].metrics)

    def _put_metrics(self, states: List[dict[Any, Any]]) -> None:
        """In the same tensors, so that nobody takes what an attempt has not used for changed."""
        for metric, state in zip(self._metrics, states):
            for value, mark, copy in state.values():
                if _is_as_it_was(value, mark, copy):
                    continue
                if isinstance(value, list):
                    value[:] = copy
                else:
                    value.detach().copy_(copy)
            vars(metric).update((name, value) for name, (value, _, _) in state.items())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Runs of training_step that are no part of the batch's leave nothing here."""
        kept = dict(vars(self))
        states = [_states_of(metric) for metric in self._metrics]
        self._records, self._is_done = {}, False
        try:
            yield
        finally:
            self._put_metrics(states)
            vars(self).update(kept)

    def clear(self) -> None:
        if self._records and not self._is_done:  # the batch failed
            self._restore_metrics(0)
        self._records, self._is_done = {}, False

    # ---- self.log() ----

    def replacing_log(self) -> "_ReplacedLog":
        return _ReplacedLog(self._module, self.keep_logged)

    def keep_logged(self, *arguments: Any, **keywords: Any) -> None:
        call = dict(self._signature.bind(*arguments, **keywords).arguments)
        call["value"] = _detached(call["value"])
        self._current.logged[self._module._current_fx_name, call["name"]] = call

    def numbers(self) -> Dict[str, Any]:
        """What the current micro-batch has logged to be averaged or summed."""
        kinds: Dict[str, Any] = {"mean": Mean, "sum": Sum}
        return {
            name: kinds[reduction](call["value"])
            for (_, name), call in self._current.logged.items()
            if (reduction := _reduction(call.get("reduce_fx", "mean"))) in kinds
            and _is_number(call["value"])
        }

    def log_all(self) -> None:
        """One call of self.log() for those of the micro-batches."""
        self._is_done = True
        keys = dict.fromkeys(key for record in self._records.values() for key in record.logged)
        for hook, name in keys:
            records = [r for r in self._records.values() if (hook, name) in r.logged]
            calls = [r.logged[hook, name] for r in records]
            call = dict(calls[-1])
            call["value"] = _combined(
                [c["value"] for c in calls],
                [r.count for r in records],
                _reduction(call.get("reduce_fx", "mean")),
            )
            if call.get("batch_size") is not None:
                call["batch_size"] = sum(c["batch_size"] for c in calls)
            self._module._current_fx_name = hook
            self._log(**call)

    # ---- of passes that graphs may replay, which log nothing ----

    def parts(self, is_captured: bool) -> List[Any]:
        """What the record of this micro-batch has, and the tensors that are taken out of it."""
        current, tensors = self._current, list[torch.Tensor]()
        logged = {
            key: {**call, "value": _without(call["value"], tensors, is_captured and key[1])}
            for key, call in current.logged.items()
        }
        extra = _without(current.extra, tensors, is_captured and "the result")
        return [_Parts(logged, extra, current.has_loss), *tensors]

    def put_parts(self, parts: List[Any]) -> None:
        """Those of all micro-batches, in their order."""
        rest = iter(parts)
        for record in self._records.values():
            record.logged, record.extra, record.has_loss = _with(next(rest), rest)

    # ---- what training_step returns beside the loss ----

    def keep(self, result: Any) -> None:
        self._current.extra = {name: _detached(value) for name, value in result.extra.items()}
        self._current.has_loss = result.closure_loss is not None

    def has_loss(self) -> bool:
        """Of the micro-batch that runs; training_step may return None."""
        return self._current.has_loss

    def have_loss(self) -> bool:
        """Of one micro-batch at least."""
        return any(record.has_loss for record in self._records.values())

    def extra(self) -> Dict[str, Any]:
        records = list(self._records.values())
        if len(records) == 1:
            return records[0].extra
        joined: Dict[str, Any] = _result_of([(record.count, record.extra) for record in records])
        return joined


class _ReplacedLog:
    """While it is entered, self.log() of a LightningModule is another function."""

    def __init__(self, module: Any, log: Any):
        self._module, self._log = module, log

    def __enter__(self) -> None:
        self._module.log = self._log

    def __exit__(self, *_: Any) -> None:
        del self._module.log


def _states_of(metric: Metric) -> Dict[str, tuple[Any, ...]]:
    """What a Metric has, what changes with that, and copies of what it changes: its tensors in
    place, its lists by appending."""
    states = {}
    for name, value in vars(metric).items():
        copy = value.detach().clone() if isinstance(value, torch.Tensor) else value
        copy = list(copy) if isinstance(copy, list) else copy
        states[name] = value, mark_of(value) if isinstance(value, torch.Tensor) else None, copy
    return states


def _is_as_it_was(value: Any, mark: Any, copy: Any) -> bool:
    if isinstance(value, torch.Tensor):  # of inference mode it has no version
        return are_same(value, copy) if value.is_inference() else mark_of(value) == mark
    return not isinstance(value, list) or len(value) == len(copy)


def _detached(value: Any) -> Any:
    """Without what a backward pass has kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.dim() == 0 else value.detach()
    if type(value) is dict:
        return {name: _detached(v) for name, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_detached(v) for v in value)
    return value


_TENSOR = object()


def _without(value: Any, tensors: List[torch.Tensor], refused: Any) -> Any:
    """A value whose tensors are moved to a list. `refused` is its name, if it may have no numbers:
    a replay has those of another batch."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    if type(value) is dict:
        return {name: _without(part, tensors, refused) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without(part, tensors, refused) for part in value)
    if refused and not isinstance(value, (str, type(None))):
        raise NotCapturedError(
            f"{refused!r} that is logged or returned has a {type(value).__name__}, which a replay "
            "would not make anew: expected tensors of the device"
        )
    return value


def _with(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The value again."""
    if value is _TENSOR:
        return next(tensors)
    if type(value) is dict:
        return {name: _with(part, tensors) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with(part, tensors) for part in value)
    return _Parts(*(_with(part, tensors) for part in value)) if type(value) is _Parts else value


def _reduction(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    return name.lower()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or isinstance(value, torch.Tensor) and value.numel() == 1


def _combined(values: List[Any], counts: List[int], reduction: str = "mean") -> Any:
    if len(values) == 1 or not all(_is_number(value) for value in values):
        return values[-1]
    if reduction in ("min", "max", "sum"):
        combine: Any = {"min": min, "max": max, "sum": sum}[reduction]
        return combine(values)
    return sum(value * (count / sum(counts)) for value, count in zip(values, counts))


def _joined(values: List[Any], counts: List[int]) -> Any:
    if len(values) == 1:
        return values[0]
    if all(isinstance(v, (torch.Tensor, list)) and _is_of(v, n) for v, n in zip(values, counts)):
        return join_results(list(zip(counts, values)), dim=0)
    return _combined(values, counts)


def _is_of(value: Any, count: int) -> bool:
    """Whether it has an entry for each of `count` samples."""
    return (not isinstance(value, torch.Tensor) or value.dim() > 0) and len(value) == count
