"""A batch that becomes larger or smaller in a running program: the tensors that have its size as
their first dimension. Must not know who asks for that."""

from __future__ import annotations

import dataclasses
from typing import Any, Set

import torch

from rebatch.fit.program.live import live, states_of, weights_of
from rebatch.torch.private import TorchDispatchMode


def is_batch(tensor: torch.Tensor, size: int, own: Set[int]) -> bool:
    """Whether it has a batch's samples. `own` are the model's and the optimizers', by id."""
    return (
        id(tensor) not in own
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.dim() > 0
        and tensor.size(0) == size
        and not tensor.requires_grad
    )


@dataclasses.dataclass(frozen=True)
class Growth:
    """From a size to another."""

    size: int
    wanted: int
    like_weights: bool  # also tensors with the shape of a weight, as a moving average has

    def grow(self) -> None:
        """All tensors of a batch become those of another size, in place."""
        weights = weights_of()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        own = {id(tensor) for tensor in [*weights, *gradients, *states_of()]}
        shapes = set() if self.like_weights else {t.shape for t in weights}
        with torch.no_grad():
            for tensor in list(live(torch.Tensor)):
                is_like_weight = tensor.is_floating_point() and tensor.shape in shapes
                if is_batch(tensor, self.size, own) and not is_like_weight:
                    tensor.data = _resized(tensor, self.wanted)


def _resized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Each sample several times, or some of them, in their order: lengths that are sorted stay so.
    Floating-point ones are left empty, as by kernels."""
    if not tensor.is_floating_point():
        order = torch.arange(size) * tensor.size(0) // size
        return tensor.cpu().index_select(0, order).to(tensor.device)
    new = tensor.new_empty if tensor.is_cuda else tensor.new_zeros
    result = new((size, *tensor.shape[1:]))
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        result = result.contiguous(memory_format=torch.channels_last)
    return result


class Transfers(TorchDispatchMode):
    """While it is active, batches of one size that go from the host to the GPU arrive in another
    size."""

    def __init__(self, growth: Growth):
        super().__init__()  # type: ignore[no-untyped-call]
        self._growth = growth

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and not args[0].is_cuda:
            device = kwargs.get("device")
            is_sent = device is not None and torch.device(device).type == "cuda"
            if is_sent and is_batch(args[0], self._growth.size, set()):
                args = (_resized(args[0], self._growth.wanted), *args[1:])
        return func(*args, **kwargs)
