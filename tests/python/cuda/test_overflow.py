"""Updates that the GPU has no memory for, under install(): the host's serves them, where the driver
can map it, in a loop of the user's own and in a Step."""

import pytest

from conftest import complaints
from test_install import child, compiled, run  # noqa: F401, compiled is a fixture

HOST = str(8 << 30)  # of the stand-in
MIB = 1 << 20

# What cuBLAS keeps from the first products on, forwards and backwards, lies beside what is limited.
BEGIN = (
    "rebatch.install()\n"
    "x = torch.zeros(64, 1024, device='cuda')\n"
    "def warm_up():\n"
    "    model = torch.nn.Linear(1024, 1024, bias=False).cuda()\n"
    "    model(x).square().mean().backward()\n"
    "warm_up()\n"
    "gc.collect()\n"
    "torch.cuda.synchronize()\n"
    "torch.cuda.empty_cache()\n"
    "kept = torch.cuda.memory_reserved()\n"
    "def limit(mib):\n"
    "    rebatch.install(limit=kept + mib * MIB)\n"
)
# Parameters of 64 MiB; with gradients and the two moments of AdamW 256 MiB.
UNLIMITED = BEGIN + (
    "from torch import nn\n"
    "layers = [nn.Linear(1024, 1024, bias=False) for _ in range(16)]\n"
    "model = nn.Sequential(*layers).cuda()\n"
    "optimizer = torch.optim.AdamW(model.parameters(), foreach=False)\n"
)
MODEL = UNLIMITED + "limit(200)\n"
PLAIN = MODEL + (
    "def train():\n"
    "    optimizer.zero_grad()\n"
    "    model(x).square().mean().backward()\n"
    "    optimizer.step()\n"
)
MAKE_STEP = (
    "from rebatch.torch import Step\n"
    "events = []\n"
    "loss_fn = lambda m, s: m(s[0]).square().mean()\n"
    "step = Step(model, optimizer, loss_fn, on_event=lambda t, _: events.append(t))\n"
)
STEP = MODEL + MAKE_STEP


@pytest.fixture(scope="module", autouse=True)
def host_memory(compiled):  # noqa: F811
    """Skips where the driver cannot map the host's memory beside the GPU's."""
    script = (
        "from rebatch import _library\n"
        "rebatch.install()\n"
        "x = tensor(MIB)\n"
        "print(_library.lib.rebatch_pool_overflow_room(rebatch.pool(x.device)))\n"
    )
    if int(child(script, STANDIN_HOST=HOST)) == 0:
        pytest.skip("the driver cannot map memory of the host beside the GPU's")


def test_a_first_step_of_adamw_in_a_plain_loop_takes_host_memory():
    script = PLAIN + (
        "train()\n"
        "stats = rebatch.stats()\n"
        "gpu = stats['reserved_bytes'] - stats['overflow_bytes'] - kept\n"
        "print(stats['overflow_total_bytes'] >> 20, gpu >> 20, len(optimizer.state))\n"
    )
    taken, gpu, kept = map(int, child(script, STANDIN_HOST=HOST).split())
    assert 56 <= taken <= 80 and gpu <= 200 and kept == 16


# Optimizers beside one another, one that calls another's step, and one that calls its own class's.
HALVES = (
    "class Wrapper(torch.optim.Optimizer):\n"
    "    def __init__(self, inner):\n"
    "        self.inner, self.slow = inner, []\n"
    "        super().__init__(inner.param_groups, {})\n"
    "    def step(self):\n"
    "        self.inner.step()\n"
    "        self.slow = [p.detach().clone() for g in self.param_groups for p in g['params']]\n"
    "class Subclass(torch.optim.AdamW):\n"
    "    def step(self):\n"
    "        super().step()\n"
    "        self.slow = [p.detach().clone() for g in self.param_groups for p in g['params']]\n"
    "class Raises(torch.optim.AdamW):\n"
    "    def step(self):\n"
    "        raise ValueError\n"
    "held = []\n"
    "def adam(kind, layers):\n"
    "    held.append(kind([p for l in layers for p in l.parameters()], foreach=False))\n"
    "    return held[-1]\n"
    "model(x).square().mean().backward()\n"
)


@pytest.mark.parametrize(
    "update",
    [
        "for half in (layers[:8], layers[8:]): adam(torch.optim.AdamW, half).step()",
        "held = [Wrapper(optimizer)]\nheld[0].step()",
        "adam(Subclass, layers).step()",
        "try: adam(Raises, layers[:8]).step()\n"
        "except ValueError: pass\n"
        "for half in (layers[:8], layers[8:]): adam(torch.optim.AdamW, half).step()",
    ],
    ids=["two optimizers", "a wrapper", "a subclass", "after one that raised"],
)
def test_an_update_is_served_however_many_optimizers_make_it(update):
    taken = child(
        MODEL
        + HALVES
        + update
        + "\nprint(rebatch.stats()['overflow_total_bytes'] >> 20)\n"
        + "try: torch.empty(300 << 20, dtype=torch.uint8, device='cuda')\n"  # it has ended
        + "except torch.OutOfMemoryError: pass\n"
        + "else: raise AssertionError('a forward pass is served too')\n",
        STANDIN_HOST=HOST,
    )
    assert int(taken) >= 56


def test_what_was_freed_makes_room_for_it():
    script = PLAIN + (
        "train()\n"
        "before = [s['exp_avg'].data_ptr() for s in optimizer.state.values()]\n"
        "limit(320)\n"
        "train()\n"
        "after = [s['exp_avg'].data_ptr() for s in optimizer.state.values()]\n"
        "print(rebatch.stats()['overflow_bytes'], before == after)\n"
    )
    assert child(script, STANDIN_HOST=HOST).split() == ["0", "True"]


def test_without_host_memory_the_step_of_a_plain_loop_fails(standin):
    result = run(PLAIN + "train()\n")
    assert result.returncode != 0 and "out of memory" in complaints(result.stderr)


def test_a_forward_pass_takes_none():
    script = PLAIN + "train()\ntorch.empty(300 << 20, dtype=torch.uint8, device='cuda')\n"
    result = run(script, STANDIN_HOST=HOST)
    assert result.returncode != 0 and "out of memory" in complaints(result.stderr)


def test_nor_does_a_closure_within_a_step():
    script = PLAIN + (
        "try:\n"
        "    optimizer.step(lambda: torch.empty(300 << 20, dtype=torch.uint8, device='cuda'))\n"
        "except torch.OutOfMemoryError:\n"
        "    print('failed')\n"
    )
    assert child(script, STANDIN_HOST=HOST).strip() == "failed"


def test_a_steps_first_update_takes_host_memory_and_says_so():
    script = STEP + (
        "step((x,))\n"
        "assert not step.report.torn and step.report.overflow_bytes > 50 << 20, step.report\n"
        "print(*events)\n"
    )
    assert "the update took host memory" in child(script, STANDIN_HOST=HOST)


def test_an_oom_at_any_allocation_of_an_update_tears_none(standin):
    """From the n-th allocation of GPU memory on, all fail."""
    script = (
        UNLIMITED
        + MAKE_STEP
        + (
            "import ctypes, sys\n"
            "standin = ctypes.CDLL('libcuda.so.1')\n"
            "apply = step._training.program.update.apply\n"
            "def failing():\n"
            "    torch.cuda.empty_cache()\n"
            "    standin.standin_fail_from(ctypes.c_size_t(at))\n"
            "    try:\n"
            "        apply()\n"
            "    finally:\n"
            "        standin.standin_fail_from(ctypes.c_size_t(0))\n"
            "step._training.program.update.apply = failing\n"
            "step._training.program.update.first_bytes = lambda: 0\n"
            "taken = 0\n"
            "for at in range(1, 12):\n"
            "    optimizer.state.clear()\n"
            "    step((x,))\n"
            "    assert not step.report.torn\n"
            "    taken += step.report.overflow_bytes > 0\n"
            "print(taken)\n"
        )
    )
    assert int(child(script, STANDIN_HOST=HOST)) > 3
