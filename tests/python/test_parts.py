"""Backward.parts(): the passes of a batch in a block of the program."""

import contextlib
import dataclasses
import decimal
import gc
import warnings
import weakref

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from rebatch.testing import fail_once
from models import FailAt, fails_above, make, same_bits, state_of
from test_gradients_outside import FailsInBackward

COUNTER = 0


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def once():
    """True the first time that next(..., False) is called with it."""
    return iter((True,))


def make_backward(**options):
    model, batch, loss_fn = make("mlp")
    torch.manual_seed(1)
    backward = rebatch.Backward(model, **{"log_level": "quiet", "growth": False, **options})
    return model, batch, loss_fn, backward


def gradients_of(model):
    return [p.grad for p in model.parameters()]


def train(limited=None, fail_at=0, where="forward", use_parts=True, **options):
    """Two batches for each of two updates: by parts(), or by a call."""
    model, batch, loss_fn, backward = make_backward(**options)
    run = fails_above(loss_fn, limited, where) if limited is not None else loss_fn
    if not use_parts:
        backward = rebatch.Backward(model, run, log_level="quiet", growth=False, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for i in range(2):
        for half in (0, 1):
            rolled = tuple(t.roll(half) for t in batch)
            with FailAt(fail_at if (i, half) == (1, 1) else 0):
                if use_parts:
                    for part in backward.parts(rolled):
                        with part as samples:
                            loss = run(model, samples)
                            part.backward(loss)
                else:
                    backward(rolled)
            losses.append(backward.loss)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model), losses


@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
@pytest.mark.parametrize("micro", (0, 3, 4))
def test_parts_have_the_bits_of_a_call(gradients, micro):
    options = {"micro_start": micro, "gradients": gradients}
    state, losses = train(**options)
    expected, expected_losses = train(use_parts=False, **options)
    assert same_bits(state, expected) and same_bits(losses, expected_losses)


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_samples_come_again_fewer_after_an_oom(where, gradients):
    state, losses = train(limited=4, where=where, gradients=gradients)
    expected, expected_losses = train(micro_start=4, gradients=gradients, use_parts=False)
    assert same_bits(state, expected) and same_bits(losses, expected_losses)


@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_no_bit_changes_when_any_operation_fails(gradients):
    options = dict(micro_start=4, micro_smallest=4, gradients=gradients, lighten=lambda on: None)
    expected, _ = train(use_parts=False, **options)
    for n in range(1, 105, 3):
        state, _ = train(fail_at=n, **options)
        assert same_bits(state, expected), f"an OOM in operation {n} changed the result"


def test_a_step_updates_after_its_last_part():
    states = []
    for use_parts in (True, False):
        model, batch, loss_fn, _ = make_backward()
        step = rebatch.Step(model, torch.optim.AdamW(model.parameters()), loss_fn, micro_start=4)
        for _ in range(2):
            if not use_parts:
                step(batch)
                continue
            for part in step.parts(batch):
                with part as samples:
                    part.backward(loss_fn(model, samples))
        states.append(state_of(model))
    assert same_bits(*states)


def test_several_batches_are_not_joined():
    gradients = []
    for use_parts in (True, False):
        model, (x, y), loss_fn, _ = make_backward()
        several = [(x[:5], y[:5]), (x[5:], y[5:])]
        backward = rebatch.Backward(model, loss_fn, log_level="quiet", micro_start=4)
        if use_parts:
            for part in backward.parts(batches=several):
                with part as samples:
                    part.backward(loss_fn(model, samples))
        else:
            backward(batches=several)
        gradients.append(gradients_of(model))
    assert same_bits(*gradients)


def test_accumulate_of_accelerate_stays():
    accelerate = pytest.importorskip("accelerate")
    states = []
    for limit in (None, 4, 0):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, batch, loss_fn, _ = make_backward()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = rebatch.Backward(model, backward=accelerator.backward, log_level="quiet")
        torch.manual_seed(1)
        for _ in range(4):
            with accelerator.accumulate(model):
                if limit is None:
                    accelerator.backward(loss_fn(model, batch))
                else:
                    for part in backward.parts(batch):
                        with part as samples:
                            if limit and part.count > limit:
                                out_of_memory()
                            part.backward(loss_fn(model, samples))
                optimizer.step()
                optimizer.zero_grad()
        states.append(state_of(model))
    plain, cut, whole = states
    assert same_bits(plain, whole) and not same_bits(plain, cut)
    for a, b in zip(plain, cut):
        torch.testing.assert_close(a, b) if isinstance(a, torch.Tensor) else None


# ---- names of the block ----


def test_what_the_block_assigned_is_none_and_numbers_are_put_back():
    model, batch, loss_fn, backward = make_backward()
    seen, text, alive, fails, gone = 0, "", iter(()), once(), None
    for part in backward.parts(batch):
        assert seen == part.first and text == "x" * part.first
        with part as samples:
            logits = samples[0] * 2
            outputs = {"logits": logits + 1}
            seen += part.count
            text += "x" * part.count
            if next(fails, False):
                alive = map(weakref.ref, (logits, outputs["logits"]))
                out_of_memory()
            part.backward(loss_fn(model, samples))
        if not part.succeeded:
            gone = logits, outputs, seen, text, alive
    assert gone == (None, None, 0, "", None)
    assert seen == len(batch[0]) and logits is not None and outputs is not None


@pytest.mark.filterwarnings("ignore:rebatch. a block that ran out of memory has changed")
def test_tensors_of_a_block_that_failed_are_gone():
    model, batch, loss_fn, backward = make_backward()
    fails, alive = once(), []

    def note(*tensors):
        alive[:] = map(weakref.ref, tensors)

    for part in backward.parts(batch):
        with part as samples:
            logits = samples[0] * 2
            outputs = [logits + 1]
            if next(fails, False):
                note(logits, outputs[0])
                out_of_memory()
            part.backward(loss_fn(model, samples))
        if not part.succeeded:
            assert len(alive) == 2 and not any(tensor() is not None for tensor in alive)


def test_numbers_of_blocks_before_are_put_back_when_the_batch_runs_again():
    model, batch, loss_fn, backward = make_backward(micro_start=4, gradients="inplace")
    seen, fails = 0, once()
    for part in backward.parts(batch):
        with part as samples:
            loss = loss_fn(model, samples)
            seen += part.count
            part.backward(loss)
            if part.first == 8 and next(fails, False):
                out_of_memory()
    assert seen == len(batch[0]) and backward.report.ooms == 1


def test_a_small_tensor_that_the_block_assigns_anew_is_put_back():
    model, batch, loss_fn, backward = make_backward(micro_start=8)
    seen, fails = torch.zeros(()), once()
    for part in backward.parts(batch):
        with part as samples:
            loss = loss_fn(model, samples)
            seen = seen + part.count
            if next(fails, False):
                out_of_memory()
            part.backward(loss)
        assert part.succeeded == (loss is not None)
    assert int(seen) == len(batch[0]) and loss is not None


@dataclasses.dataclass
class Sums:
    loss: float
    seen: int


# What a name has before a block that assigns it anew, from what it had, a count, and a loss.
ANEW = {
    "float64 of numpy": (numpy.float64(0), lambda v, n, loss: v + n),
    "float32 of numpy": (0, lambda v, n, loss: v + n * loss.detach().numpy()),
    "array": (numpy.zeros(2000), lambda v, n, loss: v + n),
    "tuple": ((0.0, 0), lambda v, n, loss: (v[0] + n * loss.item(), v[1] + n)),
    "list": ([], lambda v, n, loss: v + n * ["x"]),
    "dict": ({"seen": 0}, lambda v, n, loss: {**v, "seen": v["seen"] + n}),
    "frozenset": (frozenset(), lambda v, n, loss: v | frozenset(range(len(v), len(v) + n))),
    "object": (Sums(0.0, 0), lambda v, n, loss: dataclasses.replace(v, seen=v.seen + n)),
    "decimal": (decimal.Decimal(0), lambda v, n, loss: v + n),
    "tensors": ((torch.zeros(3), torch.zeros(())), lambda v, n, loss: (v[0] + n, v[1] + n)),
}


def anew(start, add, limited, where="backward"):
    """Three batches."""
    model, batch, loss_fn, backward = make_backward()
    run, value = fails_above(loss_fn, limited, where), start
    for _ in range(3):
        for part in backward.parts(batch):
            with part as samples:
                loss = run(model, samples)
                value = add(value, part.count, loss)
                part.backward(loss)
    assert (backward.report.microbatches > 1) == (limited < 16)
    return value


@pytest.mark.parametrize("kind", ANEW)
def test_what_the_block_assigns_anew_from_what_was_there_counts_each_sample_once(kind):
    value, expected = anew(*ANEW[kind], 4), anew(*ANEW[kind], 16)
    assert type(value) is type(expected)
    if kind in ("tuple", "array", "tensors") or "numpy" in kind:
        torch.testing.assert_close(value, expected)
    else:
        assert value == expected


def test_a_sum_of_losses_that_has_a_graph_goes_on_without_it_in_the_next_part():
    model, batch, loss_fn, backward = make_backward(micro_start=4)
    total = 0
    for part in backward.parts(batch):
        assert not (part.first and total.requires_grad)
        with part as samples:
            loss = loss_fn(model, samples)
            total = total + part.count * loss
            part.backward(loss)
    torch.testing.assert_close(total.detach() / len(batch[0]), backward.loss)


def test_a_block_that_fails_on_a_name_that_is_none_is_told_why():
    model, batch, loss_fn, backward = make_backward()
    state, run = torch.zeros(5000), fails_above(loss_fn, 8, "backward")
    with pytest.raises(TypeError) as caught:
        for part in backward.parts(batch):
            with part as samples:
                state = state + 1
                part.backward(run(model, samples))
    text = caught.value.__notes__[0]
    assert "'state' is None: an earlier block" in text and "`if part.succeeded:`" in text


def test_a_block_that_fails_for_a_part_of_the_batch_is_told_the_cut():
    model, batch, loss_fn, backward = make_backward()
    noise, run = torch.randn(len(batch[0]), 1), fails_above(loss_fn, 8, "backward")
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        for part in backward.parts(batch):
            with part as (x, y):
                part.backward(run(model, (x + noise, y)))
    assert "the micro-batch of samples 0-7 of 16, which is cut" in caught.value.__notes__[0]


def test_a_name_that_was_not_told_is_told_after_others():
    model, batch, loss_fn, backward = make_backward()
    run, outs, seen = fails_above(loss_fn, 4, "backward"), [], {"n": 0}
    with pytest.warns(RuntimeWarning, match="is not put back") as found:
        for part in backward.parts(batch):
            with part as samples:
                loss = run(model, samples)
                outs.append(loss.item())
                seen["n"] += part.count
                part.backward(loss)
    told = [str(w.message) for w in found if "is not put back" in str(w.message)]
    assert [sum(f"'{name}'" in text for text in told) for name in ("outs", "seen")] == [1, 1]


def test_in_the_text_of_a_program_names_are_put_back_too():
    model, batch, loss_fn, backward = make_backward()
    program = """
seen, fails = 0, once()
for part in backward.parts(batch):
    with part as samples:
        logits = samples[0] * 2
        seen += part.count
        if next(fails, False):
            out_of_memory()
        part.backward(loss_fn(model, samples))
    if not part.succeeded:
        gone = logits, seen
"""
    names = {**globals(), **locals()}
    exec(program, names)
    assert names["gone"] == (None, 0) and names["seen"] == len(batch[0])


def test_what_is_not_put_back_is_told_once():
    global COUNTER
    model, batch, loss_fn, backward = make_backward(micro_start=8)
    outs, total = [], torch.zeros(())
    with pytest.warns(RuntimeWarning, match="is not put back") as found:
        for part in backward.parts(batch):
            with part as samples:
                loss = loss_fn(model, samples)
                outs.append(loss)
                total += loss.detach()
                COUNTER += 1
                if part.count > 2:
                    out_of_memory()
                part.backward(loss)
    (one,) = [str(w.message) for w in found if "is not put back" in str(w.message)]
    for name in ("'COUNTER'", "'outs'", "'total'"):
        assert name in one
    assert "expected these lines after the block, under `if part.succeeded:`" in one


class Meter:
    """Deep in what a program has: looks at a name of the block do not come to it."""

    def __init__(self):
        self.seen = 0

    def update(self, count):
        self.seen += count


METERS = {"loss": [Meter()]}


class Trainer:
    def __init__(self, model, loss_fn):
        self.model, self.loss_fn = model, loss_fn
        self.meters = {"loss": Meter()}
        self.last = [fails_above(loss_fn, 8, "forward")]

    def loss(self, samples, counts):
        if counts:
            self.meters["loss"].update(len(samples[0]))
        return self.last[0](self.model, samples)


def with_a_global(trainer, samples, counts):
    if counts:
        METERS["loss"][0].update(len(samples[0]))
    return trainer.last[0](trainer.model, samples)


def with_a_closure():
    seen = {"n": torch.zeros(())}

    def loss(trainer, samples, counts):
        if counts:
            seen["n"] += len(samples[0])
        return trainer.last[0](trainer.model, samples)

    return loss


WAYS = {
    "global": (with_a_global, "METERS['loss'][0].seen"),
    "closure": (with_a_closure(), "'seen'"),
    "method": (Trainer.loss, "meters['loss'].seen"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_step", (0, 1, 5))
@pytest.mark.parametrize("counts", (True, False))
def test_what_functions_of_the_block_change_is_told_and_what_comes_later_is_not(
    way, in_step, counts
):
    """A meter below the block, and one after the backward pass, count each sample once."""
    model, batch, loss_fn, backward = make_backward()
    trainer, (loss_of, name) = Trainer(model, loss_fn), WAYS[way]
    below, after, every = Meter(), {"meters": [Meter()]}, {"meters": [Meter()]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(in_step + 3):
            trainer.last = [fails_above(loss_fn, 8 if i >= in_step else 16, "forward")]
            for part in backward.parts(batch):
                with part as samples:
                    loss = loss_of(trainer, samples, counts)
                    part.backward(loss)
                    after["meters"][0].update(part.count)
                every["meters"][0].update(1)
                if part.succeeded:
                    below.update(part.count)
    texts = [str(w.message) for w in caught if "is not put back" in str(w.message)]
    assert backward.report.micro == 8 and len(texts) == counts
    assert not counts or name in texts[0]
    assert below.seen == after["meters"][0].seen == 16 * (in_step + 3)


@pytest.mark.parametrize("is_helped", (False, True))
def test_gradients_of_another_network_of_the_loop_count_once(is_helped):
    """Its optimizer stands in the loop too, as that of a head or of a discriminator does."""

    def train(fails):
        torch.manual_seed(0)
        body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        ours, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (body, head))
        options = {} if fails else {"micro_start": 8}
        backward = rebatch.Backward(body, log_level="quiet", growth=False, **options)

        def helped(x):
            return head(FailsInBackward.apply(body(x)))

        FailsInBackward.left = int(fails)
        for _ in range(3):
            for part in backward.parts(torch.randn(16, 8)):
                with part as x:
                    out = helped(x) if is_helped else head(FailsInBackward.apply(body(x)))
                    part.backward(out.square().mean())
            for optimizer in (ours, other):
                optimizer.step()
                optimizer.zero_grad()
        assert backward.report.micro == 8
        return [*body.parameters(), *head.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_bits(train(True), train(False))


def test_nothing_is_told_of_what_a_backward_pass_on_a_cpu_has_not_come_to():
    """PyTorch holds its nodes, with the samples, until another pass runs."""
    model = torch.nn.Linear(8, 1)
    backward = rebatch.Backward(model, log_level="quiet", growth=False)
    FailsInBackward.left = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in backward.parts((torch.randn(16, 8), torch.randn(16, 1))):
            with part as (x, y):
                one, two = FailsInBackward.apply(model(x)), FailsInBackward.apply(model(x * y))
                part.backward((one + two - y).square().mean())
    assert backward.report.ooms == 1


def test_tensors_that_others_hold_are_told():
    model, batch, loss_fn, backward = make_backward(micro_start=8)

    def keep(tensor, there=[]):
        there[:] = [tensor]

    keep(0)
    with pytest.warns(RuntimeWarning, match="'loss'.*is not put back"):
        for part in backward.parts(batch):
            with part as samples:
                loss = loss_fn(model, samples)
                keep(loss)
                if part.count > 4:
                    out_of_memory()
                part.backward(loss)


def test_nothing_is_told_of_what_the_module_that_failed_was_called_with():
    """The frames of the exception hold it, and with a hook a closure does."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1))
    backward = rebatch.Backward(model, log_level="quiet")
    with warnings.catch_warnings(), fail_once(model[2], call=2) as failing:
        warnings.simplefilter("error")
        for _ in range(3):
            batch = torch.randn(32, 4), torch.randn(32)
            for part in backward.parts(batch):
                with part as (x, y):
                    hidden = torch.tanh(model[0](x))
                    loss = (model[2](hidden)[:, 0] - y).square().mean()
                    part.backward(loss)
    assert failing.failures == 1


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    more: dict


@pytest.mark.parametrize("width", [4, 4096])
@pytest.mark.parametrize("form", ["tuple", "nested"])
def test_nothing_is_told_of_a_block_that_only_assigns(form, width):
    """The samples of a whole batch are tensors that the program holds."""
    model = torch.nn.Linear(width, 1)
    backward = rebatch.Backward(model, log_level="quiet", growth=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fits in (16, 16, 8, 8, 4):
            x, y = torch.randn(16, width), torch.randn(16)
            batch = (x, y) if form == "tuple" else Pair(x, {"targets": [y]})
            for part in backward.parts(batch):
                with contextlib.nullcontext(), part as samples:
                    if form == "tuple":
                        inputs, targets = samples
                    else:
                        inputs, targets = samples.x, samples.more["targets"][0]
                    loss = (model(inputs)[:, 0] - targets).square().mean()
                    if part.count > fits:
                        out_of_memory()
                    part.backward(loss)
    assert backward.report.ooms == 1


# ---- what is refused ----


def test_a_block_without_backward_or_with_two_is_an_error():
    model, batch, loss_fn, backward = make_backward(micro_start=4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"ended without part.backward\(loss\)"):
        for part in backward.parts(batch):
            with part as samples:
                loss = loss_fn(model, samples)
                if part.first == 0:
                    part.backward(loss)
    with pytest.raises(RuntimeError, match="called twice in a block"):
        for part in backward.parts(batch):
            with part as samples:
                part.backward(loss_fn(model, samples))
                part.backward(loss_fn(model, samples))
    with pytest.raises(RuntimeError, match="a part was not run"):
        for part in backward.parts(batch):
            pass
    with pytest.raises(RuntimeError, match="outside of its block"):
        for part in backward.parts(batch):
            part.backward(loss_fn(model, samples))
    assert all(bool((g == 1).all()) for g in gradients_of(model))


def test_a_loop_that_is_left_ends_the_batch_and_the_next_call_says_so():
    model, batch, loss_fn, backward = make_backward(micro_start=4)
    expected = make_backward(micro_start=4)
    with pytest.warns(RuntimeWarning, match="left before all its parts had run"):
        for part in backward.parts(batch):
            with part as samples:
                part.backward(loss_fn(model, samples))
                if part.first == 4:
                    break
    assert all(g is None for g in gradients_of(model))
    with pytest.raises(RuntimeError, match="left before all its parts had run"):
        backward.parts(batch)
    torch.manual_seed(1)
    for a, b in ((backward, model), (expected[3], expected[0])):
        torch.manual_seed(1)
        for part in a.parts(batch):
            with part as samples:
                part.backward(loss_fn(b, samples))
    assert same_bits(gradients_of(model), gradients_of(expected[0]))


def test_an_exception_of_the_block_leaves_the_gradients_as_they_were():
    model, batch, loss_fn, backward = make_backward(micro_start=4)
    with pytest.raises(ZeroDivisionError):
        for part in backward.parts(batch):
            with part as samples:
                part.backward(loss_fn(model, samples))
                assert part.first == 0 or 1 / 0
    assert all(g is None for g in gradients_of(model))
    with pytest.raises(rebatch.Exhausted):
        for part in backward.parts(batch):
            with part as samples:
                out_of_memory()
    assert all(g is None for g in gradients_of(model))
    for part in backward.parts(batch):
        with part as samples:
            part.backward(loss_fn(model, samples))
    assert backward.report.ooms == 0 and backward.report.microbatches > 1


def test_without_a_loss_fn_a_call_is_refused():
    _, batch, _, backward = make_backward()
    with pytest.raises(ValueError, match=r"expected Backward\(model, loss_fn\), or a loop over"):
        backward(batch)


def test_nothing_is_held_after_a_batch():
    model, batch, loss_fn, backward = make_backward(micro_start=4)
    gc.disable()
    try:
        own = tuple(t.clone() for t in batch)
        there = weakref.ref(own[0])
        for part in backward.parts(own):
            with part as samples:
                part.backward(loss_fn(model, samples))
        del samples, own, part
        assert there() is None
    finally:
        gc.enable()


def clipped(model, part, loss):
    part.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)


def clipped_in_part(model, part, loss):
    part.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.body[3].parameters(), 0.01)


def cleared(model, part, loss):
    part.backward(loss)
    model.zero_grad()


def another_backward(model, part, loss):
    part.backward(loss)
    sum(p.square().sum() for p in model.parameters()).backward()


@pytest.mark.parametrize("lines", (clipped, clipped_in_part, cleared, another_backward))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
@pytest.mark.parametrize("micro", (0, 4))
def test_gradients_that_a_block_changes_are_refused(lines, gradients, micro):
    model, batch, loss_fn, backward = make_backward(micro_start=micro, gradients=gradients)
    name = r"'body\.3\.weight'" if lines is clipped_in_part else r"'body\.0\.weight'"
    with pytest.raises(ValueError, match=f"gradient of {name} was changed in a block.* below the"):
        for part in backward.parts(batch):
            with part as samples:
                lines(model, part, loss_fn(model, samples))
    assert all(gradient is None for gradient in gradients_of(model))


def test_gradients_that_a_block_reads_are_not():
    model, batch, loss_fn, backward = make_backward(micro_start=4)
    for part in backward.parts(batch):
        with part as samples:
            part.backward(loss_fn(model, samples))
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm > 0 and backward.report.microbatches == 4
