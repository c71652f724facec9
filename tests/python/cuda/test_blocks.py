"""Backward.parts() on CUDA memory: what the variables of a block hold. Like test_steps.py, on
PyTorch's native allocator and on rebatch's pool."""

import pytest
import torch

import rebatch.torch as rebatch

from conftest import INSTALLED, assert_passes_installed

from test_steps import MIB, QUIET, little_memory, wide_step


@pytest.mark.skipif(INSTALLED, reason="is that run")
def test_all_of_these_on_rebatchs_pool(standin):
    assert_passes_installed(__file__)


@pytest.mark.filterwarnings("ignore:rebatch. a block that ran out of memory has changed")
def test_names_of_a_block_hold_no_memory_when_the_next_one_begins(standin):
    """Neither of one that failed, nor of one that succeeded: 4 MiB a sample."""
    step, batch = wide_step()
    model, begins = step.model, []
    backward = rebatch.Backward(model, **QUIET)
    with little_memory(60 * MIB):
        for part in backward.parts(batch):
            with part as samples:
                begins.append(torch.cuda.memory_allocated())
                layers = [model.layers[0](samples)]
                for layer in model.layers[1:]:
                    layers.append(torch.relu(layer(layers[-1])))
                part.backward(layers[-1].square().mean())
    assert backward.report.ooms > 0 and backward.report.microbatches > 1
    assert max(begins) - begins[0] <= 16 * MIB
