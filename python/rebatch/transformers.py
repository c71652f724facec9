"""Micro-batches that fit, for the Trainer of Hugging Face transformers.

In place of transformers.Trainer::

    trainer = rebatch.transformers.RebatchTrainer(model, args, train_dataset=data)
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import transformers

from rebatch.torch.batches.cut import Cut, Cuts, cut_of
from rebatch.torch.batches.join import join_results
from rebatch.torch.batches.join_on_host import joined_where_it_fits
from rebatch.torch.check.training_snapshot import AllGenerators
from rebatch.torch.saving.lighten import checkpointing
from rebatch.torch.session.oom import is_oom
from rebatch.torch.session.report import Report, numbers_of_trainer
from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.torch.trainers.evaluation_parts import Parts
from rebatch.torch.trainers.update import TrainerUpdate
from rebatch.torch.trainers.whole_batches import CutOrWhole
from rebatch.torch.undo.generators import cuda_devices_of

# Names of transformers.Trainer that are private to it and used here. No other private name is.
PRIVATE = ("_prepare_inputs",)
PRIVATE_IN_SOME = ("_get_num_items_in_batch",)  # versions, since a Trainer counts them
# Arguments of Step that a Trainer has too.
_OF_THE_TRAINER = ("autocast", "clip", "lr_scheduler", "normalizer", "scaler")
# Of TrainingArguments, and the same on all ranks.
_SHARED = ("max_grad_norm", "gradient_accumulation_steps", "fp16", "bf16")
# Trainers of trl whose batches have pairs or groups of rows, or a loss that compares all rows.
_OF_PAIRS = (
    "BCOTrainer",
    "CPOTrainer",
    "DPOTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "OnlineDPOTrainer",
    "ORPOTrainer",
    "RewardTrainer",
    "RLOOTrainer",
)
_ITEMS = "num_items_in_batch"  # an argument of training_step
# In the states of a TrainerState.
_STATE = "rebatch"
# Losses whose quotient differs by less are the same, in bfloat16 too.
_TOLERANCE = 0.02


if TYPE_CHECKING:
    _Trainer = transformers.Trainer
else:
    _Trainer = object  # another Trainer comes after the mixin


class RebatchMixin(_Trainer):
    """What makes a Trainer a RebatchTrainer, for other Trainers.

    It comes first among the bases::

        class MyTrainer(rebatch.transformers.RebatchMixin, SFTTrainer): ..."""

    def __init__(self, *arguments: Any, rebatch: Optional[Dict[str, Any]] = None, **keywords: Any):
        super().__init__(*arguments, **keywords)
        _refuse_what_cannot_work(self)
        _refuse_pairs(self, rebatch or {})
        self._rebatch = _TrainingStep(self, super().training_step, rebatch or {})
        self._rebatch_prediction = _PredictionStep(
            self, super().prediction_step, self._rebatch, cut_of(dict(rebatch or {}))
        )

    @property
    def report(self) -> Report:
        """What the last batch needed, as rebatch.torch.Step.report has it."""
        return self._rebatch.backward.report if self._rebatch.backward else Report()

    def numbers(self, prefix: str = "rebatch/") -> Dict[str, float]:
        """What all batches of the training needed: rebatch.torch.Step.numbers()."""
        return self._rebatch.backward.numbers(prefix) if self._rebatch.backward else {}

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """transformers.Trainer.train()."""
        self._rebatch.is_beginning = True
        try:
            return super().train(*arguments, **keywords)
        finally:
            self._rebatch.put_back()

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, **keywords: Any
    ) -> torch.Tensor:
        """Forward and backward of one batch, in micro-batches that fit."""
        return self._rebatch(model, inputs, {_ITEMS: num_items_in_batch, **keywords})

    def prediction_step(
        self, model: Any, inputs: Any, *arguments: Any, **keywords: Any
    ) -> Tuple[Any, Any, Any]:
        """Loss, logits and labels of one batch, in parts that fit."""
        return self._rebatch_prediction(model, inputs, arguments, keywords)

    def log(self, logs: Dict[str, float], *arguments: Any, **keywords: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **numbers_of_trainer(self.numbers(), self._rebatch.logs_report)}
        super().log(logs, *arguments, **keywords)


class RebatchTrainer(RebatchMixin, transformers.Trainer):
    """A Trainer whose training_step runs in micro-batches that fit.

    An OOM cuts the batch of training_step, per_device_train_batch_size samples; the update stays
    the same. Precision, max_grad_norm, gradient_accumulation_steps and num_items_in_batch work as
    in transformers.Trainer. When one sample does not fit, gradient checkpointing is switched on,
    for models that have it.

    Clipping that runs out of memory is tried once more where no gradient was changed. The
    optimizer's step does not begin without the memory that an earlier one needed (Exhausted), and
    an OOM within it raises Torn.

    A loss is the sum over the items of the micro-batch, divided by num_items_in_batch, as those of
    transformers' models are; or it is the mean over the labels that are not -100, or over the
    samples where labels are no classes. When a batch is first cut, the loss of one sample is
    computed twice, without gradients, to see which.

    evaluate() and predict() go on after an OOM too: prediction_step runs on parts of its batch. The
    losses are weighted as in training, and the logits and labels are joined.

    Args:
        rebatch: arguments of rebatch.torch.Step, except those that TrainingArguments has, for
            example {"micro_start": 4}. {"check": True} checks the first batch before it trains, as
            Step.check does: what was found is printed, and a mistake raises ValueError; {"check":
            ["batch_norm"]} accepts mistakes of that kind. {"log_report": True} logs all that
            numbers() has

    The other arguments are those of transformers.Trainer. With the loss are logged the size of the
    micro-batches, the OOMs so far and the peak of memory: rebatch/micro, rebatch/ooms_total and
    rebatch/peak_bytes.

    It refuses DataParallel, FSDP1, FSDP2 with fp16 or with parameters in host memory, HSDP,
    DeepSpeed, tensor and context parallelism, auto_find_batch_size, optimizers that update within
    the backward pass, and trl's trainers of pairs and groups, such as DPOTrainer, unless
    rebatch={...} has slice and length, or micro_multiple_of, which keep such rows together. With
    DDP and FSDP2 each rank has its own micro-batches, and the gradients of each batch are reduced
    once, also where gradient_accumulation_steps is more than 1. Where whole parameters do not fit,
    FSDP2 reduces those of each micro-batch. With FSDP2 evaluate() and predict() run each batch as a
    whole."""


def missing_names(trainer: Any) -> List[str]:
    """The names of PRIVATE that this version of transformers does not have."""
    return [f"Trainer.{name}" for name in PRIVATE if not hasattr(trainer, name)]


def _refuse_what_cannot_work(trainer: Any) -> None:
    missing = missing_names(trainer)
    if missing:
        raise ValueError(
            f"rebatch: this version of transformers has no {', '.join(missing)}: expected 4.40 or "
            "newer, up to 5"
        )
    args, accelerator = trainer.args, trainer.accelerator
    sharding = _sharding_of(trainer)
    refused = {
        "DataParallel on several GPUs": args.n_gpu > 1,
        "FSDP1": trainer.is_fsdp_enabled and getattr(sharding, "fsdp_version", 1) != 2,
        "FSDP of XLA": getattr(trainer, "is_fsdp_xla_enabled", False),
        "FSDP with parameters in host memory": _keeps_on_host(sharding),
        "FSDP with fp16": trainer.is_fsdp_enabled and args.fp16,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "tensor or context parallelism, or HSDP": getattr(accelerator, "parallelism_config", None),
        f"a device of type {args.device.type}": args.device.type not in ("cpu", "cuda"),
    }
    for what, is_there in refused.items():
        if is_there:
            raise ValueError(
                f"rebatch: the Trainer uses {what}: expected one GPU for each process, alone or "
                "with DDP, or with FSDP2 in float32 or bf16"
            )
    if args.auto_find_batch_size:
        raise ValueError(
            "rebatch: auto_find_batch_size is on: expected it off, because RebatchTrainer cuts the "
            "batches itself"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise ValueError(
            f"rebatch: optim is {optim!r}, which updates within the backward pass: expected an "
            "optimizer that updates after it"
        )


def _sharding_of(trainer: Any) -> Any:
    """accelerate's plugin for FSDP, or None."""
    state = trainer.accelerator.state
    return getattr(state, "fsdp_plugin", None) if trainer.is_fsdp_enabled else None


def _keeps_on_host(sharding: Any) -> bool:
    offload = getattr(sharding, "cpu_offload", None)
    return offload is True or type(offload).__name__ == "CPUOffloadPolicy"


def _refuse_pairs(trainer: Any, options: Dict[str, Any]) -> None:
    """Unless the options say how rows that belong together are kept so."""
    found = [
        kind.__name__
        for kind in type(trainer).__mro__
        if kind.__module__.split(".")[0] == "trl" and kind.__name__ in _OF_PAIRS
    ]
    if found and not (options.get("slice") or options.get("micro_multiple_of", 1) > 1):
        raise ValueError(
            f"rebatch: the Trainer is trl's {found[0]}, whose batches have rows that belong "
            "together: expected slice and length in rebatch={...} that keep them so, or "
            "micro_multiple_of=2 where the rows of each pair are neighbours"
        )


class _TrainingStep:
    """training_step of a Trainer, once for each micro-batch. What it hands to its backward pass is
    weighted first."""

    def __init__(self, trainer: Any, plain: Callable[..., Any], options: Dict[str, Any]):
        for name in _OF_THE_TRAINER:
            if name in options:
                raise ValueError(
                    f"rebatch: {name} is an option of RebatchTrainer: expected it to be left to "
                    "TrainingArguments"
                )
        self._trainer, self._plain, self.options = trainer, plain, dict(options)
        self.logs_report = self.options.pop("log_report", False)
        self._cut = CutOrWhole(self.options)
        self.weigher = _Weigher(trainer, self._cut, self.options)
        if "lighten" not in self.options and _can_checkpoint(trainer):
            self.options["lighten"] = checkpointing(trainer.model)
        self.backward: Optional[TrainerBackward] = None
        self.is_beginning = True  # a training, which may have a checkpoint's state
        self._replaced: List[tuple[Any, ...]] = []  # methods of the optimizer and of accelerate

    def __call__(self, model: Any, inputs: Any, arguments: Dict[str, Any]) -> torch.Tensor:
        if self.backward is None or self.backward.model is not model:  # train() was called again
            self.backward = self._make_backward(model)
            self._update = TrainerUpdate(self.backward)
            self.weigher.is_divided = None
        # A Trainer writes what is here into its checkpoints, and has it again when it resumes.
        states = getattr(self._trainer.state, "stateful_callbacks", {})
        if self.is_beginning and _STATE in states:
            self.backward.load_state_dict(states[_STATE])
        self.is_beginning = False
        self._guard_update()
        self._arguments = arguments
        model.train()  # as training_step begins: it says what BatchNorm needs
        with self._cut.saying_why():
            loss = self.backward(inputs)
        states[_STATE] = self.backward.state_dict()
        return loss

    def _guard_update(self) -> None:
        """The Trainer calls these after the last batch of an update."""
        if self._replaced:
            return
        for owner, name, guarded in (
            (self._trainer.optimizer, "step", self._guarded_step),
            (self._trainer.accelerator, "clip_grad_norm_", self._guarded_clip),
        ):
            plain = getattr(owner, name)
            self._replaced.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, functools.wraps(plain)(guarded(plain)))  # schedulers mark step

    def put_back(self) -> None:
        for owner, name, own in self._replaced:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._replaced = []

    def _guarded_step(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            def body() -> Any:
                self._update.begin()
                return plain(*arguments, **keywords)

            return self._update.run(body)

        return step

    def _guarded_clip(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            parameters = list(parameters)  # for a second attempt
            body = functools.partial(plain, parameters, max_norm, norm_type)
            return self._update.clip_norm(parameters, max_norm, norm_type, body)

        return clip

    def _make_backward(self, model: Any) -> TrainerBackward:
        return TrainerBackward(
            model,
            self._loss,
            optimizer=self._trainer.optimizer,
            backward=lambda loss: self._trainer.accelerator.backward(loss, **self._keywords),
            normalizer=lambda inputs: 1,  # losses are weighted here
            slice=self._part,
            length=self._cut.length,
            within=self._cut.cut,
            shared={name: getattr(self._trainer.args, name) for name in _SHARED},
            loss_name="compute_loss",
            functions=[self._trainer.compute_loss],
            owners=[self._trainer],
            **self.options,
        )

    # ---- a micro-batch ----

    def _part(self, inputs: Any, first: int, count: int) -> Any:
        samples = self._cut.length(inputs)
        part = self._cut.part(inputs, first, count, samples)
        self._weight: Optional[torch.Tensor] = None
        if count < samples:
            items = self._arguments[_ITEMS]
            assert self.backward is not None  # it runs
            model = self.backward.model
            if self._is_sharded() or not self.weigher.divides(model, inputs, samples, items):
                self._weight = self.weigher.weight(inputs, samples, part, count)
        return part

    def _loss(self, model: Any, part: Any) -> torch.Tensor:
        given: List[tuple[Any, ...]] = []
        arguments = self._arguments
        items, is_cut = arguments[_ITEMS], self._weight is not None
        if is_cut and items is not None and self.weigher.is_divided is None and self._is_sharded():
            arguments = {**arguments, _ITEMS: self.weigher.once_and_twice(items)}
        with _replaced_backward(self._trainer.accelerator, given):
            self._plain(model, part, **arguments)
        if len(given) != 1:
            raise ValueError(
                f"rebatch: training_step calls accelerator.backward() {len(given)} times: "
                "expected once"
            )
        loss: torch.Tensor = given[0][0]
        self._keywords = given[0][1]
        if arguments is not self._arguments:
            loss = self.weigher.told_by(loss)
        if self._weight is None or self.weigher.is_divided:
            return loss
        return _weighted(loss, self._weight)

    def _is_sharded(self) -> bool:
        """A pass of one rank alone would wait for those of the others."""
        return self.backward is not None and self.backward.is_sharded


def _weighted(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The mean of no items is a NaN, and counts nothing."""
    weight = weight.to(loss.device)
    return torch.where(weight > 0, loss * weight, 0.0)


class _Weigher:
    """What the loss of a part is multiplied by, so that the losses of the parts add up to that of
    the batch."""

    def __init__(self, trainer: Any, cut: Cuts, options: Dict[str, Any]):
        self._trainer, self._cut = trainer, cut
        self._generators = options.get("generators", ())
        self._fewest = options.get("micro_multiple_of") or 1
        self.is_divided: Optional[bool] = None  # by num_items_in_batch; not known yet

    def weight(self, inputs: Any, samples: int, part: Any, count: int) -> torch.Tensor:
        """Of a loss that is a mean: the items of the part in those of the batch."""
        return self._items(part, count) / self._items(inputs, samples)

    def _items(self, inputs: Any, samples: int) -> torch.Tensor:
        """How many items a mean is over: labels that are not -100, or samples."""
        labels = _labels(inputs)
        if labels is None:
            return torch.tensor(samples)
        if labels.dim() > 1 and _predicts_next(self._trainer.model):
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    # ---- which kind of loss it is ----

    def divides(self, model: Any, inputs: Any, samples: int, items: Any) -> bool:
        """Whether the loss is divided by num_items_in_batch, and is no mean over the samples."""
        if items is None:
            return False
        if self.is_divided is None:
            once, twice = self._losses_of_one(model, inputs, samples, (items, 2 * items))
            if once == 0 or not math.isfinite(once):  # it says nothing: ask the next batch
                return bool(self._trainer.model_accepts_loss_kwargs)
            self.is_divided = _is_divided(once, twice)
        return self.is_divided

    def once_and_twice(self, items: Any) -> torch.Tensor:
        """A number of items with which the loss of a micro-batch tells it, without another pass: a
        loss that is divided by it has two values."""
        number = torch.as_tensor(items, device=self._trainer.args.device)
        return torch.stack((number, 2 * number))

    def told_by(self, loss: torch.Tensor) -> torch.Tensor:
        """Note what a loss with once_and_twice() tells. Returns the loss."""
        if loss.dim() == 0:
            self.is_divided = False
            return loss
        once, twice = loss.tolist()
        if once != 0 and math.isfinite(once):  # else the next micro-batch tells
            self.is_divided = _is_divided(once, twice)
        return loss[0]

    def _losses_of_one(
        self, model: Any, inputs: Any, samples: int, items: tuple[Any, ...]
    ) -> List[float]:
        """The losses of the sample with the most labels, and of those that stay together with it,
        for several numbers of items and the same random numbers."""
        labels, best = _labels(inputs), 0
        if labels is not None:
            best = int(labels.ne(-100).flatten(1).sum(1).argmax()) if labels.dim() > 1 else 0
        best = min(best, samples - self._fewest)
        best -= best % self._fewest
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(model)
        model.eval()  # no dropout; each training_step begins with train()
        generators = AllGenerators(cuda_devices_of([*model.parameters()]), self._generators)
        states, losses = generators.states(), []
        with torch.no_grad(), trainer.compute_loss_context_manager():
            for n in items:
                part = self._cut.part(inputs, best, self._fewest, samples)
                sample = trainer._prepare_inputs(part)
                try:
                    losses.append(float(trainer.compute_loss(model, sample, num_items_in_batch=n)))
                except Exception as error:
                    self._say_that_it_fails(error)
                    raise
                finally:
                    generators.put(states)
        return losses

    def _say_that_it_fails(self, error: Exception) -> None:
        if self._fewest == 1 and not is_oom(error):
            raise ValueError(
                f"rebatch: compute_loss fails for one sample of a batch ({type(error).__name__}: "
                f"{error}): expected samples that stand alone; where they are pairs, slice and "
                "length keep these together, or micro_multiple_of=2 if they are neighbours"
            ) from error


def _is_divided(once: float, twice: float) -> bool:
    """Whether a loss is divided by a number of items, from its values for this and twice this."""
    if abs(once - 2 * twice) <= _TOLERANCE * abs(once):
        return True
    if abs(once - twice) <= _TOLERANCE * abs(once):
        return False
    raise ValueError(
        f"rebatch: with twice the num_items_in_batch, the loss of a sample changes from {once:.6g} "
        f"to {twice:.6g}: expected half of it, or no change, because the loss of a part of a batch "
        "is else not known"
    )


def _labels(inputs: Any) -> Optional[torch.Tensor]:
    """Labels that are classes."""
    labels = inputs.get("labels") if hasattr(inputs, "get") else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    return labels if labels.dim() else None


def _predicts_next(model: Any) -> bool:
    """Whether the first label of each sequence is left out, because nothing predicts it."""
    own = getattr(getattr(model, "loss_function", None), "__name__", "")
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return own == "ForCausalLMLoss" and not is_encoder_decoder


def _can_checkpoint(trainer: Any) -> bool:
    names = ("activation_checkpointing", "gradient_checkpointing")  # the new one and the old one
    is_on = any(getattr(trainer.args, name, False) for name in names)
    is_on = is_on or getattr(_sharding_of(trainer), "activation_checkpointing", False)
    return getattr(trainer.model, "supports_gradient_checkpointing", False) and not is_on


@contextlib.contextmanager
def _replaced_backward(accelerator: Any, given: List[tuple[Any, ...]]) -> Iterator[None]:
    """Collects what accelerator.backward() is called with."""
    accelerator.backward = lambda loss, **keywords: given.append((loss, keywords))
    try:
        yield
    finally:
        del accelerator.backward


class _PredictionStep:
    """prediction_step of a Trainer, once for each part of a batch."""

    def __init__(self, trainer: Any, plain: Callable[..., Any], training: _TrainingStep, cut: Cut):
        self._trainer, self._plain, self._training = trainer, plain, training
        self._cut, self._parts = cut, Parts(cut, training.options)

    def __call__(
        self, model: Any, inputs: Any, arguments: tuple[Any, ...], keywords: Dict[str, Any]
    ) -> Tuple[Any, Any, Any]:
        if self._trainer.is_fsdp_enabled:  # a part of one rank alone would wait for the others
            whole: Tuple[Any, Any, Any] = self._plain(model, inputs, *arguments, **keywords)
            return whole
        items: List[Any] = []

        def run(part: Any) -> Tuple[Any, Any, Any]:
            with _items_of_batch(self._trainer, inputs, items):
                result: Tuple[Any, Any, Any] = self._plain(model, part, *arguments, **keywords)
            return result

        results = self._parts(self._trainer.args.device, run, inputs, key=1)
        if len(results) == 1:
            whole = results[0][1]
            return whole
        losses = [(count, result[0]) for count, result in results]
        loss = self._loss(model, inputs, losses, items[0] if items else None)
        return (loss, *(self._joined(run, inputs, results, member) for member in (1, 2)))

    def _loss(self, model: Any, inputs: Any, losses: List[tuple[Any, ...]], items: Any) -> Any:
        if losses[0][1] is None:
            return None
        weigher, samples = self._training.weigher, self._cut.length(inputs)
        if weigher.divides(model, inputs, samples, items):
            return sum(loss for _, loss in losses)
        first, weighted = 0, []
        for count, loss in losses:
            part = self._cut.part(inputs, first, count, samples)
            weighted.append((loss, weigher.weight(inputs, samples, part, count)))
            first += count
        if not any(weight > 0 for _, weight in weighted):  # no labels: the mean of nothing
            return weighted[0][0]
        return sum(_weighted(loss, weight) for loss, weight in weighted)

    def _joined(
        self, run: Callable[..., Any], inputs: Any, results: List[tuple[Any, ...]], member: int
    ) -> Any:
        """Logits or labels."""

        def other() -> Tuple[int, Any]:
            count, result = self._parts.one(run, inputs)
            return count, result[member]

        counts, values = [n for n, _ in results], [result[member] for _, result in results]
        if values[0] is None:
            return None
        values = joined_where_it_fits(lambda: _padded(counts, values), values)
        return join_results(list(zip(counts, values)), other=other)


@contextlib.contextmanager
def _items_of_batch(trainer: Any, inputs: Any, items: List[Any]) -> Iterator[None]:
    """The num_items_in_batch of a part is that of its batch. It is counted once, because processes
    exchange it, and kept in `items`."""
    plain = getattr(trainer, "_get_num_items_in_batch", None)
    if plain is None:  # an older Trainer does not count them
        yield
        return

    def count(_part: Any, device: torch.device) -> Any:
        if not items:
            found = plain([inputs], device)
            items.append(found.to(device) if isinstance(found, torch.Tensor) else found)
        return items[0]

    trainer._get_num_items_in_batch = count
    try:
        yield
    finally:
        del trainer._get_num_items_in_batch


def _padded(counts: List[int], values: List[Any]) -> List[Any]:
    """Sequences of different lengths, as those of generated tokens, are padded with -100, as a
    Trainer does between batches."""
    if isinstance(values[0], (tuple, list)):
        members = zip(*(_padded(counts, list(member)) for member in zip(*values)))
        return [type(values[0])(member) for member in members]
    if not all(isinstance(v, torch.Tensor) and v.dim() > 1 for v in values):
        return values
    lengths = [v.shape[1] for v in values]
    if len(set(lengths)) == 1 or lengths == counts:  # one entry for each pair of samples
        return values
    return [_with_length(value, max(lengths)) for value in values]


def _with_length(value: torch.Tensor, length: int) -> torch.Tensor:
    padded = value.new_full((value.shape[0], length, *value.shape[2:]), -100)
    padded[:, : value.shape[1]] = value
    return padded
