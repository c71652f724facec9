"""Batches of every form: how many samples they have, and their parts."""

import collections
import dataclasses

import numpy
import pytest
import torch

from rebatch.torch._batch import batch_length, slice_batch

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
    assert batch_length(batch) == 6
    part = slice_batch(batch, 2, 3, 6)
    assert type(part) is type(batch)
    assert torch.equal(get(part), X[2:5])


def test_entries_of_samples_are_cut_and_others_are_whole():
    part = slice_batch((X, list("abcdef"), ["once"], "name", None), 2, 3, 6)
    assert part[1:] == (["c", "d", "e"], ["once"], "name", None)


def test_parts_are_views():
    assert slice_batch(X, 2, 3, 6).data_ptr() == X[2:].data_ptr()


@pytest.mark.parametrize(
    "batch, sentence",
    (
        ({"x": "text"}, "the batch, a dict, has no tensor with a first dimension"),
        ((X, Y[:4]), "batch[0] has 6 samples and batch[1] has 4"),
        ("text", "expected tensors, or dicts, lists or tuples of them, or `slice` and `length`"),
        ({"a": X[:0]}, "batch['a'] has 0 samples"),
        (torch.tensor(1.0), "has no tensor with a first dimension"),
    ),
)
def test_a_wrong_batch_is_said(batch, sentence):
    with pytest.raises(ValueError) as caught:
        batch_length(batch)
    assert sentence in str(caught.value)


def test_numpy_is_not_needed_for_tensors():
    assert numpy.asarray(slice_batch(X, 0, 1, 6)).shape == (1, 2)
