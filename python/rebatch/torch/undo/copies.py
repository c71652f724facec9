"""Copies of tensors, and what the contents of tensors add up to."""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from rebatch.torch.batches.kinds import bytes_of, give_memory, is_plain, lacks_memory
from rebatch.torch.private import base_functions, foreach_copy_
from rebatch.torch.session.oom import is_oom

_USUAL = (torch.Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank has of a DTensor; another tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether it is copied in a list with others; else by what its own class does."""
    return type(tensor) in _USUAL and is_plain(tensor)


def copy_of(tensor: torch.Tensor, is_on_host: bool = False) -> Optional[torch.Tensor]:
    """None where it cannot be written, its class has no copies, or there is nothing to be copied.
    In host memory also where its device is full."""
    with base_functions(), torch.no_grad():
        try:
            if lacks_memory(tensor) or not _can_be_written(tensor):
                return None
            own = tensor.detach()
            return own.to("cpu", copy=True) if is_on_host else own.clone()
        except Exception as error:
            if not is_oom(error):
                return None
            if is_on_host:
                raise
    return copy_of(tensor, is_on_host=True)


def put_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """The contents of a copy, in memory that the tensor may lack."""
    part = own_part(tensor)
    with base_functions(), torch.no_grad():
        _make_alike(part, copy)
        part.copy_(copy)


def _make_alike(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if is_plain(tensor) and tensor.shape != copy.shape:  # it was resized
        tensor.data = copy.to(tensor.device, copy=True)
    give_memory(tensor)


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialized memory for a copy: on the tensor's device, or on the host if that is full."""
    try:
        return torch.empty_like(tensor, requires_grad=False)
    except Exception as error:
        if not is_oom(error):
            raise
    return torch.empty_like(tensor, requires_grad=False, device="cpu")


def _is_for(memory: torch.Tensor, tensor: Optional[torch.Tensor]) -> bool:
    return tensor is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype


def _can_be_written(tensor: torch.Tensor) -> bool:
    """An expanded tensor cannot, nor an inference tensor outside of inference mode."""
    is_expanded = is_plain(tensor) and any(
        n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride())
    )
    return not (is_expanded or tensor.is_inference())


class Copies:
    """Copies of tensors at one point. Their memory is used again for tensors of the same key."""

    def __init__(self) -> None:
        self._memory: Dict[Any, torch.Tensor] = {}
        self._given: Any = None  # the dict for which these are
        # Tensors and their copies, by kind: PyTorch copies a list by few kernels where all of it
        # has one type.
        self._kinds: List[Tuple[List[torch.Tensor], List[torch.Tensor]]] = []
        self._others: List[Tuple[torch.Tensor, torch.Tensor]] = []  # of kinds without such lists
        self._known: set[int] = set()

    def save(self, tensors: Dict[Any, torch.Tensor]) -> None:
        """A dict that was given before has the tensors that it had."""
        if tensors is not self._given or self._others:
            self._prepare(tensors)
        try:
            self._copy(to_tensors=False)
        except RuntimeError:  # some have another size now
            self._prepare(tensors)
            self._copy(to_tensors=False)

    def _prepare(self, tensors: Dict[Any, torch.Tensor]) -> None:
        """Make memory for these, and give that of others back."""
        parts = {key: own_part(tensor) for key, tensor in tensors.items()}
        usual = {key: part for key, part in parts.items() if _is_usual(part)}
        others = {key: copy_of(part) for key, part in parts.items() if key not in usual}
        self._others = [(parts[key], made) for key, made in others.items() if made is not None]
        memory = {k: m for k, m in self._memory.items() if _is_for(m, usual.get(k))}
        kinds: Dict[Any, Tuple[List[torch.Tensor], List[torch.Tensor]]] = {}
        known = {id(tensors[key]) for key, made in others.items() if made is not None}
        for key, tensor in usual.items():
            if lacks_memory(tensor):
                continue
            if key not in memory:
                if not _can_be_written(tensor):
                    continue
                memory[key] = memory_like(tensor)
            own, copies = kinds.setdefault((tensor.dtype, tensor.device), ([], []))
            own.append(tensor)
            copies.append(memory[key])
            known.add(id(tensors[key]))
        self._memory, self._kinds, self._given = memory, list(kinds.values()), tensors
        self._known = known

    def _copy(self, to_tensors: bool) -> None:
        if not self._kinds:
            return
        with torch.no_grad():
            for own, copies in self._kinds:
                foreach_copy_(*((own, copies) if to_tensors else (copies, own)))

    def restore(self) -> None:
        for own, copies in self._kinds:
            for tensor, saved in zip(own, copies):
                _make_alike(tensor, saved)
        self._copy(to_tensors=True)
        for tensor, saved in self._others:
            put_back(tensor, saved)

    def has(self) -> set[int]:
        """The ids of the tensors."""
        return self._known


def copies_on_host(
    tensors: Sequence[torch.Tensor], most_bytes: int
) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """(tensor, copy of its own_part() in host memory) of the smallest of some, each once."""
    made, left = [], most_bytes
    each = {id(t): (t, bytes_of(own_part(t))) for t in tensors}.values()
    for tensor, size in sorted(each, key=lambda t: t[1]):
        left -= size
        if left < 0:
            break
        try:
            copy_on_host = copy_of(own_part(tensor), is_on_host=True)
        except Exception as error:
            if not is_oom(error):
                raise
            continue
        if copy_on_host is not None:
            made.append((tensor, copy_on_host))
    return made


def copied(value: Any) -> Any:
    """A copy of a state_dict()."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(part) for part in value)
    return copy.deepcopy(value)


# ---- contents ----


def _has_whole_words(tensor: torch.Tensor) -> bool:
    """Whether each row of a contiguous tensor is of 64-bit words, so that a view has them."""
    if not tensor.dim() or not tensor.numel() or tensor.stride(-1) != 1:
        return False
    size = tensor.element_size()
    offset = int(tensor.storage_offset()) * size
    return int(tensor.shape[-1]) * size % 8 == 0 and offset % 8 == 0


def _sum_of(tensor: torch.Tensor) -> Optional[torch.Tensor]:
    """Of its memory as 64-bit words, which needs no other memory, and of what is left."""
    if lacks_memory(tensor):
        return None
    if tensor.is_contiguous() and _has_whole_words(tensor):
        return tensor.view(torch.int64).sum()
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    size, offset = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel() or span != tensor.numel() or offset * size % 8:
        return None
    flat = tensor.as_strided((span,), (1,))
    whole = span * size // 8 * 8 // size
    total = flat[:whole].view(torch.int64).sum()
    return total if whole == span else total + flat[whole:].view(_INTEGERS[size]).sum()


def lazy_sums_of(tensors: Sequence[torch.Tensor]) -> List[Optional[torch.Tensor]]:
    """What the bits of each tensor add up to, as integers on its device. None where that cannot be
    known."""
    try:
        parts = map(own_part, tensors)
        with base_functions(), torch.no_grad():
            return [_sum_of(t) if is_plain(t) else None for t in parts]
    except Exception as error:  # of tensors that are none of PyTorch's own, or out of memory
        if not (is_oom(error) or isinstance(error, (RuntimeError, TypeError, KeyError))):
            raise
        return [None] * len(tensors)


def read_sums(sums: Sequence[Optional[torch.Tensor]]) -> List[Optional[int]]:
    """On the host, with one copy for each device."""
    by_device: Dict[torch.device, Dict[int, torch.Tensor]] = {}
    for i, total in enumerate(sums):
        if total is not None:
            by_device.setdefault(total.device, {})[i] = total
    found: List[Optional[int]] = [None] * len(sums)
    try:
        for totals in by_device.values():
            for i, number in zip(totals, torch.stack(list(totals.values())).tolist()):
                found[i] = number
    except Exception as error:
        if not is_oom(error):
            raise
        return [None] * len(sums)
    return found


def sums_of(tensors: Sequence[torch.Tensor]) -> List[Optional[int]]:
    """Changes through .data increase no version, and change these."""
    return read_sums(lazy_sums_of(tensors))
