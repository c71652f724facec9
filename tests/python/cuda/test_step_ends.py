"""What stays on the device when a step ends."""

import torch
from torch import nn

import rebatch.torch as rebatch

from test_install import run, said


def test_a_comparison_of_cuts_leaves_no_memory_to_the_update():
    """So that it is no growth from step to step, and no need of the update."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cuda.memory_allocated()))
    step = rebatch.Step(
        model, optimizer, lambda m, x: m(x).square().mean(), micro_start=4, growth=False
    )
    comparisons = step._training.callbacks.cuts
    for _ in range(14):
        step(torch.randn(16, 512, device="cuda"))
    assert comparisons._warmed == 3 and set(seen[2:]) == {seen[2]}


def test_gradients_that_accumulate_are_no_growth():
    """Two calls for each update: what was in .grad goes before the second one ends."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    said = []
    backward = rebatch.Backward(
        model,
        lambda m, x: m(x).square().mean(),
        micro_start=4,
        growth=False,
        on_event=lambda text, event: said.append(text),
    )
    for i in range(12):
        backward(torch.randn(16, 512, device="cuda"))
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert not [text for text in said if "memory grows" in text]


CUT_TWICE = """
from torch import nn
from rebatch.torch import Step
model = nn.Linear(4096, 5120, device="cuda")  # whose gradient is larger than workspaces
def loss_fn(model, samples):
    if len(samples[0]) > largest:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return model(samples[0]).mean()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = Step(model, optimizer, loss_fn, log_level="quiet", growth=False)
batch, collected, collect = (torch.ones(8, 4096, device="cuda"),), [], gc.collect
largest = 4
step(batch)
largest = 2
step.load_state_dict({**step.state_dict(), "micro": 8})
gc.collect = lambda *at: collected.append(at) or collect(*at)
step(batch)
print(step.report.ooms >= 2, step.report.micro, () in collected)
"""


def test_sums_that_are_made_after_an_oom_are_no_garbage():
    """They stay where the next attempt fails too: to look for who holds them takes longer than an
    attempt."""
    assert said(run("rebatch.install()\n" + CUT_TWICE)).strip() == "True 2 False"
