"""What a retry must find as it was: random number generators, and buffers of modules."""

from __future__ import annotations

from typing import Dict, List, Sequence

import torch

from rebatch._library import GuardPoint


def cuda_devices_of(tensors: Sequence[torch.Tensor]) -> List[torch.device]:
    """The CUDA devices of some tensors, each once."""
    return list(dict.fromkeys(t.device for t in tensors if t.device.type == "cuda"))


class Generators:
    """The states of PyTorch's CPU generator, of those of some CUDA devices, and of others."""

    def __init__(self, devices: Sequence[torch.device], others: Sequence[torch.Generator] = ()):
        self._devices, self._others = list(devices), list(others)
        self._states: Dict[int, list] = {}

    def save(self, point: int) -> None:
        states = [torch.get_rng_state()]
        states += [torch.cuda.get_rng_state(device) for device in self._devices]
        states += [generator.get_state() for generator in self._others]
        self._states[point] = states

    def restore(self, point: int) -> None:
        states = iter(self._states[point])
        torch.set_rng_state(next(states))
        for device in self._devices:
            torch.cuda.set_rng_state(next(states), device)
        for generator in self._others:
            generator.set_state(next(states))


class Buffers:
    """The buffers of a module, such as BatchNorm's running statistics. Their copies are made when
    the session is opened, and again when the module has other buffers."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._buffers: List[torch.Tensor] = []
        self._copies: Dict[int, List[torch.Tensor]] = {point: [] for point in GuardPoint}
        self.prepare()

    def prepare(self) -> None:
        """Make copies for the module's present buffers. May run out of memory."""
        buffers = [b for b in self._module.buffers() if b is not None]
        if len(buffers) == len(self._buffers) and all(
            a is b for a, b in zip(buffers, self._buffers)
        ):
            return
        with torch.no_grad():
            self._copies = {p: [b.detach().clone() for b in buffers] for p in GuardPoint}
        self._buffers = buffers

    def save(self, point: int) -> None:
        _copy(self._copies[point], self._buffers)

    def restore(self, point: int) -> None:
        _copy(self._buffers, self._copies[point])


def _copy(to: List[torch.Tensor], source: List[torch.Tensor]) -> None:
    if to:
        with torch.no_grad():
            torch._foreach_copy_(to, source)
