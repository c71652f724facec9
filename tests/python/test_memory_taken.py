"""Memory that loss_fn takes away, as reversible networks do, comes back, or its tensor is named."""

import pytest
import torch
from torch.nn import functional as F

import rebatch.torch as rebatch
from rebatch.testing import fail_once


class Reversible(torch.autograd.Function):
    """A coupling that frees its input, and brings it back in the backward pass."""

    @staticmethod
    def forward(ctx, x, inner, *weights):
        with torch.no_grad():
            a, b = x.chunk(2, 1)
            y = torch.cat([a, b + inner(a)], 1)
        ctx.inner, ctx.x, ctx.y = inner, x, y.detach()
        x.untyped_storage().resize_(0)
        return y

    @staticmethod
    def backward(ctx, gradient):
        with torch.no_grad():
            a, b = ctx.y.chunk(2, 1)
            x = torch.cat([a, b - ctx.inner(a)], 1)
            ctx.x.untyped_storage().resize_(x.nbytes)
            ctx.x.set_(x)
        with torch.enable_grad():
            again = ctx.x.detach().requires_grad_()
            a, b = again.chunk(2, 1)
            y = torch.cat([a, b + ctx.inner(a)], 1)
            of_x, *others = torch.autograd.grad(y, [again, *ctx.inner.parameters()], gradient)
        return of_x, None, *others


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x):
        return Reversible.apply(x, self.inner, *self.inner.parameters())


def batch_of(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(16, 6, generator=generator), torch.randint(4, (16,), generator=generator)


def train(ooms_in=(), frees=True, steps=4, **options):
    """The parameters after some steps, with an OOM in some of them; the second half of the model
    runs after the first has freed the samples."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), torch.nn.Linear(6, 4))

    def loss_fn(model, samples):
        x, labels = samples
        return F.cross_entropy(model(x if frees else x.clone()), labels)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False, **options)
    for i in range(steps):
        if i in ooms_in:
            fail_once(model[1])
        step(batch_of(i))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("ooms_in", ((), (0,), (1,), (0, 3)))
@pytest.mark.parametrize("micro", (16, 8, 6))
def test_a_batch_that_is_freed_comes_back(micro, ooms_in):
    plain = train(ooms_in, frees=False, micro_start=micro)
    assert torch.equal(train(ooms_in, micro_start=micro), plain)


def test_a_batch_of_which_there_is_no_copy_is_named(monkeypatch):
    monkeypatch.setattr("rebatch.torch.undo.undo._FIRST_BYTES", 0)
    with pytest.raises(ValueError, match=r"batch\[0\] has no memory: loss_fn has freed it"):
        train(micro_start=8)
    with pytest.raises(rebatch.Error, match=r"'batch\[0\]' changed in place"):
        train(ooms_in=(0,))


class Offloaded(torch.nn.Module):
    """Its weight has memory on the device only while it is used."""

    def __init__(self, is_parameter):
        super().__init__()
        self.kept = torch.randn(6, 6)
        weight = torch.zeros(6, 6)
        if is_parameter:
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
        else:
            self.register_buffer("weight", weight)
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x):
        storage = self.weight.untyped_storage()
        storage.resize_(self.kept.nbytes)
        self.weight.data.copy_(self.kept)
        x = x @ self.weight.data
        storage.resize_(0)
        return self.head(x)


@pytest.mark.parametrize("is_parameter", (False, True))
@pytest.mark.parametrize("at", (0, 1, 5))
def test_what_a_model_frees_comes_back_when_it_is_used(is_parameter, at):
    def run(*ooms_in):
        torch.manual_seed(0)
        model = Offloaded(is_parameter)
        step = rebatch.Step(
            model,
            torch.optim.SGD(model.head.parameters(), 0.1),
            lambda m, samples: F.cross_entropy(m(samples[0]), samples[1]),
            log_level="quiet",
            growth=False,
            micro_start=16 if ooms_in else 8,
        )
        for i in range(7):
            if i in ooms_in:
                fail_once(model.head)
            step(batch_of(i) if i >= at else batch_of(0))
        return step.report.micro, model

    micro, _ = run()
    again, model = run(at)
    assert (micro, again) == (8, 8) and model.weight.untyped_storage().nbytes() == 0


def test_a_carried_tensor_that_is_freed_is_put_back_with_memory():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    model.memory = torch.ones(6)
    calls = []

    def loss_fn(model, samples):
        calls.append(model.memory.clone())
        loss = F.cross_entropy(model(samples[0] * model.memory), samples[1])
        if len(calls) == 1:
            model.memory.untyped_storage().resize_(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rebatch.Step(model, optimizer, loss_fn, log_level="quiet", state=[])(batch_of(0))
    assert len(calls) == 3 and all(seen.equal(torch.ones(6)) for seen in calls)
