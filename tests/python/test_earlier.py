"""A Step or Backward that is made anew with the same model, as in a function for one epoch, goes on
where the last one has left off."""

import warnings

import pytest
import torch

import rebatch.torch as rebatch
from models import Unseen, fails_above, make, step_or_backward


@pytest.mark.parametrize("kind", ("step", "backward"))
def test_it_begins_at_the_size_that_the_last_one_found(kind):
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def epoch(**options):
        step = step_or_backward(
            kind, model, optimizer, fails_above(loss_fn, 5), log_level="quiet", **options
        )
        step(batch)
        step(tuple(t[:3] for t in batch))  # a last batch that is smaller
        return step

    assert epoch()._training.totals.ooms == 2
    assert epoch()._training.totals.ooms == 0
    assert epoch(micro_start=2).report.micro == 2  # what is given is so


def test_another_model_optimizer_loss_or_limit_begins_anew():
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    limited = fails_above(loss_fn, 5)

    def ooms(model=model, optimizer=optimizer, loss_fn=limited, **options):
        step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", **options)
        step(batch)
        return step.report.ooms

    assert ooms() == 2 and ooms() == 0
    other, _, _ = make("mlp")
    assert ooms(model=other, optimizer=torch.optim.SGD(other.parameters(), 0.1)) == 2
    assert ooms(optimizer=torch.optim.SGD(model.parameters(), 0.1)) == 2
    assert ooms(loss_fn=lambda model, samples: limited(model, samples)) == 2
    assert ooms(micro_largest=8) == 1
    assert ooms() == 0


def test_what_was_told_is_told_once():
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen, left = [], Unseen(0)

    def counting(model, samples):
        seen.append(len(samples[0]))
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_fn(model, samples)

    told = []
    for _ in range(2):
        step = rebatch.Step(model, optimizer, counting, log_level="quiet")
        left[0] = 1
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step(batch)
        told.append([str(w.message) for w in found if "changes 'seen'" in str(w.message)])
    assert [len(texts) for texts in told] == [1, 0]


def test_nothing_is_held_of_a_model_that_is_gone():
    import gc
    import weakref

    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, log_level="quiet")
    step(batch)
    gone = weakref.ref(model)
    del model, step
    gc.collect()
    assert gone() is None
