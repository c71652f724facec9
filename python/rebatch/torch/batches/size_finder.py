"""find_batch_size: a decorator with the signature of accelerate's find_executable_batch_size."""

from __future__ import annotations

import functools
import gc
import inspect
from typing import Any, Callable, Optional

import torch

from rebatch.torch.session.oom import failed_allocations, is_oom, let_go


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def find_batch_size(
    function: Optional[Callable[..., Any]] = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Optional[Callable[[], int]] = None,
) -> Callable[..., Any]:
    """Call a function that takes a batch size first, and again with a smaller one after an OOM::

        @rebatch.find_batch_size(starting_batch_size=256)
        def train(batch_size, model): ...

        train(model)

    The signature is that of accelerate.utils.find_executable_batch_size. The function begins again
    from its first line; a Step keeps what has been done, and the effective batch. The size that was
    found is kept for the next call.

    Args:
        function: takes the batch size as its first argument
        starting_batch_size: of the first call
        reduce_batch_size_fn: returns the next size; without it, the size is halved

    Raises:
        RuntimeError: size 1 runs out of memory."""
    if function is None:
        return functools.partial(
            find_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    parameters = list(inspect.signature(function).parameters)
    size = starting_batch_size

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        nonlocal size
        _check_arguments(function, parameters, arguments)
        while True:
            if size == 0:
                raise RuntimeError("rebatch: out of memory at every batch size, down to 1")
            failed = failed_allocations()
            try:
                return function(size, *arguments, **keywords)
            except Exception as error:
                if not is_oom(error, failed_allocations() > failed):
                    raise
                let_go(error)
            _release_memory()
            size = reduce_batch_size_fn() if reduce_batch_size_fn else size // 2

    return run


def _check_arguments(
    function: Callable[..., Any], parameters: list[Any], arguments: tuple[Any, ...]
) -> None:
    if not parameters:
        raise TypeError(
            f"rebatch: {function.__name__}() has no parameter: expected the batch size as the "
            "first, which find_batch_size passes"
        )
    if len(parameters) < len(arguments) + 1:
        names = ", ".join(repr(p) for p in parameters[1:])
        raise TypeError(
            f"rebatch: {function.__name__}() takes the batch size first, which find_batch_size "
            f"passes: expected a call with ({names}), got {len(arguments)} arguments"
        )
