"""What the ranks of a pair run with a model of fully_shard() whose parameters are never whole. Each
function returns plain values."""

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn

from models import FailAt, Unseen, fails_above, same_bits
from rebatch.torch.ranks import ways as ways_module
from sharded import (
    Part,
    adam,
    batch_of,
    counting,
    killed as sharded_killed,
    loss_fn,
    own_batch,
    plain,
    sharded,
    whole,
)
from trained import RANK_OF_FAILURES, error_of, failing, failures_of, step_of, swept


def model_of(is_low=False, replicas=0):
    """With dropout."""
    torch.manual_seed(0)
    parts = (Part(), nn.Dropout(0.2), Part(), nn.Linear(8, 3))
    return sharded(nn.Sequential(*parts), is_low, replicas)


def make_step(model, loss=loss_fn, **options):
    return step_of(model, adam(model), loss, window=False, **options)


def of_size(size, **options):
    return {"micro_start": size, "micro_largest": size, "micro_smallest": size, **options}


def collectives(replicas=0):
    """Of a step with four micro-batches, of PyTorch alone with as many, and the votes."""
    model = sharded(plain(), replicas=replicas)
    step = make_step(model, **of_size(2), clip=1.0)
    step(own_batch())
    votes, calls = step._training.ranks._votes, []
    reduce = votes._all_reduce
    votes._all_reduce = lambda *arguments: (calls.append(1), reduce(*arguments))[1]
    votes.table.all_reduce = type(votes.table.all_reduce)(votes._all_reduce)
    step._training.close()  # a session copies the table
    with counting() as counts:
        step(own_batch())
    mine = dict(counts)
    with counting() as counts:
        for part in zip(*(t.split(2) for t in own_batch())):
            loss_fn(model, part).backward()
    return {"step": mine, "plain": dict(counts), "votes": len(calls)}


def as_one_process(is_low, replicas=0):
    """Whether training equals that of the whole batch by one process."""
    reference, model = plain(), sharded(plain(), is_low, replicas)
    theirs = adam(reference)
    step = make_step(model, clip=0.1, **of_size(2))
    batches = [batch_of(rank) for rank in range(dist.get_world_size())]
    everything = [torch.cat(parts) for parts in zip(*batches)]
    near = True
    for _ in range(3):
        loss = float(step(own_batch()))
        theirs.zero_grad()
        its = loss_fn(reference, everything)
        its.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        near = near and abs(loss - float(its.detach())) < (2e-2 if is_low else 1e-5)
        theirs.step()
    count = len(list(model.parameters()))
    near = near and all(
        torch.allclose(a, b, atol=2e-2 if is_low else 1e-4)
        for a, b in zip(whole(model)[:count], reference.parameters())
    )
    loss_fn(model, own_batch()).backward()  # the model is as fully_shard() made it
    return {"near": near, "ranks": step.report.ranks}


def _train(fails_at, is_failing, is_low, failing_step, replicas):
    """(state, error, the mode of the step that fails)."""
    model = model_of(is_low, replicas)
    step = make_step(model, **of_size(4), clip=0.5, lighten=[lambda on: None])
    mode, error, batch = FailAt(fails_at if is_failing else 0), None, own_batch()
    torch.manual_seed(dist.get_rank())
    for number in range(3):
        with torch.no_grad():  # it leaves parameters whole, and an order of its own
            loss_fn(model.eval(), batch)
        model.train()
        try:
            with mode if number == failing_step and fails_at else contextlib.nullcontext():
                step(batch)
        except Exception as caught:  # the other ranks hear of a torn update in the next step
            error = error or f"{type(caught).__name__}: {caught}"
    return whole(model), error, mode


def ooms_everywhere(is_on_all, is_low, failing_step, first, stride, replicas=0):
    """An OOM at each operation of one of three steps."""
    return swept(
        lambda fails_at, is_failing: _train(fails_at, is_failing, is_low, failing_step, replicas),
        is_on_all,
        first,
        stride,
    )


def _train_pairs(fails_at, is_failing):
    """(state, error, the mode of the second step), with BatchNorm and nine samples on each rank."""
    torch.manual_seed(0)
    model = sharded(nn.Sequential(Part(), nn.BatchNorm1d(8), Part(), nn.Linear(8, 3)))
    step = make_step(model, **of_size(2), lighten=[lambda on: None])
    mode, error, batch = FailAt(fails_at if is_failing else 0), None, batch_of(dist.get_rank(), 9)
    for number in range(3):
        try:
            with mode if number == 1 and fails_at else contextlib.nullcontext():
                step(batch)
        except Exception as caught:
            error = error or f"{type(caught).__name__}: {caught}"
    return whole(model), error, mode


def pairs(stride):
    """An OOM at each operation of a step whose last micro-batch has no sample."""
    return swept(_train_pairs, False, 1, stride)


def less_memory(where):
    """Rank 1 has memory for two samples: the bits of a run that began at this size."""
    states, reports = [], []
    for has_room in (True, False):
        model, limited, micro = sharded(plain()), loss_fn, 2
        if not has_room:
            micro = 8
            if dist.get_rank() == RANK_OF_FAILURES:
                limited = fails_above(loss_fn, 2, where)
        step = make_step(model, limited, micro_start=micro)
        for _ in range(2):
            step(own_batch())
        states.append(whole(model))
        reports.append(step.report)
    return {"same": same_bits(*states), "ranks": step.report.ranks, "ooms": step.report.ooms}


def failures():
    """What failures_of() and other failures of rank 1 give each rank, and whether training goes
    on."""
    model, is_failing = sharded(plain()), dist.get_rank() == RANK_OF_FAILURES
    fails, state = failing(loss_fn)
    step = make_step(model, fails, micro_start=4)
    step(own_batch())
    before, found = failures_of(step, state, own_batch(), whole)
    samples = 6 if is_failing else 8
    found["samples"] = error_of(lambda: step(batch_of(dist.get_rank(), samples)))
    found["evaluate"] = error_of(lambda: step.evaluate(own_batch()))
    step(own_batch())
    found["moved"] = not same_bits(before, whole(model))
    return found


def no_room():
    """From the second step on rank 1 has no memory for the whole parameters: the bits of a training
    whose second step was the first in lockstep, and what was warned of."""
    states, said = [], []
    for window in (None, True):
        model = sharded(plain())
        step = step_of(model, adam(model), loss_fn, window=window, **of_size(4))
        step(own_batch())
        if window is None and dist.get_rank() == RANK_OF_FAILURES:
            step._training.ranks.window.prepare = lambda beside=None: out_of_memory_at_once()
        if window:
            step = step_of(
                model,
                step._training.program.update.optimizers[0],
                loss_fn,
                window=False,
                **of_size(4),
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step(own_batch())
        said += [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
        states.append(whole(model))
    return {"same": same_bits(*states), "said": said}


def fails_in_window(replicas=0):
    """In the second step rank 1 has memory for no sample beside the whole parameters: the bits of
    a training whose second step was the first in lockstep, warnings, and the calls of loss_fn on
    each rank. Then there is room again, and a later step runs in the window."""
    states, said = [], []
    ways_module._RETURN_AFTER = 2
    for window in (None, True):
        model, is_short, calls = sharded(plain(), replicas=replicas), [False], Unseen(0)

        def limited(model, samples):
            calls[0] += 1
            if is_short[0] and not step._training.ranks.lockstep:
                out_of_memory_at_once()
            return loss_fn(model, samples)

        step = step_of(model, adam(model), limited, window=window, **of_size(4))
        step(own_batch())
        is_short[0] = window is None and dist.get_rank() == RANK_OF_FAILURES
        if window:
            optimizer = step._training.program.update.optimizers[0]
            step = step_of(model, optimizer, loss_fn, window=False, **of_size(4))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step(own_batch())
        said += [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
        states.append(whole(model))
        if window is None:
            ran, is_short[0] = calls[0], False
            was_in_lockstep = bool(step._training.ranks.lockstep)
            step(own_batch())
            is_back = not step._training.ranks.lockstep
    return {
        "same": same_bits(*states),
        "said": said,
        "calls": ran,
        "was_in_lockstep": was_in_lockstep,
        "is_back": is_back,
    }


def _train_changing(fails_at, is_failing, failing_step, replicas):
    """(state, error, the mode of the step that fails). The second of four steps goes over from the
    window to lockstep, and the last one back."""
    ways_module._RETURN_AFTER = 2
    model, is_short = model_of(replicas=replicas), [False]

    def limited(model, samples):
        if is_short[0] and not step._training.ranks.lockstep:
            out_of_memory_at_once()
        return loss_fn(model, samples)

    step = step_of(model, adam(model), limited, **of_size(4), clip=0.5, lighten=[lambda on: None])
    mode, error, batch = FailAt(fails_at if is_failing else 0), None, own_batch()
    torch.manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number in range(4):
            is_short[0] = number == 1 and dist.get_rank() == RANK_OF_FAILURES
            try:
                with mode if number == failing_step and fails_at else contextlib.nullcontext():
                    step(batch)
            except Exception as caught:
                error = error or f"{type(caught).__name__}: {caught}"
    return whole(model), error, mode


def ooms_at_changes(is_on_all, failing_step, stride, replicas=0):
    """An OOM at each operation of the step that leaves the window, or returns to it."""
    return swept(
        lambda fails_at, is_failing: _train_changing(fails_at, is_failing, failing_step, replicas),
        is_on_all,
        stride=stride,
    )


def changed_in_place(is_local):
    """Where loss_fn scales the sharded parameters: the names of errors and whether an OOM of rank 1
    changes a bit, for a Step that was not told of them and one that has them as its state."""
    return [_changed_in_place(is_local, is_told) for is_told in (False, True)]


def _changed_in_place(is_local, is_told):
    states, errors, counts = [], [], []
    for fails_at in (0, 6):
        model, calls = sharded(plain()), []

        def scaling(model, samples, calls=calls, fails_at=fails_at):
            with torch.no_grad():
                for p in model.parameters():
                    (p.to_local() if is_local else p).mul_(0.9)
            calls.append(1)
            if len(calls) == fails_at and dist.get_rank() == RANK_OF_FAILURES:
                out_of_memory_at_once()
            return loss_fn(model, samples)

        options = {"state": list(model.parameters())} if is_told else {}
        step = make_step(model, scaling, **of_size(4), lighten=[lambda on: None], **options)
        found = [error_of(lambda: step(own_batch()))[0] for _ in range(1 - is_told)]
        for _ in range(4):
            step(own_batch())
        states.append(whole(model))
        errors.append(found)
        counts.append(len(calls))
    return {"errors": errors, "same": same_bits(*states), "has_repeated": counts[0] < counts[1]}


def sums_on_the_host():
    """From the second step on rank 1 has memory for no sample in lockstep, until sums are in host
    memory: the bits of a training that has room, and what was warned of."""
    states, said, was_on_host = [], [], []
    for is_short in (True, False):
        model = model_of()
        step = make_step(
            model, loss_fn if not is_short else limited_to_host, clip=0.5, **of_size(2)
        )
        limited_to_host.step = None
        torch.manual_seed(dist.get_rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(3):
                limited_to_host.step = step if number else None
                step(own_batch())
        said += [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
        was_on_host.append(step._training.ranks.accumulators.is_on_host)
        states.append(whole(model))
    return {"same": same_bits(*states), "said": said, "was_on_host": was_on_host}


def limited_to_host(model, samples):
    step = limited_to_host.step
    if step and dist.get_rank() == RANK_OF_FAILURES:
        if not step._training.ranks.accumulators.is_on_host:
            out_of_memory_at_once()
    return loss_fn(model, samples)


def fails_otherwise_too():
    """Rank 1 runs out of memory, and rank 0 has another failure: the errors."""
    model = sharded(plain())

    def fails(model, samples):
        if dist.get_rank() == RANK_OF_FAILURES:
            out_of_memory_at_once()
        raise ValueError("the sample is bad")

    step = step_of(model, adam(model), fails, **of_size(4))
    return error_of(lambda: step(own_batch())), bool(step._training.ranks.lockstep)


def out_of_memory_at_once():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def first_fails(kind):
    """Rank 1 fails in the first micro-batch of all, in two steps: the errors, the samples of each
    call of loss_fn, how many collectives of fully_shard() ran, and whether two steps after that
    are those of a training that has not failed."""
    states, found = [], []
    for is_failing in (True, False):
        model, sizes = sharded(plain()), Unseen([])
        fails, state = failing(loss_fn)

        def seen(model, samples):
            sizes[0].append(len(samples[0]))
            return fails(model, samples)

        step = make_step(model, seen, micro_start=8, micro_smallest=2)
        if is_failing:
            state["error"] = getattr(torch, kind, ValueError)("the sample is bad")
            with counting() as counts:
                errors = [error_of(lambda: step(own_batch())) for _ in range(2)]
            collectives = sum(counts.get(name, 0) for name in ("all_gather", "reduce_scatter"))
            found, state["error"] = [errors, list(sizes[0]), collectives], None
            step._training.close()  # the next session begins at the size of the other training
            step._training._micro = 8
        for _ in range(2):
            step(own_batch())
        states.append(whole(model))
    return [*found, same_bits(*states)]


def rehearsed():
    """The first step of a model with dropout and BatchNorm, of eight samples in fours, whose
    loss_fn counts its calls: whether it is that of a training that has rehearsed before, the calls
    that are left, warnings, samples that ran again, and of each call the samples."""
    states, known = [], []
    for knows in (False, True):
        torch.manual_seed(0)
        parts = (Part(), nn.BatchNorm1d(8), nn.Dropout(0.2), Part(), nn.Linear(8, 3))
        model, calls, sizes = sharded(nn.Sequential(*parts)), [0], Unseen([])

        def counted(model, samples):
            calls[0] += 1
            sizes[0].append(len(samples[0]))
            return loss_fn(model, samples)

        step = make_step(model, counted, micro_start=4, micro_largest=4, micro_smallest=2)
        if knows:
            step._training.ranks.lockstep._known = known
        torch.manual_seed(dist.get_rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(own_batch())
        if not knows:
            known = step._training.ranks.lockstep._known
            said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
            ran, first_sizes = calls[0], list(sizes[0])
        states.append([*whole(model), torch.get_rng_state()])
    return {
        "same": same_bits(*states),
        "calls": ran,
        "said": said,
        "redone": step.report.redone_samples,
        "sizes": first_sizes,
    }


def killed(where, replicas=0):
    """Rank 1 is killed in a step: what the others get."""
    return sharded_killed(where, window=False, replicas=replicas)


def refused():
    """The message of each Step that cannot be made so."""
    model = sharded(plain())
    return {
        name: (error_of(lambda: make_step(model, **options)) or [None, ""])[1]
        for name, options in (
            ("cost", {"cost": lambda batch, first, count: count}),
            ("learn", {"learn": True}),
        )
    }
