"""What the package uses of PyTorch's private names, for versions 2.8 to 2.15, in one place.

Functions and classes are imported from here, by a name without underscore. Attributes of PyTorch's
objects are used in place and listed in ATTRIBUTES. tests/python/test_private_names.py fails when
the installed PyTorch lacks one of either, and when another module uses one that is not here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Dict, Tuple

import torch
from torch import (
    _chunk_cat as chunk_cat,
)
from torch import (
    _foreach_add_ as foreach_add_,
)
from torch import (
    _foreach_copy_ as foreach_copy_,
)
from torch import (
    _foreach_mul_ as foreach_mul_,
)
from torch import (
    _foreach_norm as foreach_norm,
)
from torch import (
    _foreach_zero_ as foreach_zero_,
)
from torch._C import (
    _get_cudnn_benchmark as is_cudnn_tuned,
)
from torch._C import (
    _get_cudnn_deterministic as is_cudnn_deterministic,
)
from torch._C import (
    _get_cudnn_enabled as is_cudnn_enabled,
)
from torch._C import (
    _get_deterministic_algorithms as are_deterministic,
)
from torch._C import (
    _get_deterministic_algorithms_warn_only as warns_of_nondeterminism,
)
from torch._C import (
    _GLIBCXX_USE_CXX11_ABI as USES_CXX11_ABI,
)
from torch._C import (
    DisableTorchFunctionSubclass as base_functions,
)
from torch._C._autograd import (
    _get_sequence_nr as next_node_number,
)
from torch._C._autograd import (
    _profiler_enabled as is_profiling,
)
from torch.cuda._utils import _get_device_index as get_device_index
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm as SpectralNormHook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

if torch.distributed.is_available():
    from torch.distributed.distributed_c10d import (
        _get_default_store as get_default_store,
    )
    from torch.distributed.distributed_c10d import (
        _set_pg_timeout as set_group_timeout,  # torch.distributed.set_timeout() in newer ones
    )
    from torch.distributed.utils import (
        _sync_module_states as sync_module_states,
    )
    from torch.distributed.utils import (
        _to_kwargs as to_kwargs,
    )

__all__ = [
    "BatchNorm",
    "Dropout",
    "SpectralNorm",
    "SpectralNormHook",
    "TorchDispatchMode",
    "USES_CXX11_ABI",
    "are_deterministic",
    "base_functions",
    "chunk_cat",
    "collectives",
    "default_device_context",
    "empty_parametrizations",
    "end_allocating",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_zero_",
    "get_default_store",
    "get_device_index",
    "is_cudnn_deterministic",
    "is_cudnn_enabled",
    "is_cudnn_tuned",
    "is_profiling",
    "next_node_number",
    "parametrize",
    "set_group_timeout",
    "storage_address",
    "sync_module_states",
    "to_kwargs",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
    "warns_of_nondeterminism",
]

# ---- modes of the process ----


# What set_default_device() has set in this thread; None: nothing.
default_device_context = functools.partial(
    getattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", None
)


def empty_parametrizations() -> None:
    """Forget what parametrize.cached() keeps."""
    parametrize._cache = {}


def storage_address(tensor: torch.Tensor) -> int:
    """Of what owns its memory, without an object of that: PyTorch does not add a gradient in place
    whose memory has one."""
    address: int = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
    return address


def collectives() -> int:
    """That this process has begun, as far as its groups count them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    count, groups = 0, torch.distributed.distributed_c10d._world.pg_map
    group: Any
    for group in groups:
        with contextlib.suppress(RuntimeError):  # of a backend that does not count
            count += group._get_sequence_number_for_group()
    return count


# ---- torch._C of builds with CUDA: another build lacks these ----


def clear_cublas_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()


def begin_allocating(device: int, pool: Any) -> None:
    """What this thread allocates comes from the pool with that id."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)


def begin_allocating_of_stream(device: int, pool: Any) -> None:
    """The same for the current stream, in every thread, such as autograd's."""
    torch._C._cuda_beginAllocateCurrentStreamToPool(device, pool)


def end_allocating(device: int, pool: Any) -> None:
    """The end of either. It is also what CUDAGraph.capture_end() leaves undone where CUDA has
    invalidated the capture."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


# Since 2.15 a graph finds the generators by itself: the call does nothing and says so on stderr.
_REGISTERS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


def register_generator(graph: Any, generator: torch.Generator) -> None:
    """A capture draws from it, and replays are to move it on."""
    if _REGISTERS:
        graph.register_generator_state(generator)


def captures_stop_draws() -> bool:
    """Whether other threads cannot draw from the device's generator while a pass is captured."""
    return _REGISTERS


def empty_pinned_cache() -> None:
    torch._C._host_emptyCache()


def memory_fraction(device: int) -> float:
    return float(torch._C._cuda_getMemoryFraction(device))


def mem_get_info(device: Any = None) -> Tuple[int, int]:
    """Free and all bytes of a GPU. HAMi refuses the question while its container uses more than its
    limit: then nothing is free."""
    is_number = isinstance(device, int)  # so PyTorch's own function, with ten calls, is not needed
    try:
        ask = torch.cuda.cudart().cudaMemGetInfo if is_number else torch.cuda.mem_get_info
        return ask(device)
    except RuntimeError as error:
        if "invalid argument" not in str(error):
            raise
        return 0, int(torch.cuda.get_device_properties(device).total_memory)


def memory_stats(device: int) -> Dict[str, Any]:
    """Nested, unlike torch.cuda.memory_stats(), and so several times faster."""
    return torch._C._cuda_memoryStats(device)


def reset_peak_memory_stats(device: int) -> None:
    torch._C._cuda_resetPeakMemoryStats(device)


# ---- modules that PyTorch imports only when they are needed ----


def has_compiled_graphs(device: torch.device) -> bool:
    """Whether torch.compile(mode="reduce-overhead") has CUDA graphs there. Only the thread that
    imported its module and those of autograd can have some; in others the module fails."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return False
    try:
        return bool(trees.get_manager(device.index or 0, False))
    except AssertionError:
        return False


def fsdp_mesh_info() -> Any:
    """The class of a mesh of fully_shard() without replicas."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    return FSDPMeshInfo


# ---- attributes ----

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MODULE_TABLES = ("_parameters", "_buffers", "_modules", *HOOK_TABLES)
# What a model of fully_shard() is refused without, in the order in which the objects are reached.
FSDP_STATE = ("_lazy_init", "_state_ctx", "_comm_ctx", "_training_state", "_modules_to_run_forward")
FSDP_CONTEXT = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
FSDP_GROUP = (
    "fsdp_params",
    "mesh_info",
    "device_handle",
    "reduce_grads",
    "reshard_after_backward",
    "post_forward_mesh_info",
    "_reduce_dtype",
    "_training_state",
    "_post_forward_indices",
    "unshard",
    "wait_for_unshard",
    "finalize_backward",
    "_to_sharded",
)
FSDP_PARAMETER = (
    "sharded_param",
    "_orig_size",
    "sharded_size",
    "contiguous_sharded_stride",
    "padded_sharded_param_size",
    "fsdp_placement",
    "to_sharded_dtensor",
    "is_dtensor",
)

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_"
# Class: its attributes, in every version.
ATTRIBUTES: Dict[str, Tuple[str, ...]] = {
    "torch.nn.Module": (*MODULE_TABLES, "_compiled_call_impl"),
    "torch.autograd.graph.Node": ("_sequence_nr",),
    "torch.Tensor": ("_version", *HOOKS_OF_TENSORS, "_indices", "_values"),
    "torch._ops.OpOverload": ("_schema",),
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod",),
    "torch.optim.Optimizer": ("_optimizer_step_pre_hooks",),
    "torch.amp.GradScaler": ("_scale", "_growth_tracker", "_per_optimizer_states"),
    "torch.distributed.ProcessGroup": ("_get_backend",),
    "torch.distributed.tensor.DTensor": ("_local_tensor",),
    "torch.nn.parallel.DistributedDataParallel": (
        "_comm_hooks",
        "_delay_all_reduce_all_params",
        "_use_python_reducer",
    ),
    "torch.distributed.fsdp.FSDPModule": ("_get_fsdp_state",),
    _FSDP + "state.FSDPState": FSDP_STATE,
    _FSDP + "state.FSDPStateContext": FSDP_CONTEXT,
    _FSDP + "param_group.FSDPParamGroup": (
        *FSDP_GROUP,
        "_all_gather_process_group",
        "_module_fqn",
        "_reduce_scatter_process_group",
    ),
    _FSDP + "param.FSDPParam": FSDP_PARAMETER,
}
# Those that some versions lack: the package asks for them first, or needs them for these alone.
IN_SOME: Dict[str, str] = {
    "_abort": "of NCCL's backend, where it has no abort()",
    "_all_gather_comm": "of FSDPParamGroup, since 2.11: lockstep needs it",
    "_reduce_scatter_comm": "of FSDPParamGroup, since 2.11: lockstep needs it",
    "_all_reduce_hook": "of FSDPParamGroup: a program may have set one",
    "_all_reduce_hook_stream": "of FSDPParamGroup: lockstep with replicas needs it",
    "_device_handle": "of FSDPState, before 2.13, which has reset_iter_state()",
    "_partial_reduce_output": "of FSDPParamGroup, before 2.13",
    "_reshard_after_forward_event": "of FSDPParamGroup, before 2.13",
    "_end_backward_iteration": "of FSDPState, else finalize_backward() of each group",
    "_fsdp_param_group": "of FSDPState, where it has no _fsdp_param_groups",
    "_fsdp_param_groups": "of FSDPState, where it may have several",
    "_post_backward_pending": "of FSDPParamGroup",
    "_set_unsharded_grad_dtypes": "of FSDPParamGroup",
    "_unsharded_param": "of FSDPParam, once it was gathered",
    "_cache_enabled": "of torch.nn.utils.parametrize, how many cached() are entered",
    "_saved_other": "of the node of a product, for the message about a scaled loss",
    "_gradient_checkpointing_func": "of transformers' modules, not PyTorch's",
}
