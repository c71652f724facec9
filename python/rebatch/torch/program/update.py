"""What the optimizers do at the end of an effective batch, and the memory that they will need."""

from __future__ import annotations

import functools
import numbers
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch.amp.grad_scaler import OptState

from rebatch.torch.program.double_updates import (
    AppliedGradient,
    applied_gradient,
    own_step,
    step_scheduler,
    warn_of_clipping,
    warn_of_scheduler,
)
from rebatch.torch.undo.copies import own_part
from rebatch.torch.undo.contents import is_same_dict
from rebatch.torch.undo.module_tree import unique

# Tensors of a parameter's size that an optimizer of PyTorch keeps from its first step on.
_KEPT = {
    "SGD": 0,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "RMSprop": 1,
    "Adadelta": 2,
    "Adagrad": 0,  # it has made it before
    "ASGD": 1,
    "Rprop": 2,
}


def _parameter_bytes(group: Dict[str, Any]) -> int:
    """On this rank."""
    parts = [own_part(p) for p in group["params"]]
    return sum(-(-p.numel() * p.element_size() // 512) * 512 for p in parts)


def _kept_tensors(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> int:
    name = type(optimizer).__name__
    kept = _KEPT[name]
    kept += bool(group.get("amsgrad")) + bool(group.get("centered"))
    return kept + (name in ("SGD", "RMSprop") and group.get("momentum", 0) != 0)


# Temporary tensors at the most within a step, beside what is kept: of all parameters at once where
# the implementation is "foreach", of the largest one where it is a loop.
_ALL = {
    "SGD": 1,
    "Adam": 1,
    "AdamW": 1,
    "NAdam": 1,
    "RAdam": 1,
    "Adamax": 1,
    "RMSprop": 1,
    "Adadelta": 2,
    "Adagrad": 2,
    "ASGD": 1,
    "Rprop": 2,
}
_LARGEST = {
    "SGD": 2,
    "Adam": 3,
    "AdamW": 3,
    "NAdam": 3,
    "RAdam": 5,
    "Adamax": 2,
    "RMSprop": 2,
    "Adadelta": 3,
    "Adagrad": 2,
    "ASGD": 2,
    "Rprop": 3,
}


def _temporary_bytes(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> int:
    name = type(optimizer).__name__
    if group.get("fused") or not group["params"]:
        return 0
    if group.get("foreach") is False:
        return _LARGEST[name] * max(_parameter_bytes({"params": [p]}) for p in group["params"])
    has_own_gradient = bool(group.get("weight_decay") or group.get("maximize"))
    more = int(name in ("NAdam", "RMSprop", "Adadelta") and has_own_gradient)
    more += name == "ASGD" and bool(group.get("maximize"))
    more += name in ("NAdam", "Adamax") and bool(group.get("capturable"))
    return (_ALL[name] + more) * _parameter_bytes(group)


def _is_before_first_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of PyTorch whose needs are known, and has not stepped yet."""
    is_known = type(optimizer).__name__ in _KEPT
    if not is_known or not type(optimizer).__module__.startswith("torch.optim"):
        return False
    if type(optimizer).__name__ == "Adagrad":
        return all(state["step"].item() == 0 for state in optimizer.state.values())
    return not optimizer.state


version_of = operator.attrgetter("_version")


def torn_text(parameters: Sequence[torch.Tensor], versions: Sequence[int]) -> str:
    """What an update has changed that ran out of memory: "out of memory" and this is a sentence.
    `versions` are those of before it."""
    changed = sum(now != then for now, then in zip(map(version_of, parameters), versions))
    if changed:
        return (
            f" in the optimizer's step, which had changed {changed} of {len(parameters)} "
            "parameters: restore a checkpoint"
        )
    return (
        " in the optimizer's step, before it changed a parameter: they are as they were, unless it "
        "writes through .data, which PyTorch does not count: then restore a checkpoint"
    )


def first_update_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The memory that the first step of an optimizer of PyTorch needs at the most: what it keeps,
    and its temporary tensors. 0 for other optimizers, and after the first step."""
    if not _is_before_first_step(optimizer):
        return 0
    return sum(
        _parameter_bytes(group) * _kept_tensors(optimizer, group)
        + _temporary_bytes(optimizer, group)
        for group in optimizer.param_groups
    )


def first_kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of that, what it keeps."""
    if not _is_before_first_step(optimizer):
        return 0
    groups = optimizer.param_groups
    return sum(_parameter_bytes(group) * _kept_tensors(optimizer, group) for group in groups)


_REHEARSALS = 4


def rehearse_first_update(optimizer: torch.optim.Optimizer) -> None:
    """Allocate and free what the first step needs, tensor by tensor and in its order, so that
    PyTorch's allocator has blocks of these sizes. Its free bytes alone tell nothing of pieces that
    are too small. What a pass gets from the device changes where the next one finds its blocks, so
    passes are made until one gets nothing: the step, which asks for the same, gets nothing then."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.is_cuda]
    if not parameters or not _is_before_first_step(optimizer):
        return
    for _ in range(_REHEARSALS):
        before = torch.cuda.memory_reserved(parameters[0].device)
        _rehearse_once(optimizer)
        if torch.cuda.memory_reserved(parameters[0].device) == before:
            return


def _rehearse_once(optimizer: torch.optim.Optimizer) -> None:
    held = []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.is_cuda]
        kept = _kept_tensors(optimizer, group)
        held += [torch.empty_like(p) for p in parameters for _ in range(kept)]
        if group.get("foreach") is False and not group.get("fused"):
            _rehearse_loop(parameters, _LARGEST[type(optimizer).__name__])
        else:
            _rehearse_all(parameters, _temporary_bytes(optimizer, group))


def _rehearse_loop(parameters: List[torch.Tensor], count: int) -> None:
    """The loop binds its names anew for each parameter, so the tensors of the one before are freed
    one by one."""
    bound: List[Optional[torch.Tensor]] = [None] * count
    for p in parameters:
        for i in range(count):
            bound[i] = torch.empty_like(p)


def _rehearse_all(parameters: List[torch.Tensor], left: int) -> None:
    held = []
    while parameters and left > 0:
        for p in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            size = _parameter_bytes({"params": [p]})
            if size <= left:
                held.append(torch.empty_like(p))
            left -= size


def check_above_zero(name: str, value: Any, what: str) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"rebatch: {name} is {value!r}: expected {what} above 0")
    if not float(value) > 0:
        raise ValueError(f"rebatch: {name} is {value!r}: expected {what} above 0")


def check_has(name: str, value: Any, member: str, expected: str) -> None:
    """TypeError for an argument that does not have a member of what is expected."""
    if not hasattr(value, member):
        raise TypeError(f"rebatch: {name} is of type {type(value).__name__}: expected {expected}")


def check_optimizer(name: str, value: Any) -> None:
    check_has(name, value, "param_groups", "a torch.optim.Optimizer")


def _inner(optimizer: Any) -> Any:
    """That of accelerate's wrapper, whose step() and zero_grad() do nothing in some iterations, and
    which has a GradScaler of its own."""
    while type(optimizer).__module__ == "accelerate.optimizer" and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _refuse_accumulation(state: Any) -> None:
    """ValueError where the program has accelerate accumulate gradients around a step."""
    if not state.sync_gradients:
        raise ValueError(
            "rebatch: a Step was called within accelerate's accumulate(), which keeps gradients "
            f"for {state.num_steps} iterations, and each call of a Step is an update: expected "
            "step(batch) without it, and all samples of an update in the batch"
        )


# After so many updates of a Step the loop is known.
_WATCHED_UPDATES = 3


class Update:
    """The optimizers' step, with a GradScaler, clipping and schedulers."""

    # A trainer clips and steps: it needs the norm, and a batch adds to gradients of those before.
    is_of_trainer = False

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        scaler: Optional[Any],
        clip: Optional[float],
    ):
        self.given, self.schedulers = list(optimizers), list(schedulers)
        for optimizer in self.given:
            check_optimizer("optimizer", optimizer)
        self.optimizers = [_inner(optimizer) for optimizer in self.given]
        self._accelerated: List[Any] = [
            o for o, inner in zip(self.given, self.optimizers) if o is not inner
        ]
        if scaler is None and not self.is_of_trainer:
            scaler = next((o.scaler for o in self._accelerated if o.scaler is not None), None)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "rebatch: the optimizer is LBFGS, whose step runs the model again: expected "
                    "one whose step takes no closure"
                )
        for scheduler in self.schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ValueError(
                    "rebatch: lr_scheduler is ReduceLROnPlateau, which needs a metric: call its "
                    "step(metric) yourself after evaluation"
                )
            check_has("lr_scheduler", scheduler, "step", "a scheduler of torch.optim")
        if scaler is not None:
            check_has("scaler", scaler, "scale", "a torch.amp.GradScaler")
            if hasattr(scaler, "is_enabled") and not scaler.is_enabled():
                scaler = None
        if clip is not None:
            check_above_zero("clip", clip, "a norm")
        self.scaler, self.clip = scaler, clip
        # Groups of each optimizer and what they have, at the points of guards.
        self._groups: Dict[int, List[Tuple[Any, List[Tuple[Any, Any]]]]] = {}
        self._watched_updates = 0 if self.is_of_trainer else _WATCHED_UPDATES
        self.applied: Optional[AppliedGradient] = None  # by the last of them
        self.clip_gradients: Callable[[Sequence[torch.Tensor], float], Any] = (
            torch.nn.utils.clip_grad_norm_
        )
        self._known: Any = None  # the parameters of which with_gradients() was asked last
        self._with_gradients: Tuple[List[Any], List[Any]] = ([], [])
        # In place of the GradScaler's own way, which makes collectives of its own for DTensors.
        self.unscale_gradients: Optional[Callable[[Any, Sequence[Any]], Any]] = None

    def save(self, point: int) -> None:
        """Before an attempt. Calls no function: it runs in each step."""
        self._groups[point] = [
            (o.param_groups, [(group, {**group}) for group in o.param_groups])
            for o in self.optimizers
        ]

    def succeeded(self) -> None:
        """What an attempt has changed there stays."""

    def restore(self, point: int) -> None:
        """After one that failed."""
        for groups, saved in self._groups[point]:
            groups[:] = [group for group, _ in saved]
            for group, entries in saved:
                if not is_same_dict(group, entries):
                    group.clear()
                    group.update(entries)

    def named_parts(self) -> List[Tuple[str, Any]]:
        """The optimizers, schedulers and scaler, by name."""
        parts = {"optimizer": self.optimizers, "lr_scheduler": self.schedulers}
        found = [
            (name if len(each) == 1 else f"{name}[{i}]", part)
            for name, each in parts.items()
            for i, part in enumerate(each)
        ]
        return found if self.scaler is None else [*found, ("scaler", self.scaler)]

    @property
    def reads_gradients(self) -> bool:
        """Whether apply() reads on the host what it computes from them: a GradScaler does."""
        return self.scaler is not None

    @property
    def parameters(self) -> List[torch.nn.Parameter]:
        groups = (g for optimizer in self.optimizers for g in optimizer.param_groups)
        return unique(p for g in groups for p in g["params"] if p.requires_grad)

    def with_gradients(
        self, parameters: Sequence[Optional[torch.nn.Parameter]]
    ) -> Tuple[List[torch.nn.Parameter], List[torch.nn.Parameter]]:
        """Of the optimizers' parameters and a model's, which may come twice or be None: all that
        get gradients, and those of them whose gradients zero_grad() leaves, and to which a batch
        adds its own."""
        groups = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        each = [*groups, *parameters]
        known = list(map(id, each)), [p is not None and p.requires_grad for p in each]
        if known != self._known:
            mine = {id(p): p for p in groups if p.requires_grad}
            others = {id(p): p for p in parameters if p is not None and p.requires_grad}
            kept = [p for key, p in others.items() if key not in mine]
            self._known, self._with_gradients = known, ([*mine.values(), *kept], kept)
        return self._with_gradients

    @property
    def device(self) -> torch.device:
        """That of the first parameter: a module may be moved at any time."""
        groups = (g for optimizer in self.optimizers for g in optimizer.param_groups)
        first: torch.Tensor = next(p for g in groups for p in g["params"] if p.requires_grad)
        return first.device

    def zero_grad(self) -> None:
        for wrapper in self._accelerated:
            _refuse_accumulation(wrapper.gradient_state)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:  # it may have unscaled gradients that are gone now
            self.scaler._per_optimizer_states.clear()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss to .grad."""
        if self.scaler is None:
            loss.backward()
            return
        # The first scale() makes two tensors: after an OOM in the second one it makes both again.
        if getattr(self.scaler, "_growth_tracker", self) is None:
            self.scaler._scale = None
        self.scaler.scale(loss).backward()

    def finish_gradients(self) -> None:
        """When the last micro-batch is accumulated: unscale and clip. This changes gradients, so an
        OOM here makes the effective batch run again."""
        if self.scaler is not None and self.unscale_gradients:
            self.unscale_gradients(self.scaler, self.optimizers)
        if self.clip is None:
            return
        if self.scaler is not None:
            states = self.scaler._per_optimizer_states
            for optimizer in self.optimizers:
                if states[id(optimizer)]["stage"] is not OptState.UNSCALED:  # by an earlier try
                    self.scaler.unscale_(optimizer)
        self.clip_gradients(self.parameters, self.clip)

    def first_bytes(self) -> int:
        return sum(first_update_bytes(optimizer) for optimizer in self.optimizers)

    def kept_bytes(self) -> int:
        """What the first step will keep."""
        return sum(first_kept_bytes(optimizer) for optimizer in self.optimizers)

    def rehearse(self) -> None:
        for optimizer in self.optimizers:
            rehearse_first_update(optimizer)

    def apply(self) -> None:
        """Change the parameters."""
        for optimizer in self.optimizers:
            step = optimizer.step
            if self.scaler is not None:
                step = functools.partial(self.scaler.step, optimizer)
            own_step(optimizer, step)

    def done(self) -> None:
        """The update was applied."""
        if self._watched_updates:
            self._watched_updates -= 1
            self.applied = applied_gradient(self.parameters)
        if self.scaler is not None:
            self.scaler.update()
        for scheduler in [s for s in self.schedulers if step_scheduler(s)]:
            warn_of_scheduler(scheduler)  # here, where all of them have stepped

    def look_at_applied(self) -> None:
        """Once the loop comes back."""
        applied, self.applied = self.applied, None
        states = self.scaler._per_optimizer_states.values() if self.scaler is not None else ()
        is_unscaled = any(state["stage"] is OptState.UNSCALED for state in states)
        if is_unscaled or (applied and applied.is_scaled()):
            self._watched_updates = 0
            warn_of_clipping()
