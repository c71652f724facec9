"""What the passes of a batch know of the update that follows them, whoever makes it: which
gradients they leave, how a loss goes backward, and the memory that the first update takes."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import warnings
import weakref
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    List,
    MutableMapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch

from rebatch._user_code import user_stacklevel
from rebatch.torch.undo.contents import is_same_dict
from rebatch.torch.undo.copies import own_part
from rebatch.torch.undo.module_tree import unique
from rebatch.torch.update.double_updates import warn_of_accumulation
from rebatch.torch.update.first_memory import (
    first_kept_bytes,
    first_update_bytes,
    warm_up_first_update,
)
from rebatch.torch.update.first_step import FirstStep


def check_has(name: str, value: Any, member: str, expected: str) -> None:
    """TypeError for an argument that does not have a member of what is expected."""
    if not hasattr(value, member):
        raise TypeError(f"rebatch: {name} is of type {type(value).__name__}: expected {expected}")


def check_optimizer(name: str, value: Any) -> None:
    check_has(name, value, "param_groups", "a torch.optim.Optimizer")


def inner_optimizer(optimizer: Any) -> Any:
    """That of accelerate's wrapper, whose step() and zero_grad() do nothing in some iterations, and
    which has a GradScaler of its own."""
    while type(optimizer).__module__ == "accelerate.optimizer" and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def are_same(ones: List[Any], others: List[Any]) -> bool:
    """Whether two lists have the same objects: tensors are not compared."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def parameters_of(optimizers: Iterable[Any]) -> List[torch.nn.Parameter]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def optimizers_with(parameters: Iterable[torch.nn.Parameter]) -> List[torch.optim.Optimizer]:
    """All optimizers of the process that have one of these parameters."""
    wanted: Set[int] = set(map(id, parameters))
    kinds: Dict[type, bool] = {}
    found = []
    gc.collect()  # optimizers that nobody has are in cycles with their schedulers
    for value in gc.get_objects():
        kind = type(value)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, torch.optim.Optimizer)
        if kinds[kind]:
            found.append(inner_optimizer(value))
    del value
    with_one = []
    for optimizer in unique(found):
        with contextlib.suppress(Exception):  # it may be one that was never made whole
            if not wanted.isdisjoint(map(id, parameters_of([optimizer]))):
                with_one.append(optimizer)
    return with_one


# Of the models for which they were looked for last: the parameters, and weak references.
_found: MutableMapping[torch.nn.Module, Tuple[FrozenSet[int], List[Callable[[], Any]]]] = (
    weakref.WeakKeyDictionary()
)


def _found_once(
    model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]
) -> List[Callable[[], Any]]:
    """Those with one of these parameters of a model, in weak references. A look at all objects of
    the process takes a tenth of a second and more, so what was found is good while it lives."""
    wanted = list(parameters)
    key = frozenset(map(id, wanted))
    known, found = _found.get(model, (None, []))
    if known != key or not found or any(reference() is None for reference in found):
        found = [weakref.ref(optimizer) for optimizer in optimizers_with(wanted)]
        _found[model] = key, found
    return found


def _scaled_backward(scaler: Any, loss: torch.Tensor) -> None:
    # The first scale() makes two tensors: after an OOM in the second one it makes both again.
    if getattr(scaler, "_growth_tracker", scaler) is None:
        scaler._scale = None
    scaler.scale(loss).backward()


class Passes:
    """The update is the program's: gradients of all parameters of a model are added to .grad.

    modules       the model's
    optimizers    of the program, as far as they are known
    backward      backward(loss), or a GradScaler"""

    is_of_program = True
    wants_norm = False  # of the gradients of a model of fully_shard()
    reads_gradients = False  # whether apply() reads on the host what it computes from them
    divided_at = ""  # the line in which the program divides what a batch returns
    scaler_option = "backward=scaler"  # what a program writes for a loss that is scaled

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        backward: Any = None,
    ):
        self._modules, self.given = list(modules), list(optimizers)
        for optimizer in self.given:
            check_optimizer("optimizer", optimizer)
        self.optimizers = [inner_optimizer(optimizer) for optimizer in self.given]
        self._found: List[Callable[[], Any]] = []  # weak references to the program's own
        # Weak references to those that have not stepped yet; None: they were not looked for.
        self._unstepped: Optional[List[Tuple[Callable[[], Any], FirstStep]]] = None
        self._stepped: List[Tuple[Callable[[], Any], FirstStep]] = []  # since
        self.schedulers: List[Any] = []
        self.scaler: Any = None  # that unscales here
        self.norm: Any = None  # a GradNorm of the last update
        self.take_backward(backward)
        # Groups of each optimizer and what they have, at the points of guards.
        self._groups: Dict[int, List[Tuple[Any, List[Tuple[Any, Any]]]]] = {}
        # What with_gradients() was asked last, and of the cleared ones those that no model has.
        self._asked: Tuple[List[Any], List[Any], List[bool]] = ([], [], [])
        self._apart: List[Tuple[Any, bool]] = []
        self._with_gradients: Tuple[List[Any], List[Any]] = ([], [])
        # In place of PyTorch's ways, which make collectives of their own for DTensors.
        self.clip_gradients: Callable[[Sequence[torch.Tensor], float], Any] = (
            torch.nn.utils.clip_grad_norm_
        )
        self.unscale_gradients: Optional[Callable[[Any, Sequence[Any]], Any]] = None

    def take_backward(self, backward: Any) -> None:
        self.scales: Any = None  # a scaler of the loss
        if hasattr(backward, "scale"):
            self.scales, backward = backward, functools.partial(_scaled_backward, backward)
        if not (backward is None or callable(backward)):
            raise TypeError(
                f"rebatch: backward is of type {type(backward).__name__}: expected a function "
                "backward(loss), such as accelerator.backward, or a torch.amp.GradScaler"
            )
        # Whether gradients may have a graph of their own, of a function of the program.
        self.may_keep_graph = self.scales is None and backward is not None
        self.functions = [backward] if self.may_keep_graph else []  # of the program
        self._backward: Callable[[torch.Tensor], Any] = backward or torch.Tensor.backward
        self._has_told_accumulation, self._looks_divided = False, 3

    # ---- what an attempt changes ----

    def save(self, point: int) -> None:
        """Before an attempt. Calls no function: it runs in each step."""
        self._groups[point] = [
            (o.param_groups, [(group, {**group}) for group in o.param_groups])
            for o in self.optimizers
        ]

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
        return found if self.scales is None else [*found, ("scaler", self.scales)]

    def shared(self) -> Dict[str, str]:
        """What must be the same on all ranks."""
        return {}

    # ---- which gradients ----

    def every_parameter(self) -> Iterable[torch.nn.Parameter]:
        """Those that get gradients, or may."""
        return (p for module in self._modules for p in module.parameters())

    @property
    def parameters(self) -> List[torch.nn.Parameter]:
        """Those that get gradients."""
        return unique(p for p in self.every_parameter() if p.requires_grad)

    def _cleared(self) -> List[torch.nn.Parameter]:
        """Those whose gradients zero_grad() clears."""
        return []

    def with_gradients(
        self, parameters: List[torch.nn.Parameter], need: List[bool]
    ) -> Tuple[List[torch.nn.Parameter], List[torch.nn.Parameter]]:
        """Of the parameters whose gradients zero_grad() clears and a model's, which may come twice,
        and those that `need` a gradient: all that get gradients, and those of them whose gradients
        it leaves, and to which a batch adds its own."""
        cleared, asked = self._cleared(), self._asked
        if not (
            are_same(cleared, asked[0])
            and are_same(parameters, asked[1])
            and need == asked[2]
            and all(p.requires_grad is needs for p, needs in self._apart)
        ):
            mine = {id(p): p for p in cleared if p.requires_grad}
            others = {id(p): p for p, needs in zip(parameters, need) if needs}
            kept = [p for key, p in others.items() if key not in mine]
            self._asked, self._with_gradients = (
                (cleared, parameters, need),
                (
                    [*mine.values(), *kept],
                    kept,
                ),
            )
            known = set(map(id, parameters))
            self._apart = [(p, p.requires_grad) for p in cleared if id(p) not in known]
        return self._with_gradients

    @property
    def device(self) -> torch.device:
        """That of the first parameter that gets a gradient, or of the first one: a module may be
        moved at any time."""
        first = None
        for p in self.every_parameter():
            if p.requires_grad:
                return p.device
            first = p if first is None else first
        return torch.device("cpu") if first is None else first.device

    # ---- around the passes ----

    def begin(self) -> None:
        """A batch begins."""
        if self._backward is torch.Tensor.backward and not self._has_told_accumulation:
            self._has_told_accumulation = warn_of_accumulation()

    def zero_grad(self) -> None:
        """Before its first pass, and before the first one again."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss to .grad."""
        self._backward(loss)

    def finish_gradients(self) -> None:
        """When the last micro-batch is accumulated. This may change gradients, so an OOM here makes
        the effective batch run again."""

    def apply(self) -> None:
        """Change the parameters."""

    def done(self) -> None:
        """The batch has succeeded."""
        for optimizer, first in self._find_unstepped():
            first.passes_done(parameters_of([optimizer]))

    # ---- the memory of the first update ----

    def find(self) -> None:
        """Where no optimizer was given, look for the program's."""
        if not self.optimizers and self._modules:
            self._found = _found_once(self._modules[0], self.parameters)
        if self._unstepped is None and self.known_optimizers():
            self._unstepped = [(weakref.ref(o), FirstStep(o)) for o in self.known_optimizers()]

    def note_earlier(self) -> None:
        """A batch begins, and there are gradients."""
        if self.divided_at:
            self._tell_divided()
        self._find_unstepped()
        stepped, self._stepped = self._stepped, []
        for reference, first in stepped:
            first.warn_if_kept(reference())

    def _tell_divided(self) -> None:
        """Unless they are zeros, gradients accumulate. Waits for the GPU, in a few batches."""
        gradients = [own_part(p.grad) for p in self.parameters if p.grad is not None]
        is_sure = any(bool(gradient.any()) for gradient in gradients)
        self._looks_divided -= 1
        line = self.divided_at
        if is_sure or not self._looks_divided:
            self.divided_at = ""
        if is_sure:
            warnings.warn(
                f"rebatch: {line} divides the loss of backward(batch), which has gone backward "
                "undivided, so the gradients of several batches are their sum, unless loss_fn "
                "divides too: expected it to divide, or backward(batches=[...]) for their mean",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )

    def known_optimizers(self) -> List[Any]:
        """Those that were given, or found."""
        found = (reference() for reference in self._found)
        return self.optimizers or [optimizer for optimizer in found if optimizer is not None]

    def _find_unstepped(self) -> List[Tuple[Any, FirstStep]]:
        """Of those that were looked for. SGD keeps nothing that would tell."""
        if not self._unstepped:
            return []
        for each in self._unstepped:
            if each[1].has_run:
                each[1].let_go()
                self._stepped.append(each)
        self._unstepped = [each for each in self._unstepped if not each[1].has_run]
        found = [(reference(), first) for reference, first in self._unstepped]
        return [each for each in found if each[0] is not None]

    def _before_first_step(self) -> List[Any]:
        if self._unstepped is None:
            return self.known_optimizers()
        return [optimizer for optimizer, _ in self._find_unstepped()] if self._unstepped else []

    def first_bytes(self) -> int:
        """What the first step needs at the most."""
        return sum(map(first_update_bytes, self._before_first_step()))

    def kept_bytes(self) -> int:
        """What the first step will keep."""
        return sum(map(first_kept_bytes, self._before_first_step()))

    def warm_up(self) -> None:
        for optimizer in self._before_first_step():
            warm_up_first_update(optimizer)
