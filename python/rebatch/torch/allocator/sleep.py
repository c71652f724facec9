"""Gives the memory of rebatch's pools to the GPU's other users for a while: sleep() and wake()."""

import ctypes
import re
import sys
from collections.abc import Collection

import torch

from rebatch import _library
from rebatch._library import lib
from rebatch.torch.allocator import install


def _pools() -> dict[int, int]:
    """The pools of this process, by their GPU's number."""
    if install.front() is None:
        install.pool()  # which says so
    torch.cuda.init()
    devices = range(torch.cuda.device_count())
    found = {device: install.front().rebatch_torch_find_pool(device) for device in devices}
    return {device: pool for device, pool in found.items() if pool}


_asleep: set[int] = set()  # by sleep(), until wake()


def _numbers(pool: int, option: str, tags: Collection[str]) -> ctypes.Array[ctypes.c_uint16]:
    """The numbers of tags. Raises ValueError for one that nothing was allocated with."""
    if isinstance(tags, (str, bytes)) or not isinstance(tags, Collection):
        raise TypeError(f'rebatch: {option} is {tags!r}: expected a tuple of tags, ("weights",)')
    names: list[bytes] = []
    usage = _library.TagUsage()
    while lib.rebatch_pool_get_tag_usage(ctypes.byref(usage), pool, len(names)) == 0:
        names.append(usage.name)
    cut = [str(tag).encode()[:31] for tag in tags]
    for tag, name in zip(tags, cut):
        if name not in names:
            known = ", ".join(repr(other.decode(errors="replace")) for other in names[1:])
            raise ValueError(
                f"rebatch: {option} has {tag!r}: expected a tag of rebatch.tag(), of which there "
                f"are {known or 'none'}"
            )
    return (ctypes.c_uint16 * len(cut))(*map(names.index, cut))


_on_wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
    lambda _user: print(
        "rebatch: memory is asked for while the pool sleeps: the call waits for rebatch.wake()",
        file=sys.stderr,
    )
)


def _check(status: int) -> None:
    """Raises Error with the names that functions of C have here."""
    try:
        _library.check(status)
    except _library.Error as error:
        text = re.sub(r"rebatch_pool_(sleep|wake)\(", r"rebatch.\1(", str(error))
        raise _library.Error(text, error.status) from None


def sleep(keep: Collection[str] = (), drop: Collection[str] = ()) -> dict[str, int]:
    """Give the memory of all GPUs' pools to others, until wake(); addresses stay.

    Call it between two steps. The contents of all tensors are copied to pinned host memory, but
    for those that were allocated within `with rebatch.tag(name)` of a name in `keep` or `drop`.
    Until wake() only tensors of `keep` may be used. A step, a map and an allocation wait for
    wake() in another thread, and say so once on stderr; freeing a tensor does not wait. Ctrl-C ends
    the wait, with a wake where there is the memory. A second call puts more to sleep.

    It returns what was done, in bytes: `released_bytes` went back to the GPUs, `copied_bytes` of
    them were copied, `held_bytes` are still held, of which `kept_bytes` are in tensors of `keep`.
    `native_bytes` is what PyTorch's own allocator, whose cache is emptied, holds beside the pools:
    CUDA graphs, MemPools and what was allocated before install().

    Args:
        keep: tags of tensors that stay on the GPU.
        drop: tags of tensors whose contents are undefined afterwards, and are not copied.

    Raises:
        ValueError: there is no such tag.
        Error: a pool cannot sleep now, for example within a step; nothing is asleep then that was
            not before, on no GPU.
        RuntimeError: before install(), and in a child of fork().
    """
    pools = list(_pools().values())
    chosen = [(_numbers(pool, "keep", keep), _numbers(pool, "drop", drop)) for pool in pools]
    total = dict.fromkeys((field[0] for field in _library.SleepReport._fields_), 0)
    slept: set[int] = set()
    for pool, (kept, dropped) in zip(pools, chosen):
        options = _library.SleepOptions(
            keep=kept, keep_count=len(kept), drop=dropped, drop_count=len(dropped), on_wait=_on_wait
        )
        report = _library.SleepReport()
        try:
            _check(lib.rebatch_pool_sleep(pool, options, ctypes.byref(report)))
        except _library.Error:
            for other in slept - _asleep:
                lib.rebatch_pool_wake(other)
            raise
        slept.add(pool)
        for name in total:
            total[name] += getattr(report, name)
    _asleep.update(slept)
    torch.cuda.empty_cache()  # of PyTorch's own allocator
    total["native_bytes"] = install.front().rebatch_torch_native_bytes()
    return total


def wake() -> None:
    """End sleep() on all GPUs: memory is mapped at all addresses in use, and contents come back.

    With less memory than before it succeeds as long as the tensors in use fit; the next
    micro-batches are smaller, and grow back. Where a GPU cannot wake, the others do.

    Raises:
        Error: GPUs, which it names, have no room for the tensors in use. Nothing is lost, and
            wake() may be called again.
        RuntimeError: before install().
    """
    failed: list[str] = []
    status = 0
    for device, pool in _pools().items():
        try:
            _check(lib.rebatch_pool_wake(pool))
            _asleep.discard(pool)
        except _library.Error as error:
            status = status or error.status
            failed.append(f"cuda:{device} cannot wake: {str(error).removeprefix('rebatch: ')}")
    if failed:
        raise _library.Error(f"rebatch: {'; '.join(failed)}", status)
