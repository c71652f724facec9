"""Masks of transformers' models in a pass that is captured. Must not know what the pass does.

A model that gets no mask, or one that masks nothing, needs none. It sees that on the host, where a
capture reads nothing. So while a stream is captured transformers always makes a mask: attention
then has other kernels than in an eager pass, other bits, and other random numbers for dropout."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable, Iterator

import torch

from rebatch.torch.undo.module_tree import is_compiled


@contextlib.contextmanager
def _replaced(model: torch.nn.Module, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """A compiled model would be compiled again: it keeps what it has."""
    masks = sys.modules.get("transformers.masking_utils")
    plain = getattr(masks, name, None)
    if plain is None or any(map(is_compiled, model.modules())):
        yield
        return
    setattr(masks, name, make(plain))
    try:
        yield
    finally:
        setattr(masks, name, plain)


def none_where_none_is_given(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it no mask is made where the model gets none, and nothing is there to be read."""

    def made(asks: Callable[[Any], bool]) -> Callable[..., bool]:
        return lambda tensor=None: tensor is not None and asks(tensor)

    return _replaced(model, "is_tracing", made)


def one_sequence_a_sample(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, and where a stream is captured, position_ids are not those of several sequences in
    one sample."""

    def made(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
        masks = sys.modules["transformers.masking_utils"]
        return lambda ids: None if masks.is_tracing(ids) else find(ids)

    return _replaced(model, "find_packed_sequence_indices", made)
