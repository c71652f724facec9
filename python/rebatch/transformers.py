"""Micro-batches that fit, for the Trainer of Hugging Face transformers.

    trainer = rebatch.transformers.RebatchTrainer(model, args, train_dataset=data)
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import transformers

from rebatch.torch._backward import Backward
from rebatch.torch._batch import cut_of
from rebatch.torch._lighten import checkpointing
from rebatch.torch._report import Report
from rebatch.torch._trainer_update import TrainerUpdate

# Arguments of Step that a Trainer has too.
_OF_THE_TRAINER = ("autocast", "clip", "lr_scheduler", "normalizer", "scaler")
# Losses whose quotient differs by less are the same, in bfloat16 too.
_TOLERANCE = 0.02


class RebatchMixin:
    """What makes a Trainer a RebatchTrainer, for other Trainers:

        class MyTrainer(rebatch.transformers.RebatchMixin, SFTTrainer): ..."""

    def __init__(self, *arguments: Any, rebatch: Optional[Dict[str, Any]] = None, **keywords: Any):
        super().__init__(*arguments, **keywords)
        _refuse_what_cannot_work(self)
        self._rebatch = _TrainingStep(self, super().training_step, rebatch or {})

    @property
    def report(self) -> Report:
        """What the last batch needed: rebatch.torch.Step.report."""
        return self._rebatch.backward.report if self._rebatch.backward else Report()

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """transformers.Trainer.train()."""
        try:
            return super().train(*arguments, **keywords)
        finally:
            self._rebatch.put_back()

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, **keywords: Any
    ) -> torch.Tensor:
        """Forward and backward of one batch, in micro-batches that fit."""
        return self._rebatch(model, inputs, {"num_items_in_batch": num_items_in_batch, **keywords})

    def log(self, logs: Dict[str, float], *arguments: Any, **keywords: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **self.report.numbers()}
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

    rebatch    arguments of rebatch.torch.Step, except those that TrainingArguments has, for example
               {"micro_start": 4}. {"check": True} checks the first batch before it trains, as
               Step.check does: what was found is printed, and a mistake raises ValueError;
               {"check": ["batch_norm"]} accepts mistakes of that kind

    The other arguments are those of transformers.Trainer. The fields of `report` are logged with
    the loss. It refuses DataParallel, FSDP, DeepSpeed, tensor and context parallelism,
    auto_find_batch_size, and optimizers that update within the backward pass. With DDP the
    gradients are reduced in the last micro-batch; the ranks do not yet agree about an OOM in that
    one, so there it may end in an error or a hang."""


def _refuse_what_cannot_work(trainer: Any) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    refused = {
        "DataParallel on several GPUs": args.n_gpu > 1,
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "tensor or context parallelism": getattr(accelerator, "parallelism_config", None),
        f"a device of type {args.device.type}": args.device.type not in ("cpu", "cuda"),
    }
    for what, is_there in refused.items():
        if is_there:
            raise ValueError(
                f"rebatch: the Trainer uses {what}: expected one GPU for each process, alone or "
                "with DDP"
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


class _TrainingStep:
    """training_step of a Trainer, once for each micro-batch. What it hands to its backward pass is
    weighted first."""

    def __init__(self, trainer: Any, plain: Callable, options: Dict[str, Any]):
        for name in _OF_THE_TRAINER:
            if name in options:
                raise ValueError(
                    f"rebatch: {name} is an option of RebatchTrainer: expected it to be left to "
                    "TrainingArguments"
                )
        self._trainer, self._plain, self._options = trainer, plain, dict(options)
        self._cut = cut_of(self._options)
        if "lighten" not in self._options and _can_checkpoint(trainer):
            self._options["lighten"] = checkpointing(trainer.model)
        self.backward: Optional[Backward] = None
        self._replaced: List[tuple] = []  # methods of the optimizer and of accelerate

    def __call__(self, model: Any, inputs: Any, arguments: Dict[str, Any]) -> torch.Tensor:
        if self.backward is None or self.backward.model is not model:  # train() was called again
            self.backward = self._make_backward(model)
            self._update = TrainerUpdate(self.backward)
            self._is_divided: Optional[bool] = None
        self._guard_update()
        self._arguments = arguments
        return self.backward(inputs)

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

    def _guarded_step(self, plain: Callable) -> Callable:
        def step(*arguments: Any, **keywords: Any) -> Any:
            def body() -> Any:
                self._update.begin()
                return plain(*arguments, **keywords)

            return self._update.run(body)

        return step

    def _guarded_clip(self, plain: Callable) -> Callable:
        def clip(parameters: Any, *arguments: Any, **keywords: Any) -> Any:
            parameters = list(parameters)  # for a second attempt
            return self._update.clip(lambda: plain(parameters, *arguments, **keywords))

        return clip

    def _make_backward(self, model: Any) -> Backward:
        optimizer = self._trainer.optimizer
        backward = Backward(
            model,
            getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
            self._loss,
            backward=lambda loss: self._trainer.accelerator.backward(loss, **self._keywords),
            normalizer=lambda inputs: 1,  # losses are weighted here
            slice=self._part,
            length=self._cut.length,
            **self._options,
        )
        backward._loss_name, backward._owners = "compute_loss", [self._trainer]
        return backward

    # ---- a micro-batch ----

    def _part(self, inputs: Any, first: int, count: int) -> Any:
        samples = self._cut.length(inputs)
        part = self._cut.part(inputs, first, count, samples)
        self._weight: Optional[torch.Tensor] = None
        if count < samples and not self._divides(inputs, samples):
            self._weight = self._items(part, count) / self._items(inputs, samples)
        return part

    def _loss(self, model: Any, part: Any) -> torch.Tensor:
        given: List[tuple] = []
        with _replaced_backward(self._trainer.accelerator, given):
            self._plain(model, part, **self._arguments)
        if len(given) != 1:
            raise ValueError(
                f"rebatch: training_step calls accelerator.backward() {len(given)} times: "
                "expected once"
            )
        loss, self._keywords = given[0]
        if self._weight is None:
            return loss
        weight = self._weight.to(loss.device)
        # The mean of no items is a NaN.
        return torch.where(weight > 0, loss * weight, 0.0)

    def _items(self, inputs: Any, samples: int) -> torch.Tensor:
        """How many items a mean is over: labels that are not -100, or samples."""
        labels = _labels(inputs)
        if labels is None:
            return torch.tensor(samples)
        if labels.dim() > 1 and _predicts_next(self._trainer.model):
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    # ---- which kind of loss it is ----

    def _divides(self, inputs: Any, samples: int) -> bool:
        """Whether the loss is divided by num_items_in_batch, and is no mean over the samples."""
        items = self._arguments["num_items_in_batch"]
        if items is None:
            return False
        if self._is_divided is None:
            once, twice = self._losses_of_one(inputs, samples, (items, 2 * items))
            if once == 0 or not math.isfinite(once):  # it says nothing: ask the next batch
                return self._trainer.model_accepts_loss_kwargs
            self._is_divided = _is_divided(once, twice)
        return self._is_divided

    def _losses_of_one(self, inputs: Any, samples: int, items: tuple) -> List[float]:
        """The losses of the sample with the most labels, for several numbers of items."""
        labels, best = _labels(inputs), 0
        if labels is not None:
            best = int(labels.ne(-100).flatten(1).sum(1).argmax()) if labels.dim() > 1 else 0
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(self.backward.model)
        model.eval()  # no dropout; each training_step begins with train()
        losses = []
        with torch.no_grad(), trainer.compute_loss_context_manager():
            for n in items:
                sample = trainer._prepare_inputs(self._cut.part(inputs, best, 1, samples))
                losses.append(float(trainer.compute_loss(model, sample, num_items_in_batch=n)))
        return losses


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
    is_classes = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
    return labels if is_classes and labels.dim() else None


def _predicts_next(model: Any) -> bool:
    """Whether the first label of each sequence is left out, because nothing predicts it."""
    own = getattr(getattr(model, "loss_function", None), "__name__", "")
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return own == "ForCausalLMLoss" and not is_encoder_decoder


def _can_checkpoint(trainer: Any) -> bool:
    names = ("activation_checkpointing", "gradient_checkpointing")  # the new one and the old one
    is_on = any(getattr(trainer.args, name, False) for name in names)
    return getattr(trainer.model, "supports_gradient_checkpointing", False) and not is_on


@contextlib.contextmanager
def _replaced_backward(accelerator: Any, given: List[tuple]) -> Iterator[None]:
    """Collects what accelerator.backward() is called with."""
    accelerator.backward = lambda loss, **keywords: given.append((loss, keywords))
    try:
        yield
    finally:
        del accelerator.backward
