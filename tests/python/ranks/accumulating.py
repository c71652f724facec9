"""A Backward of which the program accumulates several batches for an update: within no_sync() of
DistributedDataParallel, and set_requires_gradient_sync(False) of fully_shard(). Each function
returns plain values for the test."""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rebatch.torch as rebatch
import sharded
from models import FailAt, fails_above, make, same_bits
from trained import (
    RANK_OF_FAILURES,
    error_of,
    everyones,
    is_same_everywhere,
    sgd,
    swept,
    wrapped,
)

_OPTIONS = {"growth": False, "log_level": "quiet", "group_timeout": 60.0}


def backward_of(model, loss_fn, **options):
    return rebatch.Backward(model, loss_fn, **{**_OPTIONS, **options})


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters()]


def is_same_gradient(model):
    """On all ranks."""
    own = gradients_of(model)
    return all(same_bits(own, others) for others in everyones(own))


def are_near(some, others):
    return all(torch.allclose(a, b, atol=1e-6, rtol=1e-4) for a, b in zip(some, others))


def _thirds(kind):
    """(DistributedDataParallel without dropout, three batches of this rank, loss_fn)."""
    model, batch, loss_fn = wrapped(kind, samples=48, find_unused_parameters=True)
    return model.eval(), list(zip(*(t.split(8) for t in batch))), loss_fn


def as_ddp(kind, gradients, largest):
    """Two calls within no_sync() and one outside, twice, and one more outside without zero_grad():
    whether .grad is what a native loop has after each. Rank 1 has memory for `largest` samples."""
    model, batches, loss_fn = _thirds(kind)
    native = copy.deepcopy(model)
    limited = fails_above(loss_fn, largest if dist.get_rank() == RANK_OF_FAILURES else 99)
    backward = backward_of(model, limited, gradients=gradients)
    found = {"near": [], "loss": [], "ranks": [], "same": []}

    def compare(batch, is_synced):
        with contextlib.ExitStack() as stack:
            if not is_synced:
                for each in (model, native):
                    stack.enter_context(each.no_sync())
            loss = backward(batch)
            plain = loss_fn(native, batch)
            plain.backward()
        expected = plain.detach()
        if is_synced:
            expected = sum(everyones(expected)) / 2
        found["loss"].append(abs(float(loss - expected)) < 1e-6)
        found["near"].append(are_near(gradients_of(model), gradients_of(native)))
        found["same"].append(is_same_gradient(model))
        found["ranks"].append(list(backward.report.ranks))

    for _ in range(2):
        for number, batch in enumerate(batches):
            compare(batch, number == 2)
        for each in (model, native):
            sgd(each).step()
        if not found["ranks"][3:]:
            for each in (model, native):
                each.zero_grad()
    compare(batches[0], True)
    return found


def whole_bits():
    """Whether batches that run whole, one within no_sync() and one outside, leave the bits of a
    native loop."""
    model, batches, loss_fn = _thirds("mlp")
    native, backward = copy.deepcopy(model), backward_of(model, loss_fn)
    for is_synced, batch in ((False, batches[0]), (True, batches[1])):
        for each, run in ((model, backward), (native, lambda b: loss_fn(native, b).backward())):
            with contextlib.nullcontext() if is_synced else each.no_sync():
                run(batch)
    return same_bits(gradients_of(model), gradients_of(native))


def makes_no_collective():
    """Rank 1 begins its batch when that of rank 0 has ended."""
    model, batches, loss_fn = _thirds("conv")  # which has buffers
    backward = backward_of(model, loss_fn, group_timeout=60.0)
    for batch in batches[:2]:
        for rank in range(2):
            if rank == dist.get_rank():
                with model.no_sync():
                    backward(batch)
            dist.barrier()
    backward(batches[2])
    return is_same_everywhere(model) and backward.report.ranks == (8, 8)


def ooms_everywhere(is_on_all, gradients, stride):
    """An OOM at each operation of three batches, two of them within no_sync()."""

    def train(fails_at, is_failing):
        model, batches, loss_fn = _thirds("mlp")
        options = {"micro_start": 4, "micro_smallest": 4, "gradients": gradients}
        backward = backward_of(model, loss_fn, lighten=[lambda on: None], **options)
        backward(batches[0])
        mode, error = FailAt(fails_at if is_failing else 0), None
        try:
            with mode if fails_at else contextlib.nullcontext():
                for number, batch in enumerate(batches):
                    with contextlib.nullcontext() if number == 2 else model.no_sync():
                        backward(batch)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        return gradients_of(model), error, mode

    return swept(train, is_on_all, stride=stride)


def failures():
    """loss_fn fails on rank 1, within no_sync() and outside."""
    model, batches, loss_fn = _thirds("mlp")
    state = {"fails": False}

    def failing(model, samples):
        if state["fails"] and dist.get_rank() == RANK_OF_FAILURES:
            raise ValueError("the sample is bad")
        return loss_fn(model, samples)

    backward = backward_of(model, failing)
    backward(batches[0])
    found = {}
    for name, context in (("local", model.no_sync), ("synced", contextlib.nullcontext)):
        state["fails"], before = True, [p.grad for p in model.parameters()]
        with context():
            found[name] = (error_of(lambda: backward(batches[1])) or [None])[0]
        after = [p.grad for p in model.parameters()]
        found[f"{name} as before"] = all(a is b for a, b in zip(before, after))
        state["fails"] = False
    backward(batches[2])
    found["same"] = is_same_gradient(model)
    return found


def other_calls():
    """A Step within no_sync() reduces all the same, and no_sync() of one of two is refused."""
    model, batches, loss_fn = _thirds("mlp")
    step = rebatch.Step(model, sgd(model), loss_fn, **_OPTIONS)
    with model.no_sync():
        step(batches[0])
    head = DistributedDataParallel(nn.Linear(1, 1))
    both = backward_of([model, head], lambda m, s: loss_fn(m[0], s) + m[1](s[1][:, None]).mean())
    with model.no_sync():
        refused = error_of(lambda: both(batches[0]))
    both(batches[0])
    return is_same_everywhere(model), refused


def with_normalizer():
    """Sums over tokens, 24 on rank 0 and 10 on rank 1, of which the local batch is a mean."""
    model, _, _ = make("mlp")
    model = DistributedDataParallel(model.eval())
    native = copy.deepcopy(model)
    x, y = torch.randn(34, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(34)
    first = 0 if dist.get_rank() == 0 else 24
    own = x[first:][: 24 if first == 0 else 10], y[first:][: 24 if first == 0 else 10]

    def total(model, samples):
        return ((model(samples[0]) - samples[1]) ** 2).sum()

    backward = backward_of(model, total, normalizer=lambda b: len(b[0]), micro_start=4)
    with model.no_sync(), native.no_sync():
        loss = backward(own)
        plain = total(native, own) / len(own[0])
        plain.backward()
    found = [are_near([loss, *gradients_of(model)], [plain, *gradients_of(native)])]
    backward(own)
    (total(native, own) * 2 / 34).backward()  # its average is the mean over all tokens
    return [*found, are_near(gradients_of(model), gradients_of(native))]


def of_fully_shard(window):
    """Two batches without gradient sync and one with it, twice without zero_grad(): whether .grad
    is then that of a native loop. Rank 1 has memory for two samples."""
    model, native = (sharded.sharded(sharded.plain()) for _ in range(2))
    limited = fails_above(sharded.loss_fn, 2 if dist.get_rank() == RANK_OF_FAILURES else 99)
    backward, near = backward_of(model, limited, window=window), []
    for _ in range(2):
        for number in range(3):
            batch = sharded.batch_of(3 * dist.get_rank() + number)
            for each in (model, native):
                each.set_requires_gradient_sync(number == 2)
            backward(batch)
            sharded.loss_fn(native, batch).backward()
        both = [[p.grad.full_tensor() for p in each.parameters()] for each in (model, native)]
        near.append(are_near(*both))
    return near, list(backward.report.ranks)
