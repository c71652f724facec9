"""Models of fully_shard() (FSDP2) whose whole parameters do not fit: micro-batches keep PyTorch's
own collectives, so all ranks run the same ones (rebatch_options.lockstep).

A rank that fails within a micro-batch goes on with the collectives that it has not issued, with
zeros. It knows them from the micro-batch before, and before the first one from a rehearsal, which
issues none."""

from __future__ import annotations

import datetime
import functools
import gc
from typing import Any, Callable, List, NamedTuple

import torch
import torch.distributed as dist

from rebatch.torch.private import fsdp_mesh_info, set_group_timeout
from rebatch.torch.ranks.fsdp.window import Window, process_groups
from rebatch.torch.ranks.fsdp.window_reduction import lost_if_failed
from rebatch.torch.session.oom import is_oom, let_go
from rebatch.torch.session.session import Lost

# Of a group, in a step: the reduction is a sum, since losses are weighted by the samples of all
# ranks.
_OPEN = {
    "gradient_divide_factor": 1.0,
    "force_sum_reduction_for_comms": True,
    "reduce_grads": True,  # also within a trainer's no_sync()
    "all_reduce_grads": True,
}
_TRIES = 3


class _Call(NamedTuple):
    """A collective, as far as it must be the same on all ranks."""

    comm: Any  # fully_shard()'s own, or _sum_replicas
    group: Any
    dtype: torch.dtype
    sizes: tuple[int, ...]  # of output and input
    options: tuple[Any, ...]  # other arguments by name


class _Comm:
    """What a group of fully_shard() calls: counts its collectives."""

    def __init__(self, comm: Any, lockstep: "Lockstep"):
        self.plain, self._lockstep = comm, lockstep

    def allocate(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        allocated: torch.Tensor = self.plain.allocate(*arguments, **keywords)
        return allocated

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any
    ) -> Any:
        sizes = (output_tensor.numel(), input_tensor.numel())
        call = _Call(self.plain, group, output_tensor.dtype, sizes, tuple(options.items()))
        return self._lockstep.issue(call, output_tensor, input_tensor)


def _sum_replicas(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any) -> None:
    """The all-reduce of HSDP, in place: both are one tensor."""
    dist.all_reduce(output_tensor, group=group)


def why_not(window: Window) -> str:
    """Why a model cannot be trained without a window; "": it can."""
    for group in window.groups:
        if not (hasattr(group, "_all_gather_comm") and hasattr(group, "_reduce_scatter_comm")):
            return (
                f"PyTorch {torch.__version__} does not let a Step count the collectives of "
                "fully_shard(): expected 2.11 or newer"
            )
    return ""


class Lockstep(Window):
    """Of one root of fully_shard(), on all ranks of its mesh. Unlike in a window, parameters are
    gathered and sharded again in each pass."""

    def __init__(self, root: torch.nn.Module):
        super().__init__(root)
        why = why_not(self)
        if why:
            raise ValueError(f"rebatch: window is False, and {why}")
        self._kept: List[dict[Any, Any]] = []  # settings of the groups, while it is open
        self._known: List[_Call] = []  # of the last micro-batch that succeeded on all ranks
        self._is_rehearsal = False
        self._is_lost = False
        self.on_lost: Callable[[Lost], Any] = lambda error: None
        self.begin_pass()

    def set_timeout(self, seconds: float) -> None:
        """Of a collective that a rank cannot come to."""
        timeout = datetime.timedelta(seconds=seconds)
        set_timeout = getattr(dist, "set_timeout", set_group_timeout)
        for group in process_groups(self._groups):
            set_timeout(timeout, group)

    def begin_pass(self) -> None:
        """The next collective is the first of a micro-batch."""
        self._issued: List[_Call] = []

    def trained(self) -> List[torch.nn.Parameter]:
        """This rank's parts: their gradients are reduced in each pass."""
        return self.shards()

    @property
    def is_open(self) -> bool:
        return False  # no parameter is whole between two passes

    def open(self) -> None:
        """A step begins."""
        if self._kept:
            return
        self.begin_pass()
        self._forget_evaluation()
        for group in self._groups:
            settings = {**_OPEN, **self._counted(group)}
            self._kept.append({name: getattr(group, name) for name in settings})
            vars(group).update(settings)

    def _counted(self, group: Any) -> dict[str, Any]:
        """Settings of a group with which each of its collectives comes to issue()."""
        settings: dict[str, Any] = {
            name: _Comm(getattr(group, name), self)
            for name in ("_all_gather_comm", "_reduce_scatter_comm")
        }
        replicas = getattr(group.mesh_info, "replicate_process_group", None)
        if replicas is not None:  # its all-reduce has no such object, but a hook can make it
            settings["mesh_info"] = _without_replicas(group.mesh_info)
            settings["_all_reduce_hook"] = functools.partial(self._all_reduce, replicas)
            # On one stream no memory of a reduce-scatter is free before its all-reduce is over.
            settings["_all_reduce_hook_stream"] = self._sharded.stream
        return settings

    def _all_reduce(self, replicas: Any, reduced: torch.Tensor) -> None:
        sizes = (reduced.numel(), reduced.numel())
        self.issue(_Call(_sum_replicas, replicas, reduced.dtype, sizes, ()), reduced, reduced)

    def _forget_evaluation(self) -> None:
        """A pass without gradients leaves parameters whole, and an order for the next backward
        pass, so that the next micro-batch would have other collectives."""
        earlier = [(p, p.grad) for p in self.shards()]
        self.reset()
        for p, gradient in earlier:
            p.grad = gradient

    def close(self) -> None:
        """The model has its settings again. Makes no collective."""
        for group, kept in zip(self._groups, self._kept):
            vars(group).update(kept)
        self._kept = []

    # ---- collectives ----

    def issue(self, call: _Call, output: torch.Tensor, input: torch.Tensor) -> Any:
        """One of fully_shard()'s; in a rehearsal it is only noted."""
        if self._is_lost:
            raise Lost("the connection to another rank is lost")
        self._issued.append(call)  # what runs out of memory in it does so in its wait
        if self._is_rehearsal:
            _fill(output, input)
            return None
        try:
            with lost_if_failed():
                return call.comm(
                    output_tensor=output,
                    input_tensor=input,
                    group=call.group,
                    **dict(call.options),
                )
        except Lost as error:
            self._is_lost = True
            self.on_lost(error)
            raise

    def end_pass(self, has_succeeded: bool) -> None:
        """The collectives of a micro-batch are over; whether it has succeeded on all ranks."""
        if has_succeeded:
            self._known = self._issued
        self.begin_pass()

    @property
    def is_known(self) -> bool:
        """Whether all ranks know the collectives of a micro-batch."""
        return bool(self._known)

    def rehearse(self, run: Callable[[], Any]) -> None:
        """Note the collectives of run(), which runs a few samples forward and backward."""
        self.reset()
        self.begin_pass()
        self._is_rehearsal = True
        try:
            run()
        finally:
            self._is_rehearsal = False
            self.reset()

    def end_rehearsal(self) -> None:
        """All ranks have rehearsed."""
        self.end_pass(True)

    def issue_rest(self) -> None:
        """Issue the collectives of a micro-batch that has failed here, as far as it has not. Raises
        what makes that impossible."""
        for left in reversed(range(_TRIES)):
            try:
                self._issue_rest()
                return
            except Exception as error:
                if not is_oom(error) or not left:
                    raise
                let_go(error)
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _issue_rest(self) -> None:
        self.reset()
        count, device = len(self._issued), self._groups[0].device
        if self._known[:count] != self._issued:
            raise RuntimeError("the collectives of this micro-batch are others than those before")
        for call in self._known[count:]:
            zeros = [torch.zeros(n, dtype=call.dtype, device=device) for n in call.sizes]
            self.issue(call, *zeros)

    def reset(self) -> None:
        """After an exception in a pass on this rank: the next one begins as if there had been none,
        with sharded parameters and no gradients."""
        root: Any = self._root
        if hasattr(root, "reset_iter_state"):  # since 2.13
            root.reset_iter_state()
        else:
            _reset(root._get_fsdp_state(), self._groups)


def _without_replicas(mesh_info: Any) -> Any:
    """The same mesh, of whose replicas fully_shard() knows nothing."""
    alone = object.__new__(fsdp_mesh_info())
    vars(alone).update(vars(mesh_info))
    return alone


def _fill(output: torch.Tensor, input: torch.Tensor) -> None:
    """Values of the right scale, in place of those of the other ranks."""
    if output is input:
        return
    if output.numel() < input.numel():
        output.zero_()
        return
    own = input.clone()  # which may be a part of the output
    output.view(-1, own.numel()).copy_(own.expand(output.numel() // own.numel(), -1))


def _reset(state: Any, groups: List[Any]) -> None:
    """FSDPModule.reset_iter_state() of 2.13, for versions before it."""
    context, comm = state._state_ctx, state._comm_ctx
    stream = state._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        held = getattr(comm, name, None)
        if held is not None and held.event is not None:
            stream.wait_event(held.event)
        setattr(comm, name, None)
    comm.post_forward_order.clear()
    for part in context.all_states:
        part._training_state = type(part._training_state).IDLE
        part._modules_to_run_forward.clear()
    for group in groups:
        group.finalize_backward()  # waits for what is under way
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._training_state = type(group._training_state).IDLE
        for p in group.fsdp_params:
            p.sharded_param.grad = p.unsharded_accumulated_grad = None
            if hasattr(p, "_unsharded_param"):
                p._unsharded_param.grad = None
        group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
