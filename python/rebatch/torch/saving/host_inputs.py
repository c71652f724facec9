"""Inputs of checkpointed modules, in host memory between the forward and the backward pass. Owns
their copies and the stream that makes them; must not know Steps and levels."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rebatch.torch.private import empty_pinned_cache

# Of smaller tensors the copies cost more than their memory is worth: a copy of _LEAST_BYTES
# takes about as long as it takes to ask for it.
_LEAST_BYTES = 256 << 10
# Kernels are chosen by the alignment of their operands, up to _ALIGNMENT bytes.
_ALIGNMENT = 256


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are one piece of memory, in any order, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_moved(tensor: torch.Tensor) -> bool:
    """Whether its memory can be had back: not that of a tensor which autograd did not make (a
    batch, a parameter), or of a view that shows a part of what it keeps alive."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cuda
        and tensor.grad_fn is not None
        and tensor.layout is torch.strided
        and tensor.nbytes >= _LEAST_BYTES
        and not (tensor.is_conj() or tensor.is_neg())
        and _is_dense(tensor)
        and not torch.cuda.is_current_stream_capturing()
    )


class _Input:
    """One tensor. It has `on_device` until its copy is made, and again from the moment at which it
    is fetched until it is taken.

    What reads or writes the device's memory on the side stream is always ordered before what
    follows on the stream of the memory, also where an attempt ends early, so the allocator may
    give the memory to anybody as soon as it is freed. Unlike record_stream() this makes the peak
    independent of how far the host is ahead of the GPU."""

    def __init__(
        self, tensor: torch.Tensor, side: torch.cuda.Stream, before: Optional["_Input"]
    ) -> None:
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._shift = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
        self._side = side
        self._stream = torch.cuda.current_stream(tensor.device)
        self._device = tensor.device
        self.before = weakref.ref(before) if before else None
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._version = flat._version
        self._on_device: Optional[torch.Tensor] = None
        self._copy(self._host, flat, flat)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, on_device: torch.Tensor) -> None:
        self._on_device = on_device
        self._side.wait_stream(self._stream)
        with torch.cuda.stream(self._side):
            to.copy_(source, non_blocking=True)
        self._copied = self._side.record_event()

    def __del__(self) -> None:
        if getattr(self, "_on_device", None) is not None and hasattr(self, "_copied"):
            self._stream.wait_event(self._copied)

    def drop(self) -> None:
        """Give the device's memory back, once the copy is made."""
        if self._on_device is not None:
            self._check()
            self._stream.wait_event(self._copied)
            self._on_device = None

    def _check(self) -> None:
        assert self._on_device is not None
        if self._on_device._version != self._version:
            raise RuntimeError(
                "rebatch: one of the variables needed for gradient computation has been modified "
                f"by an inplace operation: the input of shape {tuple(self._shape)} of a module of "
                f"checkpointing(offload=True) is at version {self._on_device._version}: expected "
                f"version {self._version}"
            )

    def fetch(self) -> None:
        """Ask for it on the device."""
        if self._on_device is not None:
            return
        self._stream = torch.cuda.current_stream(self._device)
        count = self._shift + self._host.numel()
        memory = torch.empty(count, dtype=self._host.dtype, device=self._device)
        flat = memory[self._shift :]
        self._copy(flat, self._host, flat)
        self._version = flat._version

    def take(self) -> torch.Tensor:
        """The tensor, as it was. It can be taken again."""
        self.fetch()
        self._check()
        flat, now = self._on_device, torch.cuda.current_stream(self._device)
        assert flat is not None
        for stream in {now, self._stream}:
            stream.wait_event(self._copied)
        self._on_device = None
        return flat.as_strided(self._shape, self._stride, flat.storage_offset())


class HostInputs:
    """Runs functions whose activations are computed again in the backward pass, and keeps in pinned
    host memory what checkpoint() saves for that."""

    def __init__(self) -> None:
        self._sides: Dict[torch.device, torch.cuda.Stream] = {}
        self._last: Dict[torch.device, "weakref.ref[_Input]"] = {}

    def __reduce__(self) -> Tuple[Any, ...]:
        return HostInputs, ()  # a copy of a model has its own

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        names = list(keywords)

        def positional(*values: Any) -> Any:
            at = len(values) - len(names)
            return function(*values[:at], **dict(zip(names, values[at:])))

        values = (*arguments, *keywords.values())
        if torch.compiler.is_compiling():  # which has no hooks
            return checkpoint(positional, *values, use_reentrant=False)
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(positional, *values, use_reentrant=False)

    def release(self) -> None:
        """Give the pinned memory back that PyTorch keeps for the next input."""
        if self._sides:
            empty_pinned_cache()

    def _pack(self, tensor: torch.Tensor) -> Union[torch.Tensor, _Input]:
        if not _is_moved(tensor):
            return tensor
        device = tensor.device
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        last = self._last.get(device)
        before = last() if last else None
        with torch.no_grad():
            saved = _Input(tensor, self._sides[device], before)
        if before:
            before.drop()
        self._last[device] = weakref.ref(saved)
        return saved

    def _unpack(self, saved: Union[torch.Tensor, _Input]) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        with torch.no_grad():
            tensor = saved.take()
            before = saved.before() if saved.before else None
            if before:
                before.fetch()  # while this module runs again
        return tensor
