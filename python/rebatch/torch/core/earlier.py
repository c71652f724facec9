"""What an earlier Step or Backward has found with the same model and loss_fn, for one that is made
anew, as in a function that trains one epoch. Must not know a training that runs."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, Dict, MutableMapping, Set, Tuple

import torch

from rebatch.torch.check.cut_comparison import FirstCut
from rebatch.torch.check.first_results import FirstResults
from rebatch.torch.program.program import Program


@dataclasses.dataclass
class Found:
    """With which another one goes on."""

    micro: int = 0  # samples; 0: whole batches
    level: int = 0  # of lighten
    is_told: bool = False  # what changes outside of the model
    swallowed: Set[str] = dataclasses.field(default_factory=set)  # lines that were told
    cuts: FirstCut = dataclasses.field(default_factory=FirstCut)
    results: FirstResults = dataclasses.field(default_factory=FirstResults)  # of evaluate()


_found: MutableMapping[torch.nn.Module, Dict[Tuple[Any, ...], Found]] = weakref.WeakKeyDictionary()


def found_earlier(kind: type, program: Program) -> Found:
    """Of the last one with this model, these optimizers, a loss_fn of the same lines, and these
    limits; or a new one."""
    first, *others = program.modules
    function: Any = program.loss_fn
    while isinstance(function, functools.partial):
        function = function.func
    limits = {n: v for n, v in program.options.items() if n.startswith("micro_")}
    key = (
        kind,
        tuple(map(id, (*others, *program.update.optimizers))),
        getattr(function, "__code__", type(function)),
        repr(sorted(limits.items())),
    )
    return _found.setdefault(first, {}).setdefault(key, Found())
