"""prediction_step of a Trainer, on parts of a batch that fit."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch

from rebatch.torch.batches.cut import Cut
from rebatch.torch.batches.join import Joiner, join_results
from rebatch.torch.batches.join_on_host import joined_where_it_fits
from rebatch.torch.check.cut_comparison import Subject
from rebatch.torch.check.first_results import FirstResults
from rebatch.torch.program.program import Program
from rebatch.torch.trainers.evaluation_parts import Parts
from rebatch.torch.update.passes import Passes
from rebatch.transformers.training import TrainingStep
from rebatch.transformers.weigher import weighted


_OF_PREDICTION = Subject("evaluate()", "the result", "predictions", "an entry for each sample")


class _Predicted(Program):
    """prediction_step of a few samples and of parts of these, in the place of a loss_fn."""

    trainer: Any = None
    weigher: Any = None

    def compares(self, batch: Any) -> None:
        """num_items_in_batch is that of all of them."""
        self.few, self.items = batch, list[Any]()

    def loss_of(self, samples: Any) -> Tuple[Any, Any]:
        """The part of these samples in the loss, and logits and labels."""
        with _items_of_batch(self.trainer, self.few, self.items):
            loss, *others = self.loss_fn(self.model, samples)
        if loss is None:
            return torch.zeros((), device=self.device), others
        samples_of_all, items = self.cut.length(self.few), self.items[0] if self.items else None
        if not self.weigher.divides(self.model, self.few, samples_of_all, items):
            count = self.cut.length(samples)
            loss = weighted(loss, self.weigher.weight(self.few, samples_of_all, samples, count))
        return loss, others

    def kept(self, beside: Any) -> Any:
        """All of it."""
        return beside

    def results_of(self, whole: Any, parts: List[Any], count: int) -> Tuple[Any, Any]:
        """Joined as those of a batch. Nothing, where their padding is another one."""
        counts, found = [count, count], []
        for one, *members in zip(whole, *parts):
            if one is not None:
                padded = [one, *_padded(counts, list(members))]
                joiner = Joiner([*counts, 2 * count], None)
                found.append((one, joiner.join(padded[1:], [*padded[1:], padded[0]], "")))
        alike = [(a, b) for a, b in found if _widths(a) == _widths(b)]
        return [a for a, _ in alike], [b for _, b in alike]


def _widths(value: Any) -> Any:
    """The sizes of tensors but for the samples'."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape[1:])
    return [_widths(part) for part in value] if isinstance(value, (tuple, list)) else None


class PredictionStep:
    """prediction_step of a Trainer, once for each part of a batch."""

    def __init__(self, trainer: Any, plain: Callable[..., Any], training: TrainingStep, cut: Cut):
        self._trainer, self._plain, self._training = trainer, plain, training
        self._cut, self._parts = cut, Parts(cut, training.options, training.ran_out)
        self._results = FirstResults(), FirstResults()  # without logits, and with them

    def __call__(
        self, model: Any, inputs: Any, arguments: tuple[Any, ...], keywords: Dict[str, Any]
    ) -> Tuple[Any, Any, Any]:
        # A part of one rank alone would wait for the others.
        if self._trainer.is_fsdp_enabled or not self._training.evaluates_parts:
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
        predicted = self._combined(model, inputs, run, results, items)
        first = self._results[predicted[1] is not None]
        has_told = any(each.has_told for each in self._results)
        if not (first.is_done or has_told or self._cut.has_slice):
            self._compare(first, model, inputs, arguments, keywords)
        return predicted

    def _combined(
        self,
        model: Any,
        inputs: Any,
        run: Callable[..., Any],
        results: List[tuple[Any, ...]],
        items: List[Any],
    ) -> Tuple[Any, Any, Any]:
        losses = [(count, result[0]) for count, result in results]
        loss = self._loss(model, inputs, losses, items[0] if items else None)
        return (loss, *(self._joined(run, inputs, results, member) for member in (1, 2)))

    def _compare(
        self,
        first: FirstResults,
        model: Any,
        inputs: Any,
        arguments: tuple[Any, ...],
        keywords: Dict[str, Any],
    ) -> None:
        """They were cut: whether the result depends on that."""

        def run(samples: Any) -> Any:
            return self._plain(model, samples, *arguments, **keywords)

        program = _Predicted(
            model,
            lambda _model, samples: run(samples),
            Passes([model]),
            self._cut,
            normalizer=lambda _inputs: 1,  # losses are weighted
            loss_name="compute_loss",
            functions=[self._trainer.compute_loss],
            owners=[self._trainer],
            options=self._parts.options,
        )
        program.trainer, program.weigher = self._trainer, self._training.weigher
        self._parts.compare(inputs, first, _OF_PREDICTION, program)

    def _loss(self, model: Any, inputs: Any, losses: List[tuple[Any, ...]], items: Any) -> Any:
        if losses[0][1] is None:
            return None
        weigher, samples = self._training.weigher, self._cut.length(inputs)
        if weigher.divides(model, inputs, samples, items):
            return sum(loss for _, loss in losses)
        first, weighed = 0, []
        for count, loss in losses:
            part = self._cut.part(inputs, first, count, samples)
            weighed.append((loss, weigher.weight(inputs, samples, part, count)))
            first += count
        if not any(weight > 0 for _, weight in weighed):  # no labels: the mean of nothing
            return weighed[0][0]
        return sum(weighted(loss, weight) for loss, weight in weighed)

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
