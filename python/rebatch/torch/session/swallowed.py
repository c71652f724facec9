"""An OOM that loss_fn keeps to itself: where its `except` is."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from typing import Any, Iterator, List, Optional, Set

import torch

from rebatch._user_code import is_own

_CATCHES = ("OutOfMemoryError", "RuntimeError", "Exception", "BaseException")


def _catches(kind: Optional[ast.expr]) -> bool:
    names = (
        [node.attr for node in ast.walk(kind) if isinstance(node, ast.Attribute)] if kind else []
    )
    names += [node.id for node in ast.walk(kind) if isinstance(node, ast.Name)] if kind else []
    return kind is None or any(name in _CATCHES for name in names)


def _line_in(function: Any) -> str:
    """Of the first handler that takes an OOM and raises nothing; "": there is none."""
    code = function.__code__
    tree = _tree_of(function)
    return _handler_in(tree, code.co_filename, code.co_firstlineno) if tree else ""


def _tree_of(code: Any) -> Optional[ast.AST]:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return None


def _handler_in(tree: ast.AST, file: str, first: int) -> str:
    """`first`: the line of the file that the source of the tree begins with."""
    for node in ast.walk(tree):
        is_handler = isinstance(node, ast.ExceptHandler) and _catches(node.type)
        is_suppressing = (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] == "suppress"
            and any(map(_catches, node.args))
        )
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        if is_handler and not raises or is_suppressing:
            return f"{file}:{first + getattr(node, 'lineno', 1) - 1}"
    return ""


def _functions_of(value: Any, seen: Set[int]) -> Iterator[types.FunctionType]:
    """A function of the program, and those that it names."""
    function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    if not is_own(str(function.__module__).split(".")[0]):
        return
    seen.add(id(function))
    yield function
    names = set(function.__code__.co_names) & set(function.__globals__)
    for name in sorted(names):
        yield from _functions_of(function.__globals__[name], seen)


def swallowing_line(functions: List[Any], modules: List[torch.nn.Module]) -> str:
    """ "train.py:12", of the functions that run in a micro-batch and those of the modules; "": none
    of them keeps an OOM to itself, so PyTorch has coped with it, as its search for the fastest
    convolution does."""
    methods = [type(module).forward for module in modules]
    seen: Set[int] = set()
    for function in (f for each in [*functions, *methods] for f in _functions_of(each, seen)):
        line = _line_in(function)
        if line:
            return line
    return ""


def swallowing_line_of_block(frame: types.FrameType) -> str:
    """The same of the `with` that ends at the line of a frame, and of the functions that its block
    names."""
    code = frame.f_code
    tree, first = _tree_of(frame), max(1, code.co_firstlineno)
    line = frame.f_lineno - first + 1
    blocks = [
        node
        for node in ast.walk(tree or ast.Module([], []))
        if isinstance(node, ast.With) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not blocks:
        return ""
    block = max(blocks, key=lambda node: node.lineno)
    known = {**frame.f_globals, **frame.f_locals}
    names = {node.id for node in ast.walk(block) if isinstance(node, ast.Name)} & set(known)
    functions = [known[name] for name in sorted(names)]
    return _handler_in(block, code.co_filename, first) or swallowing_line(functions, [])
