"""What loss_fn reaches outside of the model is put back after an attempt that failed, or named."""

import collections
import functools
import itertools
import logging
import random
import sys
import types
import warnings
import weakref

import numpy
import pytest
import torch
import torch.nn.functional as F

import rebatch.torch as rebatch
from rebatch.torch._reached import Marks
from models import same_bits, state_of


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def batch_of(i, samples=16):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(i))
    return x, x[:, :4].argmax(1)


def step_of(loss_fn, model=None, **options):
    model = model or network()
    options = {"log_level": "quiet", "growth": False, **options}
    return rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, **options)


def classify(model, samples):
    return F.cross_entropy(model(samples[0]), samples[1])


class Meter:
    """As many trainings have it."""

    def __init__(self):
        self.sum, self.count, self.last = 0.0, 0, collections.deque(maxlen=3)

    def add(self, value, n):
        self.sum += value * n
        self.count += n
        self.last.append(value)


class Shared:
    seen, rows = 0, []


counted = 0
module_of_the_program = types.ModuleType("module_of_the_program")
sys.modules["module_of_the_program"] = module_of_the_program


# Each returns (a function that notes what a loss_fn saw of some samples, one that tells what was
# noted), as the parts of a program do.


def in_a_global():
    global counted
    counted = 0

    def note(out, samples):
        global counted
        counted += len(samples[0])

    return note, lambda: counted


def in_a_cell():
    seen, correct = 0, None

    def note(out, samples):
        nonlocal seen, correct
        seen += len(samples[0])
        correct = (correct or 0) + int((out.argmax(1) == samples[1]).sum())

    return note, lambda: (seen, correct)


def in_containers():
    rows, by_name, kinds = [], collections.defaultdict(list), set()
    counter, few, deep = collections.Counter(), collections.deque(maxlen=2), {"a": [{"n": 0}]}

    def note(out, samples):
        rows.append(float(out.detach().mean()))
        by_name[f"size {len(samples[0])}"].append(1)
        kinds.add(len(kinds))
        counter.update(samples[1].tolist())
        few.append(len(rows))
        deep["a"][0]["n"] += 1

    return note, lambda: (len(rows), dict(by_name), kinds, counter, list(few), deep)


def in_long_containers():
    rows, by_name = [0] * 3000, dict.fromkeys(range(3000))

    def note(out, samples):
        rows.append(1)
        rows.extend([2, 3])
        by_name[len(by_name)] = 1

    return note, lambda: (rows, by_name)


def in_objects():
    meters = collections.defaultdict(Meter)

    def note(out, samples):
        meters["loss"].add(float(out.detach().mean()), len(samples[0]))

    return note, lambda: [(m.count, list(m.last)) for m in meters.values()]


def in_a_namespace():
    state = types.SimpleNamespace(seen=0, rows=[])

    def note(out, samples):
        state.seen += len(samples[0])
        state.rows.append(1)

    return note, lambda: (state.seen, state.rows)


def in_a_class():
    Shared.seen, Shared.rows = 0, []

    def note(out, samples):
        Shared.seen += len(samples[0])
        Shared.rows.append(1)

    return note, lambda: (Shared.seen, Shared.rows)


def in_a_default():
    def note(out, samples, seen=[0]):
        seen[0] += len(samples[0])
        note.calls = getattr(note, "calls", 0) + 1

    return note, lambda: (note.__defaults__, note.calls)


def in_arguments():
    def note(rows, out, samples, *, meter):
        rows.append(len(samples[0]))
        meter.add(1.0, len(samples[0]))

    rows, meter = [], Meter()
    return functools.partial(note, rows, meter=meter), lambda: (rows, meter.count)


def in_another_module():
    module_of_the_program.seen = 0

    def note(out, samples):
        module_of_the_program.seen += len(samples[0])

    return note, lambda: module_of_the_program.seen


def in_tensors():
    seen, queue, confusion = torch.zeros(()), torch.zeros(40, 4), numpy.zeros((4, 4), dtype=int)

    @torch.no_grad()
    def note(out, samples):
        seen.add_(len(samples[0]))
        queue.copy_(torch.cat([out, queue])[:40])
        numpy.add.at(confusion, (samples[1].numpy(), out.argmax(1).numpy()), 1)

    return note, lambda: (seen.tolist(), queue.tolist(), confusion.tolist())


def in_generators():
    own, numbers, arrays = torch.Generator(), random.Random(0), numpy.random.default_rng(0)
    drawn = []

    def note(out, samples):
        drawn.append((torch.rand((), generator=own).item(), numbers.random(), arrays.random()))

    return note, lambda: drawn


def in_a_module():
    norm = torch.nn.BatchNorm1d(4)
    norm.seen = 0

    def note(out, samples):
        norm(out.detach())
        norm.seen += len(samples[0])

    return note, lambda: (norm.seen, norm.running_mean.tolist(), int(norm.num_batches_tracked))


def in_a_metric():
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy, mean = torchmetrics.classification.MulticlassAccuracy(4), torchmetrics.MeanMetric()

    def note(out, samples):
        accuracy.update(out, samples[1])
        mean.update(out.detach().mean())

    return note, lambda: (accuracy.tp.tolist(), accuracy._update_count, float(mean.compute()))


def in_another_optimizer():
    """As of a discriminator that loss_fn trains."""
    other = network(seed=1)
    optimizer = torch.optim.AdamW(other.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)

    def note(out, samples):
        optimizer.zero_grad()
        F.mse_loss(other(samples[0]), out.detach()).backward()
        optimizer.step()
        scheduler.step()

    def noted():
        state = [[t.tolist() for t in kept.values()] for kept in optimizer.state.values()]
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        return [p.tolist() for p in other.parameters()], state, group, scheduler.state_dict()

    return note, noted


KEPT = (
    in_a_global,
    in_a_cell,
    in_containers,
    in_long_containers,
    in_objects,
    in_a_namespace,
    in_a_class,
    in_a_default,
    in_arguments,
    in_another_module,
    in_tensors,
    in_generators,
    in_a_module,
    in_a_metric,
    in_another_optimizer,
)


def train(kept, largest, where, steps=3, **options):
    """What is noted in some steps, the first of which runs out of memory."""
    note, noted = kept()

    def loss_fn(model, samples):
        out = model(samples[0])
        note(out, samples)
        return F.cross_entropy(out, samples[1])

    limited = after_room(loss_fn, largest, where)
    step = step_of(limited, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(steps):
            step(batch_of(i))
    return noted()


def after_room(loss_fn, largest, where):
    """It runs first, and memory runs out then."""

    def limited(model, samples):
        loss = loss_fn(model, samples)
        if len(samples[0]) > largest:
            if where == "forward":
                strike(None)
            loss.register_hook(strike)
        return loss

    return limited


def strike(_gradient):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("kept", KEPT)
def test_a_sample_counts_once(kept, where):
    assert train(kept, 4, where) == train(kept, 99, where, micro_start=4)


@pytest.mark.parametrize("kept", KEPT)
def test_a_growth_that_fails_counts_nothing(kept):
    """The first attempt that fails is one in a later step."""
    grown = train(kept, 4, "backward", 8, micro_start=4, growth=True, grow_after=3)
    assert grown == train(kept, 99, "backward", 8, micro_start=4)


@pytest.mark.parametrize("kept", KEPT)
def test_comparisons_and_checks_count_nothing(kept):
    def run(compares):
        note, noted = kept()

        def loss_fn(model, samples):
            out = model(samples[0])
            note(out, samples)
            return F.cross_entropy(out, samples[1])

        step = step_of(loss_fn, micro_start=4)
        step._training.callbacks.cuts.is_done = not compares
        step(batch_of(0))
        if compares:
            step.check(batch_of(0))
        return repr(noted())

    assert run(True) == run(False)


class System:
    """A trainer of the program's own: the loss is its method."""

    def __init__(self, model):
        self.model, self.seen, self.history, self.meter = model, 0, [], Meter()
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.data = [batch_of(i) for i in range(3)]

    def loss(self, model, samples):
        self.seen += len(samples[0])
        self.meter.add(1.0, len(samples[0]))
        self.history.append(len(samples[0]))
        loss = classify(self.model, samples)
        if len(samples[0]) > 4:
            loss.register_hook(strike)
        return loss


def test_attributes_of_the_object_whose_method_it_is():
    system = System(network())
    step = rebatch.Step(system.model, system.optimizer, system.loss, log_level="quiet")
    for batch in system.data:
        step(batch)
    assert system.seen == system.meter.count == sum(system.history) == 48


def test_exhausted_puts_back_what_was_before_the_step():
    note, noted = in_containers()

    def loss_fn(model, samples):
        out = model(samples[0])
        note(out, samples)
        if fails and len(samples[0]) <= 4:
            strike(None)
        return F.cross_entropy(out, samples[1])

    fails = False
    step = step_of(after_room(loss_fn, 8, "forward"), micro_smallest=4)
    step(batch_of(0))
    before, fails = repr(noted()), True
    with pytest.raises(rebatch.Exhausted):
        step_of(after_room(loss_fn, 3, "forward"), micro_smallest=4)(batch_of(1))
    assert repr(noted()) == before


def test_a_flag_that_shall_make_it_fail_once_is_put_back_and_that_is_said():
    has_failed = False

    def loss_fn(model, samples):
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory (on purpose)")
        return classify(model, samples)

    with pytest.raises(rebatch.Exhausted) as caught:
        step_of(loss_fn)(batch_of(0))
    text = str(caught.value)
    assert "The program raised this OOM itself (loss_fn, " in text and __file__ in text
    assert "Try it on your script" in text and not has_failed


@pytest.mark.parametrize("how", ("of PyTorch", "raised again", "raised from it"))
def test_an_oom_of_pytorch_is_not_taken_for_one_of_the_program(how):
    def loss_fn(model, samples):
        try:
            return torch.empty(1 << 50, dtype=torch.uint8).sum()
        except RuntimeError as error:
            if how == "raised again":
                raise
            if how == "raised from it":
                raise torch.OutOfMemoryError("CUDA out of memory.") from error
        return torch.empty(1 << 50, dtype=torch.uint8).sum()

    with pytest.raises(rebatch.Exhausted) as caught:
        step_of(loss_fn)(batch_of(0))
    assert "itself" not in str(caught.value)


def test_after_an_exception_of_the_program_its_variables_tell_what_was_seen():
    seen = []

    def loss_fn(model, samples):
        seen.append(samples)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        step_of(loss_fn)(batch_of(0))
    assert len(seen) == 1


# ---- what cannot be put back ----


def test_a_large_tensor_that_changed_in_the_first_attempt_is_named(monkeypatch):
    monkeypatch.setattr("rebatch.torch._reached._FIRST_BYTES", 0)
    store = {"bank": torch.zeros(16, 4)}

    def loss_fn(model, samples):
        store["bank"].add_(1)
        return classify(model, samples)

    model = network()
    before = state_of(model)
    step = step_of(after_room(loss_fn, 4, "forward"), model)
    with pytest.raises(rebatch.Error) as caught:
        step(batch_of(0))
    text = str(caught.value)
    assert text.startswith("rebatch: \"store['bank']\" changed in place in an attempt that failed")
    assert "state=[...]" in text and "(loss, extras)" in text
    assert same_bits(before, state_of(model))
    step(batch_of(0))  # it is known now
    assert step.report.micro == 4


def test_a_long_container_that_changed_within_is_named_once():
    rows = collections.deque(maxlen=2000)
    rows.extend(range(2000))

    def loss_fn(model, samples):
        rows.append(1)
        return classify(model, samples)

    largest = [8]
    step = step_of(lambda m, s: after_room(loss_fn, largest[0], "forward")(m, s))
    with pytest.warns(RuntimeWarning, match="'rows' has more than 1024 entries, and changed") as w:
        step(batch_of(0))
        largest[0] = 4
        step(batch_of(1))
    assert len([each for each in w if "entries" in str(each.message)]) == 1


def test_gradients_of_tensors_in_no_module_are_added_once():
    """And those of a head that another optimizer trains."""
    results = []
    for start, largest in ((16, 4), (4, 99)):
        torch.manual_seed(0)
        scale, head = torch.ones(4, requires_grad=True), torch.nn.Linear(4, 4)

        def loss_fn(model, samples):
            return F.cross_entropy(head(model(samples[0])) * scale, samples[1])

        step = step_of(after_room(loss_fn, largest, "backward"), micro_start=start)
        for i in range(2):
            step(batch_of(i))
        results.append([scale.grad, head.weight.grad, head.bias.grad])
    assert same_bits(*results)


# ---- what is no mistake ----


def test_parameters_and_buffers_of_the_model_are_no_business_of_a_variable():
    """Nor is what `state` has."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    parameters, mean, seen = list(model.parameters()), model[1].running_mean, torch.zeros(())

    def loss_fn(model, samples):
        seen.add_(len(samples[0]))
        penalty = sum(p.square().sum() for p in parameters) + mean.sum()
        return classify(model, samples) + 1e-3 * penalty

    step = step_of(after_room(loss_fn, 4, "backward"), model, state=[seen])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", rebatch.CutWarning)
        for i in range(3):
            step(batch_of(i))
    assert seen == 48 and int(model[1].num_batches_tracked) == 12


def test_caches_and_loggers_are_left_alone(caplog):
    """And nothing is said of them."""
    log, built, masks = logging.getLogger("training"), [], {}

    @functools.lru_cache(maxsize=None)
    def scale_of(n):
        built.append(n)
        return 1.0

    def loss_fn(model, samples):
        n = len(samples[0])
        log.warning("loss of %d samples", n)
        if n not in masks:
            masks[n] = torch.ones(n)
        return (masks[n] * scale_of(n)).mean() * classify(model, samples)

    step = step_of(after_room(loss_fn, 4, "backward"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(2):
            step(batch_of(i))
    assert set(masks) == {4} and len(caplog.records) > 8


def test_large_data_that_loss_fn_names_is_left():
    table, rows = torch.randn(1000, 8), [(i, torch.zeros(1)) for i in range(5000)]
    arrays = numpy.zeros((1000, 1000))

    def loss_fn(model, samples):
        assert len(rows) == 5000 and arrays.shape == (1000, 1000)
        return classify(model, (samples[0] + 0 * table[: len(samples[0])], samples[1]))

    step = step_of(after_room(loss_fn, 4, "backward"))
    step(batch_of(0))
    marks = Marks(step._training.running.reached._slots)
    assert [t is table for t in marks.tensors] == [True] and not marks._arrays
    assert step.report.micro == 4 and len(rows) == 5000


class Hidden:
    """It has no __dict__, so nothing of it is put back."""

    __slots__ = ("made",)


def test_what_a_failed_attempt_left_in_a_variable_is_let_go():
    hidden, last = Hidden(), None
    hidden.made = []

    def loss_fn(model, samples):
        nonlocal last
        last = model(samples[0])
        hidden.made.append(weakref.ref(last))
        return F.cross_entropy(last, samples[1])

    step_of(after_room(loss_fn, 4, "backward"))(batch_of(0))
    alive = [made() is not None for made in hidden.made]
    assert len(alive) > 6 and sum(alive) == 1  # that of the last micro-batch


def test_learning_rates_of_the_optimizer_that_loss_fn_sets():
    def run(largest, **options):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def loss_fn(model, samples):
            for group in optimizer.param_groups:
                group["weight_decay"] += 0.01
            scheduler.step()
            return classify(model, samples)

        limited = after_room(loss_fn, largest, "backward")
        step = rebatch.Step(model, optimizer, limited, log_level="quiet", growth=False, **options)
        for i in range(3):
            step(batch_of(i))
        return optimizer.param_groups[0]["lr"], scheduler.state_dict(), state_of(model)

    (rate, numbers, parameters), (expected, like, others) = run(4), run(99, micro_start=4)
    assert rate == expected and numbers == like and same_bits(parameters, others)


@pytest.mark.parametrize("kind", (iter, lambda values: (v for v in values), itertools.cycle))
def test_an_iterator_is_named(kind):
    noise = kind([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])

    def loss_fn(model, samples):
        return classify(model, (samples[0] + next(noise), samples[1]))

    step = step_of(after_room(loss_fn, 8, "forward"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(batch_of(0))
        step(batch_of(1))
    (text,) = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert "iterator 'noise'" in text


def test_an_iterator_that_was_left_alone_is_not_named():
    rest = iter([1, 2])

    def loss_fn(model, samples):
        assert rest is not None
        return classify(model, samples)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(after_room(loss_fn, 8, "forward"))(batch_of(0))
