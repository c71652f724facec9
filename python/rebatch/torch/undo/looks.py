"""What there is at one point: marks and sums of tensors, and modes of modules. And what an attempt
moves and puts back itself."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, List, Optional, Sequence, Tuple

import torch

from rebatch.torch.undo.copies import lazy_sums_of, own_part, read_sums, sums_of
from rebatch.torch.undo.module_tree import Held, Tree, is_compiled, unique
from rebatch.torch.undo.places import Place

# Looks at attributes within an attempt, when modules run.
_LOOKS_WITHIN = 16


def _differ(a: Optional[int], b: Optional[int]) -> bool:
    return a is not None and b is not None and a != b


def mark_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes with the tensor's contents."""
    part = own_part(tensor)  # whose version is its own
    try:
        version = tensor._version + part._version
    except RuntimeError:  # one of inference mode has none
        return 0, 0
    try:
        return version, part.data_ptr()
    except (RuntimeError, NotImplementedError):  # its contents lie in other tensors
        return version, 0


class Look:
    """All that there was at one point."""

    def __init__(self, held: Held, batch: Sequence[Tuple[str, torch.Tensor]], compares: bool):
        self.held, self.batch = held, batch
        self.tensors = held.tensors + [tensor for _, tensor in batch]
        self.marks = [mark_of(t) for t in self.tensors]
        self._on_device = lazy_sums_of(self.tensors) if compares else None
        self._sums: Optional[List[Optional[int]]] = None

    @property
    def has_sums(self) -> bool:
        """Contents can be compared."""
        return self._on_device is not None

    @property
    def sums(self) -> List[Optional[int]]:
        """Of the contents. The host waits for the device where they are first asked for."""
        if self._sums is None:
            self._sums = read_sums(self._on_device or ())
        return self._sums

    def without_sums(self) -> "Look":
        """The same, for an attempt whose contents are not compared."""
        look = copy.copy(self)
        look._on_device = None
        return look

    def changed(self, later: Optional["Look"] = None) -> List[torch.Tensor]:
        """The tensors that have changed in place, until `later`, or until now."""
        marks = later._of(later.marks, self.tensors) if later else [None] * len(self.tensors)
        found = [t for t, a, b in zip(self.tensors, self.marks, marks) if a != (b or mark_of(t))]
        return unique(found + self.changed_contents(later))

    def changed_contents(self, later: Optional["Look"] = None) -> List[torch.Tensor]:
        """Tensors whose contents differ."""
        if not self.has_sums or (later and not later.has_sums):
            return []
        now = later._of(later.sums, self.tensors) if later else sums_of(self.tensors)
        return [t for t, a, b in zip(self.tensors, self.sums, now) if _differ(a, b)]

    def unmarked(self, later: "Look") -> List[torch.Tensor]:
        """Those that have changed without a mark."""
        marks = later._of(later.marks, self.tensors)
        marked = {
            id(t) for t, a, b in zip(self.tensors, self.marks, marks) if a != (b or mark_of(t))
        }
        return [t for t in self.changed_contents(later) if id(t) not in marked]

    def _of(self, figures: Sequence[Any], tensors: Sequence[torch.Tensor]) -> List[Any]:
        """Those of these tensors; None for a tensor that was not there."""
        known = {id(t): figure for t, figure in zip(self.tensors, figures)}
        return [known.get(id(t)) for t in tensors]


class Flags:
    """Which modules train, and which parameters need a gradient, at one point."""

    def __init__(
        self,
        modules: List[torch.nn.Module],
        parameters: List[torch.nn.Parameter],
        need_gradient: List[bool],
    ):
        self._modules, self._parameters, self._need_gradient = modules, parameters, need_gradient
        self._modes = [module.training for module in modules]

    def put_back(self) -> None:
        for module, is_training in zip(self._modules, self._modes):
            if module.training is not is_training:
                module.training = is_training
        for p, needs_gradient in zip(self._parameters, self._need_gradient):
            if p.requires_grad is not needs_gradient:
                p.requires_grad_(needs_gradient)


class Watch:
    """Finds what is another when a module runs than before the attempt: parameters that a loss_fn
    perturbs through .data, and puts back, and attributes that a pair of hooks switches on and off.
    That leaves no other trace."""

    def __init__(self, tree: Tree, before: Look):
        modules = tree.modules
        self._tree, self._before = tree, before
        self._calls, self._gap = 0, 1 + len(modules) // _LOOKS_WITHIN
        self.moved: List[Place] = []  # attributes
        self._tensors: List[torch.Tensor] = []
        self._sums: List[Optional[torch.Tensor]] = []
        self._handles: List[Any] = []
        if any(is_compiled(module) for module in modules):
            return
        for module in modules:
            if any(p is not None for p in module._parameters.values()):
                with contextlib.suppress(RuntimeError):  # one of TorchScript
                    self._handles.append(module.register_forward_pre_hook(self._look))

    def _look(self, module: torch.nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._calls % self._gap == 0 and self._calls < self._gap * _LOOKS_WITHIN:
            self.moved += self._before.held.moved(self._tree.prefixes())
        self._calls += 1
        own = [p for p in module._parameters.values() if p is not None]
        self._tensors += own
        self._sums += lazy_sums_of(own)

    def found(self) -> List[torch.Tensor]:
        """Those that were found."""
        before = {id(t): total for t, total in zip(self._before.tensors, self._before.sums)}
        sums = read_sums(self._sums)
        return unique(t for t, now in zip(self._tensors, sums) if _differ(before.get(id(t)), now))

    def end(self) -> None:
        """Nothing is looked at from now on."""
        for handle in self._handles:
            handle.remove()
