"""What holds a model for several ranks: DistributedDataParallel's settings, and a Step's way
through it without its collectives."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rebatch._user_code import user_stacklevel
from rebatch.torch.private import to_kwargs

_MIB = 1 << 20
_CAP_BYTES = 25 * _MIB  # of a bucket, as DistributedDataParallel has it
_FIRST_CAP_BYTES = _MIB  # of the first bucket: the reduction begins early

# Settings that need DistributedDataParallel's own reduction.
_REFUSED = {
    "mixed_precision": "autocast=torch.bfloat16 of the Step",
    "parameters_to_ignore": "requires_grad_(False) for parameters that are not trained",
    "_delay_all_reduce_all_params": "no delay_all_reduce_named_params",
    "_use_python_reducer": "torch._dynamo.config.optimize_ddp to be no 'python_reducer'",
}


def has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def wrappers_in(modules: torch.nn.Module) -> List[DistributedDataParallel]:
    """Every DistributedDataParallel in them. Raises ValueError for wrappers that are no use."""
    found = []
    for module in modules.modules():
        kind = type(module)
        if isinstance(module, DistributedDataParallel):
            found.append(module)
        elif kind.__module__.startswith("torch.distributed.fsdp.fully_sharded"):
            raise ValueError(
                "rebatch: the model is FullyShardedDataParallel (FSDP1): expected "
                "DistributedDataParallel, or fully_shard() (FSDP2)"
            )
        elif kind.__module__.startswith("deepspeed."):
            raise ValueError(
                f"rebatch: the model is DeepSpeed's {kind.__name__}, which accumulates, reduces "
                "and updates by itself: expected the plain model, DistributedDataParallel, or "
                "fully_shard() (FSDP2)"
            )
    return found


def _check_settings(wrapper: DistributedDataParallel) -> None:
    for name, expected in _REFUSED.items():
        value = getattr(wrapper, name, None)
        if value:
            raise ValueError(
                f"rebatch: the model is DistributedDataParallel with {name.lstrip('_')}, which a "
                f"Step's reduction does not have: expected {expected}"
            )


def check_modules(modules: torch.nn.Module) -> None:
    """ValueError for a module whose forward pass waits for other ranks."""
    for name, module in modules.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"rebatch: {name!r} is a SyncBatchNorm, whose forward pass waits for the other "
                "ranks, and each rank has its own number of micro-batches: expected BatchNorm, or "
                "GroupNorm"
            )


def group_of(wrappers: List[DistributedDataParallel], group: Any) -> Optional[Any]:
    """The process group that the gradients are summed over, or None for this process alone."""
    groups = {id(w.process_group): w.process_group for w in wrappers}
    if len(groups) > 1:
        raise ValueError(
            f"rebatch: the modules are DistributedDataParallel over {len(groups)} process groups: "
            "expected one for all modules of a Step"
        )
    own = next(iter(groups.values()), None)
    if group is False and own is not None:
        raise ValueError(
            "rebatch: group is False, and the model is DistributedDataParallel: expected the plain "
            "model, or no group"
        )
    if group is None or group is False or (group is True and own is not None):
        return own
    if not has_ranks():
        raise ValueError(
            f"rebatch: group is {group!r}, and torch.distributed is not initialized: expected "
            "torch.distributed.init_process_group() before the Step is made"
        )
    given = dist.group.WORLD if group is True else group
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(f"rebatch: group is {group!r}: expected True or a ProcessGroup")
    if own is not None and given is not own:
        raise ValueError(
            "rebatch: group is another one than that of DistributedDataParallel: expected no group"
        )
    return given


def warn_if_alone(modules: torch.nn.Module) -> None:
    """A plain model where there are other ranks is mostly meant to be trained with them."""
    if not has_ranks() or dist.get_world_size() < 2 or _is_sharded(modules):
        return
    warnings.warn(
        f"rebatch: torch.distributed has {dist.get_world_size()} ranks, and the model is a plain "
        "module, so this Step trains on this rank alone: pass group=True to train with all ranks, "
        "or group=False where that is meant",
        RuntimeWarning,
        stacklevel=user_stacklevel(),
    )


def _is_sharded(modules: torch.nn.Module) -> bool:
    return any(hasattr(p, "device_mesh") for p in modules.parameters())


def keeps_local(wrappers: List[DistributedDataParallel]) -> bool:
    """Whether the program is within no_sync() of all of them."""
    kept = [wrapper for wrapper in wrappers if not wrapper.require_backward_grad_sync]
    if kept and len(kept) < len(wrappers):
        raise ValueError(
            f"rebatch: a batch began within no_sync() of {len(kept)} of {len(wrappers)} modules "
            "that are DistributedDataParallel: expected no_sync() of all of them, or of none"
        )
    return bool(kept)


def caps_of(wrappers: List[DistributedDataParallel]) -> Tuple[int, int]:
    """The sizes of the first bucket and of the others, in bytes."""
    cap = min((w.bucket_bytes_cap for w in wrappers), default=_CAP_BYTES)
    return min(cap, _FIRST_CAP_BYTES), cap


def buffers_of(modules: torch.nn.Module, wrappers: List[Any]) -> List[torch.Tensor]:
    """Those that every rank has from rank 0: of plain modules, and where a wrapper says so."""
    left = {id(b) for w in wrappers if not w.broadcast_buffers for b in w.buffers()}
    return [b for b in modules.buffers() if id(b) not in left]


def compression_of(wrappers: List[DistributedDataParallel]) -> Optional[torch.dtype]:
    """The dtype that a communication hook sends gradients in."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    known = {
        default_hooks.allreduce_hook: None,
        default_hooks.fp16_compress_hook: torch.float16,
        default_hooks.bf16_compress_hook: torch.bfloat16,
    }
    dtype = None
    for hook in (hook for w in wrappers for hook, _ in w._comm_hooks):
        if hook not in known:
            raise ValueError(
                "rebatch: DistributedDataParallel has the communication hook "
                f"{getattr(hook, '__name__', hook)!r}: expected fp16_compress_hook, "
                "bf16_compress_hook, or none"
            )
        dtype = known[hook] or dtype
    return dtype


def _forward_alone(wrapper: DistributedDataParallel, *inputs: Any, **keywords: Any) -> Any:
    """What forward() of DistributedDataParallel does, without its collectives."""
    if wrapper.device_ids:
        device = torch.device(wrapper.device_type, wrapper.device_ids[0])
        there: Any = to_kwargs(inputs, keywords, device, wrapper.use_side_stream_for_tensor_copies)
        inputs, keywords = (members[0] for members in there)
    return wrapper.module(*inputs, **keywords)


class Quiet:
    """Wrappers whose forward and backward passes run without collectives within quiet()."""

    def __init__(self, wrappers: List[DistributedDataParallel]):
        for wrapper in wrappers:
            _check_settings(wrapper)
        self._wrappers = wrappers
        # Made once: torch.compile looks whether a function is another one.
        self._forwards: List[Callable[..., Any]] = [
            functools.partial(_forward_alone, w) for w in wrappers
        ]

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for wrapper, forward in zip(self._wrappers, self._forwards):
                if "forward" not in vars(wrapper):
                    stack.enter_context(wrapper.no_sync())
                    wrapper.forward = forward  # type: ignore[method-assign]
                    stack.callback(vars(wrapper).pop, "forward", None)
            yield
