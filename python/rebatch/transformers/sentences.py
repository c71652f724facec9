"""Trainers of sentence-transformers with losses that compare the rows of a batch. The model makes
the embeddings of a part; the loss, which calls the model for each column of texts, gets those of
the whole batch."""

from __future__ import annotations

from typing import Any, Dict, List, NoReturn

import torch

from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.transformers.training import TrainingStep, replaced

_EMBEDDING = "sentence_embedding"  # what a model of theirs adds to its features


def refuse_without_columns(trainer: Any) -> None:
    """ValueError for a Trainer whose samples cannot be embedded here."""
    if not hasattr(trainer, "collect_features"):
        raise ValueError(
            f'rebatch: rebatch={{"embed": True}} is given, and the Trainer is a '
            f"{type(trainer).__name__}: expected a SentenceTransformerTrainer, or a loop with "
            "Backward(model, loss_fn, embed=embed)"
        )
    if trainer.args.world_size > 1:
        raise ValueError(
            f'rebatch: rebatch={{"embed": True}} is given, and {trainer.args.world_size} ranks '
            "train: expected one, or a loop with Backward(model, loss_fn, embed=embed), whose loss "
            "is that of all ranks' samples"
        )


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
            return [model(features)[_EMBEDDING] for features in columns]

    def _loss_over_batch(self, model: Any, rows: List[torch.Tensor], batch: Any) -> torch.Tensor:
        left = list(rows)

        def made(features: Any, *_: Any, **__: Any) -> Dict[str, Any]:
            if not left:
                self._refuse_calls(len(rows))
            return {**features, _EMBEDDING: left.pop(0)}

        with replaced(model, forward=made):
            loss = self._loss(model, (batch, None, None, None))  # of _part(): without a weight
        if left:
            self._refuse_calls(len(rows))
        return loss

    def _refuse_calls(self, columns: int) -> NoReturn:
        raise ValueError(
            f"rebatch: the loss of the Trainer does not call the model once for each of the "
            f"{columns} columns of texts: expected one that does, or a batch that runs whole, by "
            'rebatch={"micro_smallest": <its size>}'
        )
