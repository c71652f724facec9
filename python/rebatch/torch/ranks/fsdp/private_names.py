"""The private parts of fully_shard() (FSDP2) that a window needs, and what differs in them between
versions of PyTorch. A version that lacks one of them is refused by its name."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Optional, Tuple

import torch

from rebatch.torch.private import FSDP_CONTEXT, FSDP_GROUP, FSDP_PARAMETER, FSDP_STATE

# Of a group while its parameters are whole: nothing is sharded again, autograd reduces nothing.
_WHOLE = {"reduce_grads": False, "reshard_after_backward": False, "post_forward_mesh_info": None}


def _check_has(owner: Any, names: Tuple[str, ...]) -> None:
    for name in names:
        if not hasattr(owner, name):
            raise ValueError(
                f"rebatch: the model is one of fully_shard() (FSDP2), and PyTorch "
                f"{torch.__version__} has no {type(owner).__name__}.{name}: expected a version "
                "from 2.8 to 2.15, or DistributedDataParallel"
            )


class FullyShard:
    """The state of a root module of fully_shard()."""

    def __init__(self, root: Any):
        self._state = root._get_fsdp_state()
        _check_has(self._state, FSDP_STATE)
        _check_has(self._state._state_ctx, FSDP_CONTEXT)
        self._state._lazy_init()
        self._context, self._comm = self._state._state_ctx, self._state._comm_ctx
        # One of a list of modules, fully_shard([norm, head]), is there once for each before 2.15.
        self._states = list(dict.fromkeys(self._context.all_states))
        self.groups = [group for state in self._states for group in _groups_of(state)]
        self._saved: List[Tuple[Any, Dict[str, Any]]] = []
        for group in self.groups:
            _check_has(group, FSDP_GROUP)
            for p in group.fsdp_params:
                _check_has(p, FSDP_PARAMETER)

    @property
    def stream(self) -> Any:
        """The one on which fully_shard() reduces gradients."""
        return self._comm.reduce_scatter_stream

    # ---- forward and backward passes with whole parameters ----

    def keep_whole(self) -> None:
        """From now on passes make no collectives, once the parameters are gathered, and their
        gradients stay in .grad of the whole parameters."""
        if self._saved:
            return
        for group in self.groups:
            self._set(group, _WHOLE)
            for p in group.fsdp_params:
                if hasattr(p, "to_accumulated_grad_if_needed"):  # before 2.15: out of .grad
                    self._set(p, {"reduce_dtype": None})
        if hasattr(self._context, "manual_backward_finalization"):  # since 2.15
            self._context.manual_backward_finalization = True

    def _set(self, owner: Any, values: Dict[str, Any]) -> None:
        self._saved.append((owner, {name: getattr(owner, name) for name in values}))
        vars(owner).update(values)

    def shard_again(self) -> None:
        """Each rank has its parts alone, and the model its settings."""
        self.reset_pass()
        self._end_iteration()
        for owner, values in self._saved:
            vars(owner).update(values)
        self._saved = []
        for group in self.groups:
            for p in group.fsdp_params:
                if hasattr(p, "_unsharded_param"):
                    p._unsharded_param.grad = None
            if hasattr(group, "_post_backward_pending"):
                group._post_backward_pending = False
            group._to_sharded()

    def reset_pass(self) -> None:
        """After an exception in a forward or backward pass on this rank: the next pass begins as if
        there had been none."""
        self._context.iter_forward_root = None
        self._context.post_backward_final_callback_queued = False
        self._comm.post_forward_order.clear()
        for state in self._states:
            state._training_state = type(state._training_state).IDLE
            state._modules_to_run_forward.clear()
        for group in self.groups:
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()
            if hasattr(group, "_set_unsharded_grad_dtypes"):
                group._set_unsharded_grad_dtypes(defer_upcast=False)

    def _end_iteration(self) -> None:
        if hasattr(self._state, "_end_backward_iteration"):
            self._state._end_backward_iteration()
        else:
            for group in self.groups:
                group.finalize_backward()
        if hasattr(self._context, "manual_backward_finalization"):
            self._context.manual_backward_finalization_active = None
            self._context.manual_backward_finalization = False


def _groups_of(state: Any) -> List[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def whole_dtype(p: Any) -> torch.dtype:
    """That of a whole parameter."""
    dtype: torch.dtype = getattr(p, "param_dtype", None) or p.orig_dtype
    return dtype


def reduce_dtype(group: Any) -> torch.dtype:
    """In which the gradients of a group are summed over the ranks."""
    given: Optional[torch.dtype] = group._reduce_dtype
    if given is not None:
        return given
    dtypes = {
        getattr(p, "unsharded_grad_dtype", None) or whole_dtype(p)
        for p in group.fsdp_params
        if p.sharded_param.requires_grad
    }
    return functools.reduce(torch.promote_types, dtypes)


def gradient_dtype(p: Any) -> Optional[torch.dtype]:
    """Of this rank's part; None is that of the reduction."""
    known = "sharded_grad_dtype" if hasattr(p, "sharded_grad_dtype") else "orig_dtype"
    dtype: Optional[torch.dtype] = getattr(p, known)
    return dtype


def reduce_scatter_of(group: Any) -> Optional[Any]:
    """What the program has set with set_custom_reduce_scatter() or a method like it: an object that
    allocates and reduces. None: torch.distributed does."""
    comm = getattr(group, "_reduce_scatter_comm", None)
    return None if type(comm).__name__ in ("NoneType", "DefaultReduceScatter") else comm
