"""CUDA graphs of torch.compile(mode="reduce-overhead"), whose results the next run overwrites."""

import pytest
import torch

from conftest import load_standin
from test_install import run, said

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
SCRIPT = (
    "import copy\n"
    "from rebatch.torch import Step\n"
    "from torch import nn\n"
    "eager = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).cuda()\n"
    "model = copy.deepcopy(eager)\n"
    "graphs = torch.compile(model, backend='cudagraphs')\n"
    "def loss_fn(model, samples):\n"
    "    if len(samples[0]) > 16:\n"
    "        raise torch.OutOfMemoryError('CUDA out of memory.')\n"
    "    return model(samples[0]).square().mean()\n"
    "def train(way, parameters):\n"
    "    optimizer = torch.optim.SGD(parameters, lr=0.1)\n"
    "    step = Step(way, optimizer, loss_fn, gradients=GRADIENTS, log_level='quiet')\n"
    "    torch.manual_seed(1)\n"
    "    for _ in range(4):\n"
    "        step((torch.randn(32, 64, device='cuda'),))\n"
    "    assert step.report.microbatches == 2\n"
    "train(eager, eager.parameters())\n"
    "train(graphs, model.parameters())\n"
)
WITHIN = (
    "from rebatch.torch.graphs.recorder import Recorder\n"
    "recorder, pool = Recorder(torch.device('cuda', 0)), torch.cuda.MemPool()\n"
    "recorder._pool = pool.id  # as of a graph that is held\n"
    "weight = torch.zeros(256, 256, device='cuda', requires_grad=True)\n"
    "def body():\n"
    "    x = torch.empty(4096, 256, device='cuda')\n"
    "    ((x @ weight).relu() @ weight).sum().backward()\n"
    "    gradient, weight.grad = weight.grad, None\n"
    "    return gradient\n"
    "held = []\n"
    "for _ in range(3):\n"
    "    recorder.within(body)\n"
    "    torch.cuda.empty_cache()\n"
    "    held.append(torch.cuda.memory_reserved())\n"
    "gradient = recorder.within(body)\n"
    "(place,) = [s for s in torch.cuda.memory_snapshot()\n"
    "    if s['address'] <= gradient.data_ptr() < s['address'] + s['total_size']]\n"
    "assert len(set(held)) == 1 and place['segment_pool_id'] == pool.id\n"
    "print('same')\n"
)
SAME_RESULT = (
    "for p, q in zip(eager.parameters(), model.parameters()):\n"
    "    assert torch.allclose(p, q, rtol=1e-3, atol=1e-5)\n"
)


@pytest.mark.parametrize("gradients", ["fresh", "inplace"])
@pytest.mark.parametrize("install", ["", "rebatch.install()\n"], ids=["native", "installed"])
def test_gradients_of_graphs_are_accumulated(install, gradients):
    script = install + SCRIPT.replace("GRADIENTS", repr(gradients))
    if load_standin() is None:  # which replays nothing
        script += SAME_RESULT
    result = run(script)
    assert result.returncode == 0, result.stdout + result.stderr


DRAWS = """
from rebatch.torch.graphs.recorder import recorder_of
own = torch.Generator("cuda").manual_seed(3)
tensor = torch.ones(8, device="cuda")
def draw():
    return torch.randn(8, device="cuda", generator=own), torch.rand(8, device="cuda")
def fail():
    draw()
    FAIL
def offsets():
    return own.get_offset(), torch.cuda.default_generators[0].get_offset()
for _ in range(2):
    recorder = recorder_of(tensor.device, [own])
    try:
        recorder.record(fail)
    except RuntimeError:
        print("failed", *offsets())
    del recorder
    draw()
recorder = recorder_of(tensor.device, [own])
graphs = [recorder.record(draw) for _ in range(2)]
print(*offsets())
for graph in 2 * graphs:
    graph.replay()
    print(*offsets())
"""


def test_a_generator_without_an_index_draws_on_each_device():
    script = (
        "from rebatch.torch.graphs.recorder import recorder_of\n"
        "generators = [torch.Generator(name) for name in ('cuda', 'cpu', 'cuda:0')]\n"
        "recorder = recorder_of(torch.device('cuda:0'), generators)\n"
        "print([generators.index(each) for each in recorder._generators])\n"
    )
    assert said(run(script)) == "[0, 2]\n"


@pytest.mark.parametrize("given, names", (("", "['own']"), ("generators=[own]", "[]")))
def test_a_generator_on_the_gpu_is_to_be_given(given, names):
    """A replay moves it on, and so do the passes that prove a graph, which put back what is."""
    script = (
        "import rebatch.torch as rebatch\n"
        "from rebatch.torch.graphs.changes import Changes\n"
        "model, own = torch.nn.Linear(4, 4).cuda(), torch.Generator('cuda')\n"
        "def loss_fn(model, x):\n"
        "    return model(x + torch.rand(4, generator=own, device='cuda')).mean()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        f"step = rebatch.Step(model, optimizer, loss_fn, {given})\n"
        "changes = Changes(step._training.running)\n"
        "for _ in range(4):\n"
        "    changes.before(list(model.parameters()))\n"
        "    loss_fn(model, torch.ones(2, 4, device='cuda')).backward()\n"
        "    changes.after()\n"
        "print(changes.names())\n"
    )
    assert said(run(script)) == f"{names}\n"


# The stand-in captures what waits, too.
END = (
    "import ctypes\n"
    "    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)\n"
    "    ctypes.CDLL(None).cudaStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))\n"
    "    raise RuntimeError"
)


@pytest.mark.parametrize("install", ["", "rebatch.install()\n"], ids=["native", "installed"])
def test_replays_move_generators_on_also_after_a_capture_that_failed(install):
    """And nothing is said on stderr."""
    fail = "tensor.sum().item()" if load_standin() is None else END
    lines = said(run(install + DRAWS.replace("FAIL", fail))).splitlines()
    assert lines == ["failed 0 0", "failed 4 4", "8 8", "12 12", "16 16", "20 20", "24 24"]


def test_passes_within_the_memory_of_graphs_need_no_other():
    """Also autograd's, of another thread."""
    assert "same" in said(run(WITHIN))


CHECKPOINT = """
from torch import nn
from torch.utils.checkpoint import checkpoint
from rebatch.torch.graphs.recorder import Recorder
device = torch.device("cuda", 0)
blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(device) for _ in range(3)]
def offset():
    return torch.cuda.default_generators[0].get_offset()
for use_reentrant in (False, True):
    def body():
        x = torch.ones(32, 64, device=device, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        x.sum().backward()
    begin = offset()
    body()
    eager = offset() - begin
    graph = Recorder(device).record(body)
    for _ in range(2):
        begin = offset()
        graph.replay()
        print(eager == offset() - begin > 0)
"""


@pytest.mark.skipif(VERSION < (2, 10), reason="PyTorch captures no state of a generator")
def test_a_pass_that_is_recomputed_in_a_capture_moves_generators_as_an_eager_one():
    assert said(run(CHECKPOINT)).split() == ["True"] * 4


RESERVED = """
from torch import nn
from rebatch.torch import Step
blocks = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
model, x = nn.Sequential(*blocks).cuda(), torch.ones(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
loss_fn = lambda model, samples: model(samples[0]).square().mean()
options = dict(micro_start=256, growth=False, log_level="quiet")
step = Step(model, optimizer, loss_fn, graphs=graphs, **options)
for _ in range(14):
    step((x,))
print(step.report.replayed, torch.cuda.max_memory_reserved())
"""


@pytest.mark.parametrize("install", ["", "rebatch.install()\n"], ids=["native", "installed"])
def test_graphs_need_no_more_memory_than_passes_without_them(install):
    """Each in a process of its own: what a second training reserves depends on the first. As on a
    GPU, work is done late, else the pool's choice between equal places is by chance."""
    lines = [
        said(run(f"{install}graphs = {graphs}{RESERVED}", STANDIN_LATE="1"))
        for graphs in (True, False)
    ]
    (replayed, graphs), (_, eager) = (map(int, line.split()) for line in lines)
    assert replayed == 4 and graphs <= 1.05 * eager


def test_what_a_capture_sets_aside_is_counted_beside_workspaces_that_it_gives_back():
    """The plans of eager passes are dropped with it, whose memory would be there twice."""
    program = (
        RESERVED
        + """
from rebatch.torch.graphs import recorder
from rebatch.torch.graphs.graphs import Graphs
workspaces = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda")]  # more than gradients
recorder.clear_cublas_workspaces = workspaces.clear
set_aside, run = [], Graphs.run
def noted(graphs, *arguments):
    result = run(graphs, *arguments)
    set_aside.append(graphs.new_bytes)
    return result
Graphs.run = noted
step = Step(model, optimizer, loss_fn, graphs=True, **options)
for _ in range(10):
    step((x,))
gradients = sum(p.numel() * p.element_size() for p in model.parameters())
print(sum(map(bool, set_aside)), max(set_aside) >= gradients)
"""
    )
    assert said(run("graphs = False" + program)).splitlines()[-1] == "1 True"
