"""CUDA graphs of torch.compile(mode="reduce-overhead"), whose results the next run overwrites."""

import pytest

from conftest import load_standin
from test_install import run

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
