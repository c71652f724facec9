"""graphs=True: which micro-batches are captured, replayed or dropped, and that the bits are those
without graphs. A CPU captures nothing: there a recorder stands in that runs the pass
again in each replay. cuda/test_replays_gpu.py has the same tests with CUDA's graphs."""

import contextlib
import gc
import random
import shutil
import threading
import time
import types
import unittest.mock
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

import models
import rebatch.torch as rebatch
from models import FailAt, make, placed, same_bits, state_of
from rebatch.torch import private
from rebatch.torch.batches.outputs import tensors_in
from rebatch.torch.check import cut_comparison
from rebatch.torch.check.cut_comparison import FirstCut
from rebatch.torch.graphs import graphs as graphs_module
from rebatch.torch.graphs import recorder as recorder_module
from rebatch.torch.graphs.changes import Changes
from rebatch.torch.graphs.inputs import NotCapturedError
from rebatch.torch.program.program import Running
from rebatch.torch.session import threads as threads_module

# Steps before the first capture: three are looked at, and a shape is to have run three times.
EAGER_STEPS = 4


class Rerun:
    """A recorder for a CPU: a replay runs the pass again, into the memory of its first results."""

    made = 0  # captures of the test
    is_short = False  # of memory for replays
    is_within = False  # what runs has the memory of graphs

    def claim(self):
        return not self.is_short

    def lend(self):
        pass

    def within(self, body):
        Rerun.is_within = True
        try:
            return body()
        finally:
            Rerun.is_within = False

    def drop(self):
        pass

    def __init__(self, fails):
        self.fails = fails  # what the next captures raise

    def record(self, body):
        if self.fails:
            raise self.fails.pop(0)
        gc.collect()
        if stale_nodes(body.__self__._parameters):
            raise RuntimeError(STALE)
        Rerun.made += 1
        first = self.within(body)

        def replay():  # which PyTorch does not know: .data has a version of its own
            now = self.within(body)
            first.loss.data.copy_(now.loss)
            for own, gradient in zip(first.gradients, now.gradients):
                if own is not None:
                    own.data.copy_(gradient)
            for own, value in zip(tensors(first.extras), tensors(now.extras)):
                own.data.copy_(value)

        return types.SimpleNamespace(result=first, replay=replay)


def nodes_of(parameters):
    """What adds to their gradients: another one, once no graph of autograd has it."""
    needing = [p for p in parameters if p.requires_grad]
    return [torch.autograd.graph.get_gradient_edge(p).node for p in needing]


STALE = (
    "CUDA error: operation would make the legacy stream depend on a capturing blocking stream\n"
    "Search for `cudaErrorStreamCaptureImplicit'"
)


def stale_nodes(parameters):
    """Those of an earlier pass, which belong to its stream: CUDA captures no pass that has them."""
    return [node for node in nodes_of(parameters) if "of an eager pass" in node.metadata]


def tensors(extras):
    return list(tensors_in(extras)) if extras is not None else []


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    """What the next captures fail with, where a test appends to it."""
    fails = []
    Rerun.made = 0
    if models.DEVICE.type == "cpu":
        monkeypatch.setattr(graphs_module, "can_capture", lambda device: True)
        monkeypatch.setattr(graphs_module, "recorder_of", lambda *_: Rerun(fails))
        # Dropout draws from it there, and so does a replay that runs the pass again.
        weighted = Running.weighted_loss

        def marked(running, *arguments, **keywords):
            result = weighted(running, *arguments, **keywords)
            for node in nodes_of(running.program.modules.parameters()):
                node.metadata["of an eager pass"] = True
            return result

        monkeypatch.setattr(Running, "weighted_loss", marked)
        names, own = Changes.names, ("torch.default_generator", "(a tensor on the CPU)")
        named = lambda self: [n for n in names(self) if not n.endswith(own)]  # noqa: E731
        monkeypatch.setattr(Changes, "names", named)
    return fails


class Run:
    """A training, and what is the same with graphs and without."""

    def __init__(self, kind, graphs, loss_fn=None, model=None, backward=False, **options):
        made, self.batch, its = make(kind)
        self.model = made if model is None else placed(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.losses, self.outputs, self.replayed = [], [], []
        options = {"growth": False, "log_level": "quiet", "graphs": graphs, **options}
        arguments = (self.model,) if backward else (self.model, self.optimizer)
        way = rebatch.Backward if backward else rebatch.Step
        self.step = way(*arguments, loss_fn or its, **options)
        self.backward = backward
        torch.manual_seed(1)

    def steps(self, count, samples=16, fail_at=0):
        for i in range(count):
            batch = tuple(t[:samples].roll(i, 0) for t in self.batch)
            with FailAt(fail_at) if fail_at else contextlib.nullcontext():
                self.losses.append(self.step(batch))
            self.outputs.append(self.step.outputs)
            self.replayed.append(self.step.report.replayed)
            if self.backward:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def state(self):
        moments = [value for one in self.optimizer.state.values() for value in one.values()]
        return [*state_of(self.model), *moments, *self.losses, *tensors(tuple(self.outputs))]


def both(kind, *plan, **options):
    """The run with graphs, whose bits are those of the run without. `plan`: steps, or (steps,
    samples)."""
    kept = options.pop("kept", True)
    runs = []
    for graphs in (kept, False):
        runs.append(run := Run(kind, graphs, **options))
        for part in plan:
            run.steps(*(part if isinstance(part, tuple) else (part,)))
    assert same_bits(*(run.state() for run in runs))
    return runs[0]


# ---- replays ----


@pytest.mark.parametrize("kind", ("mlp", "conv", "gpt"))
@pytest.mark.parametrize("micro", (16, 4))
def test_micro_batches_are_replayed_with_the_same_bits(kind, micro):
    run = both(kind, 10, micro_start=micro)
    assert run.replayed[0] == 0 and run.replayed[-1] == 16 // micro
    assert run.step.numbers()["rebatch/replayed"] == 16 // micro


def test_the_last_part_has_a_graph_too():
    assert both("gpt", 12, micro_start=6).replayed[-1] == 3


@pytest.mark.parametrize("plan, most", (([12, 4] * 6, 0), (([12] * 20 + [4]) * 5, 3)))
def test_the_last_part_needs_no_memory_beside_the_graph_of_the_others(plan, most, monkeypatch):
    """But in its first three passes, where they come later. There each takes the graphs' memory."""
    if models.DEVICE.type != "cpu":
        pytest.skip("cuda/test_replays_gpu.py has a limit of memory")
    monkeypatch.setattr(graphs_module, "_COMPARED_EVERY", 10)
    runs, taken = models.Unseen(), models.Unseen(0)

    def loss_fn(model, samples):
        graphs = runs[0].step._training.callbacks.graphs
        if torch.is_grad_enabled() and graphs._held and not Rerun.is_within:
            taken[0] += 1
            graphs.ran_out()
        return ((model(samples[0]) - samples[1]) ** 2).mean()

    runs.append(Run("mlp", True, loss_fn=loss_fn, micro_start=12))
    for samples in plan:
        runs[0].steps(1, samples)
    assert taken[0] == most
    assert runs[0].replayed[-2:] == [1, 1]


def test_nothing_is_captured_in_steps_that_compare_cuts(monkeypatch):
    """A comparison has gradients of its own."""
    steps = []  # whether cuts were compared, and captures until then
    end = FirstCut.end

    def noted(cuts):
        steps.append((cuts.comparison is not None, Rerun.made))
        end(cuts)

    monkeypatch.setattr(FirstCut, "end", noted)
    monkeypatch.setattr(cut_comparison, "ROUNDS", 3 * cut_comparison.ROUNDS)
    run = Run("mlp", True, micro_start=4).steps(14)
    assert sum(compares for compares, _ in steps) == 9
    assert {captures for compares, captures in steps if compares} == {0}
    assert run.replayed[-1] == 4


def test_one_graph_is_kept_where_one_is_asked_for():
    run = both("mlp", (8, 16), (8, 8), (4, 16), micro_start=16, kept=1)
    assert run.replayed[7] and run.replayed[15]


def test_batches_of_other_sizes_use_the_graph_of_their_micro_batch():
    run = both("mlp", (6, 16), (2, 8), micro_start=4)
    assert run.replayed[-1] == 2  # of 4 samples, which weigh twice as much


def test_a_backward_adds_to_what_is_in_grad():
    runs, kept = [], []
    for graphs in (True, False):
        runs.append(run := Run("mlp", graphs, backward=True, micro_start=16).steps(6))
        gradients = []
        for _ in range(3):  # without an update
            run.step(run.batch)
            gradients.append([p.grad for p in run.model.parameters()])
        kept.append([g.cpu() for each in gradients for g in each])
    assert runs[0].replayed[-1] and same_bits(*kept)


@pytest.mark.parametrize("micro", (16, 8))
@pytest.mark.parametrize("every", (1, 3))
def test_gradients_that_the_step_does_not_clear_are_summed(micro, every):
    """Of parameters that another optimizer has, which steps after `every` batches."""
    sums = []
    for graphs in (True, False):
        model, batch, loss_fn = make("mlp")
        own, others = model.body[0].parameters(), list(model.body[3].parameters())
        step = rebatch.Step(
            model, torch.optim.SGD(own, 0.01), loss_fn, graphs=graphs, micro_start=micro
        )
        torch.manual_seed(1)
        found = []
        for i in range(12):
            step(tuple(t.roll(i, 0) for t in batch))
            found += [p.grad.clone() for p in others]
            if i % every == every - 1:
                for p in others:
                    p.grad = None
        assert step.report.replayed == 16 // micro * graphs
        sums.append(found)
    assert same_bits(*sums)


def test_a_divisor_of_another_kind_has_a_graph_of_its_own():
    """As of max(1, mask.sum())."""

    def loss_fn(model, samples):
        return ((model(samples[0]) - samples[1]) ** 2).sum()

    calls = models.Unseen(0)

    def normalizer(batch):
        calls[0] += 1
        return 2 if calls[0] % 2 else batch[1].new_tensor(4.0)

    run = both("mlp", 14, loss_fn=loss_fn, normalizer=normalizer)
    assert run.replayed[-2:] == [1, 1] and len(run.step._training.callbacks.graphs._held) == 2


@pytest.mark.parametrize("as_tensor", (False, True))
def test_a_sum_is_divided_as_without_graphs(as_tensor):
    def loss_fn(model, samples):
        return ((model(samples[0]) - samples[1]) ** 2).sum()

    def normalizer(batch):
        return batch[1].abs().sum() if as_tensor else 3.3

    run = both("mlp", 8, loss_fn=loss_fn, normalizer=normalizer, micro_start=4)
    assert run.replayed[-1] == 4


def test_another_loss_fn_is_captured_anew():
    """What is captured, and what is known of its passes, is of the one before."""
    runs = []
    for graphs in (True, False):
        runs.append(run := Run("mlp", graphs, micro_start=16).steps(6))
        run.step.loss_fn = lambda model, s: ((model(s[0]) - s[1]) ** 4).mean()
        run.steps(7)
    assert runs[0].replayed[5] and not runs[0].replayed[6] and runs[0].replayed[-1]
    assert same_bits(*(run.state() for run in runs))


def test_what_only_another_loss_fn_names_gets_its_gradient_once():
    found = []
    for graphs in (True, False):
        run = Run("mlp", graphs).steps(6)
        scale = torch.ones((), device=models.DEVICE, requires_grad=True)
        run.step.loss_fn = lambda model, s, t=scale: ((model(s[0]) * t - s[1]) ** 2).mean()
        for _ in range(8):
            run.steps(1)
            found.append(scale.grad)
            scale.grad = None
        assert bool(run.replayed[-1]) == graphs
    assert same_bits(found[:8], found[8:])


def test_outputs_are_copies():
    def loss_fn(model, samples):
        out = model(samples[0])
        loss = ((out - samples[1]) ** 2).mean()
        return loss, {"out": out, "mean": rebatch.Mean(out.detach().mean()), "list": list(out)}

    assert both("mlp", 9, loss_fn=loss_fn, micro_start=8).replayed[-1] == 2


class Recomputed(nn.Module):
    """Blocks with dropout, whose activations are computed again in the backward pass."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
        parts = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(3)]
        self.blocks, self.options = nn.ModuleList(parts), options

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, **self.options)
        return self.head(x)[:, 0]


@pytest.mark.parametrize("use_reentrant", (False, True))
@pytest.mark.parametrize("preserve_rng_state", (False, True))
def test_gradient_checkpointing(use_reentrant, preserve_rng_state):
    """With preserve_rng_state dropout draws in the second pass what it drew in the first one."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if preserve_rng_state and models.DEVICE.type != "cpu" and version < (2, 10):
        pytest.skip("PyTorch captures the generators' state since 2.10")
    options = dict(use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    runs = []
    for graphs in (True, False):
        model = Recomputed(**options)
        run = Run("mlp", graphs, model=model, micro_start=8, autocast=torch.bfloat16)
        runs.append(run.steps(9))
    assert runs[0].replayed[-1] == 2 and same_bits(*(run.state() for run in runs))


def test_a_level_of_lighten_is_captured_anew():
    runs = []
    for graphs in (True, False):
        model, _, _ = make("gpt")
        level = rebatch.checkpointing(model.block)
        run = Run("gpt", graphs, model=model, micro_start=8, lighten=[level]).steps(6)
        run.step.load_state_dict({**run.step.state_dict(), "lighten_level": 1})
        runs.append(run.steps(6))
        assert run.step.report.lighten_level == 1
    assert [runs[0].replayed[i] for i in (5, 6, -1)] == [2, 0, 2]
    assert same_bits(*(run.state() for run in runs))


@pytest.mark.parametrize("micro", (8, 6))
def test_a_compiled_model(micro):
    """It is not compiled once more in the capture, where samples lie elsewhere."""
    if models.DEVICE.type != "cpu" and not shutil.which("gcc"):
        pytest.skip("inductor needs a C compiler")
    inner = lookup_backend("aot_eager" if models.DEVICE.type == "cpu" else "inductor")

    def backend(*arguments):
        assert not Rerun.is_within
        return inner(*arguments)

    runs = []
    for graphs in (True, False):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = torch.compile(placed(models.Mlp()), backend=backend)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*graphs=True")
            runs.append(Run("mlp", graphs, model=model, micro_start=micro).steps(9))
    assert runs[0].replayed[-1] == -(-16 // micro) and same_bits(*(run.state() for run in runs))


@pytest.mark.parametrize("form", ("dict", "list", "nested"))
def test_batches_of_other_forms(form):
    def formed(batch):
        x, y = batch
        return {
            "dict": {"x": x, "y": y, "name": "a"},
            "list": [x, y],
            "nested": {"in": (x, 2.0), "out": {"y": y}},
        }[form]

    def loss_fn(model, s):
        x, y = {
            "dict": lambda: (s["x"], s["y"]),
            "list": lambda: s,
            "nested": lambda: (s["in"][0], s["out"]["y"]),
        }[form]()
        return ((model(x) - y) ** 2).mean()

    states = []
    for graphs in (True, False):
        model, batch, _ = make("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = rebatch.Step(model, optimizer, loss_fn, graphs=graphs, micro_start=8, growth=False)
        for i in range(8):
            step(formed(tuple(t.roll(i, 0) for t in batch)))
        states.append(state_of(model))
        assert step.report.replayed == 2 * graphs
    assert same_bits(*states)


def test_the_norm_of_an_earlier_step_is_not_that_of_gradients_replayed_since():
    run = Run("mlp", True).steps(EAGER_STEPS + 2)
    norm, report = run.step.report.grad_norm, run.steps(1).step.report
    assert norm > 0
    run.steps(1)
    with pytest.raises(ValueError, match="the gradients of the update are changed"):
        report.grad_norm  # noqa: B018


def test_a_changed_learning_rate_needs_no_other_graph():
    run = Run("mlp", True).steps(EAGER_STEPS + 1)
    made = Rerun.made
    for group in run.optimizer.param_groups:
        group["lr"] = 0.5
    run.steps(2)
    assert run.replayed[-1] == 1 and Rerun.made == made


# ---- memory ----


@pytest.mark.parametrize("graphs", (False, True))
def test_all_that_a_step_had_is_freed_with_it(graphs):
    gc.collect()
    gc.disable()
    try:
        run = Run("mlp", graphs).steps(EAGER_STEPS + 2)
        callbacks = weakref.ref(run.step._training.callbacks)
        del run.step
        assert callbacks() is None
    finally:
        gc.enable()


def test_an_eager_pass_has_the_memory_of_a_graph_that_is_dropped(monkeypatch):
    if models.DEVICE.type != "cpu":
        pytest.skip("the recorder of a CPU fails on request")
    passes, alive = models.Unseen(None), models.Unseen(0)

    def loss_fn(model, samples):
        if passes[0]:
            gc.collect()  # the recorder of this file has cycles
            alive[0] = passes[0]() is not None
        return ((model(samples[0]) - samples[1]) ** 2).mean()

    run = Run("mlp", True, loss_fn=loss_fn).steps(EAGER_STEPS + 1)
    (held,) = run.step._training.callbacks.graphs._held.values()
    passes[0] = weakref.ref(held)
    del held
    monkeypatch.setattr(Rerun, "is_short", True)
    run.steps(1)
    assert run.replayed[-1] == 0 and not alive[0]


def test_a_capture_that_is_interrupted_drops_the_graphs_beside_it(recorder):
    if models.DEVICE.type != "cpu":
        pytest.skip("the recorder of a CPU fails on request")
    run = Run("mlp", True, micro_start=12)
    for _ in range(EAGER_STEPS - 1):
        run.steps(1)
    run.steps(3, 12)
    assert run.replayed[-1] == 1
    recorder.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run.steps(5)
    assert run.step._training.callbacks.graphs._recorder is None
    run.steps(20)
    assert run.replayed[-1] == 2


def test_replays_of_an_attempt_that_ran_out_of_memory_do_not_count():
    fails = []

    def before_update():
        if fails:
            raise fails.pop()

    run = Run("mlp", True, micro_start=8, before_update=before_update).steps(EAGER_STEPS + 1)
    fails.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."))
    run.steps(1)
    assert run.replayed[-2:] == [2, 0] and run.step.report.ooms == 1


def test_a_parameter_that_has_grown_has_another_sum():
    model, batch, loss_fn = make("gpt")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = rebatch.Step(model, optimizer, loss_fn, graphs=True, micro_start=8)
    for _ in range(EAGER_STEPS + 2):
        step(batch)
    assert step.report.replayed == 2
    weight = model.embedding.weight
    weight.data = torch.cat([weight.data, weight.data[:1]])
    step(batch)
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("fail_at", (1, 4, 9, 14))
def test_an_oom_beside_the_graphs_drops_them_before_the_micro_batch_is_halved(fail_at):
    if models.DEVICE.type != "cpu" and fail_at > 4:
        pytest.skip("a replay has no operations, so this one is of the update")
    run, other = (Run("conv", graphs, micro_start=8, on_oom="fit") for graphs in (True, False))
    for each in (run, other):
        each.steps(6)
    with FailAt(fail_at), warnings.catch_warnings():  # BatchNorm
        warnings.simplefilter("ignore")
        run.step({0: run.batch}[0])
    assert run.step.report.micro in (4, 8)
    run.steps(30)
    assert run.replayed[-1] == 16 // run.step.report.micro


def test_a_step_whose_lent_memory_others_have_runs_without_graphs(monkeypatch):
    if models.DEVICE.type != "cpu":
        pytest.skip("the recorder of a CPU fails on request")
    run = Run("mlp", True).steps(EAGER_STEPS + 1)
    monkeypatch.setattr(Rerun, "is_short", True)
    run.steps(2)
    monkeypatch.setattr(Rerun, "is_short", False)
    run.steps(12)
    assert run.replayed[EAGER_STEPS : EAGER_STEPS + 3] == [1, 0, 0] and run.replayed[-1]
    other = Run("mlp", False).steps(EAGER_STEPS + 1).steps(2).steps(12)
    assert same_bits(run.state(), other.state())


def test_an_oom_while_capturing_leaves_the_step_eager_for_a_while(recorder):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    recorder.append(error)
    if models.DEVICE.type != "cpu":
        pytest.skip("the recorder of a CPU fails on request")
    run = both("mlp", 20, micro_start=8)
    assert run.replayed[EAGER_STEPS] == 0 and run.replayed[-1] == 2
    assert run.step.report.micro == 8


def test_an_evaluation_gets_the_memory_of_graphs_before_its_batch_is_cut():
    run = Run("gpt", True, micro_start=8).steps(EAGER_STEPS + 2)
    graphs, program = run.step._training.callbacks.graphs, run.step._training.program
    assert run.replayed[-1] and graphs._held

    def short(model, samples):
        if graphs._held:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return models.token_loss(model, samples)

    program.loss_fn = short
    run.step.evaluate(run.batch)
    report = run.step.evaluation_report
    assert report.ooms == 1 and not graphs._held
    # Of a CPU it is not known whether the memory is there now.
    assert report.micro == (8 if models.DEVICE.type == "cpu" else 16)


# ---- a capture ----


@pytest.fixture
def own_recorder(monkeypatch):
    """makes CUDA's Recorder, of a CUDA that does nothing."""
    if models.DEVICE.type != "cpu":
        pytest.skip("replaces what a GPU has")
    for name in ("torch", "clear_cublas_workspaces", "get_device_index", "end_allocating"):
        monkeypatch.setattr(recorder_module, name, unittest.mock.MagicMock())
    recorder_module.torch.__version__ = "2.14"
    monkeypatch.setattr(private, "_REGISTERS", True)  # as before PyTorch 2.15
    return recorder_module.Recorder


def test_captures_of_two_threads_come_one_after_another(own_recorder):
    inside, seen = [], []

    def body():
        inside.append(1)
        time.sleep(0.02)
        seen.append(len(inside))
        inside.pop()

    threads = [threading.Thread(target=own_recorder(i).record, args=(body,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("is_old", (True, False))
def test_beside_another_thread_that_trains_an_old_pytorch_captures_nothing(
    own_recorder, monkeypatch, is_old
):
    """Its random numbers would fail."""
    monkeypatch.setattr(private, "_REGISTERS", is_old)
    device, ends, began = torch.device("cpu"), threading.Event(), threading.Event()
    sessions = nn.Identity(), nn.Identity()

    def train():
        threads_module.note(sessions[0], device)
        began.set()
        ends.wait()

    thread = threading.Thread(target=train)
    thread.start()
    began.wait()
    threads_module.note(sessions[1], device)  # of this thread
    own_recorder("cuda:1").record(int)  # where nobody else trains
    refusing = pytest.raises(NotCapturedError, match="another thread trains on cpu")
    try:
        with refusing if is_old else contextlib.nullcontext():
            own_recorder(device).record(int)
    finally:
        ends.set()
        thread.join()
    own_recorder(device).record(int)


def test_a_generator_of_the_program_is_one_of_the_graph(own_recorder):
    generator = unittest.mock.MagicMock()
    recorder = own_recorder("cuda:0", [generator])
    recorder.record(int)
    graph = recorder_module.torch.cuda.CUDAGraph()
    assert [name for name, *_ in graph.mock_calls][:2] == [
        "register_generator_state",
        "capture_begin",
    ]
    graph.register_generator_state.assert_called_once_with(generator)
    graph.capture_end.side_effect = RuntimeError("invalidated")
    with pytest.raises(RuntimeError, match="invalidated"):
        recorder.record(int)
    generator.graphsafe_set_state.assert_called_once_with(generator.clone_state())


def test_generators_of_the_device_are_those_of_a_graph(monkeypatch):
    made = unittest.mock.MagicMock()
    monkeypatch.setattr(recorder_module, "Recorder", made)
    generators = [torch.Generator("cpu"), random.Random(0)]
    recorder_module.recorder_of(torch.device("cpu"), generators)
    recorder_module.recorder_of(torch.device("meta"), generators)
    assert [call.args[1] for call in made.mock_calls] == [generators[:1], []]
