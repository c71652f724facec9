"""The random number generators, which a retry must find as they were."""

from __future__ import annotations

import functools
import random
import sys
import warnings
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch

from rebatch._library import GuardPoint
from rebatch._user_code import user_stacklevel

Functions = Tuple[Callable[[], Any], Callable[[Any], Any]]  # to get and to set a state
States = List[Tuple[Callable[[Any], Any], Any]]  # how to set it, and the state


def cuda_devices_of(tensors: Sequence[torch.Tensor]) -> List[torch.device]:
    """The CUDA devices of some tensors, each once."""
    return list(dict.fromkeys(t.device for t in tensors if t.device.type == "cuda"))


@functools.lru_cache(maxsize=None)
def _makes_generators(kind: Any) -> bool:
    """By the class alone: an object may answer to every name."""
    if issubclass(kind, (torch.Generator, random.Random)):
        return not issubclass(kind, random.SystemRandom)
    return kind.__module__.startswith("numpy.random") and (
        hasattr(kind, "bit_generator") or kind.__name__ == "RandomState"
    )


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers with a state."""
    kind: Any = type(value)
    return _makes_generators(kind)


def functions_of(generator: Any) -> Functions:
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


def _seed(generator: Any, seed: int) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        getattr(generator, "manual_seed" if hasattr(generator, "manual_seed") else "seed")(seed)


def is_same_state(a: Any, b: Any) -> bool:
    """Of two states of one generator. No array is printed to be compared: NumPy takes 20 ms for
    its generator's 624 words, and may leave most of them out."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(is_same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and any(hasattr(part, "all") for part in a):  # an array of NumPy
        return len(a) == len(b) and all(map(is_same_state, a, b))
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())


def of_everyone() -> Dict[str, Functions]:
    """Python's generator, and NumPy's where that is there."""
    found: Dict[str, Functions] = {"random": (random.getstate, random.setstate)}
    numpy = sys.modules.get("numpy.random")
    if numpy:
        found["numpy.random"] = (lambda: numpy.get_state(legacy=False), numpy.set_state)
    return found


# Steps in which Python's and NumPy's generators are saved, whether loss_fn draws from them or not.
_LOOKS = 3


class Generators:
    """The states of the global generators of PyTorch, of those of some CUDA devices, and of others.
    Those of Python and NumPy are saved where an attempt was seen to draw from them: in the first
    steps, or in one that runs again after a failure."""

    def __init__(self, devices: Sequence[torch.device], others: Sequence[Any] = ()):
        self._devices = list(devices)
        self._others = list(others)
        self._always: List[Functions] = [functions_of(torch.default_generator)]
        self._always += [functions_of(generator) for generator in others]
        self._has_devices = not self._devices  # their generators are there once CUDA is initialized
        self._used: Dict[str, Functions] = {}
        self._states: Dict[int, States] = {}
        self._steps = 0
        self._is_suspect = self._is_fresh = False
        self._maybe_at_begin: Dict[str, Functions] = {}

    def _maybe(self) -> Dict[str, Functions]:
        """Python's and NumPy's, if it is not known whether they are used."""
        if self._steps >= _LOOKS and not self._is_suspect:
            return {}
        return {name: each for name, each in of_everyone().items() if name not in self._used}

    def _find_devices(self) -> None:
        self._has_devices = True
        torch.cuda.init()
        for device in self._devices:
            generator = torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
            self._always.append((generator.get_state, generator.set_state))

    def save(self, point: int) -> None:
        if not self._has_devices:
            self._find_devices()
        if point == GuardPoint.STEP:
            self._steps += 1
        elif self._is_fresh and not self._is_suspect:  # nothing ran since the step began
            self._is_fresh = False
            self._states[point] = self._states[GuardPoint.STEP]
            return
        maybe = self._maybe()
        each = self._always
        if maybe or self._used:
            each = [*each, *self._used.values(), *maybe.values()]
        self._states[point] = [(put, get()) for get, put in each]
        self._maybe_at_begin = maybe
        self._is_fresh = point == GuardPoint.STEP

    def succeeded(self) -> None:
        """An attempt has: what it drew from is saved from now on."""
        maybe, self._maybe_at_begin = self._maybe_at_begin, {}
        if not maybe:
            self._is_suspect = False
            return
        states = self._states[GuardPoint.ATTEMPT][-len(maybe) :]
        for (name, functions), (_, state) in zip(maybe.items(), states):
            if not is_same_state(functions[0](), state):
                self._used[name] = functions
                if self._is_suspect:
                    self._warn(name)
        self._is_suspect = False

    def restore(self, point: int, has_failed: bool = True) -> None:
        self._is_suspect = self._is_suspect or (has_failed and self._steps > _LOOKS)
        self.put(self._states[point])
        self._is_fresh = point == GuardPoint.STEP

    # ---- all of them, beside the points ----

    def states(self) -> States:
        """Of all, also of those that no attempt was seen to draw from."""
        if not self._has_devices:
            self._find_devices()
        getattr(sys.modules.get("numpy"), "random", None)  # NumPy imports that when it is used
        return [(put, get()) for get, put in (*self._always, *of_everyone().values())]

    def put(self, states: States) -> None:
        for put, state in states:
            put(state)

    def have_moved(self, states: States, but_for_torchs: bool = False) -> bool:
        """Whether they are no more at some states; or whether others than PyTorch's are not."""
        return any(
            not is_same_state(now, then)
            for (_, now), (_, then) in zip(self.states(), states)
            if not (but_for_torchs and isinstance(now, torch.Tensor))
        )

    def seed(self, seed: int) -> None:
        """Other numbers from here on."""
        torch.manual_seed(seed)
        for generator in self._others:
            _seed(generator, seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)

    def _warn(self, name: str) -> None:
        warnings.warn(
            f"rebatch: loss_fn draws from {name} for the first time after {_LOOKS} steps, and an "
            "attempt that failed has drawn from it too: its numbers are lost, and from now on they "
            "are drawn again",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
