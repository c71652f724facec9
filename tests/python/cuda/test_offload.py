"""checkpointing(offload=True) on a GPU: inputs of modules lie in host memory between the two
passes. On a real GPU bits are compared; on the stand-in, where kernels do nothing and copies copy,
it is memory, contents of inputs, order and exceptions."""

import contextlib
import gc
import time

import pytest
import torch
from torch import nn

import rebatch.torch as rebatch
from rebatch.torch.saving import host_inputs

from conftest import INSTALLED, STANDIN, assert_passes_installed

from models import FailAt, same_bits, state_of

MIB = 1 << 20


def assert_same(a, b):
    """On a GPU: the same bits."""
    assert len(a) == len(b)
    if STANDIN is None:
        assert same_bits(a, b)


if INSTALLED:
    rebatch.install()


@pytest.mark.skipif(INSTALLED, reason="is that run")
def test_all_of_these_on_rebatchs_pool():
    assert_passes_installed(__file__)


def flat(x):
    """A copy in host memory of all that lies between the first and the last element: made without a
    kernel, which on the stand-in would do nothing."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.detach().as_strided((span,), (1,), x.storage_offset()).cpu()


class Block(nn.Module):
    """Notes what its input is in each run. Its input is 1 MiB a sample."""

    def __init__(self, change=None):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.change, self.seen = change, []

    def forward(self, x, scale=None):
        if self.change:
            x = self.change(x)
        self.seen.append((flat(x), x.stride(), x.data_ptr() % 256, x.dtype))
        y = torch.relu(self.linear(x))
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    """`between` makes the input of a block of the output of the one before."""

    def __init__(self, blocks=4, between=lambda x: x):
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.between = between

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(self.between(x))
        return x


def lightened(offload=True, **options):
    torch.manual_seed(0)
    model = Model(**options).cuda()
    for p in model.parameters():  # on the stand-in results are what memory held: make it something
        p.data.copy_(torch.randn(p.shape))
    rebatch.checkpointing(*model.blocks, offload=offload)(True)
    return model


def inputs(samples=4):
    return torch.randn(samples, 1024, 256, generator=torch.Generator().manual_seed(1)).cuda()


def run(model, x):
    """Bytes in use after the forward pass, at the peak of both, and pinned."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(x).square().mean()
    between = torch.cuda.memory_allocated() - before
    loss.backward()
    return between, torch.cuda.max_memory_allocated() - before


def assert_recomputed_from_the_same(model):
    for block in model.blocks:
        (first, *how), (again, *how_again) = block.seen
        assert torch.equal(first.view(torch.uint8), again.view(torch.uint8))
        assert how == how_again
        block.seen.clear()


def moved(monkeypatch):
    """The shapes of the inputs that go to host memory from now on."""
    shapes, made = [], host_inputs._Input.__init__

    def note(self, tensor, *arguments):
        shapes.append(tuple(tensor.shape))
        made(self, tensor, *arguments)

    monkeypatch.setattr(host_inputs._Input, "__init__", note)
    return shapes


def test_only_two_inputs_are_on_the_device(monkeypatch):
    shapes = moved(monkeypatch)
    used = {}
    for offload in (False, True):
        model = lightened(offload, blocks=12)
        for _ in range(2):  # gradients and workspaces are there in the second
            used[offload] = run(model, inputs(8))
            for block in model.blocks:
                block.seen.clear()
    plain, offloaded = used[False], used[True]
    assert plain[0] - offloaded[0] == 11 * 8 * MIB  # the last one is needed at once
    assert plain[1] - offloaded[1] >= 10 * 8 * MIB
    assert shapes == [(8, 1024, 256)] * 24


@pytest.mark.parametrize(
    "between",
    (
        lambda x: x,
        lambda x: (x * 2).transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: (x * 2).view(-1, 256),
        lambda x: torch.cat([x.flatten(), x.flatten()[:256]])[256:].view(x.shape),
        lambda x: torch.cat([x.flatten(), x.flatten()[:3]])[3:].view(x.shape),  # not aligned
    ),
)
def test_a_module_runs_again_on_what_it_ran_on(monkeypatch, between):
    shapes = moved(monkeypatch)
    model = lightened(between=between)
    run(model, inputs())
    assert_recomputed_from_the_same(model)
    assert len(shapes) == 4


@pytest.mark.parametrize(
    "between",
    (
        lambda x: x.detach(),
        lambda x: torch.cat([x, x], -1)[..., :256],  # a part of a larger one
        lambda x: x[:1, :1].expand(x.shape),
        lambda x: x[:, :8],  # small
        lambda x: x.cpu().cuda().detach().requires_grad_(),
    ),
)
def test_what_cannot_be_had_back_stays(monkeypatch, between):
    shapes = moved(monkeypatch)
    model = lightened(between=between, blocks=1)
    run(model, inputs())
    assert_recomputed_from_the_same(model)
    assert shapes == []


def test_an_input_on_the_host_stays(monkeypatch):
    shapes = moved(monkeypatch)
    model = lightened().cpu()
    run(model, inputs().cpu())
    assert_recomputed_from_the_same(model)
    assert shapes == []


def test_under_autocast_and_with_keywords(monkeypatch):
    shapes = moved(monkeypatch)
    model = lightened()

    def forward(x):
        x = model.first(x)
        scale = x * 0.5
        for block in model.blocks:
            x = block(x.bfloat16(), scale=scale)
        return x.float()

    model.forward = forward
    with torch.autocast("cuda", torch.bfloat16):
        run(model, inputs())
    assert_recomputed_from_the_same(model)
    assert len(shapes) == 8


def test_backward_may_run_twice():
    model = lightened()
    loss = model(inputs()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    for block in model.blocks:
        assert len(block.seen) == 3
        assert torch.equal(block.seen[0][0], block.seen[2][0])


def test_an_input_that_changes_within_its_module_is_an_error():
    model = lightened()
    model.blocks[2].change = lambda x: x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: the input of shape"):
        run(model, inputs())


def test_a_pass_without_gradients_moves_nothing(monkeypatch):
    shapes = moved(monkeypatch)
    with torch.no_grad():
        lightened()(inputs())
    assert shapes == []


def pinned():
    """Blocks of pinned memory that PyTorch holds, used and cached."""
    torch.cuda.synchronize()
    statistics = torch.cuda.host_memory_stats()
    return statistics["num_host_alloc"] - statistics["num_host_free"]


def test_pinned_memory_is_used_again_and_goes_back_with_the_level():
    gc.collect()
    torch._C._host_emptyCache()
    before = pinned()
    torch.manual_seed(0)
    model = Model().cuda()
    switch = rebatch.checkpointing(*model.blocks, offload=True)
    switch(True)
    x = inputs()
    held = []
    for _ in range(3):
        run(model, x)
        held.append(pinned() - before)
    assert held == [4] * 3
    switch(False)
    assert pinned() == before


def test_a_pass_that_ends_early_leaves_nothing():
    model, x = lightened(), inputs()
    run(model, x)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        model(x)  # no backward pass
        with pytest.raises(torch.OutOfMemoryError):
            loss = model(x).square().mean()
            model.blocks[1].change = out_of_memory
            loss.backward()
        loss = None
        model.blocks[1].change = None
    deadline = time.monotonic() + 30  # autograd's thread lets go after it has told of its error
    while torch.cuda.memory_allocated() != before and time.monotonic() < deadline:
        gc.collect()
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def out_of_memory(_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


# ---- in a Step ----


def loss_fn(model, samples):
    return model(samples).square().mean()


def trained(offload, mode=None, micro=4):
    """(OOMs of two steps, state) of a model that has entered its levels."""
    torch.manual_seed(0)
    model = Model().cuda()
    levels = [rebatch.checkpointing(*model.blocks)]
    if offload:
        levels.append(rebatch.checkpointing(*model.blocks, offload=True))
    options = {"micro_start": micro, "growth": False, "log_level": "quiet"}
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    step = rebatch.Step(model, optimizer, loss_fn, lighten=levels, **options)
    step.load_state_dict({"step": 0, "micro": micro, "lighten_level": len(levels)})
    ooms, batch = 0, inputs(8)
    for _ in range(2):
        with mode or contextlib.nullcontext():
            step(batch)
        ooms += step.report.ooms
        assert step.report.lighten_level == len(levels)
        for block in model.blocks:
            block.seen.clear()
    return ooms, state_of(model)


def test_a_step_has_the_bits_that_it_has_without():
    ooms, state = trained(True)
    assert ooms == 0
    assert_same(state, trained(False)[1])


def test_an_oom_at_many_operations_is_survived():
    """That of a copy too."""
    for n in range(1, 2400, 23):
        mode = FailAt(n)
        ooms, _ = trained(True, mode)
        if not mode.failed:
            break
        assert ooms <= 1  # 0: where a step makes its loss, of which it makes another
    assert 100 < n < 2370


def test_an_oom_in_any_copy_is_survived(monkeypatch):
    """In the forward pass, in the backward pass, and ahead of the module that needs it."""
    expected = trained(False)[1], trained(False, micro=2)[1]
    copy, left = host_inputs._Input._copy, [0]

    def fails(self, *arguments):
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        copy(self, *arguments)

    monkeypatch.setattr(host_inputs._Input, "_copy", fails)
    for n in range(1, 8):  # four to the host, three back
        left[0] = n
        ooms, state = trained(True)
        assert ooms == 1 and left[0] < 0
        if STANDIN is None:
            assert any(same_bits(state, e) for e in expected)
