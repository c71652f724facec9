"""find_batch_size: the drop-in for accelerate's find_executable_batch_size."""

import pytest
import torch

import rebatch.torch as rebatch
from models import out_of_memory


def test_it_halves_until_the_function_fits_and_keeps_the_size():
    tried = []

    @rebatch.find_batch_size(starting_batch_size=64)
    def train(batch_size, factor, *, offset=0):
        tried.append(batch_size)
        if batch_size > 20:
            out_of_memory(None)
        return batch_size * factor + offset

    assert train(2, offset=1) == 33
    assert train(1) == 16
    assert tried == [64, 32, 16, 16]


def test_without_brackets_it_starts_at_128():
    @rebatch.find_batch_size
    def train(batch_size):
        return batch_size

    assert train() == 128


def test_the_next_size_may_be_the_callers():
    sizes = iter((48, 40))

    @rebatch.find_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        if batch_size > 40:
            out_of_memory(None)
        return batch_size

    assert train() == 40


def test_size_1_that_does_not_fit_is_the_end():
    @rebatch.find_batch_size(starting_batch_size=2)
    def train(batch_size):
        out_of_memory(None)

    with pytest.raises(RuntimeError, match="down to 1"):
        train()


def test_other_errors_come_out():
    @rebatch.find_batch_size
    def train(batch_size):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        train()


def test_a_call_with_the_batch_size_is_said():
    @rebatch.find_batch_size
    def train(batch_size, model):
        pass

    with pytest.raises(TypeError, match=r"expected a call with \('model'\)"):
        train(16, torch.nn.Linear(1, 1))


def test_a_function_without_a_parameter_is_said():
    @rebatch.find_batch_size
    def train():
        pass

    with pytest.raises(TypeError, match=r"train\(\) has no parameter: expected the batch size"):
        train()


def test_a_library_without_memory_is_an_oom(monkeypatch):
    """As a convolution that finds no engine, after an allocation has failed within the library."""
    failed = [0]
    monkeypatch.setattr("rebatch.torch.batches.size_finder.failed_allocations", lambda: failed[0])

    @rebatch.find_batch_size(starting_batch_size=8)
    def train(size):
        if size > 2:
            failed[0] += 1
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        return size

    assert train() == 2
