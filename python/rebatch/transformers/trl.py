"""trl's trainers: what each part of a batch counts, and their metrics, once for each batch.

compute_loss of trl makes the loss from what a model returns for each row, and metrics from the same
numbers, with collectives. So a batch is cut where compute_loss is called: training_step runs once,
with its generation. In the passes collectives return what they are given, and metrics go nowhere;
once all passes are done, compute_loss runs once more on the whole batch, with what the model has
returned for its rows, and makes the metrics. All ranks do so once, however they cut."""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.metadata
import types
import warnings
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Tuple, Type

import torch

from rebatch._user_code import user_stacklevel
from rebatch.torch.batches.cut import Cut
from rebatch.transformers.sentences import EmbeddingStep
from rebatch.transformers.training import TrainingStep, replaced

# Names that are private to trl's trainers and used here. No other private name is.
PRIVATE = ("_metrics",)
_OLDEST = (1, 15)
# By trainer, losses that are the mean over the rows of a batch, or over its pairs; and those that
# are a sum, divided by a number that does not change with the cut.
_MEANS = {
    "GRPOTrainer": ("grpo", "sapo", "luspo", "dr_grpo"),
    "RLOOTrainer": (),
    "RewardTrainer": (),
    "DPOTrainer": (
        "sigmoid",
        "hinge",
        "ipo",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
        "sigmoid_norm",
    ),
}
_SUMS = ("dapo", "cispo", "vespo")
_OF_PAIRS = ("DPOTrainer", "RewardTrainer")  # chosen rows come first, the rejected ones behind
_WHY_NOT = {
    "bnpo": "divides by the tokens of all rows that it sees",
    "aot": "sorts all pairs that it sees",
    "aot_unpaired": "sorts all rows that it sees",
    "sft": "is a mean over the tokens of all rows that it sees",
}


def training_step_for(trainer: Any, options: Dict[str, Any]) -> Type[TrainingStep]:
    """How the training_step of a Trainer is cut.

    Raises ValueError for those of trl's trainers, and their losses, that cannot be."""
    name = _name_in_trl(trainer)
    if options.get("embed"):
        return EmbeddingStep
    if name == "":
        return TrainingStep
    if name == "SFTTrainer":
        return _step_of_sft(trainer)
    if name in _MEANS:
        _refuse_what_is_not_of_rows(trainer, name)
        return RowsStep
    knows = bool(options.get("slice")) or options.get("micro_multiple_of", 1) > 1
    if name == "KTOTrainer" or not knows:
        why = "whose rows may belong together, or are compared with one another"
        if name == "KTOTrainer":
            why = "whose loss has a KL that is a mean over the rows of all ranks"
        raise ValueError(
            f"rebatch: the Trainer is trl's {name}, {why}: expected SFTTrainer, "
            f"{', '.join(sorted(_MEANS))}; or, where rows only belong together, slice and length "
            "in rebatch={...} that keep them so"
        )
    return TrainingStep


def _name_in_trl(trainer: Any) -> str:
    """Of trl's class that a Trainer is, or is derived from."""
    kinds = (k for k in type(trainer).__mro__ if k.__module__.split(".")[0] == "trl")
    return next((kind.__name__ for kind in kinds), "")


def _is_older(version: str) -> bool:
    return tuple(map(int, version.split(".")[:2])) < _OLDEST


def _step_of_sft(trainer: Any) -> Type[TrainingStep]:
    """Its loss is of rows, unless it is one of these: training_step is cut then, which gathers
    metrics in each part."""
    version = importlib.metadata.version("trl")
    others = {
        "compute_loss_func": getattr(trainer, "compute_loss_func", None) is not None,
        "label_smoothing_factor": getattr(trainer, "label_smoother", None) is not None,
        "router_aux_loss_coef": getattr(trainer, "aux_loss_enabled", False),
        f"trl {version}": _is_older(version),
    }
    named = [name for name, is_there in others.items() if is_there]
    if not named:
        return RowsStep
    if trainer.accelerator.num_processes > 1:
        raise ValueError(
            f"rebatch: the SFTTrainer has {' and '.join(named)}, with which each part of a batch "
            "gathers its metrics, and several processes that cut unequally would wait for one "
            f"another: expected none of these, and trl {'.'.join(map(str, _OLDEST))} or newer, or "
            "one process"
        )
    return TrainingStep


def _refuse_what_is_not_of_rows(trainer: Any, name: str) -> None:
    version = importlib.metadata.version("trl")
    if _is_older(version):
        raise ValueError(
            f"rebatch: trl is {version}: expected {'.'.join(map(str, _OLDEST))} or newer for a "
            f"{name}"
        )
    known = (*_MEANS[name], *(_SUMS if name == "GRPOTrainer" else ()))
    for loss in _losses(trainer) if known else ():
        if loss not in known:
            why = _WHY_NOT.get(loss, "is not known to rebatch")
            raise ValueError(
                f"rebatch: loss_type of the {name} is {loss!r}, which {why}: expected a loss that "
                f"is a mean or sum over rows: {', '.join(known)}"
            )
    args = trainer.args
    whole = {
        "top_entropy_quantile": getattr(args, "top_entropy_quantile", 1.0) < 1.0,
        "entropy_coef": bool(getattr(args, "entropy_coef", 0.0)),
        "use_adaptive_entropy": getattr(args, "use_adaptive_entropy", False),
        "router_aux_loss_coef": getattr(trainer, "aux_loss_enabled", False),
    }
    for option, is_on in whole.items():
        if is_on:
            raise ValueError(
                f"rebatch: {option} of the {name} is {getattr(args, option)}, which adds to the "
                "loss what depends on all tokens that it sees: expected "
                f"{option}={1.0 if option == 'top_entropy_quantile' else 0.0}"
            )


def _losses(trainer: Any) -> List[str]:
    losses = getattr(trainer.args, "loss_type", ())
    return [losses] if isinstance(losses, str) else list(losses)


# ---- rows ----


class _Rows:
    """The rows of a batch of trl, or its pairs of them."""

    def __init__(self, are_pairs: bool):
        self._are_pairs = are_pairs
        self._utils = importlib.import_module("trl.trainer.utils")

    def length(self, inputs: Any) -> int:
        if not self._are_pairs:
            return len(inputs["completion_ids"])
        if "pixel_values" in inputs:
            raise ValueError("rebatch: the pairs of the batch have images: expected text")
        return len(inputs["input_ids"]) // 2

    def part(self, inputs: Any, first: int, count: int) -> Dict[str, Any]:
        """Some of them. Images are lists in between, with an entry for each row."""
        samples = self.length(inputs)
        split = inputs if self._are_pairs else self._utils.split_pixel_values_by_grid(inputs)
        taken = {name: _taken(name, v, samples, first, count) for name, v in split.items()}
        found: Dict[str, Any] = self._utils.unsplit_pixel_values_by_grid(taken)
        return found


def _taken(name: str, value: Any, samples: int, first: int, count: int) -> Any:
    """Entries of what has one for each sample, or those of all chosen rows and then the others."""
    is_tensor = isinstance(value, torch.Tensor)
    if not (isinstance(value, list) or (is_tensor and value.dim())):
        return value
    if len(value) == samples:
        return value[first : first + count]
    if is_tensor and len(value) == 2 * samples:
        return torch.cat([value[at : at + count] for at in (first, samples + first)])
    raise ValueError(
        f"rebatch: {name} of the batch has {len(value)} entries: expected {samples}, one for each "
        "sample, or slice and length in rebatch={...} that cut it"
    )


# ---- what models return ----


class _Outputs:
    """What a model returned, and what is read of it, by name."""

    def __init__(self, outputs: Any, read: Dict[str, Any]):
        self._outputs, self._read = outputs, read

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._outputs, name)
        self._read[name] = value
        return value

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class _Model:
    """Stands for a model while compute_loss runs: who calls it, calls `call` with the model."""

    def __init__(self, model: Any, call: Callable[..., Any]):
        self._model, self._call = model, call

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance() asks
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call(self._model, *arguments, **keywords)


def _by_sample(name: str, value: Any, samples: int) -> List[torch.Tensor]:
    """Rows, as one entry for each sample: parts of a batch may be of other lengths."""
    if not isinstance(value, torch.Tensor) or not value.dim() or len(value) % samples:
        what = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"{value!r:.40}"
        raise ValueError(
            f"rebatch: compute_loss reads {name} of what the model returns, {what}: expected a "
            "tensor with an entry for each row, because metrics are made of it after the passes"
        )
    rows: torch.Tensor = value.detach().unflatten(0, (-1, samples))
    return list(rows.transpose(0, 1).clone())


def _by_row(values: List[torch.Tensor]) -> torch.Tensor:
    """What _by_sample() made of rows, with zeros behind those of shorter parts."""
    longest = max(v.size(-1) for v in values) if values[0].dim() > 1 else 0
    if longest:
        values = [torch.nn.functional.pad(v, (0, longest - v.size(-1))) for v in values]
    return torch.stack(values).transpose(0, 1).flatten(0, 1)


def _itself(value: Any, *_: Any, **__: Any) -> Any:
    return value


# ---- training_step ----


class RowsStep(TrainingStep):
    """training_step of a trl Trainer, once for each batch; compute_loss, once for each
    micro-batch, and once more for the metrics."""

    def __init__(self, trainer: Any, plain: Callable[..., Any], options: Dict[str, Any]):
        super().__init__(trainer, plain, options)
        name = _name_in_trl(trainer)
        if self.options.pop("graphs", False):
            warnings.warn(
                f"rebatch: graphs=True has no effect on {name}, whose compute_loss reads what it "
                "logs on the host (item())",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        self._is_of_tokens = name == "SFTTrainer"  # whose batches are those of any Trainer
        # Evaluation has collectives within prediction_step, and may generate.
        self.evaluates_parts = self._is_of_tokens and trainer.accelerator.num_processes == 1
        if not (options.get("slice") or self._is_of_tokens):
            rows = _Rows(name in _OF_PAIRS)
            self._cut.cut = Cut(slice=rows.part, length=rows.length)
        self._is_sum = name == "GRPOTrainer" and trainer.args.loss_type in _SUMS
        self._called: Tuple[str, ...] = ()  # models of the trainer, beside the one that it trains
        if name == "DPOTrainer":
            has_reference = getattr(trainer, "ref_model", None) is not None
            self._called = ("ref_model" if has_reference else "model",)

    def _run(self, model: Any, inputs: Any) -> torch.Tensor:
        trainer, accelerator = self._trainer, self._trainer.accelerator
        self._compute, plain_backward = trainer.compute_loss, accelerator.backward
        held: List[Tuple[Any, Dict[str, Any]]] = []
        losses: List[torch.Tensor] = []

        def hold(_model: Any, inputs: Any, **keywords: Any) -> torch.Tensor:
            held.append((inputs, keywords))
            return torch.ones((), dtype=torch.float64)

        def passes(one: torch.Tensor, **keywords: Any) -> None:
            """`one` is what training_step has made of a loss of 1."""
            self._divisor, self._keywords = 1 / float(one), keywords
            inputs, self._compute_keywords = held.pop()
            self._inputs, self._samples = inputs, self._cut.length(inputs)
            if self._is_of_tokens:
                self._is_sum = self._compute_keywords.get("num_items_in_batch") is not None
            with replaced(accelerator, backward=plain_backward):
                losses.append(self._run_batch(inputs))
            self._make_metrics(model, inputs)

        with replaced(trainer, compute_loss=hold), replaced(accelerator, backward=passes):
            self._plain(model, inputs, **self._arguments)
        if len(losses) != 1:
            raise ValueError(
                f"rebatch: training_step calls accelerator.backward() {len(losses)} times: "
                "expected once"
            )
        return losses[0]

    # ---- a micro-batch ----

    def _part(self, inputs: Any, first: int, count: int) -> Any:
        return self._cut.part(inputs, first, count, self._cut.length(inputs))

    def _loss(self, model: Any, part: Any) -> Any:
        reads: List[Dict[str, Any]] = []

        def call(called: Any, *arguments: Any, **keywords: Any) -> _Outputs:
            reads.append({})
            return _Outputs(called(*arguments, **keywords), reads[-1])

        with self._apart(call):
            loss = self._loss_of(_Model(model, call), part)
        samples = self._cut.length(part)
        outputs = tuple({n: _by_sample(n, v, samples) for n, v in r.items()} for r in reads)
        loss = loss / self._divisor
        if not self._is_sum and samples < self._samples:
            loss = loss * self._weight_of(part, samples)
        return loss, outputs

    def _weight_of(self, part: Any, samples: int) -> Any:
        """Of a mean."""
        if self._is_of_tokens:
            return self.weigher.weight(self._inputs, self._samples, part, samples)
        return samples / self._samples

    def _loss_of(self, model: Any, inputs: Any) -> torch.Tensor:
        with self._trainer.compute_loss_context_manager():
            loss: torch.Tensor = self._compute(model, dict(inputs), **self._compute_keywords)
        return loss

    @contextlib.contextmanager
    def _apart(self, call: Callable[..., Any]) -> Iterator[None]:
        """Without collectives; what compute_loss notes in the trainer is put back."""
        trainer, before = self._trainer, dict(vars(self._trainer))
        metrics: Dict[str, Any] = {mode: collections.defaultdict(list) for mode in trainer._metrics}
        local = {"gather": _itself, "gather_for_metrics": _itself, "reduce": _itself}
        try:
            with (
                self._models(call),
                replaced(trainer, _metrics=metrics),
                replaced(trainer.accelerator, **local),
            ):
                yield
        finally:
            vars(trainer).clear()
            vars(trainer).update(before)

    def _models(self, call: Callable[..., Any]) -> ContextManager[None]:
        trainer = self._trainer
        return replaced(trainer, **{n: _Model(getattr(trainer, n), call) for n in self._called})

    # ---- after all of them ----

    @torch.no_grad()
    def _make_metrics(self, model: Any, inputs: Any) -> None:
        """As the uncut batch makes them, with its collectives."""
        assert self.backward is not None  # it has run
        outputs, self.backward.outputs = iter(self.backward.outputs), None

        def call(*_: Any, **__: Any) -> _Outputs:
            rows = {name: _by_row(value) for name, value in next(outputs).items()}
            return _Outputs(types.SimpleNamespace(**rows), {})

        with self._models(call):
            self._loss_of(_Model(model, call), inputs)
