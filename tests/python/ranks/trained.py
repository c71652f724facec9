"""What the ranks of a pair run. Each function returns plain values for the test."""

import contextlib
import copy
import gc
import os
import signal
import time
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rebatch.torch as rebatch
from rebatch import _library as c
import models
import pair
from models import FailAt, Unseen, fails_above, make, placed, same_bits, state_of

RANK_OF_FAILURES = 1


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def everyones(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_same_everywhere(model):
    """Bit for bit, parameters and buffers."""
    return all(same_bits(state, state_of(model)) for state in everyones(state_of(model)))


def batch_of_rank(batch, samples=None):
    """Each rank's own: a batch of make() has 16 samples."""
    rank, size = dist.get_rank(), dist.get_world_size()
    each = samples or len(batch[0]) // size
    return tuple(t[rank * each : (rank + 1) * each] for t in batch)


def wrapped(kind, samples=32, **options):
    """(DistributedDataParallel, this rank's batch of half the samples, loss_fn)."""
    model, batch, loss_fn = make(kind, samples=samples)
    options.setdefault("bucket_cap_mb", 0.0005)  # several buckets
    return DistributedDataParallel(model, **options), batch_of_rank(batch), loss_fn


def several():
    """Lists of batches, of which one rank has three and the other two, beside all samples at once,
    with an OOM on one rank."""
    model, whole, loss_fn = make("mlp", samples=20)
    expected = loss_fn(model.eval(), whole)
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    ddp, rank = DistributedDataParallel(model, bucket_cap_mb=0.0005), dist.get_rank()
    batches = list(zip(*(t.split([6, 4] if rank else [3, 5, 2]) for t in batch_of_rank(whole))))
    backward = rebatch.Backward(
        ddp, fails_above(loss_fn, 5), growth=False, log_level="quiet", group_timeout=60.0
    )
    loss = backward(batches=batches)
    found = [p.grad for p in model.parameters()]
    return {
        "near": all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, gradients)),
        "loss": torch.allclose(loss, expected.detach()),
        "same": all(same_bits(others, found) for others in everyones(found)),
        "microbatches": backward.report.microbatches == (3 + rank),
    }


def with_graphs():
    """What is said of gradients with a graph, which the ranks would sum without it."""
    model, batch, loss_fn = make("mlp")
    backward = rebatch.Backward(
        model,
        loss_fn,
        group=True,
        gradients="inplace",
        backward=lambda loss: loss.backward(create_graph=True),
        log_level="quiet",
    )
    try:
        backward(batch)
    except ValueError as error:
        return str(error)
    return ""


def short_before_update():
    """One rank's before_update runs out of memory once, when it has changed a gradient."""
    ddp, batch, loss_fn = wrapped("mlp")
    left = Unseen(dist.get_rank() == RANK_OF_FAILURES)

    def halve():
        for p in ddp.parameters():
            p.grad.mul_(0.5)
            if left[0]:
                left[0] = False
                models.out_of_memory(None)

    step = step_of(ddp, sgd(ddp), loss_fn, before_update=halve)
    before = state_of(ddp)
    error = error_of(lambda: step(batch))
    unchanged = same_bits(before, state_of(ddp))
    step(batch)
    return {"error": error[:2], "unchanged": unchanged, "same": is_same_everywhere(ddp)}


def step_of(model, optimizer, loss_fn, **options):
    options.setdefault("growth", False)
    options.setdefault("log_level", "quiet")
    options.setdefault("group_timeout", 60.0)
    return rebatch.Step(model, optimizer, loss_fn, **options)


# ---- graphs ----


def captures_on_a_cpu():
    """See tests/python/test_replays.py."""
    from rebatch.torch.graphs import graphs as module
    from rebatch.torch.graphs.changes import Changes
    from test_replays import Rerun

    module.can_capture, module.recorder_of = lambda _: True, lambda *_: Rerun([])
    names, own = Changes.names, ("torch.default_generator", "(a tensor on the CPU)")
    Changes.names = lambda self: [n for n in names(self) if not n.endswith(own)]


def noting(model, calls):
    """Nodes that add to the gradients of the parameters, as a wrapper keeps them."""
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: calls.append(1))
    return nodes


def replayed(kind, micro, how=""):
    """Whether a training with graphs has the bits of one without, and what its steps replayed."""
    if models.DEVICE.type == "cpu":
        captures_on_a_cpu()
    states, runs = [], []
    for graphs in (True, False):
        model, batch, loss_fn = wrapped(kind)
        options = {"graphs": graphs, "micro_start": micro}
        if how == "plain":
            model, options["group"] = model.module, True
        if how == "normalizer":
            mean, options["normalizer"] = loss_fn, lambda batch: len(batch[0])
            loss_fn = lambda model, s, mean=mean: mean(model, s) * len(s[0])  # noqa: E731
        if how == "beside":
            mean, beside = loss_fn, [p for p in model.parameters() if p.dim() > 1]
            loss_fn = lambda model, s, m=mean, b=beside: m(model, s) + b[0].sum()  # noqa: E731
        step, calls = step_of(model, sgd(model), loss_fn, **options), []
        nodes = [] if how == "plain" else noting(model, calls)
        torch.manual_seed(dist.get_rank())
        losses, replays = [], []
        for i in range(9):
            before = len(calls)
            losses.append(step(tuple(t.roll(i, 0) for t in batch)))
            replays.append(step.report.replayed)
        del nodes
        states.append([*state_of(model), *losses])
        runs.append((replays, len(calls) - before))
    (replays, added), (none, added_without) = runs
    return {
        "bits": same_bits(*states),
        "same": is_same_everywhere(model),
        "replays": [replays[0], replays[-1], *set(none)],
        "hooks": [added > 0, added_without > 0],
    }


# ---- the same as DistributedDataParallel ----


def as_ddp(kind, options, step_options):
    """Whether the parameters after three steps have the bits of DistributedDataParallel's, on rank
    0, and are the same on all ranks."""
    model, batch, loss_fn = wrapped(kind, **options)
    other = DistributedDataParallel(copy.deepcopy(model.module), find_unused_parameters=True)
    mine, theirs = sgd(model), sgd(other)
    step, losses = step_of(model, mine, loss_fn, **step_options), []
    for number in range(3):
        torch.manual_seed(10 * number + dist.get_rank())
        losses.append(float(step(batch)))
        torch.manual_seed(10 * number + dist.get_rank())
        theirs.zero_grad()
        loss = loss_fn(other, batch)
        loss.backward()
        theirs.step()
    return {
        "bits": dist.get_rank() > 0 or same_bits(state_of(model), state_of(other)),
        "near": all(
            torch.allclose(a, b, atol=0.01) for a, b in zip(model.parameters(), other.parameters())
        ),
        "same": is_same_everywhere(model),
        "loss": abs(losses[-1] - sum(everyones(float(loss.detach()))) / 2) < 1e-6,
        "ranks": step.report.ranks,
    }


def pairs():
    """BatchNorm, nine samples on each rank, in micro-batches of two: their sizes, and whether the
    update is that of such micro-batches by hand, and the same on all ranks."""
    model, batch, loss_fn = wrapped("conv", samples=18)
    by_hand, sizes = copy.deepcopy(model.module), []

    def noting(model, samples):
        sizes.append(len(samples[0]))
        return loss_fn(model, samples)

    step_of(model, sgd(model), noting, micro_start=2)(batch)
    for part in zip(*(t.split([2, 2, 2, 3]) for t in batch)):
        (loss_fn(by_hand, part) * (len(part[0]) / 18)).backward()
    gradients = [everyones(p.grad) for p in by_hand.parameters()]
    expected = [p - 0.1 * sum(own) for p, own in zip(by_hand.parameters(), gradients)]
    near = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), expected))
    return {"sizes": sizes[:4], "near": near, "same": is_same_everywhere(model)}


# ---- the end of a Step, and of the process groups ----


def gone(step, batch):
    """Whether nothing is left of a Step, that this function has alone, after some batches, while
    nothing collects cycles. `step` is in a list, which is emptied."""
    gc.collect()
    gc.disable()
    for _ in range(2):
        step[0](batch)
    ranks = step[0]._training.ranks
    left = [weakref.ref(part) for part in (step[0], step[0]._training.session, ranks, ranks._votes)]
    vote = ranks._votes.table.all_reduce
    del ranks
    step.clear()
    # A vote that nobody is there to cast is no vote that succeeded.
    return [*(part() is None for part in left), vote(None, 0, 0, 0, None) == c.Status.E_PEER]


def let_go(kind):
    """gone() of a Step of DistributedDataParallel or a plain model."""
    if kind == "ddp":
        model, batch, loss_fn = wrapped("mlp")
        return gone([step_of(model, sgd(model), fails_above(loss_fn, 9))], batch)
    model, batch, loss_fn = make("mlp", samples=32)
    step = [step_of(model, sgd(model), fails_above(loss_fn, 9), group=True, clip=1.0)]
    return gone(step, batch_of_rank(batch))


def destroyed():
    """Whether destroy_process_group() ends all groups while a Step is there, and what its next call
    says."""
    model, batch, loss_fn = make("mlp", samples=32)
    batch = batch_of_rank(batch)
    step = step_of(model, sgd(model), loss_fn, group=True)
    step(batch)
    groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    return [group() is None for group in groups], error_of(lambda: step(batch))[:2]


# ---- an OOM at every operation ----


def _train(kind, fails_at, is_failing, times=1, **options):
    """(state, error, number of operations of the step that may fail)."""
    model, batch, loss_fn = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options.update(micro_start=4, micro_smallest=4, micro_largest=4)
    step, error, mode = step_of(model, optimizer, loss_fn, **options), None, FailAt()
    torch.manual_seed(dist.get_rank())
    for number in range(3):
        if number == 1:
            mode = FailAt(fails_at if is_failing else 0, times)
        try:
            with mode if number == 1 and fails_at else contextlib.nullcontext():
                step(batch)
        except Exception as caught:
            error = error or f"{type(caught).__name__}: {caught}"
    return state_of(model), error, mode


def swept(train, is_on_all, first=1, stride=1):
    """An OOM at each stride-th operation of one step, from the first-th on; RANKS_STRIDE and
    RANKS_FIRST (default 1) in the environment take their place. train(fails_at, is_failing) ->
    (state, error, mode), where the mode has counted operations; 0: nothing fails."""
    if "RANKS_STRIDE" in os.environ:
        first, stride = (int(os.environ.get(f"RANKS_{what}", 1)) for what in ("FIRST", "STRIDE"))
    expected, _, _ = train(0, False)
    _, _, counter = train(1 << 30, True)
    count = min(everyones(counter.seen))
    found = {"wrong": [], "torn": 0, "errors": [], "recovered": 0, "count": count}
    is_failing = is_on_all or dist.get_rank() == RANK_OF_FAILURES
    for at in range(first, count + 1, stride):
        state, error, mode = train(at, is_failing)
        errors = everyones(error)
        if any(errors):  # within the update: the others hear of it in the next step
            is_torn = any(e and e.startswith("Torn") for e in errors)
            found["torn"] += is_torn
            found["errors"] += [(at, errors)] if not is_torn else []
            continue
        found["recovered"] += mode.failed
        if not same_bits(state, expected):
            found["wrong"].append(at)
    return found


def ooms_everywhere(kind, is_on_all, gradients, stride):
    """An OOM at each operation of the second of three steps."""
    options = {"gradients": gradients, "lighten": [lambda on: None], "clip": 0.5}

    def train(fails_at, is_failing):
        return _train(kind, fails_at, is_failing, **options)

    state, _, _ = train(0, False)
    is_same = all(same_bits(state, other) for other in everyones(state))
    return {**swept(train, is_on_all, stride=stride), "same": is_same}


# ---- less memory on one rank ----


def less_memory(kind, where, gradients):
    """Rank 1 has memory for 4 samples. Returns whether the result is that of a run with room."""
    results = []
    for largest in (99, 4):
        model, batch, loss_fn = wrapped(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if dist.get_rank() == RANK_OF_FAILURES:
            loss_fn = fails_above(loss_fn, largest, where)
        step = step_of(model, optimizer, loss_fn, gradients=gradients, clip=1.0)
        for number in range(3):
            torch.manual_seed(number)
            model.eval()  # no dropout: it draws other numbers at other cuts
            step(batch)
        results.append((state_of(model), step.report.ranks))
    (whole, _), (cut, ranks) = results
    return {
        "near": all(torch.allclose(a, b, atol=1e-4) for a, b in zip(whole, cut)),
        "same": is_same_everywhere(model),
        "ranks": ranks,
    }


def struck_in_backward():
    """The backward pass of rank 1 fails in its middle, when some buckets are launched. Returns the
    number of buckets, of all-reduces, and of those launched before a backward pass had ended."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = placed(nn.Sequential(*layers, nn.Linear(16, 1)))
    model = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    reference = copy.deepcopy(model.module)
    x = placed(torch.randn(32, 16, generator=torch.Generator().manual_seed(3)))
    own, launched = batch_of_rank((x,))[0], []
    plain = dist.all_reduce
    is_struck, is_within = Unseen(False), Unseen(False)

    def strike(_gradient):
        if dist.get_rank() == RANK_OF_FAILURES and not is_struck[0]:
            is_struck[0] = True
            time.sleep(0.2)  # the other rank waits in a bucket that comes later
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def loss_fn(model, samples):
        is_within[0] = True
        middle = model.module[:6](samples)
        middle.register_hook(strike)
        return model.module[6:](middle).square().mean()

    def counted(*arguments, **keywords):
        launched.append(is_within[0])
        return plain(*arguments, **keywords)

    step = step_of(model, sgd(model), loss_fn)
    dist.all_reduce = counted
    try:
        callbacks = step._training.callbacks
        plain_reduce = callbacks._reduce
        callbacks._reduce = lambda ranks: (is_within.__setitem__(0, False), plain_reduce(ranks))
        step(own)
    finally:
        dist.all_reduce = plain
    (reference(x).square().mean()).backward()
    near = all(
        torch.allclose(a.grad, b.grad, atol=1e-6)
        for a, b in zip(model.parameters(), reference.parameters())
    )
    return {
        "buckets": len(step._training.callbacks.accumulators._buckets),
        "launched": len(launched),
        "within": sum(launched),
        "near": near,
        "same": is_same_everywhere(model),
        "ooms": step.report.ooms,
    }


# ---- samples and weights ----


def uneven(has_normalizer, is_plain):
    """16 samples on rank 0 and 5 on rank 1: the gradient of all 21 in one process."""
    torch.manual_seed(0 if dist.get_rank() == 0 or not is_plain else 1)
    model = placed(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    trained = model if is_plain else DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(7)
    x, y = placed(torch.randn(21, 8, generator=generator), torch.randn(21, 1, generator=generator))
    own = (x[:16], y[:16]) if dist.get_rank() == 0 else (x[16:], y[16:])

    def total(model, samples):
        return ((model(samples[0]) - samples[1]) ** 2).sum()

    def mean(model, samples):
        return total(model, samples) / len(samples[0])

    options = {"group": True} if is_plain else {}
    if has_normalizer:
        options["normalizer"] = lambda batch: torch.tensor(len(batch[0]))
    step = step_of(
        trained, sgd(trained), total if has_normalizer else mean, micro_start=4, **options
    )
    reference = copy.deepcopy(model)
    loss = float(step(own))
    whole = mean(reference, (x, y))
    whole.backward()
    return {
        "near": all(
            torch.allclose(a.grad, b.grad, atol=1e-6)
            for a, b in zip(model.parameters(), reference.parameters())
        ),
        "loss": abs(loss - float(whole.detach())) < 1e-6,
        "same": is_same_everywhere(model),
        "ranks": step.report.ranks,
    }


def unused(is_find_unused):
    """One layer is used on rank 0 only, and one nowhere."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(4, 1) for name in ("all", "some", "none")})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            y = self.layers["all"](x)
            return y + self.layers["some"](x) if dist.get_rank() == 0 else y

    trained = DistributedDataParallel(placed(Model()), find_unused_parameters=is_find_unused)
    step = step_of(trained, sgd(trained), lambda m, x: m(x).square().mean(), micro_start=2)
    for _ in range(2):
        step(placed(torch.ones(4, 4) * (1 + dist.get_rank())))
    return {
        "grads": [p.grad is not None for p in trained.parameters()],
        "same": is_same_everywhere(trained),
    }


def scaled():
    """fp16's GradScaler: an inf on rank 1 alone is one on all ranks."""
    model, batch, loss_fn = wrapped("mlp")
    scaler = torch.amp.GradScaler(models.DEVICE.type, init_scale=16.0)
    state = {"factor": 1.0}

    def loss(model, samples):
        return loss_fn(model, samples) * state["factor"]

    step = step_of(model, sgd(model), loss, scaler=scaler, clip=1.0, micro_start=4)
    before = state_of(model)
    if dist.get_rank() == RANK_OF_FAILURES:
        state["factor"] = float("inf")
    step(batch)
    skipped, scale = same_bits(before, state_of(model)), scaler.get_scale()
    state["factor"] = 1.0
    step(batch)
    return {
        "skipped": skipped,
        "scale": scale,
        "moved": not same_bits(before, state_of(model)),
        "same": is_same_everywhere(model),
    }


# ---- failures ----


def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "rank", None)]
    return None


def failing(loss_fn):
    """(a loss_fn that raises state["error"] on one rank, while that is set; the state)."""
    state = {"error": None}

    def fails(model, samples):
        if state["error"] and dist.get_rank() == RANK_OF_FAILURES:
            raise state["error"]
        return loss_fn(model, samples)

    return fails, state


def failures_of(step, state, batch, copy_of):
    """What each rank gets when one fails in some way, and whether copy_of(step.model), which is
    returned too, is as before."""
    before, found = copy_of(step.model), {}
    for name, error in (
        ("loss_fn", ValueError("the sample is bad")),
        ("Exhausted", torch.OutOfMemoryError("CUDA out of memory.")),
    ):
        state["error"] = error
        found[name] = error_of(lambda: step(batch))
        state["error"] = None
        found[name].append(same_bits(before, copy_of(step.model)))
    bad = {} if dist.get_rank() == RANK_OF_FAILURES else batch
    found["batch"] = [*error_of(lambda: step(bad)), same_bits(before, copy_of(step.model))]
    return before, found


def exceptions():
    """What failures_of() finds, and whether training goes on."""
    model, batch, loss_fn = wrapped("conv")
    loss_fn, state = failing(loss_fn)
    step = step_of(model, sgd(model), loss_fn, micro_start=4)
    step(batch)
    before, found = failures_of(step, state, batch, state_of)
    step(batch)
    found["same"] = is_same_everywhere(model)
    found["moved"] = not same_bits(before, state_of(model))
    found["step"] = step._training.number
    return found


def torn():
    """The update of rank 1 is torn: rank 0 hears of it in the next step."""
    model, batch, loss_fn = wrapped("mlp")
    from models import HalfStep

    optimizer = sgd(model) if dist.get_rank() == 0 else HalfStep(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, loss_fn)
    return [error_of(lambda: step(batch)) for _ in range(2)]


def alone():
    """What one rank may call without the others."""
    model, batch, loss_fn = wrapped("conv")
    step = step_of(model, sgd(model), loss_fn, micro_start=4)
    step(batch)
    if dist.get_rank() == 0:
        assert float(step.evaluate(batch)) > 0
        step.check(batch)
        step.evaluate(batch)
    step(batch)
    return is_same_everywhere(model)


def compared():
    """What each rank says of a loss that is a sum, and how often: rank 1 has smaller micro-batches.
    And the same without a comparison: whether the bits are the same."""
    said, states = [], []
    for is_compared in (True, False):
        model, batch, _ = wrapped("conv")
        loss_fn = lambda m, s: ((m(s[0]) - s[1]) ** 2).sum()
        if dist.get_rank() == RANK_OF_FAILURES:
            loss_fn = fails_above(loss_fn, 4)
        step = step_of(model, sgd(model, 1e-4), loss_fn, micro_start=8)
        step._training.callbacks.cuts.is_done = not is_compared
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                step(batch)
        said += [str(w.message) for w in caught if issubclass(w.category, rebatch.CutWarning)]
        states.append(state_of(model))
    return {"said": said, "same": same_bits(*states) and is_same_everywhere(model)}


def killed(where, is_timeout, has_unused=False, timeout=None):
    """Rank 1 is killed, or stands still, in a step: what the others get, and how long it takes.
    Where a parameter has no gradient, the ranks read what the others have."""
    timeout = timeout or pair.seconds_until_seen()
    model, batch, its_loss = make("mlp", samples=32)
    if has_unused:
        model.register_parameter("unused", nn.Parameter(placed(torch.zeros(3))))
    model, batch = DistributedDataParallel(model), batch_of_rank(batch)

    def end():
        if is_timeout:
            time.sleep(100)
        os.kill(os.getpid(), signal.SIGKILL)

    def loss_fn(model, samples):
        loss = its_loss(model, samples)
        if state["ends"] == "forward":
            end()
        if state["ends"] == "backward":
            loss.register_hook(lambda _: end())
        return loss

    class Ending(torch.optim.SGD):
        def step(self, closure=None):
            if state["ends"] == "update":
                end()
            return super().step(closure)

    state = {"ends": None}
    optimizer = Ending(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, loss_fn, micro_start=8, group_timeout=timeout)
    step(batch)
    if dist.get_rank() == RANK_OF_FAILURES:
        state["ends"] = where
        if where == "between":
            end()
        if where == "reduce":
            plain = step._training.ranks.accumulators._launch_rest
            step._training.ranks.accumulators._launch_rest = lambda loss: (end(), plain(loss))
    began = time.monotonic()
    errors = [error_of(lambda: step(batch)) for _ in range(3)]
    return [error for error in errors if error], time.monotonic() - began


# ---- what is refused, or said ----


class FullyShardedDataParallel(nn.Linear):
    """Named as FSDP1 is."""


class DeepSpeedEngine(nn.Linear):
    """Named as DeepSpeed's is."""


def refused():
    """The message of each model that cannot be trained so, and of what is only said."""
    FullyShardedDataParallel.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"
    found = {}

    def make_step(model, **options):
        step_of(model, sgd(model), lambda m, x: m(x).mean(), **options)

    def note(name, model, **options):
        found[name] = (error_of(lambda: make_step(model, **options)) or [None, ""])[1]

    plain = placed(nn.Linear(2, 2))
    note("FSDP1", placed(FullyShardedDataParallel(2, 2)))
    note("DeepSpeed", placed(DeepSpeedEngine(2, 2)))
    note("SyncBatchNorm", nn.Sequential(plain, placed(nn.SyncBatchNorm(2))), group=True)
    hooked = DistributedDataParallel(placed(nn.Linear(2, 2)))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    note("hook", hooked)
    note("group=False", DistributedDataParallel(placed(nn.Linear(2, 2))), group=False)
    note("group=3", plain, group=3)
    note("group_timeout", plain, group=True, group_timeout=0)
    note("sizes", placed(nn.Linear(2, 2 + dist.get_rank())), group=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_step(plain)
        make_step(plain, group=False)
    found["alone"] = [str(w.message) for w in caught if w.filename == __file__]
    sparse = placed(nn.Embedding(4, 2, sparse=True))
    step = step_of(sparse, sgd(sparse), lambda m, x: m(x).mean(), group=True)
    found["sparse"] = error_of(lambda: step(placed(torch.arange(4))))[1]
    found["key"] = _disagreeing(plain)
    return found


def disagreeing():
    """The message on each rank for what differs between ranks, in two tries of the first step
    where it is the batch."""
    rank, found = dist.get_rank(), {}

    def note(name, model, optimizer=None, **options):
        def make():
            return step_of(model, optimizer or sgd(model), lambda m, x: m(x).mean(), **options)

        found[name] = (error_of(make) or [None, ""])[:2]

    def wrapped_linear(**options):
        return DistributedDataParallel(placed(nn.Linear(2, 2)), **options)

    note("clip", wrapped_linear(), clip=1.0 + rank)
    note("a wrong clip on one", wrapped_linear(), clip=-1.0 if rank else 1.0)
    note("a wrong option on one", wrapped_linear(), micro_start=-1 if rank else 1)
    note("clip on one", wrapped_linear(), clip=0.5 if rank else None)
    scaler = torch.amp.GradScaler(models.DEVICE.type) if rank else None
    note("scaler", wrapped_linear(), scaler=scaler)
    note("normalizer", wrapped_linear(), normalizer=len if rank else None)
    note("buckets", wrapped_linear(bucket_cap_mb=1 + rank))
    linear = wrapped_linear()
    some = list(linear.parameters())[rank:]
    note("optimizer", linear, optimizer=torch.optim.SGD(some, lr=0.1))
    kinds = ("fresh", "inplace")  # a rank's own affair
    found["fine"] = error_of(
        lambda: step_of(linear, sgd(linear), lambda m, x: m(x).mean(), gradients=kinds[rank])
    )
    step = step_of(linear, sgd(linear), lambda m, b: m(b["x"]).mean())
    before, x = state_of(linear), placed(torch.ones(4, 2))
    other = {"x": x, "mask": {"m": x}} if rank else {"x": x}
    found["keys"] = [error_of(lambda: step(other))[:2] for _ in range(2)]
    found["unchanged"] = same_bits(before, state_of(linear))
    step({"x": x, "y": x} if rank else {"y": x, "x": x})  # now all have the same
    step(other)  # not the first batch: what the ranks see may differ
    found["same"] = is_same_everywhere(linear) and not same_bits(before, state_of(linear))
    return found


def _disagreeing(plain):
    step = step_of(plain, sgd(plain), lambda m, x: m(x).mean(), group=True)
    step.load_state_dict({"step": 3 + dist.get_rank(), "micro": 2})
    return error_of(lambda: step(placed(torch.ones(4, 2))))[1]
