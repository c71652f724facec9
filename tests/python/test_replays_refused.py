"""graphs=True: what cannot be captured, or differs when it is replayed, is named once, and the
results are those without graphs. A CPU captures nothing: see test_replays.py.
cuda/test_replays_gpu.py has the same tests with CUDA's graphs."""

import copy
import random
import re
import shutil
import sys
import types
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models
import rebatch.torch as rebatch
from models import make, placed, same_bits
from rebatch.torch.graphs import graphs as graphs_module
from test_replays import EAGER_STEPS, Recomputed, Rerun, Run, recorder  # noqa: F401


def told(run, steps=8):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.steps(steps)
    return [str(w.message) for w in found if "graphs=True" in str(w.message)]


def _with_counter():
    def loss_fn(model, samples):
        model.calls = getattr(model, "calls", 0) + 1
        return ((model(samples[0]) - samples[1]) ** 2).mean() * (1 + model.calls / 100)

    return loss_fn


def _with_history():
    history = []

    def loss_fn(model, samples):
        loss = ((model(samples[0]) - samples[1]) ** 2).mean()
        history.append(loss.detach())
        return loss

    return loss_fn


def _with_host_random():
    def loss_fn(model, samples):
        scale = random.random()
        return ((model(samples[0]) - samples[1]) ** 2).mean() * scale

    return loss_fn


@pytest.mark.parametrize(
    "make_loss, named",
    ((_with_counter, "calls"), (_with_history, "history"), (_with_host_random, "random")),
)
def test_what_a_replay_would_leave_out_is_named_once_and_the_results_are_the_same(make_loss, named):
    states = []
    for graphs in (True, False):
        random.seed(0)
        run = Run("mlp", graphs, loss_fn=make_loss(), micro_start=8)
        said = told(run)
        assert len(said) == graphs and all(named in text for text in said), said
        of_random = "expected random numbers of a generator on the GPU"
        assert all((of_random in text) is (named == "random") for text in said)
        assert set(run.replayed) == {0}
        states.append(run.state())
    assert same_bits(*states)


def test_a_collective_in_a_pass_is_told():
    """Ranks may capture in different steps, and a capture runs a pass three times."""

    def loss_fn(model, samples):
        loss = ((model(samples[0]) - samples[1]) ** 2).mean()
        dist.all_reduce(loss.detach().clone())
        return loss

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = Run("mlp", True, loss_fn=loss_fn)
        (said,) = told(run)
    finally:
        dist.destroy_process_group()
    assert "loss_fn calls other ranks (torch.distributed)" in said and set(run.replayed) == {0}


def test_a_search_for_anomalies_is_told():
    run = Run("mlp", True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        said = told(run)
    assert len(said) == 1 and "expected torch.autograd.set_detect_anomaly(False)" in said[0]
    assert set(run.replayed) == {0} and run.steps(1).replayed[-1] == 1


def test_memory_that_runs_out_again_and_again_beside_graphs_is_told(recorder):  # noqa: F811
    if models.DEVICE.type != "cpu":
        pytest.skip("the recorder of a CPU fails on request")
    text = "CUDA out of memory. Tried to allocate 2.00 MiB."
    recorder += [torch.OutOfMemoryError(text) for _ in range(4)]
    run = Run("mlp", True, micro_start=8)
    (said,) = told(run, 70)
    assert "memory ran out 4 times beside the graphs" in said and "micro_largest" in said
    assert run.replayed[-1] == 2


def test_checks_are_no_steps_that_are_looked_at():
    run = Run("mlp", True, loss_fn=_with_counter(), micro_start=16)
    for _ in range(3):
        run.step.check(run.batch)
    (said,) = told(run)
    assert "calls" in said and set(run.replayed) == {0}


def test_steps_that_fail_are_none_that_are_looked_at():
    counted, is_bad = _with_counter(), models.Unseen(True)

    def loss_fn(model, samples):
        if is_bad[0]:
            raise ArithmeticError("a bad batch")
        return counted(model, samples)

    run = Run("mlp", True, loss_fn=loss_fn)
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            run.steps(1)
    is_bad[0] = False
    (said,) = told(run)
    assert "calls" in said and set(run.replayed) == {0}


def test_what_a_function_of_the_program_for_backward_reads_is_read_again():
    settings = types.SimpleNamespace(scale=1.0)

    def backward(loss):
        (loss * settings.scale).backward()

    model, batch, loss_fn = make("mlp")
    passes = rebatch.Backward(model, loss_fn, backward=backward, graphs=True)
    replayed = []
    for i in range(EAGER_STEPS + 3):
        passes(batch)
        replayed.append(passes.report.replayed)
        settings.scale = 1.0 if i < EAGER_STEPS + 1 else 0.5
    assert replayed[-3:] == [1, 1, 0]


def test_what_a_function_of_the_program_for_backward_changes_is_named():
    history = []

    def backward(loss):
        history.append(loss.detach())
        loss.backward()

    model, batch, loss_fn = make("mlp")
    passes = rebatch.Backward(model, loss_fn, backward=backward, graphs=True)
    with pytest.warns(RuntimeWarning, match="changes 'history'"):
        for _ in range(EAGER_STEPS):
            passes(batch)


def test_a_pass_that_cannot_be_captured_is_told_with_its_line(recorder):  # noqa: F811
    if models.DEVICE.type == "cpu":
        recorder.append(RuntimeError("operation not permitted when stream is capturing"))

    def loss_fn(model, samples):
        loss = ((model(samples[0]) - samples[1]) ** 2).mean()
        return loss * (2 if loss.item() > 1e9 else 1)

    run = Run("mlp", True, loss_fn=loss_fn)
    (said,) = told(run)
    assert "operation not permitted when stream is capturing" in said and "item()" in said
    if models.DEVICE.type != "cpu":
        assert "test_replays_refused.py" in said
    assert set(run.replayed) == {0}


def test_a_program_that_keeps_a_tensor_of_an_earlier_pass_is_told_what_to_write():
    """The nodes that add to gradients stay those of the stream on which that pass ran."""
    kept = models.Unseen(None)

    def loss_fn(model, samples):
        kept[0] = loss = models.regression_loss(model, samples)
        return loss

    run = Run("mlp", True, loss_fn=loss_fn)
    (said,) = told(run)
    assert "keeps a tensor of an earlier pass" in said and "item()" not in said
    assert "expected .detach() on what it keeps" in said and set(run.replayed) == {0}


def test_gradient_checkpointing_that_cannot_be_captured_is_told(recorder):  # noqa: F811
    """As before PyTorch 2.10."""
    if models.DEVICE.type != "cpu":
        pytest.skip("the recorder of a CPU fails on request")
    text = "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture. If you need it"
    recorder.append(RuntimeError(text))
    run = Run("mlp", True, model=Recomputed(use_reentrant=False))
    (said,) = told(run)
    assert "as in gradient checkpointing" in said and "expected 2.10 or later" in said
    assert "preserve_rng_state=False" in said and "item()" not in said
    assert set(run.replayed) == {0}


def test_random_numbers_of_a_generator_that_the_step_does_not_know_are_told(recorder):  # noqa: F811
    if models.DEVICE.type != "cpu":
        pytest.skip("the recorder of a CPU fails on request")
    text = "Attempt to increase offset for a CUDA generator not in capture mode."
    recorder.append(RuntimeError(text))
    run = Run("mlp", True)
    (said,) = told(run)
    assert "expected it in generators=" in said and "item()" not in said
    assert set(run.replayed) == {0}


@pytest.fixture
def graphs_of_a_compiler(monkeypatch):
    """Those of torch.compile, which a CPU has not."""
    if models.DEVICE.type == "cpu":
        monkeypatch.setattr(graphs_module, "has_compiled_graphs", lambda device: True)
    elif not shutil.which("gcc"):
        pytest.skip("inductor needs a C compiler")
    yield
    if models.DEVICE.type != "cpu":
        sys.modules["torch._inductor.cudagraph_trees"].reset_cudagraph_trees()  # the process has it


@pytest.mark.parametrize("mode", ("reduce-overhead", "max-autotune"))
def test_a_model_that_is_compiled_with_graphs_of_its_own_is_told(mode, graphs_of_a_compiler):
    """It is compiled once: tuned by time twice, it may have other kernels."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = placed(models.Mlp())
    compiled = model if models.DEVICE.type == "cpu" else torch.compile(model, mode=mode)
    begun, runs = copy.deepcopy(model.state_dict()), []
    for graphs in (True, False):
        model.load_state_dict(begun)
        model.zero_grad()
        run = Run("mlp", graphs, model=compiled, micro_start=8)
        said = told(run, 9)
        assert len(said) == graphs and all(f'"{mode}"' in text for text in said)
        runs.append((set(run.replayed), [t.detach().clone() for t in run.state()]))
    assert runs[0][0] == {0} and same_bits(runs[0][1], runs[1][1])


def test_a_replay_that_differs_is_not_used():
    calls = models.Unseen(0)  # which no look sees

    def loss_fn(model, samples):
        calls[0] += 1
        return ((model(samples[0]) - samples[1]) ** 2).mean() * (1 + calls[0])

    run = Run("mlp", True, loss_fn=loss_fn)
    (said,) = told(run)
    assert "a replay differs from an eager pass in the loss" in said
    assert set(run.replayed) == {0}


def noise_of_kernels():
    """As of kernels that sum in any order, and never the same twice: of random numbers some are."""
    calls = models.Unseen(0)

    def noise():
        calls[0] += 1
        return 1e-4 * (calls[0] * 0.618 % 1)

    return noise


def test_a_replay_of_a_noisy_pass_is_used_and_proved_anew_instead_of_compared(monkeypatch):
    monkeypatch.setattr(graphs_module, "_COMPARED_EVERY", 3)
    noise = noise_of_kernels()

    def loss_fn(model, samples):
        return ((model(samples[0]) - samples[1]) ** 2).mean() * (1 + noise())

    run = Run("mlp", True, loss_fn=loss_fn)
    assert not told(run, EAGER_STEPS + 9)
    assert re.fullmatch("0+1110+1+", "".join(map(str, run.replayed)))


def test_passes_that_are_compared_are_never_held_together(monkeypatch):
    noise, gradients, run_eagerly = noise_of_kernels(), [], graphs_module.Graphs._run_eagerly

    def noted(self, eager):
        assert not any(gradient() is not None for gradient in gradients)
        result = run_eagerly(self, eager)
        gradients.append(weakref.ref(result.gradients[0]))
        return result

    def loss_fn(model, samples):
        return ((model(samples[0]) - samples[1]) ** 2).mean() * (1 + noise())

    monkeypatch.setattr(graphs_module.Graphs, "_run_eagerly", noted)
    run = Run("mlp", True, loss_fn=loss_fn)
    assert not told(run, EAGER_STEPS + 2)
    assert run.replayed[-1] and len(gradients) == 3


def test_eager_passes_that_agree_by_chance_are_looked_at_again():
    """As of kernels that mostly sum in one order: a replay is the first pass to differ."""
    eager, runs = EAGER_STEPS + 1, models.Unseen(0)  # two passes before the capture

    def loss_fn(model, samples):
        runs[0] += 1
        is_other = runs[0] > eager + 1 and runs[0] % 3 == 1
        return ((model(samples[0]) - samples[1]) ** 2).mean() * (1 + 1e-4 * is_other)

    run = Run("mlp", True, loss_fn=loss_fn)
    assert not told(run, EAGER_STEPS + 9)
    assert run.replayed[-1] == 1


@pytest.mark.parametrize("kind", ("infinite", "complex"))
def test_a_replay_of_a_noisy_pass_whose_results_are_no_real_numbers_is_used(kind):
    noise = noise_of_kernels()

    def loss_fn(model, samples):
        out = model(samples[0]) * (1 + noise())
        beside = torch.complex(out, out)
        if kind == "infinite":
            beside = out.masked_fill(torch.arange(len(out), device=out.device) < 3, -torch.inf)
        return ((out - samples[1]) ** 2).mean(), beside

    run = Run("mlp", True, loss_fn=loss_fn)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(graphs=True|imaginary)")
        run.steps(EAGER_STEPS + 2)
    assert run.replayed[-1] == 1


def test_what_no_look_sees_is_found_by_the_comparison_of_later_steps(monkeypatch):
    monkeypatch.setattr(graphs_module, "_COMPARED_EVERY", 3)
    factor = models.Unseen(1.0)

    def loss_fn(model, samples):
        return ((model(samples[0]) - samples[1]) ** 2).mean() * factor[0]

    run = Run("mlp", True, loss_fn=loss_fn).steps(EAGER_STEPS + 2)
    assert run.replayed[-1]
    if models.DEVICE.type == "cpu":
        pytest.skip("a replay that runs the pass again reads what is now")
    factor[0] = 2.0
    (said,) = told(run, 4)
    assert "did not when it was captured" in said


def test_a_number_that_changes_between_steps_is_read_again():
    model = models.Mlp()
    model.weight_of_kl = 1.0

    def loss_fn(model, samples):
        return ((model(samples[0]) - samples[1]) ** 2).mean() * model.weight_of_kl

    states = []
    for graphs in (True, False):
        torch.manual_seed(0)
        run = Run("mlp", graphs, loss_fn=loss_fn)
        run.model.weight_of_kl = 1.0
        run.steps(6)
        run.model.weight_of_kl = 0.5
        run.steps(20)
        states.append(run.state())
        assert bool(run.replayed[5]) == graphs and bool(run.replayed[-1]) == graphs
        assert run.replayed[6] == 0
    assert same_bits(*states)


def test_what_no_graph_can_have_is_told_when_it_comes_later():
    run = Run("mlp", True).steps(EAGER_STEPS + 2)
    run.model.body[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    (said,) = told(run, 12)
    assert "register_post_accumulate_grad_hook()" in said and set(run.replayed[-12:]) == {0}


def test_a_hook_that_a_parameter_gets_is_seen():
    states = []
    for graphs in (True, False):
        run = Run("mlp", graphs).steps(6)
        run.model.body[0].weight.register_hook(lambda gradient: gradient * 0.5)
        run.steps(10)
        states.append(run.state())
        assert run.replayed[6] == 0 and bool(run.replayed[-1]) == graphs
    assert same_bits(*states)


def test_shapes_that_never_come_again_are_told():
    model = nn.Linear(1, 1)
    x = placed(torch.randn(4, 100, 1))

    def loss_fn(model, samples):
        return model(samples).square().mean()

    model = placed(model)
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.01), loss_fn, graphs=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for i in range(70):
            step(x[:, : 20 + i])
    (said,) = [str(w.message) for w in found if "graphs" in str(w.message)]
    assert "shapes" in said and "padded" in said and step.report.replayed == 0


def test_a_batch_that_no_graph_can_have_is_named():
    class Odd:
        def __init__(self, x):
            self.x = x

    def loss_fn(model, samples):
        return model(samples["x"].x).square().mean()

    model = placed(models.Mlp())
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        loss_fn,
        graphs=True,
        slice=lambda batch, first, count: {"x": Odd(batch["x"].x[first : first + count])},
        length=lambda batch: len(batch["x"].x),
    )
    with pytest.warns(RuntimeWarning, match=r"batch\['x'\] is a Odd: expected tensors"):
        for _ in range(6):
            step({"x": Odd(placed(torch.randn(4, 8)))})


def test_a_cpu_is_told(monkeypatch):
    monkeypatch.undo()
    model = models.Mlp()
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.01), models.regression_loss, graphs=True
    )
    with pytest.warns(RuntimeWarning, match="the model is on cpu, where nothing can be captured"):
        for _ in range(5):
            step((torch.randn(4, 8), torch.randn(4)))


@pytest.mark.parametrize(
    "options, text",
    (
        ({"graphs": -1}, "graphs is -1: expected False, True, or how many"),
        ({"graphs": "yes"}, "graphs is 'yes': expected"),
        ({"graphs": True, "gradients": "inplace"}, "expected gradients='fresh'"),
    ),
)
def test_arguments_are_checked(options, text):
    model = placed(models.Mlp())
    with pytest.raises(ValueError, match=text):
        rebatch.Step(
            model, torch.optim.SGD(model.parameters(), 0.1), models.regression_loss, **options
        )


def test_parts_are_refused():
    model = placed(models.Mlp())
    backward = rebatch.Backward(model, models.regression_loss, graphs=True)
    with pytest.raises(ValueError, match="graphs is 2: expected graphs=False, or a loss_fn"):
        backward.parts(placed(torch.randn(4, 8)))


def test_a_check_and_an_evaluation_use_no_graphs():
    run = Run("mlp", True).steps(EAGER_STEPS + 2)
    before = Rerun.made
    assert run.step.check(run.batch)
    run.step.evaluate(run.batch)
    assert Rerun.made == before
    assert run.steps(1).replayed[-1] == 1
