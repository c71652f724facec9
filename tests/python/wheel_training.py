"""What scripts/test-wheel runs beside an installed wheel: a training survives an OOM, without a GPU
and then with install() where there is one. Prints one line; asserts what must hold."""

import sys

import torch

import rebatch.torch as rebatch
from rebatch.testing import fail_once

SAMPLES = 64
MiB = 1 << 20


def a_step(device, hidden):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = rebatch.Step(model, optimizer, lambda model, x: model(x).square().mean())
    return step, model, torch.randn(SAMPLES, 8, device=device)


def on_the_host():
    """The parameters after a step with an OOM are those of a step without one."""
    results = []
    for failures in 0, 1:
        step, model, batch = a_step("cpu", 16)
        if failures:
            with fail_once(model[2]):
                step(batch)
        else:
            step(batch)
        assert step.report.ooms == failures, step.report
        results.append([p.detach().clone() for p in model.parameters()])
    for without, after in zip(*results):
        torch.testing.assert_close(without, after)


def under_a_limit():
    """A batch that does not fit under install()'s limit is cut."""
    rebatch.install(limit=64 * MiB)
    assert rebatch.installed()
    step, _, batch = a_step("cuda", 1 << 18)  # 64 samples of hidden values have 64 MiB
    step(batch)
    assert step.report.micro < SAMPLES and step.report.ooms + step.report.learned > 0, step.report
    assert rebatch.stats()["reserved_bytes"] <= 64 * MiB, rebatch.stats()
    return step.report.micro


on_the_host()
cut = f", under a limit in micro-batches of {under_a_limit()}" if "--gpu" in sys.argv else ""
print(f"PyTorch {torch.__version__}, rebatch {rebatch.__version__}: trained through an OOM{cut}")
