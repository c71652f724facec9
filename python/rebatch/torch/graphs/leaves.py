"""Other leaves of autograd in the place of parameters. Must not know what is captured."""

from __future__ import annotations

import contextlib
from typing import Iterator, List, Sequence

import torch


@contextlib.contextmanager
def other_leaves(
    modules: torch.nn.Module, parameters: Sequence[torch.Tensor]
) -> Iterator[List[torch.Tensor]]:
    """Within it modules have other leaves for these parameters, in the same memory. Gives, in their
    order, what gets the gradients.

    DistributedDataParallel keeps the nodes of autograd that add to the gradients of its parameters.
    They belong to the stream on which it was made, which is not the one of a capture, and run its
    hooks."""
    known = set(map(id, parameters))
    tables = [module._parameters for module in modules.modules()]
    places = [(t, name, p) for t in tables for name, p in t.items() if p is not None]
    places = [(t, name, p) for t, name, p in places if id(p) in known]
    others = {id(p): torch.nn.Parameter(p.detach()) for _, _, p in places}
    for _, _, p in places:
        vars(others[id(p)]).update(vars(p))
    for table, name, p in places:
        table[name] = others[id(p)]
    try:
        yield [others.get(id(p), p) for p in parameters]
    finally:
        for table, name, p in places:
            table[name] = p
