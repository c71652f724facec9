"""What the ranks of a pair run with a loss over the samples of all of them."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rebatch.torch as rebatch
import test_embed
from models import FailAt, same_bits, state_of
from test_embed import LOSSES, Pair, assert_near, batch_of, gradients_of, limited
from trained import error_of, everyones

SPLIT = (14, 10)  # samples of each rank


def own_part(batch):
    return tuple(t.split(SPLIT)[dist.get_rank()] for t in batch)


def labelled(kind):
    """embed and loss_fn of a kind. What the loss takes of other ranks' samples are rows too."""
    embed, loss_fn = LOSSES[kind]
    if kind != "triplet":
        return embed, loss_fn

    def with_labels(model, samples):
        return *embed(model, samples), samples[3]

    def by_labels(model, embeddings, batch):
        return loss_fn(model, embeddings[:2], (None, None, None, embeddings[2]))

    return with_labels, by_labels


def of_ddp(embed):
    return lambda model, samples: embed(getattr(model, "module", model), samples)


def of_loss(loss_fn):
    return lambda model, rows, batch: loss_fn(getattr(model, "module", model), rows, batch)


def gradients(kind, caps, options, wraps, passes):
    """Beside the gradients of one process with the samples of both ranks, with memory for so many
    samples on each rank, in both passes or in the second."""
    embed, loss_fn = labelled(kind)
    batch, reference = batch_of(sum(SPLIT)), Pair().double()
    expected, theirs = test_embed.uncut(reference, embed, loss_fn, batch)
    model = Pair().double()
    if wraps:
        model = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    else:
        options = {**options, "group": True}
    backward = rebatch.Backward(
        model,
        of_loss(loss_fn),
        embed=limited(of_ddp(embed), caps[dist.get_rank()], passes),
        growth=False,
        log_level="quiet",
        group_timeout=60.0,
        **options,
    )
    for times in (1, 2):
        loss = backward(own_part(batch))
        torch.testing.assert_close(loss, expected)
        assert_near(gradients_of(model), [g if g is None else times * g for g in theirs], 1e-11)
    model.zero_grad()
    backward(own_part(batch))
    found = [g for g in gradients_of(model) if g is not None]
    assert all(same_bits(found, others) for others in everyones(found))
    return backward.report.ranks


def grown_back(steps):
    """Sizes of the ranks' micro-batches, where memory is short in the first batch alone."""
    embed, loss_fn = LOSSES["clip"]
    model, is_short = DistributedDataParallel(Pair().double()), [True]
    short = limited(of_ddp(embed), 5, "both")

    def embedded(model, samples):
        return (short if is_short[0] else of_ddp(embed))(model, samples)

    backward = rebatch.Backward(
        model, of_loss(loss_fn), embed=embedded, grow_after=1, log_level="quiet", group_timeout=60.0
    )
    sizes = []
    for _ in range(steps):
        backward(own_part(batch_of(sum(SPLIT))))
        is_short[0] = False
        sizes.append(backward.report.ranks)
    return sizes


def _trained(fails_at, is_failing, size, steps=3, later=0):
    """An OOM at an operation of the second step, which then runs at the size `later`, where
    nothing fails."""
    model, batch = Pair(0.3), own_part(batch_of(sum(SPLIT), torch.float32))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    embed, loss_fn = LOSSES["clip"]

    def made(size):
        return rebatch.Step(
            ddp, optimizer, of_loss(loss_fn), embed=of_ddp(embed), micro_start=size, growth=False,
            log_level="quiet", group_timeout=60.0,
        )  # fmt: skip

    step, mode, error = made(size), FailAt(), None
    torch.manual_seed(dist.get_rank())
    for number in range(steps):
        if number == 1:
            mode = FailAt(fails_at if is_failing else 0)
            step = made(later) if later else step
        try:
            with mode if number == 1 and fails_at else contextlib.nullcontext():
                step(batch)
        except Exception as caught:
            error = error or f"{type(caught).__name__}: {caught}"
    return [*state_of(model), torch.random.get_rng_state()], error, mode, step


def swept(stride):
    """An OOM on rank 1 at each stride-th operation: where the bits are not those of a run at the
    sizes to which it led."""
    _, _, counter, _ = _trained(1 << 30, True, 5)
    count, is_failing = min(everyones(counter.seen)), dist.get_rank() == 1
    wrong, sizes, known, torn = [], set(), {}, 0
    for at in range(1, count + 1, stride):
        state, error, mode, step = _trained(at, is_failing, 5)
        errors = everyones(error)
        if any(errors):
            torn += any(e and e.startswith("Torn") for e in errors)
            wrong += [] if any(e and e.startswith("Torn") for e in errors) else [(at, errors)]
            continue
        now = tuple(everyones(step.report.micro))
        if now not in known:
            known[now] = _trained(0, False, 5, later=now[dist.get_rank()])[0]
        sizes.add(now)
        if not same_bits(state, known[now]):
            wrong.append(at)
    return {"wrong": wrong, "sizes": sorted(sizes), "torn": torn, "count": count}


def failing(where):
    """What each rank is told where rank 1 fails for good, and whether the next batch is right."""
    embed, loss_fn = LOSSES["clip"]
    batch, left = own_part(batch_of(sum(SPLIT))), [dist.get_rank() == 1]

    def fail():
        if left[0]:
            left[0] = False
            raise RuntimeError("a mistake of the program")

    def failing_embed(model, samples):
        if where == "first" or (where == "second" and torch.is_grad_enabled()):
            fail()
        return embed(model, samples)

    def failing_loss(model, rows, batch):
        if where == "loss":
            fail()
        return loss_fn(model, rows, batch)

    model = Pair().double()
    backward = rebatch.Backward(
        model, failing_loss, embed=failing_embed, group=True, micro_start=4, growth=False,
        log_level="quiet", group_timeout=60.0,
    )  # fmt: skip
    error = error_of(lambda: backward(batch))
    backward(batch)
    expected = test_embed.uncut(Pair().double(), embed, loss_fn, batch_of(sum(SPLIT)))[1]
    assert_near(gradients_of(model), expected, 1e-11)
    return error


def refused(what):
    """The error where ranks have rows of other shapes, or one is within no_sync()."""
    embed, loss_fn = LOSSES["clip"]
    batch, width = own_part(batch_of(sum(SPLIT))), 4 - (what == "shapes") * dist.get_rank()
    model = DistributedDataParallel(Pair().double())

    def narrow(model, samples):
        return tuple(rows[:, :width] for rows in embed(model.module, samples))

    backward = rebatch.Backward(
        model, of_loss(loss_fn), embed=narrow, log_level="quiet", group_timeout=60.0
    )
    with model.no_sync() if what == "no_sync" else contextlib.nullcontext():
        return error_of(lambda: backward(batch))


def sharded(window):
    """Of fully_shard(): its gradients beside those of one process; or what is said."""
    embed, loss_fn = LOSSES["clip"]
    batch, model = batch_of(sum(SPLIT)), Pair().double()
    for name in ("temperature", "bias"):  # no scalar can be sharded
        setattr(model, name, torch.nn.Parameter(getattr(model, name).detach()[None]))
    expected, theirs = test_embed.uncut(model, embed, loss_fn, batch)
    fully_shard(model.left), fully_shard(model)
    options = {} if window is None else {"window": window}
    try:
        backward = rebatch.Backward(
            model, loss_fn, embed=limited(embed, 9 - 4 * dist.get_rank()), growth=False,
            log_level="quiet", group_timeout=60.0, **options,
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    loss = backward(own_part(batch))
    torch.testing.assert_close(loss, expected)
    found = [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]
    assert_near(found, theirs, 1e-11)
    return backward.report.ranks
