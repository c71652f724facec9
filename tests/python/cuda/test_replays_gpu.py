"""tests/python/test_replays*.py with CUDA's own graphs, and what only these show. A stand-in for
CUDA captures nothing."""

import threading

import pytest
import torch

import models
from conftest import load_standin
from rebatch.torch import private
from rebatch.torch.check import cut_comparison
from test_replays import *  # noqa: F403
from test_replays import Run, both
from test_replays_of_trainers import *  # noqa: F403
from test_replays_refused import *  # noqa: F403

pytestmark = pytest.mark.skipif(load_standin() is not None, reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch, request):
    """A comparison of cuts begins later than on a CPU, and lasts longer; no pass is captured until
    it has ended."""
    monkeypatch.setattr(models, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(cut_comparison, "_SIZES", ())
    if "compare_cuts" not in request.node.name:
        monkeypatch.setattr(cut_comparison.FirstCut, "begin", lambda *_: None)


def operations_of_a_pass():
    model, batch, loss_fn = models.make("gpt")
    with models.FailAt(1 << 30) as seen:
        loss_fn(model, tuple(t[:8] for t in batch)).backward()
    return seen.seen


@pytest.mark.parametrize("part", range(16))
def test_an_oom_at_any_operation_of_a_capture_leaves_the_same_bits(part):
    """Two passes without a graph, and one that is captured. Without a size that changes."""
    fail_at = 1 + part * 3 * operations_of_a_pass() // 16
    states = []
    for graphs in (True, False):
        run = Run("gpt", graphs, micro_allowed=[8]).steps(3)
        assert not any(run.replayed)
        run.steps(1, fail_at=fail_at * graphs)
        states.append(run.steps(14).state())
        assert bool(run.replayed[-1]) == graphs
    assert models.same_bits(*states)


def test_autocast_and_a_scaler():
    for dtype in (torch.bfloat16, torch.float16):
        states = []
        for graphs in (True, False):
            model, batch, loss_fn = models.make("gpt")
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            scaler = torch.amp.GradScaler(enabled=dtype is torch.float16)
            options = {"autocast": dtype, "scaler": scaler, "micro_start": 8, "growth": False}
            step = models.rebatch.Step(model, optimizer, loss_fn, graphs=graphs, **options)
            torch.manual_seed(1)
            losses = [step(batch) for _ in range(10)]
            assert step.report.replayed == 2 * graphs
            states.append([*models.state_of(model), *losses])
        assert models.same_bits(*states)


def test_batches_on_the_host_are_copied_to_the_graph():
    states = []
    for graphs in (True, False):
        model, batch, _ = models.make("mlp")
        batch = tuple(t.cpu() for t in batch)

        def loss_fn(model, samples):
            x, y = (t.to("cuda", non_blocking=True) for t in samples)
            return ((model(x) - y) ** 2).mean()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = models.rebatch.Step(model, optimizer, loss_fn, graphs=graphs, micro_start=8)
        for i in range(9):
            step(tuple(t.roll(i, 0) for t in batch))
        states.append(models.state_of(model))
        assert step.report.replayed == 2 * graphs
    assert models.same_bits(*states)


def test_a_capture_after_one_that_failed():
    """The allocator and the generators are usable."""

    def loss_fn(model, samples):
        loss = models.token_loss(model, samples)
        loss.item()
        return loss

    with pytest.warns(RuntimeWarning, match="cannot be captured at .*test_replays_gpu.py"):
        Run("gpt", True, loss_fn=loss_fn).steps(7)
    assert both("gpt", 8, micro_start=8).replayed[-1] == 2


def test_dropping_gives_the_memory_back():
    run = Run("gpt", True, micro_start=8).steps(8)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    run.step._training.callbacks.graphs.drop()
    assert torch.cuda.memory_reserved() < held


def test_the_last_part_is_captured_in_the_memory_of_the_others():
    """Each sample needs 64 MiB of activations, and the limit has no room for the graph of six and
    an eager pass of four."""

    def loss_fn(model, samples):
        x = samples[0].repeat(1, 32)[:, None].expand(-1, 4096, -1)
        return ((model(x).mean((1, 2)) - samples[1]) ** 2).mean()

    def run(graphs):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256), torch.nn.GELU()] * 8
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = torch.nn.Sequential(*layers)
        return Run("mlp", graphs, loss_fn=loss_fn, model=model, micro_start=6).steps(12)

    expected = run(False).state()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = 1.4 * torch.cuda.max_memory_reserved()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        found = run(True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.replayed[-8:] == [3] * 8 and found.step.report.micro == 6
    assert models.same_bits(found.state(), expected)


def test_a_generator_of_the_program():
    states = []
    for graphs in (True, False):
        generator = torch.Generator("cuda").manual_seed(3)

        def loss_fn(model, samples, generator=generator):
            x, y = samples
            noise = torch.randn(x.shape, device=x.device, generator=generator)
            return ((model(x + noise) - y) ** 2).mean()

        run = Run("mlp", graphs, loss_fn=loss_fn, generators=[generator], micro_start=8).steps(8)
        assert run.replayed[-1] == 2 * graphs
        states.append([*run.state(), generator.get_state()])
    assert models.same_bits(*states)


def test_two_threads_capture_and_replay():
    def loss_fn(model, samples):  # without random numbers, which the threads would share
        return ((model.body[0](samples[0])).mean(1) - samples[1]).square().mean()

    runs = [Run("mlp", graphs, loss_fn=loss_fn, micro_start=8) for graphs in (True, True, False)]
    both_train = threading.Barrier(2)

    def train(run):
        run.steps(1)
        both_train.wait()
        run.steps(11)

    threads = [threading.Thread(target=train, args=(run,)) for run in runs[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs[2].steps(1).steps(11)  # of the same batches: they begin again with each call
    if private.captures_stop_draws():  # so nothing is captured once both train
        told = [text for run in runs[:2] for text in run.step._training.callbacks.graphs._told]
        assert any("another thread trains" in text for text in told)
    else:
        assert [run.replayed[-1] for run in runs] == [2, 2, 0]
    assert models.same_bits(runs[0].state(), runs[2].state())
    assert models.same_bits(runs[1].state(), runs[2].state())
