"""For tests of `rebatch fit`: it runs, on the stand-in for CUDA, for programs that they write."""

import json
import os
import subprocess
import sys

import pytest
import torch

from rebatch.fit import cards
from rebatch.fit.standin_library import library, versions_of


def fit(*arguments, **environment):
    command = [sys.executable, "-m", "rebatch.fit", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def found(*arguments):
    done = fit("--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["rows"]


def plainly(path, samples, room):
    """What the program prints in a fresh process of the stand-in with so much memory; None: that
    runs out."""
    preloaded = library(sys.executable, versions_of(sys.executable)[0])
    card = cards.find("h100")
    env = {
        **os.environ,
        "LD_PRELOAD": str(preloaded),
        "STANDIN_CARD": card.standin,
        "STANDIN_MEMORY": str(card.memory_bytes),
        "STANDIN_LIMIT": str(room),
    }
    command = [sys.executable, path, str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        assert "OutOfMemoryError" in done.stderr, done.stderr
        return None
    return done.stdout


def trains_plainly(path, samples, room):
    """Whether the program trains in a fresh process of the stand-in with so much memory."""
    return plainly(path, samples, room) is not None


def on_standin(test):
    has_cuda = torch.version.cuda is not None
    return pytest.mark.night(pytest.mark.skipif(not has_cuda, reason="needs CUDA")(test))


# About a quarter of a MiB of activations for each sample.
MODEL = """
import sys
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 32768), torch.nn.ReLU(), torch.nn.Linear(32768, 16)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)


def batch(n):
    return torch.randn(n, 64), torch.randint(0, 16, (n,))


def loss_fn(model, samples):
    inputs, classes = samples
    return F.cross_entropy(model(inputs.cuda()), classes.cuda())
"""

STEP = """
import rebatch.torch as rebatch

step = rebatch.Step(model, optimizer, loss_fn)
for _ in range(3):
    print(step(batch(int(sys.argv[1]))))
"""

# Programs without a Step, which train for so long that only an end in their midst passes.
LOADED = """
samples = torch.utils.data.TensorDataset(*batch(1000))
loader = torch.utils.data.DataLoader(samples, int(sys.argv[1]), num_workers=2, shuffle=True)
for _ in range(1_000_000):
    for inputs, classes in loader:
        loss = F.cross_entropy(model(inputs.cuda()), classes.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
