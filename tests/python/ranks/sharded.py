"""What the ranks of a pair run with a model of fully_shard(). Each function returns plain
values."""

import contextlib
import functools
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import models
import pair
from models import FailAt, fails_above, placed, same_bits
from trained import RANK_OF_FAILURES, error_of, failing, failures_of, gone, step_of, swept

# Their names in versions of PyTorch.
_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
}
_LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.mean = (
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Buffer(torch.zeros(())),
        )

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.float().mean(), 0.1)
        return x + torch.tanh(self.linear(self.norm(x)))


def plain():
    torch.manual_seed(0)
    return placed(nn.Sequential(Part(), Part(), nn.Linear(8, 3)))


@functools.lru_cache(maxsize=None)
def _mesh_of(*shape):
    """The process groups of two dimensions are new, and no model needs its own."""
    names = ("copies", "parts")[-len(shape) :]
    return init_device_mesh(models.DEVICE.type, shape, mesh_dim_names=names)


def sharded(model, is_low=False, replicas=0, by_columns=False):
    """With replicas, each of so many sets of ranks has all parts (HSDP)."""
    policy = MixedPrecisionPolicy(**_LOW) if is_low else MixedPrecisionPolicy()
    size = dist.get_world_size()
    mesh = _mesh_of(replicas, size // replicas) if replicas else _mesh_of(size)
    options = {"mesh": mesh, "mp_policy": policy}
    if by_columns:
        options["shard_placement_fn"] = lambda p: Shard(p.dim() - 1) if p.dim() == 2 else None
    for part in list(model):
        fully_shard(part, **options)
    return fully_shard(model, **options)


def loss_fn(model, samples):
    return (model(samples[0]).float() - samples[1]).square().mean()


def batch_of(rank, samples=8):
    generator = torch.Generator().manual_seed(100 + rank)
    return placed(
        torch.randn(samples, 8, generator=generator),
        torch.randn(samples, 3, generator=generator),
    )


def own_batch():
    return batch_of(dist.get_rank())


def let_go(window):
    """gone() of a Step of this model."""
    model = sharded(plain())
    step = [step_of(model, adam(model), loss_fn, window=window, clip=1.0, micro_largest=4)]
    return gone(step, own_batch())


def disagreeing(window):
    """The messages where the first batch has other keys on rank 1, and options differ."""
    rank, model = dist.get_rank(), sharded(plain())
    optimizer, x = adam(model), own_batch()[0]

    def make_step(**options):
        return step_of(model, optimizer, lambda m, b: m(b["x"]).mean(), window=window, **options)

    clip = error_of(lambda: make_step(clip=2.0 - rank))
    step = make_step()
    keys = error_of(lambda: step({"x": x, "y": x} if rank else {"x": x}))
    return {"clip": clip[1], "keys": keys[1], "then": float(step({"x": x})) == 0.0}


def whole(model):
    """Copies of all parameters and buffers, whole."""
    return [p.detach().full_tensor() for p in model.parameters()] + [
        b.clone() for b in model.buffers()
    ]


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@contextlib.contextmanager
def counting():
    """Collectives of torch.distributed that the model's process groups run, by kind."""
    counts = {}
    plain_ones = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}

    def counted(name):
        def call(*arguments, **keywords):
            kind = _COLLECTIVES[name]
            counts[kind] = counts.get(kind, 0) + 1
            return plain_ones[name](*arguments, **keywords)

        return call

    for name in plain_ones:
        setattr(dist, name, counted(name))
    try:
        yield counts
    finally:
        for name, function in plain_ones.items():
            setattr(dist, name, function)


def collectives():
    """Of a step with eight micro-batches on rank 0 and one on rank 1: all, and those that were
    issued before the last loss_fn had returned."""
    model, seen = sharded(plain()), []

    def watched(model, samples):
        loss = loss_fn(model, samples)
        seen.append(dict(counts))
        return loss

    micro = 8 if dist.get_rank() else 1
    step = step_of(model, adam(model), watched, micro_start=micro, micro_largest=micro, clip=1.0)
    for _ in range(2):
        seen.clear()
        with counting() as counts:
            step(own_batch())
    return {"all": dict(counts), "first": seen[0], "last": seen[-1], "runs": len(seen)}


def as_one_process(is_low, replicas=0, by_columns=False):
    """What _as_one_process() finds for each way to train."""
    others = (8,) * (dist.get_world_size() - 1)
    return [
        _as_one_process(is_low, "fresh", clip, sizes, replicas, by_columns)
        for clip, sizes in ((None, (8, *others)), (0.1, (2, *others)))
    ]


def two_modules_of_one_group():
    """Whether one step equals that of the whole batch by one process."""
    reference, model = plain(), plain()
    mesh = init_device_mesh(models.DEVICE.type, (dist.get_world_size(),))
    fully_shard(list(model)[1:], mesh=mesh)
    fully_shard(model, mesh=mesh)
    step_of(model, adam(model), loss_fn)(own_batch())
    batches = [batch_of(rank) for rank in range(dist.get_world_size())]
    theirs = adam(reference)
    loss_fn(reference, [torch.cat(parts) for parts in zip(*batches)]).backward()
    theirs.step()
    pairs = zip(whole(model), reference.parameters())
    return all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)


def _as_one_process(is_low, gradients, clip, sizes, replicas, by_columns):
    """Whether training equals that of the whole batch by one process, and what fully_shard() does
    by itself before and after."""
    reference, model = plain(), sharded(plain(), is_low, replicas, by_columns)
    theirs, mine = adam(reference), adam(model)
    step = step_of(
        model,
        mine,
        loss_fn,
        gradients=gradients,
        clip=clip,
        micro_start=sizes[dist.get_rank()],
        micro_largest=sizes[dist.get_rank()],
    )
    batches = [batch_of(rank) for rank in range(len(sizes))]
    everything, near = [torch.cat(parts) for parts in zip(*batches)], True
    for _ in range(3):
        loss = float(step(own_batch()))
        theirs.zero_grad()
        its = loss_fn(reference, everything)
        its.backward()
        if clip:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        near = near and abs(loss - float(its.detach())) < (2e-2 if is_low else 1e-5)
        if not is_low:
            near = near and all(
                torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-6)
                for a, b in zip(model.parameters(), reference.parameters())
            )
        theirs.step()
    count = len(list(model.parameters()))
    near = near and all(
        torch.allclose(a, b, atol=2e-2 if is_low else 1e-4)
        for a, b in zip(whole(model)[:count], reference.parameters())
    )
    loss_fn(model, own_batch()).backward()  # the model is as fully_shard() made it
    return {
        "near": near,
        "ranks": step.report.ranks,
        "is_sharded": all(hasattr(p, "device_mesh") for p in model.parameters()),
    }


def _train(fails_at, is_failing, is_low, replicas):
    """(state, error, the mode of the second step)."""
    model = sharded(plain(), is_low, replicas)
    step = step_of(
        model,
        adam(model),
        loss_fn,
        micro_start=4,
        micro_largest=4,
        micro_smallest=4,
        clip=0.5,
        lighten=[lambda on: None],
    )
    mode, error, batch = FailAt(fails_at if is_failing else 0), None, own_batch()
    for number in range(3):
        try:
            with mode if number == 1 and fails_at else contextlib.nullcontext():
                step(batch)
        except Exception as caught:  # the other ranks hear of a torn update in the next step
            error = error or f"{type(caught).__name__}: {caught}"
    return whole(model), error, mode


def behind():
    """Whether a training whose GPU is a step behind the host has the bits of one that waits for it.
    torch.empty() writes, since pair asks for deterministic algorithms."""
    states, batch = [], own_batch()  # to copy it in each step would wait
    for is_behind in (False, True):
        model = sharded(plain())

        def late(model, samples, is_behind=is_behind):
            if is_behind:
                torch.cuda._sleep(200_000_000)  # a tenth of a second
            return loss_fn(model, samples)

        step = step_of(model, adam(model), late, clip=0.5)
        for _ in range(4):
            step(batch)
            if not is_behind:
                torch.cuda.synchronize()
        states.append(whole(model))
    return same_bits(*states)


def ooms_everywhere(is_on_all, is_low, stride, replicas=0):
    """An OOM at each operation of the second of three steps."""
    return swept(
        lambda fails_at, is_failing: _train(fails_at, is_failing, is_low, replicas),
        is_on_all,
        stride=stride,
    )


def less_memory():
    """What _less_memory() finds for each place where memory runs out."""
    return [
        _less_memory(where, gradients)
        for where in ("forward", "backward")
        for gradients in ("fresh",)
    ]


def _less_memory(where, gradients):
    """Rank 1 has memory for two samples: the bits of a run that began at these sizes."""
    states = []
    for has_room in (True, False):
        model, limited = sharded(plain()), loss_fn
        micro = 2 if dist.get_rank() == RANK_OF_FAILURES else 8
        if not has_room and dist.get_rank() == RANK_OF_FAILURES:
            limited, micro = fails_above(loss_fn, 2, where), 8
        step = step_of(model, adam(model), limited, gradients=gradients, micro_start=micro)
        for _ in range(2):
            step(own_batch())
        states.append(whole(model))
    return {"same": same_bits(*states), "ranks": step.report.ranks}


def scaled(clip):
    """An inf in the gradients of one rank, and then none: training without a scaler is near."""
    state = {"factor": 1.0}

    def spoiled(model, samples):
        return loss_fn(model, samples) * state["factor"]

    mine, other = sharded(plain()), sharded(plain())
    scaler = torch.amp.GradScaler(models.DEVICE.type, init_scale=16.0, growth_interval=1000)
    sgd = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, other)]
    options = {"clip": clip, "micro_start": 4, "micro_largest": 4}
    step = step_of(mine, sgd[0], spoiled, scaler=scaler, **options)
    count = len(list(mine.parameters()))  # buffers move with a skipped update too
    before = whole(mine)[:count]
    if dist.get_rank() == RANK_OF_FAILURES:
        state["factor"] = float("inf")
    step(own_batch())
    skipped, scale = same_bits(before, whole(mine)[:count]), scaler.get_scale()
    state["factor"] = 1.0
    plain_step = step_of(other, sgd[1], loss_fn, **options)
    for _ in range(2):
        step(own_batch())
        plain_step(own_batch())
    pairs = list(zip(whole(mine)[:count], whole(other)[:count]))
    near = all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    moved = not same_bits(before, whole(mine)[:count])
    return {"skipped": skipped, "scale": scale, "near": near, "moved": moved}


def unused():
    """A parameter that is used on rank 0 only, and one that is used nowhere."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.all, self.some, self.none = (nn.Linear(4, 2) for _ in range(3))

        def forward(self, x):
            y = self.all(x)
            return y + self.some(x) if dist.get_rank() == 0 else y

    torch.manual_seed(0)
    model = placed(Model())
    mesh = init_device_mesh(models.DEVICE.type, (dist.get_world_size(),))
    for part in list(model.children()):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = step_of(model, adam(model), lambda m, x: m(x).square().mean(), micro_start=2)
    for _ in range(2):
        step(placed(torch.ones(4, 4) * (1 + dist.get_rank())))
    return [p.grad is not None for p in model.parameters()]


def failures():
    """What failures_of() and other failures of rank 1 give each rank, and whether training goes
    on."""
    model, is_failing = sharded(plain()), dist.get_rank() == RANK_OF_FAILURES
    fails, state = failing(loss_fn)
    step = step_of(model, adam(model), fails, micro_start=4, window=True)
    step(own_batch())
    before, found = failures_of(step, state, own_batch(), whole)
    plain_prepare = step._training.ranks.window.prepare

    def prepare(beside_bytes=None):
        if is_failing:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    step._training.ranks.window.prepare = prepare
    found["gather"] = error_of(lambda: step(own_batch()))
    step._training.ranks.window.prepare = plain_prepare
    found["mixed"] = error_of(lambda: (step.evaluate if is_failing else step)(own_batch()))
    loss = float(step.evaluate(own_batch()))
    step(own_batch())
    found["moved"] = not same_bits(before, whole(model)) and loss > 0
    return found


def killed(where, window=None, replicas=0):
    """Rank 1 is killed in a step: what the others get."""
    model, state = sharded(plain(), replicas=replicas), {"ends": False}

    def end():
        if state["ends"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def ending(model, samples):
        if where == "forward":
            end()
        loss = loss_fn(model, samples)
        if where == "backward":
            loss.register_hook(lambda _: end())
        return loss

    options = {"window": window, "micro_start": 4, "group_timeout": pair.seconds_until_seen()}
    step = step_of(model, adam(model), ending, **options)
    step(own_batch())
    state["ends"] = dist.get_rank() == RANK_OF_FAILURES
    if where == "between":
        end()
    if where == "reduce":
        plain_next = step._training.ranks.window.reduce_next
        step._training.ranks.window.reduce_next = lambda sums: (end(), plain_next(sums))[1]
    return [error_of(lambda: step(own_batch())) for _ in range(2)]


def refused():
    """The message of each model that cannot be trained so."""
    found = {}

    def note(name, make):
        found[name] = (error_of(make) or [None, ""])[1]

    def make_step(model, optimizer=None, **options):
        return step_of(model, optimizer or adam(model), loss_fn, **options)

    mesh = init_device_mesh(models.DEVICE.type, (2,))
    parts = plain()
    fully_shard(parts[0], mesh=mesh)
    note("parts", lambda: make_step(parts))
    two = nn.ModuleList(fully_shard(plain(), mesh=mesh) for _ in range(2))
    two[1].requires_grad_(False)
    note("two", lambda: make_step(two, adam(two[0])))
    some = fully_shard(plain(), mesh=mesh)
    note("optimizer", lambda: make_step(some, adam(some[0])))
    both = init_device_mesh(models.DEVICE.type, (2, 1), mesh_dim_names=("data", "tensor"))
    parallel = parallelize_module(plain(), both["tensor"], {"2": ColwiseParallel()})
    fully_shard(parallel, mesh=both["data"])
    note("parallel", lambda: make_step(parallel))
    factor = fully_shard(plain(), mesh=mesh)
    factor.set_gradient_divide_factor(3.0)
    note("factor", lambda: make_step(factor))
    fine = fully_shard(plain(), mesh=mesh)
    half = fully_shard(plain().half(), mesh=mesh)
    note("scaler", lambda: make_step(half, scaler=torch.amp.GradScaler(models.DEVICE.type)))
    note("inplace", lambda: make_step(fine, gradients="inplace"))
    note("group", lambda: make_step(fine, group=False))
    note("check", lambda: make_step(fine).check(own_batch()))
    ignoring = plain()
    fully_shard(ignoring, mesh=mesh, ignored_params={ignoring[2].bias})
    note("ignored", lambda: make_step(ignoring))
    return found
