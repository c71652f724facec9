"""What the loss of a part of a batch is multiplied by."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional

import torch

from rebatch.torch.batches.cut import Cuts
from rebatch.torch.check.training_snapshot import Reached
from rebatch.torch.session.oom import is_oom
from rebatch.torch.undo.generators import Generators, cuda_devices_of

# Losses whose quotient differs by less are the same, in bfloat16 too.
_TOLERANCE = 0.02


def weighted(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The mean of no items is a NaN, and counts nothing."""
    weight = weight.to(loss.device)
    return torch.where(weight > 0, loss * weight, 0.0)


class Weigher:
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
        generators = Generators(cuda_devices_of([*model.parameters()]), self._generators)
        states, losses = generators.states(), []
        reached = Reached([trainer.compute_loss], [*model.modules()])  # this is no micro-batch
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
                    reached.put_back()
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
