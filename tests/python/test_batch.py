"""Batches of every form: how many samples they have, and their parts."""

import collections
import dataclasses

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch.batches.cut import Cut

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str


class Encoding(collections.UserDict):
    pass


X, Y = torch.arange(12).reshape(6, 2), torch.arange(6)

BATCHES = {
    "tensor": (X, lambda p: p),
    "array": (X.numpy(), torch.from_numpy),
    "dict": ({"x": X, "scale": 3.0}, lambda p: p["x"]),
    "list": ([X, Y], lambda p: p[0]),
    "tuple": ((X, Y), lambda p: p[0]),
    "named tuple": (Pair(X, Y), lambda p: p.x),
    "dataclass": (Record(X, "a"), lambda p: p.x),
    "mapping": (Encoding({"x": X}), lambda p: p["x"]),
    "nested": ({"a": (X, {"b": Y})}, lambda p: p["a"][0]),
    "with a scalar": ((X, torch.tensor(3.0)), lambda p: p[0]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_parts_are_of_the_same_type(name):
    batch, get = BATCHES[name]
    cut = Cut()
    assert cut.length(batch) == 6
    part = cut.part(batch, 2, 3, 6)
    assert type(part) is type(batch)
    assert torch.equal(get(part), X[2:5])


def test_entries_of_samples_are_cut_and_others_are_whole():
    part = Cut().part((X, list("abcdef"), ["once"], "name", None), 2, 3, 6)
    assert part[1:] == (["c", "d", "e"], ["once"], "name", None)


def test_parts_are_views():
    assert Cut().part(X, 2, 3, 6).data_ptr() == X[2:].data_ptr()


ARRAYS = {
    "alone": (lambda a: a, lambda p: p),
    "dict": (lambda a: {"x": a, "y": Y}, lambda p: p["x"]),
    "one a sample": (
        lambda a: {"x": [{"a": row[: 1 + i % 2]} for i, row in enumerate(a)], "y": Y},
        lambda p: p["x"][0]["a"],
    ),
    "named tuple": (lambda a: Pair(a, Y), lambda p: p.x),
    "dataclass": (lambda a: Record(a, "a"), lambda p: p.x),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("own", (False, True))
def test_arrays_of_numpy_are_copies(name, own):
    """Nothing tells that an array was changed in place, so nothing may reach the batch."""
    form, get = ARRAYS[name]
    array = X.numpy().copy()
    batch = form(array)
    slices = {"slice": lambda b, first, count: b, "length": lambda b: 6} if own else {}
    cut = Cut(**slices)
    part = cut.part(batch, 0, 6, cut.length(batch))
    assert type(part) is type(batch)
    get(part)[:] = -1
    assert numpy.array_equal(array, X.numpy())


@pytest.mark.parametrize(
    "batch, sentence",
    (
        ({"x": "text"}, "the batch, a dict, has no tensor with a dimension of samples"),
        ((X, Y[:4]), "batch[0] has 6 samples and batch[1] has 4"),
        ("text", "expected tensors, or dicts, lists or tuples of them, or `slice` and `length`"),
        ({"a": X[:0]}, "batch['a'] has 0 samples"),
        (torch.tensor(1.0), "has no tensor with a dimension of samples"),
    ),
)
def test_a_wrong_batch_is_said(batch, sentence):
    with pytest.raises(ValueError) as caught:
        Cut().length(batch)
    assert sentence in str(caught.value)


def test_numpy_is_not_needed_for_tensors():
    assert numpy.asarray(Cut().part(X, 0, 1, 6)).shape == (1, 2)


# ---- lists with one tensor a sample ----


def pieces(*lengths):
    return [torch.full((n, 2), float(i)) for i, n in enumerate(lengths)]


LISTS = {
    "sequences of different lengths": (pieces(3, 5, 4, 3), 4, lambda p: p),
    "and in a dict": ({"x": pieces(3, 5, 4)}, 3, lambda p: p["x"]),
    "images and labels": ((pieces(3, 3, 3, 3), torch.arange(4)), 4, lambda p: p[0]),
    "images and targets of a detector": (
        (tuple(pieces(3, 3)), tuple({"boxes": b} for b in pieces(1, 2))),
        2,
        lambda p: p[0],
    ),
    "a list of such": ([pieces(3, 3), torch.arange(2)], 2, lambda p: p[0]),
    "dicts": ([{"x": x} for x in pieces(2, 3, 4)], 3, lambda p: [e["x"] for e in p]),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_with_a_tensor_for_each_sample_is_seen(name):
    batch, samples, get = LISTS[name]
    cut = Cut()
    assert cut.length(batch) == samples
    part = cut.part(batch, 1, 1, samples)
    assert len(get(part)) == 1 and torch.equal(get(part)[0], get(batch)[1])
    assert type(part) is type(batch)


@pytest.mark.parametrize(
    "batch", ([X, X + 1], [X, X, X, X], [X], [[X, X], Y], {"views": [X, X], "y": Y}, (X,) * 9)
)
def test_a_list_of_fields_is_seen(batch):
    cut = Cut()
    assert cut.length(batch) == 6
    first = cut.part(batch, 2, 3, 6)
    while not isinstance(first, torch.Tensor):
        first = first["views"] if isinstance(first, dict) else first[0]
    assert torch.equal(first, X[2:5])


@pytest.mark.parametrize("batch", (pieces(*[20] * 32), {"x": pieces(*[20] * 5)}, [{"x": X}] * 5))
def test_a_list_that_may_be_either_is_refused(batch):
    with pytest.raises(ValueError, match="may be fields of the batch or samples: expected a tuple"):
        Cut().length(batch)


def test_what_the_refusal_says_helps():
    as_fields = Cut()
    assert as_fields.length(tuple(pieces(*[20] * 32))) == 20
    as_samples = Cut(slice=lambda batch, first, count: batch[first : first + count], length=len)
    batch = pieces(*[20] * 32)
    assert as_samples.length(batch) == 32 and as_samples.part(batch, 5, 2, 32)[0][0, 0] == 5


def test_after_lists_of_samples_a_small_one_is_one():
    cut = Cut()
    cut.length(pieces(3, 5, 4))
    assert cut.length(pieces(7)) == 1 and cut.length(pieces(7, 7)) == 2
    assert len(cut.part(pieces(7, 7), 1, 1, 2)) == 1


def images(count, *sizes):
    return [torch.full(sizes or (3, 8, 8), float(i)) for i in range(count)]


def targets(*counts):
    return [{"boxes": torch.rand(n, 4), "labels": torch.ones(n)} for n in counts]


IMAGES = {
    "a list": images(4),
    "two": images(2),
    "six": images(6),
    "grey": images(3, 1, 28, 28),
    "with transparency": images(2, 4, 9, 7),
    "volumes": images(2, 1, 8, 8, 8),
    "arrays": [numpy.zeros((3, 8, 8)) for _ in range(3)],
    "with as many boxes each": (images(4), targets(3, 3, 3, 3)),
    "with as many boxes as there are images": (torch.zeros(2, 3, 8, 8), targets(2, 2)),
    "of a collate_fn that zips": tuple(zip(*zip(images(2), targets(3, 3)))),
    "in a dict": {"images": images(3), "targets": targets(3, 3, 3)},
    "with their labels": [(image, torch.tensor(1)) for image in images(3)],
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_one_size_in_a_list_are_samples(name):
    batch, cut = IMAGES[name], Cut()
    inner = batch["images"] if isinstance(batch, dict) else batch
    inner = inner[0] if isinstance(inner, tuple) else inner
    assert cut.length(batch) == len(inner)
    part = cut.part(batch, 1, 1, len(inner))
    part = part["images"] if isinstance(part, dict) else part
    assert len(part[0] if isinstance(batch, tuple) else part) == 1


PAIR = [{"x": X}, {"x": X + 1}]


@pytest.mark.parametrize(
    "batch",
    (
        images(2, 64, 3, 32, 32),
        images(2, 6, 9, 9),
        PAIR,
        [PAIR, torch.arange(6)],
        (images(2, 4, 3, 8, 8), torch.zeros(4)),
    ),
)
def test_fields_of_one_form_stay_fields(batch):
    cut = Cut()
    assert cut.length(batch) in (64, 6, 4)


def test_after_lists_of_fields_a_small_batch_has_fields():
    cut = Cut()
    assert cut.length(images(2, 32, 9, 9)) == 32
    assert cut.length(images(2, 3, 9, 9)) == 3  # the last one of a loader


# ---- spans of samples ----


@pytest.mark.parametrize(
    "make",
    (
        lambda: torch.arange(12).reshape(6, 2),
        lambda: (torch.arange(6), {"y": torch.arange(6), "scale": torch.tensor(2.0), "n": 3}),
        lambda: (pieces(3, 1, 4, 1, 5, 9), [{"boxes": torch.zeros(i, 4)} for i in range(6)]),
        lambda: [pieces(3, 1, 4, 1, 5, 9), torch.arange(6)],
        lambda: {"x": numpy.arange(6), "names": list("abcdef"), "labels": torch.arange(6)},
        lambda: {"x": torch.arange(6), "names": tuple("abcdef"), "size": (2, 3)},
    ),
)
def test_spans_are_a_batch_of_which_the_parts_are_those_of_the_first(make):
    batch, cut = make(), Cut()
    samples = cut.length(batch)
    expected = [cut.part(batch, first, 2, samples) for first in (4, 1)]
    arranged = cut.arranged(batch, [(4, 2), (1, 2)], samples)
    assert cut.length(arranged) == 4
    for at, part in zip((0, 2), expected):
        assert str(cut.part(arranged, at, 2, 4)) == str(part)


def test_spans_are_joined_along_the_dimension_of_the_samples():
    cut = Cut(dim=1)
    batch = {"x": torch.arange(24).reshape(2, 4, 3), "y": torch.arange(4)}
    arranged = cut.arranged(batch, [(3, 1), (0, 2)], cut.length(batch))
    assert arranged["y"].tolist() == [3, 0, 1]
    assert torch.equal(arranged["x"], batch["x"][:, [3, 0, 1]])


def test_what_a_slice_of_the_programs_own_cuts_is_not_arranged():
    cut = Cut(slice=lambda batch, first, count: batch[first : first + count], length=len)
    assert cut.arranged(X, [(1, 1), (0, 1)], len(X)) is None


# ---- samples in another dimension ----


def test_the_dimension_of_the_samples_can_be_said():
    cut = Cut(dim=1)
    batch = {"x": torch.arange(24).reshape(2, 4, 3), "y": torch.arange(4), "scale": 2.0}
    assert cut.length(batch) == 4
    part = cut.part(batch, 1, 2, 4)
    assert torch.equal(part["x"], batch["x"][:, 1:3]) and part["y"].tolist() == [1, 2]
    array = numpy.arange(8).reshape(2, 4)
    assert cut.length(array) == 4 and cut.part(array, 3, 1, 4).tolist() == [[3], [7]]
    with pytest.raises(ValueError, match="batch has 4 samples|or batch_dim where"):
        Cut().length((batch["x"], batch["y"]))
    with pytest.raises(ValueError, match="batch_dim is -1: expected the number of a dimension"):
        Cut(dim=-1)


@pytest.mark.parametrize("micro", (32, 6))
@pytest.mark.parametrize("kind", ("list", "sequence first"))
def test_a_step_cuts_between_samples(kind, micro):
    """Whatever the cut, the loss is that of the whole batch."""
    torch.manual_seed(0)
    gru = torch.nn.GRU(8, 8)
    x = torch.randn(20, 32, 8)
    if kind == "list":
        batch = list(x.transpose(0, 1))
        options = dict(slice=lambda batch, first, n: batch[first : first + n], length=len)
    else:
        batch, options = x, dict(batch_dim=1)

    def loss_fn(m, part):
        v = torch.stack(part, dim=1) if kind == "list" else part
        assert v.shape[0] == 20
        return ((m(v)[0] - v) ** 2).mean()

    step = rebatch.Step(
        gru, torch.optim.SGD(gru.parameters(), 0.0), loss_fn, micro_start=micro, **options
    )
    assert torch.allclose(step(batch), plain(gru, x))
    assert step.report.samples == 32 and step.report.micro == micro
    if kind == "sequence first":
        assert torch.allclose(step.evaluate(batch), plain(gru, x))


def plain(gru, x):
    return ((gru(x)[0] - x) ** 2).mean().detach()


@pytest.mark.parametrize("dim, shape", ((1, (3, 4, 5)), (2, (2, 3, 4)), (1, (3, 4))))
def test_a_part_is_contiguous_where_the_whole_is(dim, shape):
    """As kernels ask for, such as cuDNN's of a carried hidden state."""
    whole, cut = torch.randn(shape), Cut(dim=dim)
    part = cut.part((whole, whole), 1, 2, cut.length((whole, whole)))[0]
    assert part.is_contiguous() and torch.equal(part, whole.narrow(dim, 1, 2))
    assert part.view(-1).shape == (part.numel(),)
    mixed = whole.transpose(0, 1).contiguous().transpose(0, 1)
    assert cut.part(mixed, 1, 2, 4).stride() == mixed.stride()


def test_a_part_of_the_first_dimension_is_a_view():
    whole, cut = torch.randn(4, 3), Cut()
    assert cut.part({"x": whole}, 1, 2, cut.length(whole))["x"].data_ptr() == whole[1].data_ptr()


# ---- a `slice` and whole batches ----


class Graphs:
    """Nodes of several graphs."""

    def __init__(self, x, graph):
        self.x, self.graph = x, graph


def part_of(batch, first, count):
    mine = (batch.graph >= first) & (batch.graph < first + count)
    return Graphs(batch.x[mine], batch.graph[mine] - first)


def graph_step(slice, loss_fn, **options):
    model = torch.nn.Linear(2, 1)
    return rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn,
        slice=slice,
        length=lambda batch: 4,
        log_level="quiet",
        **options,
    )


def graphs():
    return Graphs(torch.arange(16.0).view(8, 2), torch.arange(8) // 2)


def test_a_slice_that_changes_nothing_is_not_called_for_whole_batches():
    calls = []

    def counted(batch, first, count):
        calls.append(count)
        return part_of(batch, first, count)

    seen = []

    def loss_fn(model, part):
        seen.append(type(part))
        del part.graph  # of the micro-batch, and not of the batch
        return model(part.x).square().mean()

    step, batch = graph_step(counted, loss_fn), graphs()
    for _ in range(6):
        step(batch)
    assert calls == [4, 4, 4] and seen == [Graphs] * 6 and batch.graph is not None


def test_a_whole_batch_of_a_slice_that_does_more_is_always_sliced():
    def doubled(batch, first, count):
        part = part_of(batch, first, count)
        part.x = part.x * 2
        return part

    seen = []

    def loss_fn(model, part):
        seen.append(float(part.x.max()))
        return model(part.x).square().mean()

    step, batch = graph_step(doubled, loss_fn), graphs()
    for _ in range(6):
        step(batch)
    assert seen == [30.0] * 6


def test_a_whole_batch_that_loss_fn_changed_is_whole_when_it_runs_again():
    model_calls, fails = [], [False]

    def loss_fn(model, part):
        part.x = part.x / 2
        model_calls.append(float(part.x.max()))
        if fails[0] and len(part.x) == 8:
            fails[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(part.x).square().mean()

    step, batch = graph_step(part_of, loss_fn, growth=False), graphs()
    for _ in range(4):
        step(batch)
    fails[0] = True
    step(batch)
    assert step.report.micro == 2 and float(batch.x.max()) == 15
    assert model_calls == [7.5] * 5 + [3.5, 7.5]
