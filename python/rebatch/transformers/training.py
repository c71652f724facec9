"""training_step of a Trainer, in micro-batches that fit."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch

from rebatch.torch.graphs.masks import one_sequence_a_sample
from rebatch.torch.saving.lighten import checkpointing
from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.torch.trainers.captured import Unread, refusing
from rebatch.torch.trainers.update import TrainerUpdate
from rebatch.torch.trainers.whole_batches import CutOrWhole
from rebatch.torch.undo.places import is_of_program
from rebatch.transformers.refused import sharding_of
from rebatch.transformers.weigher import Weigher, weighted

# Arguments of Step that a Trainer has too.
_OF_THE_TRAINER = ("autocast", "clip", "lr_scheduler", "normalizer", "scaler")
# Of TrainingArguments, and the same on all ranks.
_SHARED = ("max_grad_norm", "gradient_accumulation_steps", "fp16", "bf16")
_ITEMS = "num_items_in_batch"  # an argument of training_step
_ACCUMULATED = "current_gradient_accumulation_steps"  # of a Trainer, since 4.48
# In the states of a TrainerState.
_STATE = "rebatch"


class TrainingStep:
    """training_step of a Trainer, once for each micro-batch. What it hands to its backward pass is
    weighted first."""

    evaluates_parts = True

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
        self.weigher = Weigher(trainer, self._cut, self.options)
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
        loss = self._run(model, inputs)
        states[_STATE] = self.backward.state_dict()
        return loss

    def _run(self, model: Any, inputs: Any) -> torch.Tensor:
        model.train()  # as training_step begins: it says what BatchNorm needs
        return self._run_batch(inputs)

    def _run_batch(self, inputs: Any) -> torch.Tensor:
        assert self.backward is not None
        with self._cut.saying_why():
            return self.backward(inputs)

    def ran_out(self) -> None:
        """Of memory, beside the batches."""
        if self.backward:
            self.backward.ran_out()

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
        weighing = {"normalizer": lambda inputs: 1, "slice": self._part}  # losses are weighted here
        return self._backward_of(model, self._loss, **weighing)

    def _backward_of(self, model: Any, loss_fn: Callable[..., Any], **own: Any) -> TrainerBackward:
        return TrainerBackward(
            model,
            loss_fn,
            optimizer=self._trainer.optimizer,
            backward=lambda loss: self._trainer.accelerator.backward(loss, **self._keywords),
            length=self._cut.length,
            within=self._cut.cut,
            shared={name: getattr(self._trainer.args, name) for name in _SHARED},
            loss_name="compute_loss",
            functions=[self._trainer.compute_loss],
            owners=[self._trainer],
            hooks=[self._plain] if is_of_program(self._plain) else [],
            **own,
            **self.options,
        )

    # ---- a micro-batch ----

    def _part(self, inputs: Any, first: int, count: int) -> Any:
        samples = self._cut.length(inputs)
        part = self._cut.part(inputs, first, count, samples)
        items, weight = self._arguments[_ITEMS], None
        if count < samples:
            assert self.backward is not None  # it runs
            model = self.backward.model
            if self._is_sharded() or not self.weigher.divides(model, inputs, samples, items):
                weight = self.weigher.weight(inputs, samples, part, count)
        # A graph serves other batches with tensors of theirs, and the same numbers.
        items = items if isinstance(items, torch.Tensor) else None
        return part, items, weight, getattr(self._trainer, _ACCUMULATED, None)

    def _loss(self, model: Any, samples: Any) -> torch.Tensor:
        given: List[tuple[Any, ...]] = []
        part, items, weight, _ = samples
        is_captured = self.backward is not None and self.backward.is_captured
        arguments, plain = self._arguments, self._plain
        if items is None:
            items = arguments[_ITEMS]
        asks = weight is not None and items is not None and self.weigher.is_divided is None
        asks = asks and self._is_sharded()
        if asks:
            arguments = {**arguments, _ITEMS: self.weigher.once_and_twice(items)}
        elif is_captured:
            is_number = isinstance(items, (int, float))
            arguments = {**arguments, _ITEMS: Unread(_ITEMS) if is_number else items}
            plain = self._captured

        def collect(loss: torch.Tensor, **keywords: Any) -> None:
            given.append((loss, keywords))

        with replaced(self._trainer.accelerator, backward=collect):
            plain(model, part, **arguments)
        if len(given) != 1:
            raise ValueError(
                f"rebatch: training_step calls accelerator.backward() {len(given)} times: "
                "expected once"
            )
        loss: torch.Tensor = given[0][0]
        self._keywords = given[0][1]
        if asks:
            loss = self.weigher.told_by(loss)
        if weight is None or self.weigher.is_divided:
            return loss
        return weighted(loss, weight)

    def _captured(self, model: Any, part: Any, **arguments: Any) -> None:
        refused = refusing("it calls the Trainer's log()", "a callback that logs")
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self._trainer, log=refused))
            if self._counts_positions(model, part):
                stack.enter_context(one_sequence_a_sample(model))
            self._plain(model, part, **arguments)

    def _counts_positions(self, model: Any, part: Any) -> bool:
        """A model of transformers does, from 0 for each sample: neither the batch nor code of the
        program gives it others."""
        run = (self._plain, self._trainer.compute_loss, *map(type, model.modules()))
        return "position_ids" not in part and not any(map(is_of_program, run))

    def _is_sharded(self) -> bool:
        """A pass of one rank alone would wait for those of the others."""
        return self.backward is not None and self.backward.is_sharded


def _can_checkpoint(trainer: Any) -> bool:
    names = ("activation_checkpointing", "gradient_checkpointing")  # the new one and the old one
    is_on = any(getattr(trainer.args, name, False) for name in names)
    is_on = is_on or getattr(sharding_of(trainer), "activation_checkpointing", False)
    return getattr(trainer.model, "supports_gradient_checkpointing", False) and not is_on


@contextlib.contextmanager
def replaced(owner: Any, **members: Any) -> Iterator[None]:
    """An object with other attributes of its own."""
    before = {name: vars(owner)[name] for name in members if name in vars(owner)}
    vars(owner).update(members)
    try:
        yield
    finally:
        for name in members:
            vars(owner).pop(name, None)
        vars(owner).update(before)
