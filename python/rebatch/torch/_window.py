"""Models of fully_shard() (FSDP2): a window in which parameters are whole, so that forward and
backward passes make no collectives, and each rank has its own number of micro-batches.

open() gathers the parameters, group by group. Gradients then add up beside whole parameters.
reduce() sums them over the ranks and leaves each rank its part. Both go through the groups in one
order and can go on after an OOM where they were, so no collective is issued twice."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist

from rebatch.torch._oom import is_oom
from rebatch.torch._session import Lost

# Of a group, while a window is open: nothing is sharded again, nothing is reduced by autograd, and
# the reduction is a sum, since losses are weighted by the samples of all ranks.
_OPEN = {
    "reduce_grads": False,
    "reshard_after_backward": False,
    "post_forward_mesh_info": None,
    "gradient_divide_factor": 1.0,
    "force_sum_reduction_for_comms": True,
    "reduce_scatter_unused_params": True,
}


def window_of(modules: torch.nn.Module, group: Any) -> Optional["Window"]:
    """That of a Step's modules, or None where none is one of fully_shard()."""
    found = [m for m in modules.modules() if hasattr(m, "_get_fsdp_state")]
    if not found:
        return None
    if len(list(modules)) > 1 or found[0] is not modules[0]:
        raise ValueError(
            "rebatch: fully_shard() was called for parts of the model: expected one model, and "
            "fully_shard() of the model itself after that of its parts"
        )
    window = Window(found[0])
    if group not in (None, True, window.group):
        raise ValueError(
            f"rebatch: group is {group!r}, and the model is one of fully_shard(): expected no group"
        )
    return window


class _Sent:
    """A group's reduce-scatter, which is issued once: when the code after it runs out of memory and
    runs again, it has the result of before."""

    def __init__(self, comm: Any):
        self._comm, self._output = comm, None

    def allocate(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return self._comm.allocate(*arguments, **keywords)

    def __call__(self, output_tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if self._output is not None:
            return output_tensor.copy_(self._output)
        with lost_if_failed():
            work = self._comm(output_tensor, *arguments, **keywords)
        self._output = output_tensor
        return work


@contextlib.contextmanager
def lost_if_failed() -> Iterator[None]:
    """Around a collective."""
    try:
        yield
    except RuntimeError as error:
        if is_oom(error):
            raise
        raise Lost(str(error)) from error


class Window:
    """Of one root of fully_shard(), on all ranks of its mesh."""

    def __init__(self, root: torch.nn.Module):
        _check_version(root)
        self._root = root
        self._state = root._get_fsdp_state()
        self._saved: List[dict] = []  # settings of the groups, while it is open
        self._has_begun = False
        self._state._lazy_init()
        self._states = list(self._state._state_ctx.all_states)
        self._groups = [group for state in self._states for group in state._fsdp_param_groups]
        self._check()

    def _check(self) -> None:
        for group in self._groups:
            name = repr(group._module_fqn or "the model")
            if group._is_hsdp or not hasattr(group.mesh_info, "shard_process_group"):
                raise ValueError(
                    f"rebatch: fully_shard() of {name} has a mesh of several dimensions (HSDP), or "
                    "one that replicates: expected a mesh of one dimension"
                )
            for setting in ("gradient_divide_factor", "_all_reduce_hook"):
                if getattr(group, setting) is not None:
                    raise ValueError(
                        f"rebatch: fully_shard() of {name} has {setting.lstrip('_')}: expected "
                        "none, since a Step weights losses by the samples of all ranks"
                    )
        sizes = {tuple(dist.get_process_group_ranks(g)) for g in self._process_groups()}
        if len(sizes) != 1:
            raise ValueError(
                f"rebatch: fully_shard() shards over {len(sizes)} sets of ranks: expected one"
            )
        mine = {id(p.sharded_param) for p in self._all()}
        for name, p in self._root.named_parameters():
            if id(p) not in mine and p.requires_grad:
                raise ValueError(
                    f"rebatch: the parameter {name!r} requires a gradient, and no fully_shard() "
                    "has it: expected fully_shard() of the whole model, without ignored_params"
                )

    def check_match(self, update: Any, scaler: Any) -> None:
        """ValueError for an update that a window cannot serve."""
        if scaler is not None:
            raise ValueError(
                "rebatch: scaler is given, and the model is one of fully_shard(): expected "
                "bfloat16, by MixedPrecisionPolicy(param_dtype=torch.bfloat16), which needs no "
                "scaler"
            )
        updated = {id(p) for p in update.parameters}
        mine = {id(p) for p in self.shards()}
        if updated != mine:
            raise ValueError(
                f"rebatch: the model of fully_shard() has {len(mine)} parameters that require a "
                f"gradient, and the optimizer has {len(updated & mine)} of them and "
                f"{len(updated - mine)} others: expected the same, and an optimizer that is made "
                "after fully_shard()"
            )

    def _process_groups(self) -> List[Any]:
        return [group.mesh_info.shard_process_group for group in self._groups]

    @property
    def group(self) -> Any:
        """The process group of its ranks."""
        return self._process_groups()[0]

    def _all(self) -> List[Any]:
        return [p for group in self._groups for p in group.fsdp_params]

    @property
    def is_open(self) -> bool:
        return bool(self._saved)

    def trained(self) -> List[torch.nn.Parameter]:
        """The whole parameters that require a gradient, while it is open."""
        return [p.unsharded_param for p in self._all() if p.sharded_param.requires_grad]

    def shards(self) -> List[torch.nn.Parameter]:
        """This rank's parts of them, in the same order."""
        return [p.sharded_param for p in self._all() if p.sharded_param.requires_grad]

    # ---- opening and closing ----

    def prepare(self) -> None:
        """Allocate and free what open() needs. May run out of memory; makes no collective."""
        held, largest = [], 0
        for group in self._groups:
            total = 0
            for p in group.fsdp_params:
                dtype, count = p.param_dtype or p.orig_dtype, p._orig_size.numel()
                held.append(torch.empty(count, dtype=dtype, device=group.device))
                total += count * dtype.itemsize
            largest = max(largest, total)
        # A group's parts, and all ranks' parts of it, each in one tensor.
        held += [torch.empty(2 * largest, dtype=torch.uint8, device=self._groups[0].device)]

    def open(self) -> None:
        """Gather the whole parameters. After an OOM it may be called again. Raises Lost."""
        if not self._saved:
            self._saved = [{name: getattr(g, name) for name in _OPEN} for g in self._groups]
            for group in self._groups:
                vars(group).update(_OPEN)
            self._state._state_ctx.manual_backward_finalization = True
        for group in self._groups:
            with lost_if_failed():
                group.unshard()
                group.wait_for_unshard()

    def close(self) -> None:
        """Each rank has its parts alone, and the model its settings. Makes no collective."""
        if not self._saved:
            return
        self.attempt_failed()
        for p in self._all():
            if hasattr(p, "_unsharded_param"):
                p._unsharded_param.grad = None
        self._state._end_backward_iteration()
        context = self._state._state_ctx
        context.manual_backward_finalization_active = None
        context.manual_backward_finalization = False
        for group, saved in zip(self._groups, self._saved):
            vars(group).update(saved)
            if isinstance(group._reduce_scatter_comm, _Sent):
                group._reduce_scatter_comm = group._reduce_scatter_comm._comm
            group._post_backward_pending = False
            group._to_sharded()
        self._saved, self._has_begun = [], False

    def attempt_failed(self) -> None:
        """After an exception in a forward or backward pass on this rank: the next pass begins as if
        there had been none. Gradients are the caller's."""
        self._state._state_ctx.iter_forward_root = None
        self._state._state_ctx.post_backward_final_callback_queued = False
        self._state._comm_ctx.post_forward_order.clear()
        for state in self._states:
            state._training_state = type(state._training_state).IDLE
            state._modules_to_run_forward.clear()
        for group in self._groups:
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()
            group._set_unsharded_grad_dtypes(defer_upcast=False)

    # ---- the reduction ----

    def begin_reduction(self) -> None:
        """Allocate and free what a group's reduction needs. May run out of memory, and then be
        called again; makes no collective."""
        if self._has_begun:
            return
        self._rehearse_reduction()
        for group in self._groups:
            group._reduce_scatter_comm = _Sent(group._reduce_scatter_comm)
        self._has_begun = True
        self._waiting = list(reversed(self._groups))
        self._reduced: Dict[int, Optional[torch.Tensor]] = {}

    def _rehearse_reduction(self) -> None:
        """Each group's result is kept, and there are two of the tensors that are sent."""
        stream, ranks = self._state._comm_ctx.reduce_scatter_stream, dist.get_world_size(self.group)
        counts = [sum(p._orig_size.numel() for p in g.fsdp_params) for g in self._groups]
        held = []
        for group, count in zip(self._groups, counts):
            dtype = group._reduce_dtype or torch.float32
            with group.device_handle.stream(stream):  # as fully_shard() allocates
                held.append(torch.empty(-(-count // ranks), dtype=dtype, device=group.device))
        for _ in range(2):
            held.append(torch.empty(max(counts), dtype=dtype, device=group.device))

    def reduce_next(self) -> bool:
        """Sum the gradients of a group's whole parameters over the ranks. After an OOM it may be
        called again, with the gradients in .grad again. False where no group is left. Raises
        Lost."""
        if not self._waiting:
            self._state._end_backward_iteration()
            return False
        group = self._waiting[0]
        for p in group.fsdp_params:
            p.sharded_param.grad = None
        group.reduce_grads = True
        try:
            group.post_backward()
        finally:
            group.reduce_grads = False
            group._training_state = type(group._training_state).IDLE
        for p in group.fsdp_params:
            self._reduced[id(p.sharded_param)] = p.sharded_param.grad
            p.sharded_param.grad = None
        self._waiting.pop(0)
        return True

    def is_reduced(self) -> List[bool]:
        """Of each of trained(), whether its gradient has been reduced."""
        return [self._has_begun and id(p) in self._reduced for p in self.shards()]

    def reduced(self) -> List[Optional[torch.Tensor]]:
        """The gradients of shards()."""
        return [self._reduced[id(p)] for p in self.shards()]


def _check_version(root: torch.nn.Module) -> None:
    if not hasattr(root, "finalize_backward"):
        raise ValueError(
            f"rebatch: the model is one of fully_shard() (FSDP2), and PyTorch is "
            f"{torch.__version__}: expected 2.15 or newer, or DistributedDataParallel"
        )
