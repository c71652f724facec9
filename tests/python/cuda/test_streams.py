"""A side stream reads a tensor without record_stream(), as PyTorch allows where the tensor's own
stream waits for it: no memory leaves that stream before the GPU is done with all it had.

On a GPU values are compared; on the stand-in, whose kernels do nothing, addresses and the order of
calls: its work is under way until the host waits (STANDIN_LATE)."""

import pytest
from test_install import run

# reading(n): a tensor of the current stream that is freed while another stream reads it: where it
# was, and a function that ends the reading and tells whether the values were whole.
SIDE = """
import ctypes, torch, rebatch.torch as rebatch
rebatch.install({options})
side, other = torch.cuda.Stream(), torch.cuda.Stream()
standin = getattr(ctypes.CDLL('libcuda.so.1'), 'standin_early_unmaps', None)

def reading(n):
    x = torch.ones(n, device='cuda')
    torch.cuda.synchronize()
    if standin:
        standin(True)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        total = x.sum()  # exact: at most 2 ** 24 ones
    def is_whole():
        torch.cuda.synchronize()
        assert not standin or standin(False) == 0, 'memory was unmapped before a wait'
        return standin or total.item() == n
    return x.data_ptr(), is_whole

def overwrite(n, stream):
    with torch.cuda.stream(stream):
        z = torch.empty(n, device='cuda')
        z.fill_(-1)
    return z

MIB = (1 << 20) // 4
"""


def run_side(script, options=""):
    done = run(SIDE.format(options=options) + script, STANDIN_LATE="1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_stream_does_not_get_what_is_read():
    run_side(
        "for _ in range(20):\n"
        "    where, is_whole = reading(64 * MIB)\n"
        "    z = overwrite(64 * MIB, other)\n"
        "    assert not standin or z.data_ptr() != where\n"
        "    assert is_whole()\n"
        "    del z\n"
    )


def test_its_own_stream_gets_it_at_once():
    run_side(
        "where, is_whole = reading(64 * MIB)\n"
        "torch.cuda.current_stream().wait_stream(side)\n"
        "z = torch.empty(64 * MIB, device='cuda').fill_(-1)\n"
        "assert z.data_ptr() == where and is_whole()\n"
    )


@pytest.mark.parametrize(
    "act",
    [
        "torch.cuda.empty_cache()",
        "rebatch.install(limit='64MiB')",
        "torch.cuda.memory.set_per_process_memory_fraction(0.001)",
        # 120 MiB, where 106 are left: pages of the block that is read must move.
        "z = overwrite(120 * MIB, torch.cuda.current_stream())",
        "z = overwrite(120 * MIB, other)",
    ],
)
def test_pages_are_unmapped_and_moved_when_it_was_read(act):
    run_side(
        "keep = [torch.empty(2 * MIB, device='cuda')]\n"
        "where, is_whole = reading(60 * MIB)\n"
        "keep.append(torch.empty(2 * MIB, device='cuda'))\n"
        f"{act}\n"
        "assert is_whole()\n",
        "limit='170MiB'",
    )


def test_an_oom_within_a_step_takes_nothing_that_is_read():
    """The attempt's tensors are freed when it fails, and the samples run again at once."""
    run_side(
        "model = torch.nn.Linear(64, 64, bias=False).cuda()\n"
        "ends = []\n"
        "def loss_fn(model, x):\n"
        "    ends.append(reading(len(x) * 4 * MIB)[1])\n"
        "    torch.cuda.current_stream().wait_stream(side)\n"
        "    scratch = torch.empty(len(x) * 12 * MIB, device='cuda').fill_(-1)\n"
        "    return model(x).square().mean()\n"
        "step = rebatch.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn)\n"
        "step(torch.ones(16, 64, device='cuda'))\n"
        "assert step.micro < 16\n"
        "assert all(is_whole() for is_whole in ends[-1:])\n",
        "limit='200MiB'",
    )


def test_while_a_graph_is_captured_nothing_waits_and_nothing_leaves_its_stream():
    run_side(
        "import threading\n"
        "static = torch.ones(8, device='cuda')\n"
        "x = torch.ones(60 * MIB, device='cuda')\n"
        "y = torch.empty_like(x)\n"
        "torch.mul(x, 2, out=y)\n"
        "got = []\n"
        "def free_and_allocate():\n"
        "    global x\n"
        "    where = x.data_ptr()\n"
        "    with torch.cuda.stream(side):\n"
        "        torch.cuda._sleep(50_000_000)\n"
        "        torch.mul(x, 2, out=y)\n"
        "    del x\n"
        "    got.append(overwrite(60 * MIB, other))\n"
        "    assert not standin or got[0].data_ptr() != where\n"
        "    got.append(where)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph, capture_error_mode='thread_local'):\n"
        "    static.mul_(2)\n"
        "    thread = threading.Thread(target=free_and_allocate)\n"
        "    thread.start(); thread.join()\n"
        "graph.replay()\n"
        "torch.cuda.synchronize()\n"
        "assert len(got) == 2\n"
        "assert standin or bool((y == 2).all()) and static.tolist() == [2.0] * 8\n"
    )
