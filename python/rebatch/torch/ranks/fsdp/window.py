"""Models of fully_shard() (FSDP2): a window in which parameters are whole, so that forward and
backward passes make no collectives, and each rank has its own number of micro-batches.

open() gathers the parameters, group by group. Gradients then add up beside whole parameters.
reduce() sums them over the ranks and leaves each rank its part. Both go through the groups in one
order and can go on after an OOM where they were, so no collective is issued twice."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator, List, Optional

import torch
import torch.distributed as dist

from rebatch.torch.ranks.fsdp.private_names import FullyShard, reduce_dtype, whole_dtype
from rebatch.torch.ranks.fsdp.window_reduction import Reduction, lost_if_failed, scatter_group


def window_of(
    modules: torch.nn.ModuleList,
    group: Any,
    make: Callable[[torch.nn.Module], "Window"],
) -> Optional["Window"]:
    """What make() makes of the root of a Step's modules, which has all parameters that are trained
    or sharded; None where no module is one of fully_shard()."""
    found: List[Any] = [m for m in modules.modules() if hasattr(m, "_get_fsdp_state")]
    if not found:
        return None
    for module in found:  # a pass without gradients leaves parameters whole
        module.reshard()
    root = found[0]
    trained = {p for p in modules.parameters() if p.requires_grad}
    has_all = trained <= set(root.parameters()) and set(found) <= set(root.modules())
    if len(list(modules)) > 1 or not has_all:
        raise ValueError(
            "rebatch: fully_shard() was called for parts of the model: expected one model, and "
            "fully_shard() of all that is trained or sharded, after that of its parts"
        )
    window = make(root)
    if group not in (None, True, window.group):
        raise ValueError(
            f"rebatch: group is {group!r}, and the model is one of fully_shard(): expected no group"
        )
    return window


class Window:
    """Of one root of fully_shard(), on all ranks of its mesh."""

    def __init__(self, root: torch.nn.Module):
        self._root = root
        self._sharded = FullyShard(root)
        self._groups = self._sharded.groups
        self._is_open = False
        self._reduction: Any = None  # a Reduction, once its memory is there
        self._check()
        self.group = _group_of(self._groups[0].mesh_info.mesh)  # of all its ranks
        # The ranks that have each gradient, once it is reduced.
        self.replicas = dist.get_world_size(self.group) // self._groups[0].mesh_info.shard_mesh_size

    def _check(self) -> None:
        for group in self._groups:
            name = repr(group._module_fqn or "the model")
            if not hasattr(group.mesh_info, "shard_process_group"):
                raise ValueError(
                    f"rebatch: fully_shard() of {name} has a mesh that replicates alone: expected "
                    "DistributedDataParallel, or a mesh with a dimension that shards"
                )
            if any(p.is_dtensor for p in group.fsdp_params):
                raise ValueError(
                    f"rebatch: parameters of {name} were DTensors before fully_shard(), as tensor "
                    "parallelism makes them: expected plain parameters"
                )
            for setting in ("gradient_divide_factor", "_all_reduce_hook"):
                if getattr(group, setting, None) is not None:
                    raise ValueError(
                        f"rebatch: fully_shard() of {name} has {setting.lstrip('_')}: expected "
                        "none, since a Step weights losses by the samples of all ranks"
                    )
        meshes = {repr(group.mesh_info.mesh.mesh.tolist()) for group in self._groups}
        if len(meshes) != 1:
            raise ValueError(
                f"rebatch: fully_shard() has {len(meshes)} meshes: expected one for all of the "
                "model"
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
        dtypes = {p.dtype for p in self.shards()}
        if scaler is not None and torch.float16 in dtypes:
            raise ValueError(
                "rebatch: scaler is given, and parameters of fully_shard() are float16: expected "
                "float32, and MixedPrecisionPolicy(param_dtype=torch.float16)"
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

    def _all(self) -> List[Any]:
        return [p for group in self._groups for p in group.fsdp_params]

    @property
    def root(self) -> torch.nn.Module:
        return self._root

    @property
    def groups(self) -> List[Any]:
        """Those of fully_shard()."""
        return self._groups

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def sum_dtype(self) -> torch.dtype:
        """The widest in which gradients are reduced: sums of micro-batches are no narrower."""
        dtypes = {reduce_dtype(g) for g in self._groups if _trained_of(g)}
        return functools.reduce(torch.promote_types, dtypes)

    def trained(self) -> List[torch.nn.Parameter]:
        """The whole parameters that require a gradient, while it is open."""
        return [p.unsharded_param for p in self._all() if p.sharded_param.requires_grad]

    def shards(self) -> List[torch.nn.Parameter]:
        """This rank's parts of them, in the same order."""
        return [p.sharded_param for p in self._all() if p.sharded_param.requires_grad]

    def connect(self) -> None:
        """NCCL connects ranks within their first collective of a kind, where a rank waits for one
        that does not come without any timeout. So each kind runs once here, where all ranks are."""
        device = self._groups[0].device
        for group in dict.fromkeys([self.group, *process_groups(self._groups)]):
            size = dist.get_world_size(group)
            one, all_of_them = torch.zeros(1, device=device), torch.zeros(size, device=device)
            dist.all_gather_into_tensor(all_of_them, one, group=group)
            dist.reduce_scatter_tensor(one, all_of_them, group=group)
            dist.all_reduce(one, group=group)

    # ---- opening and closing ----

    def prepare(self, beside_bytes: Optional[int] = None) -> None:
        """Allocate and free what open() needs; with `beside_bytes` also the whole gradients, and
        so many bytes. May run out of memory; makes no collective."""
        held, largest = [], 0
        if beside_bytes is not None:
            device = self._groups[0].device
            held.append(torch.empty(beside_bytes, dtype=torch.uint8, device=device))
        for group in self._groups:
            total = 0
            if beside_bytes is not None:
                held += [
                    torch.empty(p._orig_size, dtype=reduce_dtype(group), device=group.device)
                    for p in _trained_of(group)
                ]
            for p in group.fsdp_params:
                dtype, count = whole_dtype(p), p._orig_size.numel()
                held.append(torch.empty(count, dtype=dtype, device=group.device))
                total += count * dtype.itemsize
            largest = max(largest, total)
        # A group's parts, and all ranks' parts of it, each in one tensor.
        held += [torch.empty(2 * largest, dtype=torch.uint8, device=self._groups[0].device)]

    def open(self) -> None:
        """Gather the whole parameters. After an OOM it may be called again. Raises Lost."""
        self._is_open = True
        self._sharded.keep_whole()
        for group in self._groups:
            with lost_if_failed():
                group.unshard()
                group.wait_for_unshard()

    def close(self) -> None:
        """Each rank has its parts alone, and the model its settings. Makes no collective."""
        if self._is_open:
            self._sharded.shard_again()
        self._is_open, self._reduction = False, None

    def attempt_failed(self) -> None:
        """After an exception in a forward or backward pass on this rank. Gradients are the
        caller's."""
        self._sharded.reset_pass()

    # ---- the reduction ----

    def begin_reduction(self) -> None:
        """Allocate and free what the reduction needs. May run out of memory, and then be called
        again; makes no collective."""
        if not self._reduction:
            reduction = Reduction(self._groups, self._sharded.stream)
            reduction.warm_up()
            self._reduction = reduction

    def reduce_next(self, sums: List[Optional[torch.Tensor]]) -> bool:
        """Sum the gradients of a group's whole parameters over the ranks: of those in `sums`, which
        has one for each of trained(), and loses them. After an OOM it may be called again. False
        where no group is left. Raises Lost."""
        return bool(self._reduction.next(sums))

    def reduced(self) -> List[Optional[torch.Tensor]]:
        """The gradients of shards()."""
        parts: List[Optional[torch.Tensor]] = self._reduction.parts
        return parts


def _trained_of(group: Any) -> List[Any]:
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]


def process_groups(groups: List[Any]) -> Iterator[Any]:
    """In which these groups of fully_shard() make collectives."""
    for group in groups:
        yield group._all_gather_process_group
        yield scatter_group(group)
        replicas = getattr(group.mesh_info, "replicate_process_group", None)
        if replicas is not None:
            yield replicas


def _group_of(mesh: Any) -> Any:
    """A process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    if sorted(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(sorted(ranks), use_local_synchronization=True)
