"""Arenas under install(): graphs captured in them, lent between replays, claimed before the next.
The stand-in replays nothing: there addresses and memory are looked at, on a GPU the bits too."""

import pytest

from conftest import load_standin
from test_install import child, compiled, run  # noqa: F401, compiled is a fixture

BEGIN = (
    "from rebatch.torch.allocator.arenas import Arena\n"
    "rebatch.install()\n"
    "x = torch.zeros(MIB, device='cuda')\n"
    "def used():\n"
    "    stats = arena.stats()\n"
    "    return stats['bytes'] // MIB, stats['live_bytes'] // MIB, stats['taken_bytes'] // MIB\n"
    "def capture(mib, pool):\n"
    "    graph = torch.cuda.CUDAGraph()\n"
    "    with torch.cuda.graph(graph, pool=pool):\n"
    "        activations = tensor(mib * MIB)\n"
    "        kept = tensor(8 * MIB)\n"
    "        address = activations.data_ptr()\n"
    "        kept.zero_()\n"  # PyTorch warns of a graph without work
    "        del activations\n"
    "    return graph, kept, address\n"
    "arena = Arena()\n"
)


def test_a_capture_is_served_by_its_arena():
    script = BEGIN + (
        "native = torch.cuda.memory_reserved() - rebatch.stats()['reserved_bytes']\n"
        "first = capture(64, arena.id)\n"
        "print(*used())\n"
        "second = capture(32, arena.id)\n"  # in what the first one has free
        "print(*used(), first[2] <= second[2] < first[2] + 64 * MIB)\n"
        "print(torch.cuda.memory_reserved() - rebatch.stats()['reserved_bytes'] - native)\n"
        "third = capture(64, None)\n"  # of no arena
        "print(*used())\n"
    )
    lines = child(script).splitlines()
    assert lines == ["72 8 0", "72 16 0 True", "0", "72 16 0"]


def test_what_is_lent_serves_others_and_comes_back():
    script = BEGIN + (
        "graph, kept, address = capture(256, arena.id)\n"
        "limit = rebatch.stats()['reserved_bytes'] + 64 * MIB\n"
        "rebatch.install(limit=limit)\n"
        "def evaluate():\n"
        "    try:\n"
        "        return tensor(200 * MIB)\n"
        "    except torch.OutOfMemoryError:\n"
        "        return None\n"
        "print(evaluate() is None)\n"
        "arena.lend()\n"
        "evaluation = evaluate()\n"
        "print(evaluation is None, arena.claim(), used()[2] >= 136)\n"
        "del evaluation\n"
        "print(arena.claim(), *used(), evaluate() is None)\n"
        "arena.lend()\n"
        "rebatch.install(limit=100 * MIB)\n"
        "print(rebatch.stats()['reserved_bytes'] <= 100 * MIB, arena.claim())\n"
        "rebatch.install(limit=limit)\n"
        "print(arena.claim(), *used())\n"
    )
    assert child(script).splitlines() == [
        "True",
        "False False True",
        "True 264 8 0 True",
        "True False",
        "True 264 8 0",
    ]


def test_an_oom_within_a_capture_is_pytorchs():
    script = BEGIN + (
        "rebatch.install(limit=rebatch.stats()['reserved_bytes'] + 64 * MIB)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "try:\n"
        "    with torch.cuda.graph(graph, pool=arena.id):\n"
        "        x.zero_()\n"  # PyTorch warns of a graph without work
        "        tensor(128 * MIB)\n"
        "except torch.OutOfMemoryError:\n"
        "    print('oom')\n"
        "print(*used())\n"
        "arena.drop()\n"
        "del graph\n"
        "tensor(32 * MIB)\n"
        "arena = Arena()\n"
        "kept = capture(32, arena.id)\n"
        "print(*used())\n"
    )
    assert child(script).splitlines() == ["oom", "0 0 0", "40 8 0"]


def test_a_capture_that_failed_is_ended_with_its_arena():
    script = BEGIN + (
        "graph = torch.cuda.CUDAGraph()\n"
        "stream = torch.cuda.Stream()\n"
        "with torch.cuda.stream(stream):\n"
        "    graph.capture_begin(pool=arena.id)\n"
        "    lost = tensor(16 * MIB)\n"
        "print(*used())\n"
        "if END:\n"  # the stream's, but not PyTorch's
        "    import ctypes\n"
        "    runtime, out = ctypes.CDLL(None), ctypes.c_void_p()\n"
        "    end = runtime.cudaStreamEndCapture\n"
        "    end(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(out))\n"
        "arena.drop()\n"
        "kept = tensor(16 * MIB)\n"  # asks no filter of the graph any more
        "del lost\n"
        "torch.cuda.empty_cache()\n"
        "print(rebatch.stats()['live_bytes'] // MIB)\n"
    )
    for end in "False", "True":
        if end == "True" and load_standin() is None:
            continue
        result = run(script.replace("END", end))
        assert result.stdout.splitlines() == ["16 16 0", "20"], result.stderr


def test_tensors_outlive_their_arena():
    script = BEGIN + (
        "graph, kept, address = capture(64, arena.id)\n"
        "arena.lend()\n"
        "del graph\n"
        "arena.drop()\n"
        "arena.drop()\n"
        "kept.fill_(3)\n"
        "torch.cuda.synchronize()\n"
        "torch.cuda.empty_cache()\n"
        "stats = rebatch.stats()\n"
        "print(stats['live_bytes'] // MIB, stats['reserved_bytes'] < 20 * MIB)\n"
        "del kept\n"
        "torch.cuda.synchronize()\n"
        "torch.cuda.empty_cache()\n"
        "print(rebatch.stats()['live_bytes'] // MIB)\n"
    )
    assert child(script).splitlines() == ["12 True", "4"]


def test_without_install_it_says_what_is_missing():
    result = run("from rebatch.torch.allocator.arenas import Arena\nArena()\n")
    assert result.returncode != 0
    assert "call rebatch.torch.install() first" in result.stderr


# ---- what replays compute ----

TRAINING = (
    "from rebatch.torch.allocator.arenas import Arena\n"
    "rebatch.install()\n"
    "from torch import nn\n"
    "torch.manual_seed(1)\n"
    "layers = [m for _ in range(12) for m in (nn.Linear(1024, 1024), nn.GELU(), nn.Dropout(0.1))]\n"
    "model = nn.Sequential(*layers).cuda()\n"
    "static, weight = torch.zeros(8192, 1024, device='cuda'), torch.ones((), device='cuda')\n"
    "batches = [torch.randn(8192, 1024, device='cuda') for _ in range(6)]\n"
    "def micro():\n"
    "    loss = model(static).square().mean() * weight\n"
    "    return loss, torch.autograd.grad(loss, list(model.parameters()))\n"
    "side = torch.cuda.Stream()\n"
    "with torch.cuda.stream(side):\n"
    "    for _ in range(3):\n"
    "        micro()\n"
    "torch.cuda.synchronize()\n"
    "def capture(pool):\n"
    "    graph = torch.cuda.CUDAGraph()\n"
    "    with torch.cuda.graph(graph, pool=pool):\n"
    "        loss, grads = micro()\n"
    "    return graph, [loss.detach(), *grads]\n"
    "copies = [[torch.zeros_like(t) for t in (weight, *model.parameters())] for _ in batches]\n"
    "def run(graph, results, between):\n"
    "    torch.cuda.manual_seed(5)\n"
    "    for batch, copy in zip(batches, copies):\n"  # allocates nothing
    "        static.copy_(batch)\n"
    "        graph.replay()\n"
    "        for to, result in zip(copy, results):\n"
    "            to.copy_(result)\n"
    "        between()\n"
    "    torch.cuda.synchronize()\n"
    "    return [t.cpu() for each in copies for t in each]\n"
    "def same(a, b):\n"
    "    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b))\n"
    "graph, results = capture(None)\n"
    "expected = run(graph, results, lambda: None)\n"
    "del graph, results\n"
    "gc.collect()\n"
    "torch.cuda.empty_cache()\n"
    "arena = Arena()\n"
    "graph, results = capture(arena.id)\n"
    "size = arena.stats()['bytes']\n"
)


@pytest.fixture
def gpu():
    if load_standin() is not None:
        pytest.skip("needs a GPU: the stand-in replays nothing")


def test_replays_in_an_arena_have_the_bits_of_others(gpu):
    script = TRAINING + "print(same(run(graph, results, lambda: None), expected))\n"
    assert child(script).split() == ["True"]


def test_an_arena_that_was_lent_between_replays_has_the_same_bits(gpu):
    script = TRAINING + (
        "taken = []\n"
        "rebatch.install(limit=rebatch.stats()['reserved_bytes'] + size // 8)\n"
        "def evaluate():\n"
        "    arena.lend()\n"
        "    block = tensor(size // 2).fill_(255)\n"  # also while the replay still runs
        "    taken.append(arena.stats()['taken_bytes'])\n"
        "    assert not arena.claim()\n"
        "    del block\n"
        "    assert arena.claim()\n"
        "print(same(run(graph, results, evaluate), expected), min(taken) > size // 4)\n"
        "print(arena.stats()['taken_total_bytes'] >= 6 * (size // 4))\n"
    )
    assert child(script).split() == ["True", "True", "True"]


def test_a_limit_below_the_arena_holds_until_it_is_raised(gpu):
    script = TRAINING + (
        "before = rebatch.stats()['reserved_bytes']\n"
        "def lower():\n"
        "    arena.lend()\n"
        "    rebatch.install(limit=before - size // 2)\n"
        "    assert rebatch.stats()['reserved_bytes'] <= before - size // 2\n"
        "    assert not arena.claim()\n"
        "    update = tensor(size // 8).fill_(255)\n"
        "    del update\n"
        "    rebatch.install(limit=0)\n"
        "    assert arena.claim()\n"
        "print(same(run(graph, results, lower), expected))\n"
    )
    assert child(script).split() == ["True"]


def test_two_graphs_share_an_arena(gpu):
    script = TRAINING + (
        "other, others = capture(arena.id)\n"
        "print(arena.stats()['bytes'] < 1.5 * size)\n"
        "def between():\n"
        "    arena.lend()\n"
        "    tensor(size // 2).fill_(255)\n"
        "    assert arena.claim()\n"
        "    state = torch.cuda.get_rng_state()\n"
        "    other.replay()\n"
        "    torch.cuda.set_rng_state(state)\n"
        "print(same(run(graph, results, between), expected))\n"
    )
    assert child(script).split() == ["True", "True"]
