"""Micro-batches that fit, for the Trainer of Hugging Face transformers.

In place of transformers.Trainer::

    trainer = rebatch.transformers.RebatchTrainer(model, args, train_dataset=data)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import torch
import transformers

from rebatch.torch.batches.cut import cut_of
from rebatch.torch.session.report import Report, numbers_of_trainer
from rebatch.transformers.prediction import PredictionStep
from rebatch.transformers.refused import refuse_losses_over_the_batch, refuse_what_cannot_work
from rebatch.transformers.trl import training_step_for

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
        refuse_what_cannot_work(self)
        options = rebatch or {}
        refuse_losses_over_the_batch(self, options)
        kind = training_step_for(self, options)
        self._rebatch = kind(self, super().training_step, options)
        self._rebatch_prediction = PredictionStep(
            self, super().prediction_step, self._rebatch, cut_of(dict(options))
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
        return self._rebatch(model, inputs, {"num_items_in_batch": num_items_in_batch, **keywords})

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
            numbers() has. {"embed": True}, in a SentenceTransformerTrainer: the model runs in
            micro-batches, and a loss that compares all rows gets the embeddings of all of them

    The other arguments are those of transformers.Trainer. With the loss are logged the size of the
    micro-batches, the OOMs so far and the peak of memory: rebatch/micro, rebatch/ooms_total and
    rebatch/peak_bytes.

    It refuses DataParallel, FSDP1, FSDP2 with fp16 or with parameters in host memory, HSDP,
    DeepSpeed, tensor and context parallelism, auto_find_batch_size, optimizers that update within
    the backward pass, and trl's trainers but for SFTTrainer, GRPOTrainer, RLOOTrainer, DPOTrainer
    and RewardTrainer, unless rebatch={...} has slice and length, or micro_multiple_of, which keep
    rows together that belong so. With DDP and FSDP2 each rank has its own micro-batches, and the
    gradients of each batch are reduced once, also where gradient_accumulation_steps is more than 1.
    Where whole parameters do not fit, FSDP2 reduces those of each micro-batch. With FSDP2, and in
    trl's trainers but for SFTTrainer, evaluate() and predict() run each batch as a whole."""
