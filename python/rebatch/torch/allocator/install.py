"""rebatch's pool as PyTorch's CUDA allocator: install(), tags, statistics and snapshots."""

import contextlib
import ctypes
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from typing import Any, ContextManager, Union

import torch

from rebatch import _library
from rebatch import snapshot as snapshots
from rebatch._user_code import user_stacklevel
from rebatch.torch.allocator import front_library, phases, settings
from rebatch.torch.private import (
    clear_cublas_workspaces,
    get_device_index,
    mem_get_info,
    memory_fraction,
)

_front_library: Any = None  # once installed
_Size = Union[int, str, None]
_Device = Union[torch.device, int, str, None]  # as PyTorch names it

_install_lock = threading.Lock()
_options: dict[str, int] = {}  # the members of PoolOptions that were set


def install(
    limit: int | str | None = None,
    headroom: int | str | None = None,
    *,
    events: int | None = None,
    replay: bool | None = None,
    rounding_divisions: int | None = None,
    floor: int | str | None = None,
) -> None:
    """Make rebatch's pool PyTorch's allocator for ordinary CUDA memory, in this process.

    It may be called at any time: tensors that exist stay where they are. Memory for CUDA graphs and
    torch.cuda.MemPool stays with PyTorch's native allocator, but for graphs in an arena
    (arenas.py). The memory fraction, the observers of OOMs and the switch of
    caching_allocator_enable() stay as they were set before. The first call on a machine compiles
    the allocator, which takes about five seconds; the result is kept.

    Args:
        limit: the most memory that rebatch and PyTorch's native allocator may hold together on each
            GPU, in bytes or as "22GiB" or "90%"; 0: no limit. It is never more than the environment
            variable REBATCH_MEMORY_LIMIT or the memory fraction says.
        headroom: memory of each GPU, in bytes or as text, that stays free for libraries; 0: none.
        events: how many of the latest allocations and frees a snapshot has; default 0.
        replay: plan repeated phases when memory is short; default: on.
        rounding_divisions: sizes are rounded up to one of this many steps between powers of two; 0:
            to 512 bytes only. Default: roundup_power2_divisions of PYTORCH_ALLOC_CONF, else 0.
            Settings there that do not reach the pool are named in a warning.
        floor: memory that the pool of each GPU reserves with its first allocation, in bytes or as
            text, and gives back only in sleep() and on request; at most the limit. 0: none.

    With the environment variable PYTORCH_NO_CUDA_MEMORY_CACHING, every call goes to the device, as
    in PyTorch.

    Without a GPU it warns, and has no effect.

    There is no way back. In a second call, None leaves an option as it is; limit and floor can
    always change, the other options only until the first allocation.

    Raises:
        FrontError: the allocator cannot be compiled or loaded.
        Error, TypeError, ValueError: an option or variable is wrong.
        RuntimeError: PyTorch uses another allocator than its native one, or an option cannot change
            any more.
    """
    global _front_library
    floor_bytes = 0 if floor is None else _bytes("floor", floor)
    given = _members(limit, headroom, events, replay, rounding_divisions)
    first = {**_pytorchs_members(), **given}
    options = _pool_options(first)
    limit_bytes = _pool_options({**_options, **given}).limit_bytes
    if 0 < limit_bytes < floor_bytes:
        raise ValueError(
            f"rebatch: floor is {floor_bytes} bytes: expected at most the limit, {limit_bytes}"
        )
    with _install_lock:
        if _front_library is not None:
            _change(_front_library, given)
            if floor is not None:
                _library.check(_front_library.rebatch_torch_set_floor(floor_bytes))
            return
        if not torch.cuda.is_available():
            warnings.warn(
                "rebatch: there is no GPU, so install() has no effect", stacklevel=user_stacklevel()
            )
            return
        _front_library = _load_front(options)
        _options.update(first)
        _library.check(_front_library.rebatch_torch_set_floor(floor_bytes))
        _warn_of_settings()
        phases.watch_optimizers(pool)
        _empty_native_cache()


def _empty_native_cache() -> None:
    """It is of use to nobody now. A workspace of cuBLAS would keep the whole segment that it lies
    in."""
    clear_cublas_workspaces()
    torch.cuda.empty_cache()


def _load_front(options: _library.PoolOptions) -> Any:
    """The front, in the place of PyTorch's native allocator."""
    front = front_library.load()
    if front.rebatch_torch_install(ctypes.byref(options)) == 2:
        raise RuntimeError(
            f"rebatch: PyTorch uses the allocator {torch.cuda.get_allocator_backend()!r}; "
            "install() needs the native one"
        )
    return front


def installed() -> bool:
    """Whether rebatch is PyTorch's allocator in this process."""
    return _front_library is not None and bool(_front_library.rebatch_torch_is_installed())


def front() -> Any:
    """The library of front.cpp, once pool() has given a handle."""
    return _front_library


def _members(
    limit: _Size,
    headroom: _Size,
    events: int | None,
    replay: bool | None,
    rounding_divisions: int | None,
) -> dict[str, int]:
    """The members of PoolOptions that the arguments of install() set."""
    members = {}
    if limit is not None:
        members["limit_bytes"], members["limit_permille"] = _library.parse_size(limit)
    if headroom is not None:
        members["headroom_bytes"] = _bytes("headroom", headroom)
    if events is not None:
        members["events"] = events
    if rounding_divisions is not None:
        members["rounding_divisions"] = rounding_divisions
    if replay is not None:
        members["replay"] = _library.Toggle.ON if replay else _library.Toggle.OFF
    return members


def _pytorchs_members() -> dict[str, int]:
    """The members of PoolOptions that PyTorch's environment variables set."""
    members = {}
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):  # for memory checkers
        members["caching"] = int(_library.Toggle.OFF)
    divisions = settings.rounding_divisions(settings.read_settings())
    if divisions is not None:
        members["rounding_divisions"] = divisions
    return members


def _warn_of_settings() -> None:
    for gpu in range(torch.cuda.device_count()):
        _others_limit(gpu)
    names = settings.without_effect(settings.read_settings())
    if names:
        warnings.warn(
            "rebatch: these settings of PyTorch's allocator do not reach rebatch's pool: "
            f"{', '.join(names)}; they hold for CUDA graphs and MemPools",
            stacklevel=user_stacklevel(),
        )


def _environment_limit() -> tuple[int, int]:
    """Bytes and share (in 1/1000) of the variable REBATCH_MEMORY_LIMIT; 0: none."""
    count, share = ctypes.c_size_t(), ctypes.c_uint32()
    _library.check(_library.lib.rebatch_config_run_limit(ctypes.byref(count), ctypes.byref(share)))
    return count.value, share.value


def _others_limit(gpu: int) -> int:
    """Bytes that variables of MPS or HAMi leave of a GPU; 0: they set no limit."""
    count = ctypes.c_size_t()
    status = _library.lib.rebatch_cuda_limit(ctypes.byref(count), None, 0, gpu)
    if status != _library.Status.OK:
        warnings.warn(f"rebatch: {_library.last_error()}", stacklevel=user_stacklevel())
    return count.value


def _pool_options(members: dict[str, int]) -> _library.PoolOptions:
    """The options of a pool, whose limit is at most that of the environment."""
    options = _library.PoolOptions(**members)
    for name, most in zip(("limit_bytes", "limit_permille"), _environment_limit()):
        if most:
            setattr(options, name, min(getattr(options, name) or most, most))
    return options


def limit_native(device: torch.device) -> None:
    """The environment's limit for PyTorch's native allocator, unless it has a lower one."""
    count, share = _environment_limit()
    others = _others_limit(device.index)
    if not (count or share or others):
        return
    total = mem_get_info(device)[1]
    most = min(total, others or total)
    fraction = min(count or most, most * share // 1000 or most, most) / total
    if fraction < memory_fraction(device.index):
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def _bytes(name: str, size: int | str) -> int:
    """A size that cannot be a share."""
    count, share = _library.parse_size(size)
    if share:
        raise ValueError(f'rebatch: {name} is {size!r}: expected bytes, or a text such as "512MiB"')
    return count


def _change(front: Any, given: dict[str, int]) -> None:
    """A second install()."""
    options = _pool_options({**_options, **given})
    if front.rebatch_torch_configure(ctypes.byref(options)) != _library.Status.OK:
        for name, value in given.items():
            if name not in ("limit_bytes", "limit_permille") and value != _options.get(name, 0):
                raise RuntimeError(
                    f"rebatch: install() cannot change {name} after the first allocation; pass it "
                    "to the first install()"
                )
        _library.check(front.rebatch_torch_set_limit(options.limit_bytes, options.limit_permille))
    _options.update(given)


def pool(device: _Device = None) -> int:
    """The handle of the rebatch_pool of a GPU, for the functions of the C library.

    The pool is made if need be, and lives as long as the process. device: as PyTorch names it;
    None: the current one. Raises RuntimeError before install() and without a GPU, and Error when
    there is no pool.
    """
    if _front_library is None:
        if not torch.cuda.is_available():
            raise RuntimeError("rebatch: there is no GPU, so there is no pool")
        raise RuntimeError("rebatch: there is no pool yet: call rebatch.torch.install() first")
    torch.cuda.init()
    handle = ctypes.c_void_p()
    index = get_device_index(device, optional=True)
    _library.check(_front_library.rebatch_torch_pool(ctypes.byref(handle), index))
    assert handle.value is not None  # it is made
    return handle.value


def yield_to(path: str | os.PathLike[str] | None = None, device: _Device = None) -> None:
    """Let others ask this process for its GPU memory, at a Unix socket of this user.

    `rebatch ask SOCKET give 4GiB` then has a Step or a Backward go on in smaller micro-batches, and
    `rebatch ask SOCKET wake` lets them grow again (docs/sharing.md). What is only cached is given
    back at once. The environment variable REBATCH_YIELD does the same when the first Step, Backward
    or Map is made. A second call replaces the socket of the first.

    Args:
        path: of the socket; a folder: PID.sock in it; None: the same in the folder that
            `rebatch top` lists.
        device: whose pool, as PyTorch names it; None: the current one.

    Raises RuntimeError before install() and without a GPU, and Error where there can be no socket.
    """
    where = None if path is None else os.fsencode(path)
    _library.check(_library.lib.rebatch_yield_to(pool(device), where))


_no_tag: ContextManager[None] = contextlib.nullcontext()


def tag(name: str) -> ContextManager[None]:
    """What is allocated within the block is named `name` in reports; its first 31 bytes count.

    The tag applies to the thread, and within a block of the main thread also to the threads that
    are in no block of their own, such as those in which autograd runs backward passes. Where the
    main thread is in no block, they have the tag of the thread that first entered one. There are at
    most 255 names in a process. Before install() the block does nothing.
    """
    return _no_tag if _front_library is None else _tagged(_front_library, name)


@contextlib.contextmanager
def _tagged(front: Any, name: str) -> Iterator[None]:
    number = front.rebatch_torch_tag(name.encode()[:31])
    if number < 0:
        raise RuntimeError(f"rebatch: no tag {name!r}: there are 255 tags already")
    before = front.rebatch_torch_enter_tag(number)
    try:
        yield
    finally:
        front.rebatch_torch_leave_tag(before)


def stats(device: _Device = None) -> dict[str, int]:
    """The statistics of a GPU's pool by their names in rebatch/pool.h; sizes are in bytes.

    Unlike torch.cuda.memory_stats() they do not count what the native allocator holds.
    """
    out = _library.PoolStats()
    _library.check(_library.lib.rebatch_pool_get_stats(ctypes.byref(out), pool(device)))
    return {field[0]: getattr(out, field[0]) for field in out._fields_}


def summary(device: _Device = None) -> str:
    """Statistics and tags of a GPU's pool as a table of text."""
    return _library.text_of(_library.lib.rebatch_pool_format_summary, pool(device))


def snapshot(device: _Device = None) -> dict[str, Any]:
    """A snapshot of a GPU's pool in the layout of torch.cuda.memory._snapshot().

    Write it to a file with pickle to see it in PyTorch's memory viewer. It has the pool's blocks
    with their tags, and the latest events if install(events=...) asked for them.
    """
    handle = pool(device)
    with tempfile.TemporaryDirectory(prefix="rebatch-") as folder:
        paths = []
        for form in _library.SnapshotFormat:
            path = os.path.join(folder, form.name)
            save = _library.lib.rebatch_pool_save_snapshot
            _library.check(save(handle, form, os.fsencode(path)))
            paths.append(path)
        return snapshots.read(*paths, device=get_device_index(device, optional=True))
