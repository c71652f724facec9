"""Trainers of sentence-transformers with losses that compare the rows of a batch. The model makes
the embeddings of a part; the loss, which calls the model for each column of texts, gets those of
the whole batch."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Dict, List, NoReturn

import torch

from rebatch.torch.program.left_backward import add_sentence
from rebatch.torch.session.oom import is_oom
from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.transformers.training import TrainingStep, replaced

_MERGED = "sentence_transformers.base.losses.merged_forward"  # since 6.2
_GATHERS = "gather_across_devices"
_EMBEDDING = "sentence_embedding"  # what a model of theirs adds to its features


_OR_WHOLE = 'or a batch that runs whole, by rebatch={"micro_smallest": <its size>}'
_WITHIN_LOSS = (
    "rebatch: with embed the loss gets embeddings in place of what the model returns: expected one "
    f"that takes nothing else of the model, {_OR_WHOLE}"
)


def _embeddings_of(model: Any, columns: List[Any]) -> List[torch.Tensor]:
    """As most losses run a model: columns of candidates together, where theirs does so."""
    try:
        run = importlib.import_module(_MERGED).embed_columns
    except (ImportError, AttributeError):
        run = _one_by_one
    try:
        embeddings: List[torch.Tensor] = run(model, columns)
    except KeyError as error:
        if error.args != (_EMBEDDING,):
            raise
        raise ValueError(
            f"rebatch: the model returns no {_EMBEDDING!r}: expected a SentenceTransformer or a "
            "SparseEncoder, or a loop with Backward(model, loss_fn, embed=embed)"
        ) from None
    return embeddings


def _one_by_one(model: Any, columns: List[Any]) -> List[torch.Tensor]:
    return [model(features)[_EMBEDDING] for features in columns]


def _samples_of(features: Any) -> int:
    """Of a column, or of several that a loss has joined; 0: no tensor tells it."""
    texts = (features.get(name) for name in ("input_ids", "attention_mask"))
    sizes = (len(text) for text in texts if isinstance(text, torch.Tensor) and text.dim() > 1)
    return next(sizes, 0)


def refuse_without_columns(trainer: Any) -> None:
    """ValueError for a Trainer whose samples cannot be embedded here."""
    if not hasattr(trainer, "collect_features"):
        raise ValueError(
            f'rebatch: rebatch={{"embed": True}} is given, and the Trainer is a '
            f"{type(trainer).__name__}: expected a SentenceTransformerTrainer, or a loop with "
            "Backward(model, loss_fn, embed=embed)"
        )
    accumulated = trainer.args.gradient_accumulation_steps
    if trainer.args.world_size > 1 and accumulated > 1:
        raise ValueError(
            f'rebatch: rebatch={{"embed": True}} is given, {trainer.args.world_size} ranks train, '
            f"and gradient_accumulation_steps is {accumulated}: expected 1, and a batch that has "
            "all samples of an update, by per_device_train_batch_size"
        )
    if trainer.args.world_size > 1 and not all(map(_gathers, _losses_of(trainer))):
        raise ValueError(
            f'rebatch: rebatch={{"embed": True}} is given, and {trainer.args.world_size} ranks '
            "train, so the loss is that of all ranks' samples: expected one with "
            "gather_across_devices=True, such as MultipleNegativesRankingLoss, or one rank"
        )


def _losses_of(trainer: Any) -> List[Any]:
    """One, or one for each dataset."""
    return list(trainer.loss.values()) if isinstance(trainer.loss, dict) else [trainer.loss]


def _gathering_parts(loss: Any) -> List[Any]:
    """Of a loss: itself, or one that it wraps, which compare the samples of all ranks."""
    parts = loss.modules() if isinstance(loss, torch.nn.Module) else [loss]
    return [part for part in parts if getattr(part, _GATHERS, False)]


def _gathers(loss: Any) -> bool:
    return bool(_gathering_parts(loss))


class EmbeddingStep(TrainingStep):
    """training_step once for each batch, with embeddings that are made in micro-batches."""

    evaluates_parts = False

    def __init__(self, trainer: Any, plain: Any, options: Dict[str, Any]):
        refuse_without_columns(trainer)
        super().__init__(trainer, plain, {k: v for k, v in options.items() if k != "embed"})

    def _make_backward(self, model: Any) -> TrainerBackward:
        functions = {"embed": self._embed, "slice": self._rows_of}
        return self._backward_of(model, self._loss_over_batch, **functions)

    def _rows_of(self, inputs: Any, first: int, count: int) -> Any:
        return self._cut.part(inputs, first, count, self._cut.length(inputs))

    def _embed(self, model: Any, part: Any) -> List[torch.Tensor]:
        trainer = self._trainer
        inputs = dict(trainer._prepare_inputs(part))
        inputs.pop("dataset_name", None)
        columns, _ = trainer.collect_features(inputs)
        with trainer.compute_loss_context_manager():
            return _embeddings_of(model, list(columns))

    def _loss_over_batch(self, model: Any, rows: List[torch.Tensor], batch: Any) -> torch.Tensor:
        left, own = list(rows), self._cut.length(batch)

        def made(features: Any, *_: Any, **__: Any) -> Dict[str, Any]:
            columns = _samples_of(features) // own or 1
            taken = [left.pop(0) for _ in range(min(columns, len(left)))]
            if len(taken) < columns:
                self._refuse_calls(len(rows))
            return {**features, _EMBEDDING: torch.cat(taken) if columns > 1 else taken[0]}

        with contextlib.ExitStack() as stack:
            for part in (p for loss in _losses_of(self._trainer) for p in _gathering_parts(loss)):
                stack.enter_context(replaced(part, **{_GATHERS: False}))  # the rows are of all
            stack.enter_context(replaced(model, forward=made))
            try:
                # As _part() gives it: without a weight.
                loss = self._loss(model, (batch, None, None, None))
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
                if not is_oom(error):
                    add_sentence(error, _WITHIN_LOSS)
                raise
        if left:
            self._refuse_calls(len(rows))
        return loss

    def _refuse_calls(self, columns: int) -> NoReturn:
        raise ValueError(
            f"rebatch: the loss of the Trainer does not call the model once for each of the "
            f"{columns} columns of texts: expected one that does, {_OR_WHOLE}"
        )
