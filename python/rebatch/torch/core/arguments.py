"""The arguments of a Backward or a Step: what is said of a wrong one, and how some become lists
with names. Must not know a batch that runs."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set, Tuple

import torch

from rebatch.torch.program.mistakes import check_loss_fn
from rebatch.torch.program.program import Program, is_manager, listed
from rebatch.torch.ranks.agreement import REFUSED
from rebatch.torch.session.options import PassOptions
from rebatch.torch.session.session import session_options
from rebatch.torch.undo.generators import Generators
from rebatch.torch.update.passes import Passes, check_has, parameters_of

if TYPE_CHECKING:
    from rebatch.torch.ranks.ranks import Ranks


# What a function with @contextlib.contextmanager returns.
_ONCE = type(contextlib.contextmanager(iter)(()))


def check_arguments(program: Program) -> None:
    """Arguments that would else fail within a step, or only at an OOM."""
    for module in listed(program.model):
        check_has("model", module, "named_buffers", "a torch.nn.Module")
    given = [("loss_fn", program.loss_fn), *(("lighten", level) for level in program.lighten)]
    may_be_none = (
        ("embed", program.embed),
        ("normalizer", program.normalizer),
        ("cost", program.cost),
        ("on_event", program.on_event),
    )
    given += [(name, value) for name, value in may_be_none if value is not None]
    for name, value in given:
        if not callable(value):
            raise TypeError(f"rebatch: {name} is {value!r}: expected a function")
    check_loss_fn(program.loss_fn, program.embed is not None)
    if program.embed is not None:
        _check_embed(program)
    _check_autocast(program.autocast)
    Generators((), program.generators)
    session_options(**program.options)


def _check_embed(program: Program) -> None:
    refused = {
        "normalizer": program.normalizer and "what the sum of the losses of parts is divided by",
        "graphs": program.graphs and "graphs of a micro-batch's loss",
    }
    for name, what in refused.items():
        if what:
            raise ValueError(
                f"rebatch: {name} is given beside embed, whose loss_fn returns the loss of the "
                f"whole batch: expected no {name}, {what}"
            )


_MOST_GRAPHS = 64

# Options of a Step, and what a program with a Backward does instead.
_OF_THE_UPDATE = {
    "clip": "torch.nn.utils.clip_grad_norm_(model.parameters(), {value!r}) after backward(batch)",
    "scaler": (
        "backward=scaler here, and scaler.step(optimizer) and scaler.update() after backward(batch)"
    ),
    "lr_scheduler": "scheduler.step() after optimizer.step()",
    "before_update": "its lines between backward(batch) and optimizer.step()",
}


def check_names(kind: type, options: Dict[str, Any]) -> None:
    """TypeError for a keyword that is no argument of a Backward, or of a Step."""
    given = inspect.signature(kind).parameters.values()
    known = [*PassOptions.__annotations__, *(p.name for p in given if p.kind is p.KEYWORD_ONLY)]
    for name, value in options.items():
        if name in known:
            continue
        if name in _OF_THE_UPDATE:
            raise TypeError(
                f"rebatch: {kind.__name__} has no option {name}, since the update is the "
                f"program's: expected {_OF_THE_UPDATE[name].format(value=value)}, or a Step"
            )
        near = difflib.get_close_matches(name, known, len(known), 0.0)  # all, the nearest first
        meant = f"expected one of {', '.join(near)}"
        if difflib.get_close_matches(name, near[:1]):
            meant = f"did you mean {near[0]}? The others are {', '.join(near[1:])}"
        raise TypeError(f"rebatch: {kind.__name__} has no option {name}: {meant}")


def graphs_kept(graphs: Any, gradients: str) -> int:
    """How many CUDA graphs of micro-batches are kept."""
    if not (isinstance(graphs, int) and 0 <= graphs <= _MOST_GRAPHS):
        raise ValueError(
            f"rebatch: graphs is {graphs!r}: expected False, True, or how many shapes of "
            f"micro-batches are kept as graphs, at most {_MOST_GRAPHS}"
        )
    if graphs and gradients != "fresh":
        raise ValueError(
            f"rebatch: graphs={graphs!r} keeps a micro-batch's gradients apart, and gradients is "
            f"{gradients!r}: expected gradients='fresh'"
        )
    return 2 if graphs is True else int(graphs)


def _check_autocast(autocast: Any) -> None:
    if isinstance(autocast, _ONCE):
        raise TypeError(
            "rebatch: autocast is a context manager that can be entered once, and each "
            "micro-batch enters it: expected the function that makes it, without a call"
        )
    is_known = autocast is None or isinstance(autocast, torch.dtype)
    if not (is_known or is_manager(autocast) or callable(autocast)):
        raise TypeError(
            f"rebatch: autocast is {autocast!r}: expected a dtype such as torch.bfloat16, a "
            "context manager, or a function that returns one"
        )


def named_modules(model: Any) -> List[Tuple[str, torch.nn.Module]]:
    """A single model's parameters have the names that it gives them."""
    modules = listed(model)
    return [(f"model[{i}]" if len(modules) > 1 else "", m) for i, m in enumerate(modules)]


def named_state(state: Any) -> List[Tuple[str, Any]]:
    parts = listed(state)
    for i, part in enumerate(parts):
        has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        if not (isinstance(part, torch.Tensor) or has_state):
            raise TypeError(
                f"rebatch: state[{i}] is of type {type(part).__name__}: expected a tensor, a "
                "module, or an object with state_dict() and load_state_dict()"
            )
    return [(f"state[{i}]", part) for i, part in enumerate(parts)]


def check_match(modules: torch.nn.Module, update: Passes, state: Any) -> None:
    """ValueError for a model and an optimizer that do not go together."""
    if not (update.parameters or update.is_of_program):
        raise ValueError("rebatch: the optimizer has no parameter that requires a gradient")
    parts = [part for part in listed(state) if isinstance(part, torch.nn.Module)]
    known: Set[Any] = {p for module in (modules, *parts) for p in module.parameters()}
    known.update(part for part in listed(state) if isinstance(part, torch.Tensor))
    for optimizer in update.optimizers:
        its = parameters_of([optimizer])
        if its and known.isdisjoint(its):
            raise ValueError(
                f"rebatch: no parameter of the optimizer {type(optimizer).__name__} is in the "
                "model: expected an optimizer of the model's parameters, or a list of all the "
                "modules that it updates as the model"
            )


def ranks_or_none(
    program: Program,
    group: Any,
    timeout_seconds: float,
    window: Optional[bool],
    shared: Dict[str, str],
) -> Optional[Ranks]:
    """The other ranks, where there are some. `shared` is what must be the same on all of them,
    beside what this finds in the program."""
    if group is None and not torch.distributed.is_available():
        return None
    from rebatch.torch.ranks.ranks import ranks_of  # needs a PyTorch with torch.distributed

    update = program.update
    own_sizes = "cost" if program.cost else "learn" if program.options.get("learn") else ""
    own_sizes = "embed" if program.embed is not None else own_sizes
    if window is None and own_sizes:
        window = True  # each rank has its own sizes
    shared = {
        **update.shared(),
        "normalizer": "None" if program.normalizer is None else "given",
        **shared,
    }
    ranks = ranks_of(program.modules, group, timeout_seconds, window, update.parameters, shared)
    if ranks and ranks.lockstep and own_sizes:
        raise ValueError(
            f"rebatch: {own_sizes} is given, and window is False: expected one of them, since "
            "all ranks have the same micro-batches without a window"
        )
    if ranks and ranks.window and not program.is_fresh:
        raise ValueError(
            "rebatch: gradients is 'inplace', and the model is one of fully_shard(): expected "
            "'fresh'"
        )
    if ranks:
        ranks.take_update(update)
    return ranks


def tell_ranks(
    model: Any, group: Any, timeout_seconds: float, window: Optional[bool], error: Exception
) -> None:
    """This rank makes none: the others, which compare what theirs are made with, hear why."""
    with contextlib.suppress(Exception):
        from rebatch.torch.ranks.ranks import ranks_of  # needs a PyTorch with torch.distributed

        modules = torch.nn.ModuleList(listed(model))
        ranks_of(modules, group, timeout_seconds, window, [], {REFUSED: str(error)})
