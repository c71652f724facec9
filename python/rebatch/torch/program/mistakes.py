"""What a loss_fn must leave to the Step, which says so before any update. Must not know a session,
and how gradients are accumulated."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import re
import types
from typing import Any, Container, Iterator, List, NoReturn, Sequence, Tuple

import torch

from rebatch._library import Status
from rebatch.torch.undo.undo import NotPutBackError


def no_loss_fn(_model: Any, _samples: Any) -> NoReturn:
    """Of a Backward that was made without one."""
    raise ValueError(
        "rebatch: the Backward has no loss_fn: expected Backward(model, loss_fn), or a loop over "
        "backward.parts(batch)"
    )


def check_loss_fn(function: Any, takes_embeddings: bool = False) -> None:
    """TypeError for a criterion of PyTorch, which takes what a model returns, and for a function
    that cannot be called with a model and samples."""
    inner = function.func if isinstance(function, functools.partial) else function
    kind = inner if hasattr(inner, "__qualname__") else type(inner)
    if kind.__module__ in ("torch.nn.modules.loss", "torch.nn.functional"):
        raise TypeError(
            f"rebatch: loss_fn is {getattr(inner, '__name__', inner)}, which does not run the "
            "model: expected a function of the model and samples, such as "
            "lambda model, samples: criterion(model(samples[0]), samples[1])"
        )
    try:
        signature = inspect.signature(function)
    except Exception:  # a function of C, or annotations that are no more than text
        return
    try:
        signature.bind(*[None] * (3 if takes_embeddings else 2))
    except TypeError:
        if takes_embeddings:
            raise TypeError(
                f"rebatch: loss_fn takes ({', '.join(signature.parameters)}), and embed is given: "
                "expected loss_fn(model, embeddings, batch), which gets what embed returns for the "
                "whole batch"
            ) from None
        raise TypeError(
            f"rebatch: loss_fn takes ({', '.join(signature.parameters)}): expected "
            "loss_fn(model, samples), which gets a part of the batch as samples, such as (x, y)"
        ) from None


def refuse_order() -> NoReturn:
    """TypeError for a Backward that was made with the arguments of a Step."""
    raise TypeError(
        "rebatch: Backward was made with the arguments of a Step: expected "
        "Backward(model, loss_fn), or Backward(model, loss_fn, optimizer=optimizer)"
    )


def refuse_fields(name: str) -> NoReturn:
    """TypeError for a call with the fields of a batch."""
    raise TypeError(
        f"rebatch: {name} was called with the fields of a batch: expected the batch as one "
        f"argument, such as {name}((x, y)) or {name}({{'x': x, 'y': y}}), and loss_fn gets samples "
        "in that form"
    )


_BACKWARD = ("backward", "manual_backward")
_NAMES = re.compile("LOAD|STORE")  # of variables; an instruction may have two


def refuse_backward(caller: types.FrameType, is_of_program: bool) -> None:
    """ValueError where a program that calls one goes straight on to a backward() of its loss."""
    code = [it for it in dis.get_instructions(caller.f_code) if it.offset > caller.f_lasti]
    is_of_loss = "ATTR" in code[0].opname or "METHOD" in code[0].opname
    if is_of_loss and code[0].argval in _BACKWARD:  # step(batch).backward()
        _refuse_line(caller, code[0].offset, is_of_program)
    if not re.match("STORE_(FAST|NAME|GLOBAL|DEREF)", code[0].opname):
        return
    loss, *others = _variables(code[0])
    names = [("LOAD", name) for _, name in others]  # of a statement
    for it in code[1:]:
        names += (
            [("", it.argval)] if "ATTR" in it.opname or "METHOD" in it.opname else _variables(it)
        )
        if it.opcode in dis.hasjrel or it.opcode in dis.hasjabs or loss in names:
            return  # what runs next is not known, or the loss is another
        if ("LOAD", loss[1]) in names and any(("", name) in names for name in _BACKWARD):
            _refuse_line(caller, it.offset, is_of_program)
        if it.opname == "POP_TOP" or "STORE" in it.opname:
            names = []


def divided_at(caller: types.FrameType) -> str:
    """The line in which a program that calls one divides its loss by a number or a variable, and
    keeps that as the loss, as a loop that accumulates gradients does; or nothing."""
    code = [it for it in dis.get_instructions(caller.f_code) if it.offset > caller.f_lasti]
    words = [(kind, name, it) for it in code[:12] for kind, name in _words(it)]
    loss = None
    if words[0][0] == "STORE" and [("LOAD", words[0][1])] == [word[:2] for word in words[1:2]]:
        loss, words = words[0][1], words[2:]  # in the next statement
    depth = 0  # of the stack above the loss
    for (kind, _, it), (next_kind, next_name, _) in zip(words, words[1:]):
        if kind == "/" and depth == 1:
            is_kept = next_kind == "STORE" and loss in (None, next_name)
            return _line_of(caller, it.offset) if is_kept else ""
        depth += {"LOAD": 1, "[]": -1}.get(kind, 0)
        if depth < 1 or kind not in ("LOAD", "[]", "."):
            break
    return ""


def _words(it: dis.Instruction) -> List[Tuple[str, Any]]:
    """What it does, in words for the operations of a plain expression."""
    if "ATTR" in it.opname or "METHOD" in it.opname:
        return [(".", it.argval)]
    if "TRUE_DIVIDE" in it.opname or (it.opname, it.argrepr) in _DIVISIONS:
        return [("/", None)]
    if it.opname == "BINARY_SUBSCR" or (it.opname, it.argrepr) == ("BINARY_OP", "[]"):
        return [("[]", None)]
    return _variables(it) or [(it.opname, None)]


_DIVISIONS = (("BINARY_OP", "/"), ("BINARY_OP", "/="))


def _variables(it: dis.Instruction) -> List[Tuple[str, Any]]:
    """("LOAD" or "STORE", name) of each in an instruction."""
    names = it.argval if isinstance(it.argval, tuple) else (it.argval,)
    return list(zip(_NAMES.findall(it.opname), names))


def _line_of(caller: types.FrameType, offset: int) -> str:
    code = caller.f_code
    line = max(line for at, line in dis.findlinestarts(code) if at <= offset and line)
    return f"{code.co_filename}:{line}"


def _refuse_line(caller: types.FrameType, offset: int, is_of_program: bool) -> NoReturn:
    name, more = (
        ("Backward", "") if is_of_program else ("Step", ", optimizer.step() and zero_grad()")
    )
    raise ValueError(
        f"rebatch: {_line_of(caller, offset)} calls backward() on the loss of "
        f"{name.lower()}(batch), and a {name} has done that: expected the loop without this "
        f"line{more}"
    )


def refuse_gradients(
    loss_name: str, models: Sequence[torch.nn.Module], given: Sequence[torch.nn.Parameter]
) -> NoReturn:
    """ValueError for parameters that had no gradient before loss_fn ran, and have one now: it is
    not weighted by the part of the batch."""
    names = _names_of(models, set(map(id, given))) or ["a parameter of the optimizer"]
    raise ValueError(
        f"rebatch: {names[0]} got a gradient while {loss_name} ran, which counts once in each "
        f"micro-batch, whatever its size: expected {loss_name} to return the sum of its losses and "
        "to call no backward(), since rebatch calls it"
    )


def _names_of(models: Sequence[torch.nn.Module], wanted: Container[int]) -> List[str]:
    """The names of the parameters with these ids."""
    return [
        f"'model[{i}].{name}'" if len(models) > 1 else repr(name)
        for i, model in enumerate(models)
        for name, p in model.named_parameters()
        if id(p) in wanted
    ]


def _mark_of_gradient(p: torch.nn.Parameter) -> Tuple[int, int]:
    return id(p.grad), getattr(p.grad, "_version", 0)


def marks_of_gradients(parameters: Sequence[torch.nn.Parameter]) -> List[Tuple[Any, Any]]:
    return [(p, _mark_of_gradient(p)) for p in parameters if p.grad is not None]


def refuse_changed(models: Sequence[torch.nn.Module], marks: Sequence[Tuple[Any, Any]]) -> None:
    """ValueError where a block has changed gradients that it had made: what clips or clears them
    is to see those of the whole batch."""
    changed = {id(p) for p, mark in marks if _mark_of_gradient(p) != mark}
    if changed:
        names = _names_of(models, changed) or ["a parameter of the optimizer"]
        raise ValueError(
            f"rebatch: the gradient of {names[0]} was changed in a block of parts() after "
            "part.backward(loss), and is that of some samples: expected clipping, unscale_() and "
            "zero_grad() below the loop over backward.parts(batch), and one part.backward() with "
            "the sum of the losses"
        )


def hooked(parameters: Sequence[torch.nn.Parameter]) -> List[torch.nn.Parameter]:
    """Those with a hook that may step an optimizer within a backward pass."""
    return [p for p in parameters if p._post_accumulate_grad_hooks]


def refuse_stepped(
    models: Sequence[torch.nn.Module], noted: Sequence[Tuple[torch.nn.Parameter, int]]
) -> None:
    """Error where a hook has stepped, in the backward pass of a micro-batch that is no batch."""
    changed = {id(p) for p, version in noted if p._version != version}
    if changed:
        names = _names_of(models, changed)
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        raise NotPutBackError(
            f"rebatch: {', '.join(names[:3])}{more} changed within a backward pass, and each has a "
            "hook of register_post_accumulate_grad_hook(): an optimizer that steps there steps "
            "once a micro-batch, and its state cannot be put back: expected the optimizer to be "
            "given to the Step, which steps it once a batch",
            Status.E_STATE,
        )


def refuse_graphs(trained: Sequence[torch.nn.Parameter], has_ranks: bool) -> None:
    """ValueError for gradients with a graph of their own, of backward(create_graph=True). Gradients
    that are kept apart are added outside of it, and so are those of ranks."""
    for p in trained:
        gradient = p.grad
        if gradient is None or not gradient.requires_grad:
            continue
        expected = (
            "torch.autograd.grad(..., create_graph=True) within loss_fn"
            if has_ranks
            else 'gradients="inplace", with which autograd adds them, or '
            "micro_smallest=<the batch's size> and no gradients before the batch"
        )
        raise ValueError(
            "rebatch: the gradients have a graph, of backward(create_graph=True), and are to be "
            f"added to {'those of other ranks' if has_ranks else 'others'} without it: expected "
            f"{expected}"
        )


def refuse_scaled(loss_name: str, loss: torch.Tensor, option: str) -> None:
    """ValueError for a loss from scale() of a GradScaler. Its weight would be another one once the
    scale changes, and the update that many times as large."""
    if any(map(_is_scale, _factors(loss))):
        raise ValueError(
            f"rebatch: {loss_name} returned a loss that a GradScaler has scaled: expected the loss "
            f"itself, and {option} among the options, by which rebatch scales it"
        )


def _factors(loss: torch.Tensor) -> Iterator[Any]:
    """Those of the last operations of which a loss is the result."""
    node = loss.grad_fn
    for _ in range(4):
        if node is None:
            return
        yield getattr(node, "_saved_other", None)
        node = node.next_functions[0][0] if node.next_functions else None


def _is_scale(factor: Any) -> bool:
    is_like_one = isinstance(factor, torch.Tensor) and factor.dtype == torch.float32
    if not is_like_one or factor.dim() or not factor.is_leaf or factor.requires_grad:
        return False
    holders = gc.get_referrers(factor)
    holders += gc.get_referrers(*(h for h in holders if isinstance(h, dict)))
    return any(isinstance(holder, torch.amp.GradScaler) for holder in holders)
