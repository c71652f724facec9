"""Failures on purpose: a training is seen to survive them, on any machine."""

from __future__ import annotations

from typing import Any

import torch


def fail_once(model: torch.nn.Module, call: int = 1, every: int = 0) -> Failing:
    """Let a module run out of memory on purpose, in one of its forward passes.

    It needs no GPU, and no change of the program: what runs the module gets the exception. ::

        with rebatch.testing.fail_once(model.layers[3], call=2) as failing:
            step(batch)
        assert failing.failures == 1 and step.report.ooms == 1

    A forward pass that runs again counts as a call too, and so does one of a comparison or a check.

    Args:
        model: the module; any module of a model, whose forward pass is run by calling it
        call: the number of the call that fails, from 1
        every: with n, each n-th call after it fails too; 0: none does

    Returns what counts the calls and failures. Its remove(), or the end of a `with`, ends it.

    Raises:
        TypeError: `model` is no module, or a number is no int.
        ValueError: `call` is less than 1, or `every` is less than 0.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"rebatch: fail_once() was called with a {type(model).__name__}: expected a "
            "torch.nn.Module"
        )
    for name, value, least in (("call", call, 1), ("every", every, 0)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"rebatch: {name} of fail_once() is {value!r}: expected an int")
        if value < least:
            raise ValueError(f"rebatch: {name} of fail_once() is {value}: expected {least} or more")
    return Failing(model, call, every)


class Failing:
    """What fail_once() returns.

    `calls` is how many calls the module had so far, `failures` how many of them failed."""

    def __init__(self, model: torch.nn.Module, call: int, every: int):
        self._call, self._every = call, every
        self.calls = self.failures = 0
        self._handle = model.register_forward_pre_hook(self._count)

    def _count(self, _module: torch.nn.Module, _inputs: Any) -> None:
        self.calls += 1
        later = self.calls - self._call
        if later == 0 or (later > 0 and self._every and later % self._every == 0):
            self.failures += 1
            raise torch.OutOfMemoryError(
                "CUDA out of memory (on purpose: rebatch.testing.fail_once)"
            )

    def remove(self) -> None:
        """No call fails from now on."""
        self._handle.remove()

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.remove()
