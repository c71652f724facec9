"""Sparse and nested tensors, and those of other libraries, in batches and models."""

import collections
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import rebatch.torch as rebatch
from models import out_of_memory
from rebatch.torch.batches.cut import Cut
from rebatch.torch.batches.kinds import are_same

# What several micro-batches change in place depends on the cut, of course.
pytestmark = pytest.mark.filterwarnings("ignore::rebatch.torch.CutWarning", "ignore::UserWarning")


class Wrapped(torch.Tensor):
    """One whose contents lie in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrapped(value):
            return value.inner if isinstance(value, Wrapped) else value

        out = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        if func._schema.name.endswith("_"):
            return args[0]
        return tree_map(lambda t: Wrapped(t) if isinstance(t, torch.Tensor) else t, out)


class Strict(torch.Tensor):
    """One whose class has few functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("_foreach_copy_", "empty_like", "clone", "copy_", "as_strided"):
            raise TypeError(f"{func.__name__}() of a Strict tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


def rows():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2 + i % 3, 6, generator=generator) for i in range(8)]


def dense():
    return torch.stack([row[0] for row in rows()]).relu()


def jagged():
    return torch.nested.nested_tensor(rows(), layout=torch.jagged)


KINDS = {
    "plain": dense,
    "COO": lambda: dense().to_sparse(),
    "CSR": lambda: dense().to_sparse_csr(),
    "CSC": lambda: dense().to_sparse_csc(),
    "jagged": jagged,
    "nested": lambda: torch.nested.nested_tensor(rows()),
    "wrapped": lambda: Wrapped(dense()),
    "strict": lambda: dense().as_subclass(Strict),
}
LABELS = torch.arange(8) % 4


def features(tensor):
    """A row of numbers for each sample."""
    if isinstance(tensor, Wrapped):
        return tensor.inner
    if tensor.is_nested:
        return torch.stack([row.mean(0) for row in tensor.unbind()])
    if tensor.layout is torch.strided:
        return tensor.as_subclass(torch.Tensor)
    return tensor.to_dense()


def loss_fn(model, samples):
    return F.cross_entropy(model(features(samples[0])), samples[1])


def train(batch, loss_fn=loss_fn, steps=2, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False, **options)
    for _ in range(steps):
        step(batch)
    return model.weight.detach(), step


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_every_kind_is_cut(kind):
    weight, step = train((KINDS[kind](), LABELS), micro_start=3)
    assert step.report.microbatches == 3
    same, _ = train((features(KINDS[kind]()), LABELS), micro_start=3)
    assert torch.equal(weight, same)


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_attempt_changed_in_it_is_put_back(kind):
    """It is halved in the first attempt, which fails."""
    batch, calls = (KINDS[kind](), LABELS), []

    def halved(model, samples):
        calls.append(len(samples[1]))
        if len(calls) == 1:
            with torch.no_grad():
                batch[0].mul_(0.5)
            out_of_memory(None)
        return loss_fn(model, samples)

    weight, step = train(batch, halved, steps=1)
    assert step.report.ooms == 1 and calls == [8, 4, 4]
    same, _ = train((KINDS[kind](), LABELS), steps=1, micro_start=4)
    assert torch.equal(weight, same)
    assert are_same(batch[0], KINDS[kind]())


@pytest.mark.parametrize("place", ("buffer", "attribute", "state"))
@pytest.mark.parametrize("at", (0, 4))
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_attempt_changed_in_a_model_is_put_back(kind, place, at):
    torch.manual_seed(0)
    model, held = torch.nn.Linear(6, 4), KINDS[kind]()
    if place == "buffer":
        model.register_buffer("held", held)
    elif place == "attribute":
        model.held = held
    number, succeeded = [0], [0]

    def doubling(model, samples):
        with torch.no_grad():
            held.mul_(2.0)
        if number[0] == at and len(samples[0]) > 4:
            out_of_memory(None)
        succeeded[0] += 1
        return loss_fn(model, samples)

    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        doubling,
        log_level="quiet",
        growth=False,
        state=[held] if place == "state" else [],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `number` and `succeeded` are variables
        for number[0] in range(6):
            step((dense(), LABELS))
    assert torch.equal(features(held), features(KINDS[kind]()) * 2.0 ** succeeded[0])


def test_nested_tensors_with_the_same_offsets_have_so_in_each_part():
    first = jagged()
    second = torch.nested.nested_tensor_from_jagged(first.values() * 2, first.offsets())
    part = Cut().part((first, {"second": second}), 2, 3, 8)
    assert (part[0] + part[1]["second"]).unbind()[0].equal(first.unbind()[2] * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_beside_the_loss_is_joined(kind):
    def beside(model, samples):
        return loss_fn(model, samples), {"x": samples[0]}

    if kind == "strict":
        return  # it has no clone()
    _, step = train((KINDS[kind](), LABELS), beside, micro_start=3)
    assert are_same(step.outputs["x"], KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_and_an_evaluation_run(kind):
    batch = (KINDS[kind](), LABELS)
    _, step = train(batch, micro_start=4)
    step.evaluate(batch)
    assert not step.check(batch).mistakes


# ---- what cannot be cut ----


class Single(torch.Tensor):
    """Of which no part can be made."""

    def __getitem__(self, _):
        raise TypeError("a Single tensor has no parts")


class Whole(collections.abc.Mapping):
    """Which is made of more than its entries."""

    def __init__(self, entries, _device):
        self._entries = entries

    def __getitem__(self, key):
        return self._entries[key]

    def __iter__(self):
        return iter(self._entries)

    def __len__(self):
        return len(self._entries)


UNCUT = {
    "BSR": (lambda: (dense().to_sparse_bsr((2, 2)), LABELS), r"batch\[0\], a Tensor of layout"),
    "single": (lambda: {"x": dense().as_subclass(Single)}, r"batch\['x'\], a Single of layout"),
    "mapping": (lambda: Whole({"x": dense()}, "cpu"), "the batch, a Whole, cannot be cut"),
}


@pytest.mark.parametrize("kind", UNCUT)
def test_what_cannot_be_cut_is_named_in_the_first_step(kind):
    make, sentence = UNCUT[kind]
    with pytest.raises(ValueError, match=f"rebatch: {sentence}.*`slice` and `length`"):
        train(make(), lambda model, samples: model(features(samples[0])).sum())


def test_with_slice_and_length_it_goes_through_these():
    batch = UNCUT["BSR"][0]()

    def part(batch, first, count):
        samples = batch[0].to_dense()[first : first + count]
        return samples, batch[1][first : first + count]

    weight, _ = train(batch, micro_start=4, slice=part, length=lambda batch: len(batch[1]))
    assert torch.equal(weight, train((dense(), LABELS), micro_start=4)[0])


def sliced(batch, first, count):
    return tuple(Cut(0, None, None).part(batch, first, count, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_the_programs_own_may_return_tensors_of_every_kind(kind):
    batch = KINDS[kind](), LABELS
    options = {"slice": sliced, "length": lambda batch: len(batch[1])}
    for micro in 8, 3:
        weight, _ = train(batch, micro_start=micro, **options)
        assert torch.equal(weight, train(batch, micro_start=micro)[0])


# ---- classes derived from dict ----


class Named(dict):
    """With an argument of its own."""

    def __init__(self, name, **entries):
        super().__init__(entries)
        self.name = name


@pytest.mark.parametrize(
    "batch",
    (
        collections.defaultdict(list, x=dense(), y=LABELS),
        collections.OrderedDict(x=dense(), y=LABELS),
        Named("train", x=dense(), y=LABELS),
    ),
    ids=lambda batch: type(batch).__name__,
)
def test_parts_of_a_dict_are_of_its_class(batch):
    part = Cut().part(batch, 2, 3, 8)
    assert type(part) is type(batch)
    assert torch.equal(part["y"], LABELS[2:5]) and len(batch["y"]) == 8
    for name in ("__dict__", "default_factory"):
        assert getattr(part, name, None) == getattr(batch, name, None)
