"""What is said where a program goes backward through a loss that a Step or Backward returned,
behind an `if` or in a function: PyTorch's error does not name the line to take out. Must not know
a training."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, Iterator

import torch

from rebatch._user_code import is_own

# Of PyTorch's errors: for a loss without a graph, and for outputs whose graph was used.
_TEXTS = ("does not require grad and does not have a grad_fn", "through the graph a second time")


@functools.lru_cache(maxsize=None)
def explain_left_backward() -> None:
    """From now on an error of torch.autograd.backward() that is such a line's says so."""
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*arguments: Any, **keywords: Any) -> None:
        try:
            plain(*arguments, **keywords)
        except RuntimeError as error:
            if any(text in str(error) for text in _TEXTS):
                _explain(error, list(_frames(sys._getframe(1))))
            raise

    torch.autograd.backward = backward


def _frames(frame: Any) -> Iterator[types.FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def _explain(error: RuntimeError, frames: list[types.FrameType]) -> None:
    packages = [str(f.f_globals.get("__name__", "")).split(".")[0] for f in frames]
    own = [f for f, package in zip(frames, packages) if is_own(package)]
    if own and "rebatch" not in packages:  # whose passes are not left over
        add_sentence(
            error,
            f"rebatch: {own[0].f_code.co_filename}:{own[0].f_lineno} calls backward(). If that is "
            "on the loss of a Step or Backward, which has gone backward already: expected the loop "
            "without this line",
        )


def add_sentence(error: Any, sentence: str) -> None:
    """To what is said of an exception. Before Python 3.11 there are no notes, so its own text has
    it."""
    if hasattr(error, "add_note"):
        error.add_note(sentence)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{sentence}", *error.args[1:])
