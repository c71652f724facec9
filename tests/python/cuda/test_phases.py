"""A training loop of the user's own, without Step: its phases are marked, and planned."""

import pytest
from test_install import child, run

MEMORY = str(32 << 30)  # of the stand-in

TRAINING = (
    "rebatch.install()\n"
    "from torch import nn\n"
    "widths = [256, 4096, 512, 4096, 1024, 4096, 256, 16384]\n"
    "layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.GELU())]\n"
    "model = nn.Sequential(*layers).cuda()\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n"
    "x = torch.zeros(65536, 256, device='cuda')\n"
    "def train(steps):\n"
    "    for _ in range(steps):\n"
    "        optimizer.zero_grad()\n"
    "        for part in x.split(20000):\n"
    "            scores = model(part).float()\n"
    "            torch.nn.functional.cross_entropy(scores, part[:, 0].long()).backward()\n"
    "        optimizer.step()\n"
)


def test_a_plain_loop_holds_little_more_than_it_uses():
    """On a GPU that is behind its host, whose memory cannot be moved while it works."""
    script = TRAINING + (
        "train(20)\n"
        "stats = rebatch.stats()\n"
        "print(stats['reserved_bytes'] / stats['live_peak_bytes'])\n"
    )
    assert float(child(script, STANDIN_LATE="1", STANDIN_MEMORY=MEMORY)) < 1.15


def test_each_optimizer_ends_phases_of_a_kind_and_a_session_marks_its_own():
    script = TRAINING + (
        "from rebatch import _library\n"
        "keys = []\n"
        "_library.lib.rebatch_pool_mark = lambda pool, key: keys.append(key)\n"
        "train(2)\n"
        "bias = model[0].bias\n"
        "other = torch.optim.SGD([bias])\n"
        "on_cpu = torch.optim.SGD([torch.ones(8, requires_grad=True)])\n"
        "for o in other, on_cpu, other, optimizer: o.step()\n"
        "a, b = keys[0], keys[2]\n"
        "assert a != b and keys == [a, a, b, b, a], keys\n"
        "from rebatch.torch import Step\n"
        "step = Step(model, optimizer, lambda m, s: m(s[0]).square().mean())\n"
        "step((x[:1024],))\n"
        "assert len(keys) == 5, keys\n"
    )
    child(script, STANDIN_MEMORY=MEMORY)


def test_an_optimizer_may_be_compiled_and_captured():
    script = TRAINING + (
        "train(3)\n"
        "torch.compile(optimizer.step, backend='eager')()\n"
        "sgd = torch.optim.SGD([torch.ones(8, device='cuda', requires_grad=True)])\n"
        "sgd.param_groups[0]['params'][0].grad = torch.ones(8, device='cuda')\n"
        "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "    sgd.step()\n"
        "train(3)\n"
    )
    result = run(script, STANDIN_MEMORY=MEMORY)  # PyTorch's compiler may complain
    assert result.returncode == 0, result.stderr


STEP = (
    "rebatch.install()\n"
    "from torch import nn\n"
    "from rebatch.torch import Step\n"
    "F = nn.functional\n"
    "class Block(nn.Module):\n"
    "    def __init__(self, width):\n"
    "        super().__init__()\n"
    "        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)\n"
    "        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)\n"
    "    def forward(self, x):\n"
    "        q, k, v = self.mix(self.norm(x)).chunk(3, -1)\n"
    "        x = x + F.scaled_dot_product_attention(q, k, v)\n"
    "        return x + self.down(F.gelu(self.up(x)))\n"
    "blocks = [Block(256) for _ in range(6)]\n"
    "model = nn.Sequential(nn.Embedding(8192, 256), *blocks, nn.Linear(256, 8192)).cuda()\n"
    "def loss_fn(model, samples):\n"
    "    with torch.autocast('cuda', torch.bfloat16):\n"
    "        scores = model(samples[0])\n"
    "        loss = F.cross_entropy(scores.flatten(0, 1), samples[0].flatten())\n"
    "    return loss, {'right': scores.detach().argmax(-1).eq(samples[0]).sum(1)}\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n"
    "step = Step(model, optimizer, loss_fn, micro_start=16, growth=False)\n"
    "def train(steps, samples):\n"
    "    batch = (torch.zeros(samples, 256, dtype=torch.long, device='cuda'),)\n"
    "    metric = torch.zeros((), device='cuda')\n"
    "    for _ in range(steps):\n"
    "        step(batch)\n"
    "        metric += step.outputs['right'].sum()\n"
    "    return rebatch.stats()\n"
)


def test_a_step_whose_last_micro_batch_does_more_is_planned():
    """It joins what loss_fn returned, so its calls are others, step for step. What compares
    two cuts within some steps takes some of the plan's pages, and ends no plan."""
    script = STEP + (
        "before = train(20, 32)['remaps']\n"
        "stats = train(10, 32)\n"
        "print(stats['remaps'] - before, stats['reserved_bytes'] / stats['live_peak_bytes'])\n"
    )
    remaps, held = child(script, STANDIN_MEMORY=MEMORY).split()
    assert int(remaps) < 100  # of 850 without plans; a comparison within moves some
    assert float(held) < 1.05


@pytest.mark.parametrize(
    "samples, phases", [(32, 4), (48, 5), (128, 10), (40, 5)], ids="2 3 8 2-and-a-remainder".split()
)
def test_all_phases_of_a_step_but_one_are_planned_and_move_no_page(samples, phases):
    """On a GPU that is behind its host. The one: zero_grad allocates little or nothing."""
    script = STEP + (
        f"before = train(20, {samples})\n"
        f"stats = train(10, {samples})\n"
        "for name in 'phases', 'planned_phases', 'remaps', 'device_frees':\n"
        "    print(stats[name] - before[name])\n"
        "print(stats['reserved_bytes'], stats['live_peak_bytes'])\n"
    )
    printed = child(script, STANDIN_LATE="1", STANDIN_MEMORY=MEMORY).split()
    marked, planned, remaps, frees, reserved, peak = (int(number) for number in printed)
    assert (marked, planned) == (10 * phases, 10 * (phases - 1))
    assert (remaps, frees) == (0, 0)
    assert reserved <= peak + peak // 16 + (32 << 20)


def test_a_size_that_ran_in_a_step_is_not_refused_in_the_next():
    """Its first micro-batch made the sums of gradients, which are made before it from then on."""
    script = (
        "from torch import nn\n"
        "from rebatch.torch import Step\n"
        "rebatch.install()\n"
        "width = 2048\n"
        "ends = [(width, 4 * width), (4 * width, width)] * 2\n"
        "model = nn.Sequential(*(nn.Linear(a, b) for a, b in ends)).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "def loss_fn(model, samples): return model(samples[0]).square().mean()\n"
        "step = Step(model, optimizer, loss_fn, growth=False, log_level='quiet')\n"
        "batch = (torch.zeros(32, 256, width, device='cuda'),)\n"
        "for number in range(6):\n"
        "    if number == 3: rebatch.install(limit='1800MiB')\n"
        "    step(batch)\n"
        "    print(step.report.micro, step.report.ooms)\n"
    )
    printed = child(script, STANDIN_MEMORY=MEMORY).splitlines()
    assert printed == ["32 0"] * 3 + ["16 1"] + ["16 0"] * 2
