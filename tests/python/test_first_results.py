"""The comparison of what evaluate() and map() return once memory has cut a batch: it warns of a
result that depends on the cut, is silent for one that does not, and leaves everything as it was."""

import contextlib
import itertools
import random
import re
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

import rebatch.torch as rebatch
from rebatch._library import EventKind
from rebatch.testing import fail_once
from rebatch.torch.check import cut_comparison, first_results
from models import Unseen, fails_above, same_bits, state_of

SAMPLES, CLASSES, TOKENS = 32, 5, 12
Mean, Sum = rebatch.Mean, rebatch.Sum


def warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, rebatch.CutWarning)]


def net(features=CLASSES):
    torch.manual_seed(1)
    layers = torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Dropout(0.3)
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, features))


def images():
    """Samples and classes."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 8)
    return x, x[:, :CLASSES].argmax(1)


def texts():
    """Sequences of different lengths, and of classes of their tokens, or -100."""
    x, y = torch.randn(SAMPLES, TOKENS, 8), torch.randint(0, CLASSES, (SAMPLES, TOKENS))
    lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1))
    return x, torch.where(torch.arange(TOKENS) < lengths, y, -100)


def tokens_of(batch):
    return (batch[1] != -100).sum()


def fails_first(model):
    """The next call of the model's last layer runs out of memory."""
    return fail_once(model[-1])


def evaluated(loss_fn, batch, model=None, **options):
    """Uncut, and cut in two: (loss, outputs) of each, and what was told."""
    model = model or net(16 if loss_fn in (contrastive, pairs) else CLASSES)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, sgd, loss_fn, log_level="quiet", **options)
    found = []

    def run():
        found.append((step.evaluate(batch), step.evaluation_outputs))

    assert warned(run) == []
    with fails_first(model):
        told = warned(run)
    assert step.evaluation_report.microbatches == 2
    return *found, told


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value.float()]
    if isinstance(value, dict):
        return [t for part in value.values() for t in flat(part)]
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in flat(part)]
    return [torch.tensor(float(value))] if isinstance(value, (int, float)) else []


def are_close(a, b, rtol=1e-4):
    a, b = flat(a), flat(b)
    return [t.shape for t in a] == [t.shape for t in b] and all(
        torch.allclose(x, y, rtol, 1e-5) for x, y in zip(a, b)
    )


# ---- validations as trainers write them ----


def mean(model, samples):
    return F.cross_entropy(model(samples[0]), samples[1])


def top_k(model, samples):
    logits, y = model(samples[0]), samples[1]
    right = logits.topk(2, 1).indices == y[:, None]
    means = {"top1": Mean(right[:, 0].float().mean()), "top2": Mean(right.any(1).float().mean())}
    return F.cross_entropy(logits, y), means


def confusion(model, samples):
    logits, y = model(samples[0]), samples[1]
    counts = torch.bincount(y * CLASSES + logits.argmax(1), minlength=CLASSES**2)
    return F.cross_entropy(logits, y), Sum(counts.view(CLASSES, CLASSES))


def detections(model, samples):
    logits = model(samples[0])
    found = [{"boxes": r[:4].view(2, 2), "labels": r.argsort()[:2], "name": "a"} for r in logits]
    return F.cross_entropy(logits, samples[1]), found


def kept_rows(model, samples):
    """Of all samples, some: no entry for each, and right all the same."""
    logits = model(samples[0])
    return F.cross_entropy(logits, samples[1]), logits[logits.sigmoid() > 0.5]


def predictions(model, samples):
    logits = model(samples[0])
    classes = logits.argmax(1)
    return F.cross_entropy(logits, samples[1]), (logits, classes, classes.tolist())


def dropped(model, samples):
    logits = F.dropout(model(samples[0]), 0.2)
    return F.cross_entropy(logits, samples[1])


def draws_by_python(model, samples):
    return F.cross_entropy(model(samples[0]), samples[1]) * (1 + random.random())


def token_sum(model, samples):
    logits, y = model(samples[0]).flatten(0, 1), samples[1].flatten()
    right = Sum(((logits.argmax(1) == y) & (y != -100)).sum())
    seen = {"right": right, "of": Sum(tokens_of(samples))}
    return F.cross_entropy(logits, y, reduction="sum"), seen


RIGHT = [
    *((f, images, {}) for f in (mean, top_k, confusion, detections, kept_rows, predictions)),
    (token_sum, texts, {"normalizer": tokens_of}),
]


@pytest.mark.parametrize("mode", ("", "inference", "bf16"))
@pytest.mark.parametrize("loss_fn, batch, options", RIGHT, ids=lambda v: getattr(v, "__name__", ""))
def test_what_does_not_depend_on_the_cut_is_silent(loss_fn, batch, options, mode):
    within = torch.inference_mode() if mode == "inference" else contextlib.nullcontext()
    autocast = torch.bfloat16 if mode == "bf16" else None
    with within:
        uncut, cut, told = evaluated(loss_fn, batch(), autocast=autocast, **options)
    assert told == []
    assert are_close(uncut[0], cut[0], 1e-2 if autocast else 1e-4)
    assert autocast or are_close(uncut[1], cut[1])


@pytest.mark.parametrize("loss_fn", (dropped, draws_by_python))
def test_random_numbers_of_another_cut_are_silent(loss_fn):
    assert evaluated(loss_fn, images())[2] == []


def summed(model, samples):
    return F.cross_entropy(model(samples[0]), samples[1], reduction="sum")


def class_weights(model, samples):
    weight = torch.tensor([1.0, 5.0, 1.0, 20.0, 1.0])
    return F.cross_entropy(model(samples[0]), samples[1], weight=weight)


def token_mean(model, samples):
    return F.cross_entropy(model(samples[0]).flatten(0, 1), samples[1].flatten())


def root(model, samples):
    return F.mse_loss(model(samples[0])[:, 0], samples[1].float()).sqrt()


def hardest_triplets(model, samples):
    """0 for a few samples."""
    rows, y = F.normalize(model(samples[0]), dim=1), samples[1]
    apart, same = torch.cdist(rows, rows), y[:, None] == y
    return F.relu((apart * same).amax(1) - (apart + 9 * same).amin(1) - 0.5).mean()


def no_number_of_one_class(model, samples):
    logits, y = model(samples[0])[:, 0], samples[1] == 0
    ranked = (logits[y][:, None] > logits[~y]).float().mean()
    return F.binary_cross_entropy_with_logits(logits, y.float()), Mean(ranked)


def contrastive(model, samples):
    rows = F.normalize(model(samples[0]), dim=1)
    return F.cross_entropy(rows @ rows.T.roll(1, 0) * 10, torch.arange(len(rows)))


def pairs(model, samples):
    rows = F.normalize(model(samples[0]), dim=1)
    return rows.square().mean(), {"logits": rows @ rows.T}


def perplexity(model, samples):
    loss = F.cross_entropy(3 * model(samples[0]), samples[1])
    return loss, {"perplexity": Mean(loss.exp())}


def counted_as_mean(model, samples):
    logits, y = model(samples[0]), samples[1]
    return F.cross_entropy(logits, y), {"right": Mean((logits.argmax(1) == y).sum())}


def accuracy_as_sum(model, samples):
    logits, y = model(samples[0]), samples[1]
    return F.cross_entropy(logits, y), {"accuracy": Sum((logits.argmax(1) == y).float().mean())}


def macro_f1(model, samples):
    found, y = model(samples[0]).argmax(1), samples[1]
    each = range(CLASSES)
    both = torch.stack([((found == c) & (y == c)).sum() for c in each])
    any_ = torch.stack([(found == c).sum() + (y == c).sum() for c in each]).clamp(min=1)
    return F.cross_entropy(model(samples[0]), y), Mean((2 * both / any_).mean())


def matrix_of_counts(model, samples):
    loss, counts = confusion(model, samples)
    return loss, {"matrix": counts.value}


def softmax_over_samples(model, samples):
    logits = model(samples[0])
    return F.cross_entropy(logits, samples[1]), {"p": logits.softmax(0)}


def numbered(model, samples):
    """Entries of which each says in which sample it is."""
    logits = model(samples[0])
    return F.cross_entropy(logits, samples[1]), {"at": (logits > 0).nonzero()[:, 0]}


def list_of_metrics(model, samples):
    logits = model(samples[0])
    return F.cross_entropy(logits, samples[1]), [float(logits.mean()), float(logits.std())]


WRONG = [
    (summed, images, {}, "sums over its samples; return the mean, or pass a normalizer"),
    (class_weights, images, {}, "class weights"),
    (token_mean, texts, {}, "pass a normalizer"),
    (token_mean, texts, {"normalizer": tokens_of}, "although there is a normalizer"),
    (root, images, {}, "loss_fn depends on the cut"),
    (contrastive, images, {}, "needs embed="),
    (hardest_triplets, images, {}, "of samples 0-15 is .* needs embed="),
    (no_number_of_one_class, images, {}, "is nan in one micro-batch|nan in micro-batches of"),
    (pairs, images, {}, r"outputs\['logits'\] of samples .* is of shape \(2, 2\) in one"),
    (perplexity, images, {}, r"\['perplexity'\] .*, a perplexity, .* return each of these as"),
    (counted_as_mean, images, {}, r"\['right'\] of samples .* a sum over them in a rebatch.Sum"),
    (accuracy_as_sum, images, {}, r"\['accuracy'\] of .* a mean over the samples in a rebatch"),
    (macro_f1, images, {}, "evaluation_outputs of samples .* such as a score"),
    (matrix_of_counts, images, {}, r"of shape \(5, 5\) in one micro-batch and of shape \(10, 5\)"),
    (softmax_over_samples, images, {}, r"\['p'\] of samples .* differs by \d\d.\d% between"),
    (numbered, images, {}, r"\['at'\] of samples .* each row to be of its own sample alone"),
    (list_of_metrics, images, {}, "is a list of 2 in one micro-batch and a list of 4 in"),
]


@pytest.mark.parametrize("loss_fn, batch, options, expected", WRONG)
def test_what_depends_on_the_cut_is_named(loss_fn, batch, options, expected):
    """Where nothing but validation is cut."""
    uncut, cut, told = evaluated(loss_fn, batch(), **options)
    assert not (are_close(uncut[0], cut[0]) and are_close(uncut[1], cut[1]))
    (text,) = told
    assert text.startswith("rebatch: evaluate(): ") and "depends on how memory cuts" in text
    assert re.search(expected, text), text


@pytest.mark.parametrize("loss_fn", (summed, softmax_over_samples, numbered, matrix_of_counts))
def test_it_is_named_in_16_bits(loss_fn):
    assert len(evaluated(loss_fn, images(), autocast=torch.bfloat16)[2]) == 1


@pytest.mark.parametrize("loss_fn", (counted_as_mean, accuracy_as_sum))
def test_a_count_of_few_is_named_once_there_are_some(loss_fn):
    """Where none of a few samples is right, more are compared, and of the next batch too."""
    x, y = images()
    model = net()
    wrong = (model.eval()(x).argmax(1) + 1) % CLASSES
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), fails_above(loss_fn, 16))
    assert warned(lambda: step.evaluate((x, wrong))) == []
    assert len(warned(lambda: step.evaluate((x, y)))) == 1


# ---- when, and what it leaves ----


def evaluator(model, loss_fn, largest=8, **options):
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return rebatch.Step(model, sgd, fails_above(loss_fn, largest), log_level="quiet", **options)


def counting(loss_fn, lengths):
    def counted(model, samples):
        lengths.append(len(samples[0]))
        return loss_fn(model, samples)

    return counted


def test_few_samples_run_once_behind_the_first_batch_that_is_cut():
    lengths, batch = Unseen(), images()
    step = evaluator(net(), counting(mean, lengths))
    short = tuple(t[:8] for t in batch)
    assert warned(lambda: [step.evaluate(short), step.evaluate(batch)]) == []
    assert lengths[:] == [8, 8, 8, 8, 8, 2, 1, 1, 4, 2, 2, 4, 2, 2]
    assert warned(lambda: step.evaluate(batch)) == []
    assert lengths[14:] == [8, 8, 8, 8]


def test_a_function_that_takes_long_is_compared_behind_several_batches(monkeypatch):
    monkeypatch.setattr(first_results.time, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(first_results, "_SECONDS", 1.5)
    lengths, batch = Unseen(), images()
    step = evaluator(net(), counting(mean, lengths))
    for _ in range(4):
        step.evaluate(batch)
    eights = [8] * 4
    compared = [2, 1, 1], [4, 2, 2], [4, 2, 2], []
    assert lengths[:] == [n for each in compared for n in (*eights, *each)]


def test_a_difference_is_told_once_and_in_words_of_the_sums():
    step = evaluator(net(), summed)
    (text,) = warned(lambda: [step.evaluate(images()) for _ in range(3)])
    whole, parts = (float(text.split(word)[1].split()[0]) for word in (" is ", "batch and "))
    assert whole == pytest.approx(2 * parts, rel=1e-3)


def test_what_training_has_told_is_not_told_again():
    step = evaluator(net(), summed, growth=False)
    assert len(warned(lambda: [step(images()) for _ in range(4)])) == 1
    assert warned(lambda: step.evaluate(images())) == []


def test_a_step_that_is_made_anew_compares_nothing_again():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.1)

    def epoch():
        step = rebatch.Step(model, sgd, fails_above(summed, 8), log_level="quiet")
        step.evaluate(images())

    assert len(warned(epoch)) == 1 and warned(epoch) == []


def test_one_allowed_size_is_no_cut_of_memory():
    assert warned(lambda: evaluator(net(), summed, micro_allowed=[8]).evaluate(images())) == []


def test_an_evaluation_with_on_event_is_told_there():
    told = []
    step = evaluator(net(), summed, on_event=lambda *said: told.append(said))
    assert warned(lambda: step.evaluate(images())) == []
    ((text, event),) = [(t, e) for t, e in told if e.kind == EventKind.CUT]
    assert text.startswith("rebatch: evaluate(): ") and (event.batch, event.micro_after) == (32, 8)


class Metric:
    def __init__(self):
        self.right, self.count, self.seen = torch.zeros(()), 0, []

    def update(self, logits, y):
        self.right += (logits.argmax(1) == y).sum()
        self.count += len(y)
        self.seen.append(logits)


def test_nothing_but_the_parts_of_the_batch_is_left():
    """Not in a metric of the program, the model, or a generator; and the modes are as before."""

    def run(is_compared):
        model, metric = net(), Metric()
        model.register_buffer("calls", torch.zeros(()))
        model.last = None

        def loss_fn(model, samples):
            model.last = logits = model(samples[0] + 0 * torch.rand(1))
            model.calls.add_(1)
            metric.update(logits, samples[1])
            return F.cross_entropy(logits, samples[1])

        step = evaluator(model, loss_fn, micro_start=8)
        step._training._found.results.is_done = not is_compared
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = step.evaluate(images())
        assert (metric.count, len(metric.seen), int(model.calls)) == (SAMPLES, 4, 4)
        assert len(model.last) == 8 and model.training
        return loss, metric.right, model.last, torch.rand(1)

    assert list(map(float, run(True)[::3])) == list(map(float, run(False)[::3]))


@pytest.mark.parametrize("normalized", (False, True))
def test_an_oom_in_the_comparison_is_no_failure(normalized):
    lengths, batch = Unseen(), images()
    loss_fn = counting(fails_above(summed if normalized else mean, 1), lengths)
    options = {"normalizer": lambda b: float(len(b[0]))} if normalized else {}
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, sgd, loss_fn, log_level="quiet", growth=False, **options)
    expected = mean(step.model.eval(), batch)
    for _ in range(3):
        assert warned(lambda: torch.testing.assert_close(step.evaluate(batch), expected)) == []
    ones = [1] * SAMPLES
    assert lengths[5:] == [*ones, 2, *ones, 2, *ones]  # after two it is given up


def test_a_function_that_takes_no_few_samples_is_told_once():
    def even(model, samples):
        assert len(samples[0]) % 4 == 0, "in fours"
        return mean(model, samples)

    step = evaluator(net(), even)
    (text,) = warned(lambda: [step.evaluate(images()) for _ in range(2)])
    assert "could not be compared at two cuts (AssertionError: in fours)" in text
    assert "micro_multiple_of" in text
    assert warned(lambda: evaluator(net(), even, micro_multiple_of=4).evaluate(images())) == []


def test_it_waits_while_another_thread_trains():
    step, runs, ends = evaluator(net(), summed), threading.Event(), threading.Event()

    def other():
        other_step = evaluator(net(), mean)
        other_step(images())
        runs.set()
        ends.wait()
        del other_step

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert runs.wait(60)
        assert warned(lambda: step.evaluate(images())) == []
    finally:
        ends.set()
        thread.join()
    assert len(warned(lambda: step.evaluate(images()))) == 1


def test_batches_of_other_forms_and_a_slice_are_compared():
    x, y = images()
    loss_fn = lambda model, samples: summed(model, (samples["x"], samples["y"]))

    def limited(model, samples):
        if len(samples["x"]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_fn(model, samples)

    def part(batch, first, count):
        inner = {name: t[first : first + count] for name, t in vars(batch).items()}
        return inner

    for batch, options in (
        ({"x": x, "y": y}, {}),
        (types.SimpleNamespace(x=x, y=y), {"slice": part, "length": lambda b: len(b.x)}),
    ):
        model = net()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        step = rebatch.Step(model, sgd, limited, log_level="quiet", **options)
        (text,) = warned(lambda: step.evaluate(batch))
        assert "sums over its samples" in text


def test_rows_of_embed_are_compared():
    def embed(model, samples):
        rows = model(samples[0])
        return rows - rows.mean(0)

    def loss_fn(_model, rows, _batch):
        return rows.square().mean()

    def limited(model, samples):
        if len(samples[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return embed(model, samples)

    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, sgd, loss_fn, embed=limited, log_level="quiet")
    (text,) = warned(lambda: step.evaluate(images()))
    assert "the sum of the rows of samples" in text
    assert "a row depends on the other samples of its micro-batch" in text


def test_normalizing_by_the_batch_in_evaluation_mode_is_named():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8, track_running_stats=False)
    model = torch.nn.Sequential(norm, torch.nn.Linear(8, CLASSES))
    (text,) = evaluated(mean, images(), model)[2]
    assert "BatchNorm ('0') normalizes by the statistics of a micro-batch, so the result" in text


# ---- map() ----


def maps():
    model = net().eval()
    return {
        "model": model,
        "dict": lambda x: {"logits": model(x), "classes": model(x).argmax(1), "none": None},
        "numbers": lambda x: model(x).max(1).values.tolist(),
        "texts": lambda x: [str(int(i)) for i in model(x).argmax(1)],
        "layers": lambda x: torch.stack([model(x), model(-x)]),
        "column": lambda x: model(x)[:, :1],
        "softmax over samples": lambda x: model(x).softmax(0),
        "range": lambda x: (model(x) - model(x).min()) / (model(x).max() - model(x).min()),
        "ranks": lambda x: model(x)[:, 0].argsort().argsort(),
        "nearest": lambda x: (model(x) @ model(x).T).argmax(1),
        "nested": lambda x: (model(x), {"p": [model(x), model(x).softmax(0)]}),
    }


def mapped(name, times=1):
    """What is told of a map that is cut, and whether it has the uncut result."""
    found, x = [], images()[0]
    function, largest = maps()[name], [SAMPLES]

    def limited(inputs):
        if len(inputs) > largest[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return function(inputs)

    for largest[0] in (SAMPLES, *[8] * times):
        told = warned(lambda: found.append(rebatch.map(limited, x)))
        assert told == [] or largest[0] == 8
    return told, are_close(*found[:2])


@pytest.mark.parametrize("name", list(maps())[:6])
def test_a_map_of_each_sample_alone_is_silent(name):
    assert mapped(name) == ([], True)


@pytest.mark.parametrize("name", list(maps())[6:])
def test_a_map_whose_rows_depend_on_others_is_named(name):
    (text,), is_same = mapped(name)
    where = "the result[1]['p'][1]" if name == "nested" else "the result"
    assert not is_same and text.startswith(f"rebatch: map(): {where} of samples ")
    assert "expected each row to be of its own sample alone" in text
    assert "check(batch)" not in text


class Outputs(torch.nn.Module):
    """Of the two of a GRU."""

    def forward(self, both):
        return both[0]


def test_a_map_that_is_cut_through_time_is_told_so():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.GRU(8, 8), Outputs())
    with fails_first(model):
        (text,) = warned(lambda: rebatch.map(model, torch.randn(16, 6, 8)))
    assert "takes the first dimension of its input for time" in text and "give batch_dim=1" in text
    with fails_first(model):
        assert warned(lambda: rebatch.map(model, torch.randn(6, 16, 8), batch_dim=1)) == []


def test_a_map_is_compared_once_for_functions_of_the_same_lines():
    assert mapped("softmax over samples", times=2)[0] == []
    model, x, lengths = net().eval(), images()[0], Unseen()

    def predict(x):
        if len(x) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        lengths.append(len(x))
        return model(x)

    for _ in range(3):
        rebatch.map(lambda x: predict(x), x)
    assert lengths[:] == [16, 16, 2, 1, 1, 4, 2, 2, 4, 2, 2, 16, 16, 16, 16]


def test_a_map_of_dropout_in_training_mode_is_silent():
    model = net().train()
    with fails_first(model):
        assert warned(lambda: rebatch.map(model, images()[0])) == []
    assert model.training and model[2].training


def test_a_map_leaves_its_model_as_it_is():
    model, x = net().train(), images()[0]
    model.insert(0, torch.nn.BatchNorm1d(8))
    model.calls = 0

    def count(module, *_):
        module.calls += 1

    model.register_forward_hook(count)
    plain = torch.nn.BatchNorm1d(8)
    for part in x.split(16):
        plain(part)
    with fails_first(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rebatch.map(model, x)
    assert same_bits(state_of(model[0]), state_of(plain)) and model.calls == 2


def test_an_error_in_the_comparison_of_a_map_stays_there():
    model = net().eval()

    def even(x):
        assert len(x) % 8 == 0
        return model(x)

    with fails_first(model):
        assert warned(lambda: rebatch.map(even, images()[0])) == []


@pytest.mark.parametrize("is_right", (True, False))
def test_of_wide_rows_some_columns_are_compared(is_right, monkeypatch):
    """Such as the logits of a vocabulary."""
    widths, plain = [], cut_comparison.leaves_of

    def leaves_of(given, whole, parts, device):
        widths.append((whole["rows"].shape[-1], whole["list"][0].shape[-1]))
        return plain(given, whole, parts, device)

    monkeypatch.setattr(cut_comparison, "leaves_of", leaves_of)
    wide = torch.nn.Linear(CLASSES, 5000)

    def loss_fn(model, samples):
        rows = wide(model(samples[0]))
        rows = rows if is_right else rows.softmax(0)
        return rows.square().mean(), {
            "rows": rows,
            "list": list(rows[:, None]),
            "n": Sum(len(rows)),
        }

    step = evaluator(net(), loss_fn)
    assert len(warned(lambda: step.evaluate(images()))) == (not is_right)
    assert step.evaluation_outputs["rows"].shape == (SAMPLES, 5000)
    assert all(max(each) < 512 for each in widths) and widths
