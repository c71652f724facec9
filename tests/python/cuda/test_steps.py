"""Step on CUDA memory: on PyTorch's native allocator, and, in a process of its own, on rebatch's
pool (REBATCH_TEST_INSTALL=1). On a real GPU results are compared too; on the stand-in, where
kernels do nothing, it is memory, order and exceptions."""

import contextlib
import ctypes
import gc
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rebatch.torch as rebatch
from rebatch import _library
from rebatch.torch.private import clear_cublas_workspaces
from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.torch.trainers.update import TrainerUpdate
from rebatch.torch.update.first_memory import first_update_bytes

from conftest import INSTALLED, STANDIN, assert_passes_installed

from models import FailAt, fails_above, make, out_of_memory, same_bits, state_of

MIB = 1 << 20
if INSTALLED:
    rebatch.install()

QUIET = dict(log_level="quiet", growth=False)


@pytest.mark.skipif(INSTALLED, reason="is that run")
def test_all_of_these_on_rebatchs_pool():
    assert_passes_installed(__file__)


@pytest.fixture(autouse=True)
def one_thread_of_cublas():
    """The same bits in each run need a fixed workspace."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def on_gpu(kind, device="cuda"):
    model, batch, loss_fn = make(kind)
    return model.to(device), tuple(t.to(device) for t in batch), loss_fn


def live():
    """Memory in use, when all threads have let go, without workspaces of cuBLAS: PyTorch 2.8 to
    2.11 have one for each thread in memory of the allocator."""
    gc.collect()
    torch.cuda.synchronize()
    clear_cublas_workspaces()
    return torch.cuda.memory_allocated()


def assert_same(a, b):
    """On a GPU: the same bits."""
    assert len(a) == len(b)
    if STANDIN is None:
        assert same_bits(a, b)


class Wide(nn.Module):
    """Needs 1 MiB for each sample and layer."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def wide_loss(model, samples):
    return model(samples).square().mean()


def wide_step(**options):
    torch.manual_seed(0)
    model = Wide().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = rebatch.Step(model, optimizer, wide_loss, **{**QUIET, **options})
    return step, torch.randn(32, 512, 512, device="cuda")


@contextlib.contextmanager
def little_memory(free_bytes):
    """So much is left on the device, beside workspaces of cuBLAS."""
    if STANDIN is None:
        pytest.skip("needs the stand-in, which takes memory away")
    x = torch.ones(1, 1, device="cuda", requires_grad=True)
    (x @ x).backward()
    del x
    torch.cuda.empty_cache()
    used = STANDIN.standin_used(0)
    STANDIN.standin_set_memory(0, used + free_bytes)
    try:
        yield
    finally:
        STANDIN.standin_set_memory(0, 8 << 30)


# ---- OOMs of the allocator itself ----


def test_memory_that_is_short_makes_the_micro_batch_smaller(standin):
    step, batch = wide_step()
    before = live()
    with little_memory(160 * MIB):
        for _ in range(3):
            loss = step(batch)
    assert 1 <= step.report.micro < 32 and loss.dim() == 0
    assert step.report.ooms == 0  # the first step has learned it
    del loss, batch
    assert live() - before <= 16 * MIB  # what AdamW keeps, and gradients


def test_memory_that_goes_away_in_mid_run_is_survived(standin):
    step, batch = wide_step()
    step(batch)
    assert step.report.micro == 32
    with little_memory(120 * MIB):
        step(batch)
        assert step.report.micro < 32 and step.report.ooms > 0
        step(batch)
        assert step.report.ooms == 0
    assert step.report.peak_bytes > 0 or not INSTALLED


def test_after_a_size_ran_admission_wastes_nothing(standin):
    step, batch = wide_step()
    for _ in range(3):
        step(batch)
    with little_memory(120 * MIB):
        step(batch)
    assert step.report.redone_samples <= 32  # the size that ran before was not started
    assert step.report.micro < 32


def test_learning_finds_a_size_from_small_ones(standin):
    """PyTorch's sums over many rows take memory that small micro-batches do not show, so the first
    steps may run out of memory."""
    step, batch = wide_step(learn=True)
    with little_memory(200 * MIB):
        step(batch)
        assert step.report.learned > 0
        for _ in range(5):
            step(batch)
        assert step.report.ooms == 0
    assert step.report.micro >= 8


def holds(micro):
    """Whether steps of that size meet no OOM."""
    gc.collect()
    torch.cuda.empty_cache()
    step, batch = wide_step(micro_start=micro)
    ooms = 0
    for _ in range(6):
        step(batch)
        ooms += step.report.ooms
    return ooms == 0


@pytest.mark.skipif(INSTALLED, reason="the pool's sizes are predicted exactly")
@pytest.mark.parametrize("cap", [220, 260])
def test_learning_finds_what_fits_with_one_oom_at_the_most(standin, cap):
    with little_memory(cap * MIB):
        step, batch = wide_step(learn=True)
        ooms = 0
        for _ in range(24):  # a stride beyond the line takes one to three steps
            step(batch)
            ooms += step.report.ooms
        micro = step.report.micro
        del step, batch
        true = max(size for size in range(1, 32) if holds(size))
        assert ooms <= 1 and 0.9 * true <= micro < 32, (micro, true)


@pytest.mark.skipif(INSTALLED, reason="the pool's sizes are predicted anew after an update")
def test_learning_leaves_room_for_what_the_optimizer_will_keep(standin):
    """AdamW's moments are twice the parameters; the first step has no OOM, nor has the second."""
    torch.manual_seed(0)
    model = Wide(layers=24).cuda()  # 24 MiB, and 48 MiB of moments
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    events = []
    step = rebatch.Step(
        model,
        optimizer,
        wide_loss,
        learn=True,
        growth=False,
        on_event=lambda t, e: events.append(t),
    )
    batch = torch.randn(64, 64, 512, device="cuda")
    with little_memory(150 * MIB):
        step(batch)
        first = step.report.micro
        assert step.report.ooms == 0
        step(batch)
        assert step.report.ooms == 0, events
    assert step.report.micro >= first


@pytest.mark.skipif(INSTALLED, reason="the pool's sizes are predicted anew after an update")
def test_learning_leaves_room_for_an_optimizer_that_is_found(standin):
    """As for one that is given. With SGD, which keeps nothing, the first size is larger."""
    torch.manual_seed(0)
    model = Wide(layers=24).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 64, 512, device="cuda")

    def first_size(**options):
        model.zero_grad()
        backward = rebatch.Backward(model, wide_loss, learn=True, **QUIET, **options)
        backward(batch)
        assert backward.report.ooms == 0
        return backward.report.micro

    with little_memory(150 * MIB):
        without = first_size(optimizer=torch.optim.SGD(model.parameters(), 0.1))
        given, found = first_size(optimizer=optimizer), first_size()
        optimizer.step()
    assert found == given < without


def test_the_micro_batch_grows_when_memory_is_back(standin):
    step, batch = wide_step(growth=True, grow_after=2)
    with little_memory(160 * MIB):
        step(batch)
        small = step.report.micro
    for _ in range(12):
        step(batch)
    assert step.report.micro == 32 > small


def test_exhausted_leaves_nothing_behind(standin):
    step, batch = wide_step()
    before = live()
    with little_memory(2 * MIB), pytest.raises(rebatch.Exhausted) as caught:
        step(batch)
    assert "of 1 sample" in str(caught.value) and "CUDA out of memory" in str(caught.value)
    del caught
    assert live() - before <= 16 * MIB


# ---- an OOM at every k-th operation ----


def train(kind, fail_at=0, **options):
    model, batch, loss_fn = on_gpu(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=False)
    if "scaler" in options:
        options["scaler"] = torch.amp.GradScaler("cuda", init_scale=1024.0)
    options = {**QUIET, "micro_start": 4, "micro_smallest": 4, "micro_largest": 4, **options}
    step = rebatch.Step(model, optimizer, loss_fn, lighten=[lambda on: None], **options)
    torch.manual_seed(1)
    for i in range(3):
        with FailAt(fail_at if i == 1 else 0):
            step(batch)
    return state_of(model)


def operations(kind, **options):
    counter = FailAt(1 << 30)
    model, batch, loss_fn = on_gpu(kind)
    if "scaler" in options:
        options["scaler"] = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=False)
    step = rebatch.Step(model, optimizer, loss_fn, **{**QUIET, "micro_start": 4, **options})
    step(batch)
    with counter:
        step(batch)
    return counter.seen


@pytest.mark.parametrize(
    "kind, options",
    (
        ("mlp", {}),
        ("conv", {}),
        ("conv", dict(scaler=True, autocast=torch.float16, clip=1.0)),
        ("gpt", dict(autocast=torch.bfloat16, gradients="inplace")),
    ),
    ids=("mlp", "conv", "conv scaled", "gpt inplace"),
)
def test_an_oom_at_every_operation(kind, options):
    expected = train(kind, **options)
    before = live()
    survived = 0
    for n in range(1, operations(kind, **options) + 1, 3 if kind == "mlp" else 11):
        try:
            state = train(kind, n, **options)
        except rebatch.Torn:
            continue
        survived += 1
        assert_same(state, expected)
        del state
    assert survived >= 8
    assert live() - before <= 16 * MIB


# ---- where OOMs come from ----


class FailsInBackward(torch.autograd.Function):
    """Runs out of memory in its backward, in autograd's thread, for more than `largest` samples."""

    @staticmethod
    def forward(context, x, largest):
        context.too_large = len(x) > largest
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if context.too_large:
            out_of_memory(None)
        return gradient, None


def function_loss(model, samples):
    return FailsInBackward.apply(model(samples), 8).square().mean()


def hook_loss(model, samples):
    out = model(samples)
    if len(samples) > 8:
        out.register_hook(out_of_memory)
    return out.square().mean()


@pytest.mark.parametrize("loss_fn", (function_loss, hook_loss))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_an_oom_in_autograds_thread(loss_fn, gradients):
    step, batch = wide_step(gradients=gradients)
    before = live()
    step.loss_fn = loss_fn
    step(batch)
    assert step.report.micro == 8
    assert live() - before <= 24 * MIB


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed_models(reentrant):
    step, batch = wide_step()
    batch.requires_grad_(reentrant)

    def loss_fn(model, samples):
        out = checkpoint(model, samples, use_reentrant=reentrant)
        return fails_above(lambda m, s: out.square().mean(), 8, "backward")(model, (samples,))

    step.loss_fn = loss_fn
    step(batch)
    assert step.report.micro == 8


def test_several_streams():
    step, batch = wide_step()
    side = torch.cuda.Stream()

    def loss_fn(model, samples):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = model(samples)
        torch.cuda.current_stream().wait_stream(side)
        out.record_stream(torch.cuda.current_stream())
        return fails_above(lambda m, s: out.square().mean(), 8, "backward")(model, (samples,))

    step.loss_fn = loss_fn
    before = live()
    for _ in range(3):
        step(batch)
    assert step.report.micro == 8
    assert live() - before <= 16 * MIB


def test_an_exception_in_autograds_thread_comes_out():
    step, batch = wide_step()

    def broken(gradient):
        raise KeyError("mine")

    def loss_fn(model, samples):
        out = model(samples)
        out.register_hook(broken)
        return out.square().mean()

    step.loss_fn = loss_fn
    with pytest.raises(KeyError, match="mine"):
        step(batch)


# ---- several of them ----


def test_two_steps_take_turns():
    first, batch = wide_step()
    second, _ = wide_step()
    second.loss_fn = hook_loss
    for _ in range(3):
        first(batch), second(batch)
    assert first.report.micro == 32 and second.report.micro == 8


@pytest.mark.gpus(2)
def test_two_devices():
    reports = []
    for device in ("cuda:0", "cuda:1"):
        model = Wide().to(device)
        step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), hook_loss, **QUIET)
        with torch.cuda.device(device):
            step(torch.randn(16, 512, 512, device=device))
        reports.append(step.report)
    assert [r.micro for r in reports] == [8, 8]


def test_batches_from_a_loader_with_pinned_memory():
    step, _ = wide_step()
    data = torch.utils.data.TensorDataset(torch.randn(16, 4, 512))
    loader = torch.utils.data.DataLoader(data, 8, num_workers=1, pin_memory=True)
    for (batch,) in loader:
        step(batch.to("cuda", non_blocking=True))
    assert step.report.samples == 8


def test_a_thread_beside_the_step_keeps_its_memory():
    step, batch = wide_step()
    step.loss_fn = hook_loss
    made, has_begun, stop = [], threading.Event(), threading.Event()

    def work():
        while not stop.is_set():
            made.append(torch.zeros(1000, device="cuda"))
            has_begun.set()
            stop.wait(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    assert has_begun.wait(300)
    for _ in range(3):
        step(batch)
    stop.set()
    thread.join()
    assert made and all(t.shape == (1000,) for t in made)
    if STANDIN is None:
        assert all(bool((t == 0).all()) for t in made)


def test_map_on_a_gpu(standin):
    model = Wide().cuda().eval()
    inputs = torch.randn(64, 512, 512, device="cuda")
    with little_memory(130 * MIB):
        assert rebatch.map(model, inputs).shape == inputs.shape


@pytest.mark.parametrize("is_held", (False, True))
def test_results_that_do_not_fit_twice_are_joined_in_host_memory(standin, is_held):
    """Eight parts of 4 MiB, and no room for 32 MiB more beside them. They go back to the device
    where nobody else holds them."""
    held = []

    def model(x):
        if len(x) > 1:
            out_of_memory(None)
        made = x.new_empty(1, MIB)
        held.extend([made] * is_held)
        return made

    x, predict = torch.zeros(8, 1, device="cuda"), rebatch.Map(model)
    with little_memory(44 * MIB):
        if is_held:
            with pytest.warns(RuntimeWarning, match="32.0 MiB in all do not fit"):
                joined = predict(x)
        else:
            joined = predict(x)
    assert joined.shape == (8, MIB) and joined.is_cuda is not is_held


# ---- with the pool ----


@pytest.mark.skipif(not INSTALLED, reason="needs rebatch's pool")
def test_a_probe_finds_a_size_that_runs(standin, capsys):
    step, batch = wide_step()
    with little_memory(200 * MIB):
        found = step.probe(batch)
        assert 4 <= found.size < 32
        assert "largest micro-batch" in capsys.readouterr().out
        for _ in range(3):
            step(batch)
            assert step.report.ooms == 0
        assert step.report.micro == found.size


@pytest.mark.skipif(not INSTALLED, reason="needs rebatch's pool")
def test_a_probe_of_a_backward(standin):
    step, batch = wide_step()
    backward = rebatch.Backward(step.model, step.loss_fn, **QUIET)
    with little_memory(200 * MIB):
        found = backward.probe(batch)
        assert 4 <= found.size < 32
        for _ in range(3):
            backward(batch)
            assert backward.report.ooms == 0
        assert backward.report.micro == found.size


@pytest.mark.skipif(INSTALLED, reason="is about the native allocator")
def test_without_install_a_probe_is_refused():
    step, batch = wide_step()
    with pytest.raises(rebatch.Error, match="call rebatch.install"):
        step.probe(batch)


@pytest.mark.skipif(not INSTALLED, reason="needs rebatch's pool")
def test_an_oom_at_every_request_of_the_pool(monkeypatch):
    """REBATCH_RUN_OOM fails the n-th request that a callback makes."""
    expected = train("mlp")
    survived = torn = 0
    for n in range(1, 400, 7):
        monkeypatch.setenv("REBATCH_RUN_OOM", str(n))
        try:
            assert_same(train("mlp"), expected)
            survived += 1
        except rebatch.Torn:
            torn += 1
    assert survived > 20


@pytest.mark.gpus(2)
@pytest.mark.skipif(not INSTALLED, reason="needs rebatch's pool")
def test_kernels_of_another_gpu_may_use_the_pools_memory(standin):
    """PyTorch asks for it when it first copies a tensor that is not contiguous: a kernel of the
    source's GPU writes."""
    old = torch.zeros(4 << 20, device="cuda:1")
    assert not standin.standin_can_access(0, old.data_ptr())
    target = torch.zeros(64, 64, device="cuda:1")
    target.copy_(torch.zeros(64, 64, device="cuda:0").t())
    new = torch.zeros(16 << 20, device="cuda:1")
    for tensor in (old, target, new):
        assert standin.standin_can_access(0, tensor.data_ptr())
        assert standin.standin_can_access(1, tensor.data_ptr())


@pytest.mark.skipif(not INSTALLED, reason="needs rebatch's pool")
def test_a_model_on_the_cpu_is_refused():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    with pytest.raises(ValueError, match="move the model to the GPU first"):
        step(batch)


@pytest.mark.parametrize("order", ("step", "model", "none"))
def test_the_interpreter_ends_in_any_order(order):
    program = f"""
import torch, rebatch.torch as rebatch
{"rebatch.install()" if INSTALLED else ""}
model = torch.nn.Linear(8, 8).cuda()
step = rebatch.Step(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean())
step(torch.randn(4, 8, device="cuda"))
import time; time.sleep(0.1)
if {order!r} == "step":
    del step
elif {order!r} == "model":
    del model
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr and "terminate" not in done.stderr, done.stderr


# ---- the update of a trainer ----


def trainer_update(**options):
    torch.manual_seed(0)
    model = Wide().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    backward = TrainerBackward(model, wide_loss, optimizer=optimizer, **QUIET)
    batch = torch.randn(4, 512, 512, device="cuda")
    update = TrainerUpdate(backward)

    def train():
        backward(batch)
        update.run(apply)
        optimizer.zero_grad()

    def apply():
        update.begin()
        optimizer.step()

    return backward, update, train, apply


def test_a_trainers_update_does_not_begin_without_the_memory_of_an_earlier_one(standin):
    backward, update, train, apply = trainer_update()
    for _ in range(3):
        train()
    versions = [p._version for p in backward.parameters]
    (needed,) = update._needed_bytes.values()
    assert 4 * MIB <= needed <= 10 * MIB  # temporaries of the parameters' size
    with little_memory(64 * MIB):
        train()
        assert versions != [p._version for p in backward.parameters]
    backward(torch.randn(4, 512, 512, device="cuda"))
    versions = [p._version for p in backward.parameters]
    with little_memory(0):
        taken = []
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(MIB // 2, device="cuda"))
        with pytest.raises(rebatch.Exhausted, match="step needs .* MiB, there is .* MiB"):
            update.run(apply)
        assert versions == [p._version for p in backward.parameters]
        del taken
    update.run(apply)
    assert versions != [p._version for p in backward.parameters]


def test_a_trainers_update_is_measured_again_when_other_parameters_train():
    backward, update, train, _ = trainer_update()
    for _ in range(3):
        train()
    (whole,) = update._needed_bytes.values()
    for p in backward.parameters[2:]:
        p.requires_grad_(False)
    for _ in range(3):
        train()
    assert len(update._needed_bytes) == 2 and min(update._needed_bytes.values()) < whole


# ---- a model that moves ----


@pytest.mark.parametrize("micro", (16, 4))
def test_a_step_may_be_made_before_the_model_is_on_the_gpu(micro):
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, micro_start=micro, **QUIET
    )
    if not INSTALLED:  # on the CPU first
        assert step(batch).device.type == "cpu"
    model.cuda()
    on_gpu = tuple(t.cuda() for t in batch)
    for _ in range(3):
        assert step(on_gpu).device.type == "cuda" == step.device.type
    assert step.report.peak_bytes > 0 or not INSTALLED
    assert all(p.grad.is_cuda for p in model.parameters())
    if not INSTALLED:
        model.cpu()
        assert step(batch).device.type == "cpu" and step.report.step == 4


# ---- libraries that cope with a failed allocation, and then fail for want of it ----


def no_engine(x, largest):
    """As a convolution that gets no workspace: the allocation fails within the library."""
    if len(x) > largest:
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        raise RuntimeError("GET was unable to find an engine to execute this computation")


def test_a_library_without_a_workspace_is_an_oom():
    model, batch, loss_fn = on_gpu("mlp")

    def limited(m, samples):
        no_engine(samples[0], 4)
        return loss_fn(m, samples)

    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), limited, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rebatch.CutWarning)
        step(batch)
    assert step.report.micro == 4 and step.report.ooms == 2
    assert rebatch.map(lambda x: (no_engine(x, 4), model(x))[1], batch[0]).shape == (16,)


def test_a_library_that_fails_for_another_reason_is_an_error():
    model, batch, loss_fn = on_gpu("mlp")

    def broken(m, samples):
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), broken, **QUIET)
    with pytest.raises(RuntimeError, match="unable to find an engine"):
        step(batch)


# ---- an optimizer's first step ----

UPDATES = [
    (name, flags, how)
    for name, flags in (
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("AdamW", {}),
        ("AdamW", {"maximize": True}),
        ("NAdam", {"weight_decay": 0.1}),
        ("RAdam", {"weight_decay": 0.1}),
        ("Adamax", {"weight_decay": 0.1}),
        ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
        ("Adadelta", {}),
        ("Adadelta", {"weight_decay": 0.1}),
        ("Adagrad", {"weight_decay": 0.1}),
        ("ASGD", {"weight_decay": 0.1}),
        ("ASGD", {"maximize": True}),
        ("Rprop", {"maximize": True}),
    )
    for how in ({}, {"foreach": False}, {"fused": True}, {"capturable": True})
    if name in ("SGD", "Adam", "AdamW") or "fused" not in how
    if name not in ("SGD", "Adagrad") or "capturable" not in how
]


@pytest.mark.skipif(INSTALLED, reason="is measured by PyTorch's allocator")
@pytest.mark.parametrize("name, flags, how", UPDATES, ids=str)
def test_the_first_update_needs_no_more_than_is_promised(name, flags, how):
    sizes = (1 << 20, 1 << 19, 1 << 18, 1 << 18)
    parameters = [nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **flags, **how)
    promised = first_update_bytes(optimizer)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    optimizer.step()  # as asked for: what a block has beyond that depends on what ran before
    needed = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert needed <= promised + (1 << 14)  # steps, and other numbers
    assert promised <= needed + 2 * sum(4 * size for size in sizes)
    assert first_update_bytes(optimizer) == (promised if not optimizer.state else 0)


@pytest.mark.skipif(INSTALLED, reason="host memory serves it there")
@pytest.mark.parametrize("name, flags, how", UPDATES, ids=str)
@pytest.mark.parametrize("width, layers, last", ((256, 12, 3000), (640, 5, 2200), (1100, 3, 64)))
def test_a_first_update_asks_the_device_for_nothing(standin, name, flags, how, width, layers, last):
    """Its memory was had before it began, so no OOM can tear it."""
    body = [nn.Linear(width, width) for _ in range(layers)]
    model = nn.Sequential(*body, nn.Linear(width, last, bias=False)).cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **flags, **how)
    step = rebatch.Step(model, optimizer, lambda m, x: m(x).mean(), **QUIET)
    apply = step._training.program.update.apply

    def failing():
        standin.standin_fail_from(1)
        try:
            apply()
        finally:
            standin.standin_fail_from(0)

    step._training.program.update.apply = failing
    step(torch.randn(64, width).cuda())
    assert not step.report.torn and step.report.ooms == 0


@pytest.mark.skipif(INSTALLED or STANDIN is None, reason="sets the limit of PyTorch's allocator")
def test_a_first_update_under_a_tight_limit_is_never_torn():
    """Free bytes in pieces that are too small are none: the optimizer is not begun with them."""
    total = torch.cuda.get_device_properties(0).total_memory
    outcomes = set()
    for limit in range(40, 160, 3):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = rebatch.Step(model, optimizer, lambda m, x: m(x).mean(), **QUIET)
        torch.cuda.set_per_process_memory_fraction(limit * MIB / total)
        try:
            step(torch.randn(64, 256).cuda())
            outcomes.add("done")
        except torch.OutOfMemoryError as error:
            outcomes.add(type(error).__name__)
            assert not optimizer.state
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            del model, optimizer, step
            gc.collect()
            torch.cuda.empty_cache()
    assert {"done", "Exhausted"} <= outcomes


def test_numbers_say_how_much_room_is_left_beyond_the_peak(standin):
    step, batch = wide_step(micro_start=8)
    with little_memory(1 << 30):
        step(batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            before = step.numbers()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peak = before["rebatch/peak_bytes"]
        assert peak == step.report.peak_bytes > 0
        assert before["rebatch/reserved_bytes"] == step.report.reserved_bytes > 0
        # There is room beyond the peak, and less than what was left before the first step.
        assert 0 < before["rebatch/room_bytes"] < 1 << 30
        kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert step.numbers()["rebatch/room_bytes"] == before["rebatch/room_bytes"]
        if not INSTALLED:  # then another holds it, as another process does
            STANDIN.standin_set_memory(0, STANDIN.standin_used(0))
            assert step.numbers()["rebatch/room_bytes"] < before["rebatch/room_bytes"]
        del kept
        peaks = [peak]
        for _ in range(3):
            step(batch)
            peaks.append(step.report.peak_bytes)
        assert INSTALLED or peaks[-1] == 0
        last_measured = [peak for peak in peaks if peak][-1]
        assert step.numbers()["rebatch/peak_bytes"] == last_measured


@pytest.mark.skipif(INSTALLED, reason="the pool knows each peak")
@pytest.mark.parametrize("micro", (32, 8))
def test_a_peak_is_right_or_not_measured(standin, micro):
    step, batch = wide_step(micro_start=micro)
    highest = 0

    def loss_fn(model, samples):
        nonlocal highest
        loss = wide_loss(model, samples)
        highest = max(highest, torch.cuda.memory_allocated())
        return loss

    step.loss_fn, measured = loss_fn, []
    for _ in range(5):
        highest = 0
        step(batch)
        measured.append(step.report.peak_bytes)
        assert measured[-1] == 0 or measured[-1] >= highest
    assert min(measured[:2]) > 0 and measured[2:] == [0, 0, 0]
    step(batch[:24])  # a size of its own
    assert step.report.peak_bytes > 0


@pytest.mark.parametrize("kind", (nn.LSTM, nn.GRU))
def test_a_state_that_is_carried_in_the_batch_is_cut_along_batch_dim(kind):
    """cuDNN takes a part of (layers, samples, width) only where it has no gaps."""
    model = kind(8, 16, num_layers=2).cuda()
    x, hidden = torch.zeros(12, 8, 8, device="cuda"), torch.zeros(2, 8, 16, device="cuda")
    carried = (hidden, hidden.clone()) if kind is nn.LSTM else hidden
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def loss_fn(m, part):
        return m(*part)[0].square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the stand-in no number is right
        for micro in (8, 3):
            step = rebatch.Step(model, optimizer, loss_fn, batch_dim=1, micro_start=micro, **QUIET)
            step((x, carried))
            assert step.report.micro == micro
            step.evaluate((x, carried))


# ---- memory that others hold ----


@pytest.mark.parametrize("holder", ("gives back", "keeps", "own"))
def test_memory_that_others_hold_is_waited_for(holder):
    if holder == "own" and STANDIN is None:
        pytest.skip("the context of a GPU is held outside of the allocators, as others' memory is")
    driver, pointer, retries = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), []

    def on_event(text, event):
        if event.kind == _library.EventKind.RETRY:
            retries.append(text)
            if holder == "gives back" and len(retries) == 3:
                assert driver.cuMemFree_v2(pointer) == 0

    def loss_fn(model, x):
        torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        return model(x).square().mean()

    model, x = torch.nn.Linear(4, 1).cuda(), torch.randn(1, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, oom_wait_ms=20, on_event=on_event)
    step(x)  # loads kernels
    gc.collect(), torch.cuda.empty_cache()
    held = torch.cuda.mem_get_info()[0] - 64 * MIB
    if holder == "own":
        kept = torch.empty(held, dtype=torch.uint8, device="cuda")  # noqa: F841
    else:
        assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(held)) == 0
    with contextlib.nullcontext() if holder == "gives back" else pytest.raises(rebatch.Exhausted):
        step(x)
    if holder == "keeps":
        assert driver.cuMemFree_v2(pointer) == 0
    assert len(retries) == {"gives back": 3, "keeps": 5, "own": 0}[holder]
