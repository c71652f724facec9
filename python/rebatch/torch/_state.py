"""The random number generators, which a retry must find as they were."""

from __future__ import annotations

import random
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch


def cuda_devices_of(tensors: Sequence[torch.Tensor]) -> List[torch.device]:
    """The CUDA devices of some tensors, each once."""
    return list(dict.fromkeys(t.device for t in tensors if t.device.type == "cuda"))


def functions_of(generator: Any) -> Tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to get and set the state of a generator of PyTorch, NumPy or Python."""
    if hasattr(generator, "bit_generator"):  # numpy.random.Generator
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if hasattr(generator, "getstate"):  # random.Random
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):  # torch.Generator, numpy.random.RandomState
        return generator.get_state, generator.set_state
    raise TypeError(
        f"rebatch: generators has a {type(generator).__name__}: expected generators of PyTorch, "
        "NumPy or Python"
    )


def seed_generator(generator: Any, seed: int) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        getattr(generator, "manual_seed" if hasattr(generator, "manual_seed") else "seed")(seed)


def is_same_state(a: Any, b: Any) -> bool:
    """Of two states of one generator."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return repr(a) == repr(b)
    return len(a) == len(b) and all(
        (x == y) if isinstance(x, (tuple, str, int, float, type(None))) else bool((x == y).all())
        for x, y in zip(a, b)
    )


class Generators:
    """The states of the global generators of PyTorch, Python, and NumPy if the program has it, of
    those of some CUDA devices, and of others."""

    def __init__(self, devices: Sequence[torch.device], others: Sequence[Any] = ()):
        self._devices = list(devices)
        self._others = [functions_of(generator) for generator in others]
        self._states: Dict[int, list[Any]] = {}

    def _each(self) -> List[Tuple[Callable[[], Any], Callable[[Any], Any]]]:
        each: List[Tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
        ]
        numpy = sys.modules.get("numpy.random")
        if numpy:
            each.append((lambda: numpy.get_state(legacy=False), numpy.set_state))
        return each + self._others

    def save(self, point: int) -> None:
        states = [(put, get()) for get, put in self._each()]
        devices = [(device, torch.cuda.get_rng_state(device)) for device in self._devices]
        self._states[point] = [states, devices]

    def have_moved(self, point: int) -> bool:
        """Whether numbers were drawn since save()."""
        states, devices = self._states[point]
        now = [get() for get, _ in self._each()]
        now += [torch.cuda.get_rng_state(device) for device, _ in devices]
        return not all(map(is_same_state, now, [s for _, s in states] + [s for _, s in devices]))

    def restore(self, point: int) -> None:
        states, devices = self._states[point]
        for put, state in states:
            put(state)
        for device, state in devices:
            torch.cuda.set_rng_state(state, device)
