"""What a type checker says of a user's script, and that the types are those of the options."""

import importlib.util
import inspect
import os
import pathlib
import subprocess
import sys

import pytest

import rebatch
from rebatch.torch.session.options import SessionOptions
from rebatch.torch.session.session import session_options

SCRIPT = """
import torch

import rebatch.torch as rebatch


def loss_fn(model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(samples).square().mean()
    return loss


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rebatch.install(limit="22GiB", headroom=1 << 20)
step = rebatch.Step(model, optimizer, loss_fn, micro_start=4, on_oom="fit", learn=False)
loss = step(torch.randn(8, 4))
outputs = rebatch.map(model, torch.randn(8, 4))
print(loss, outputs, step.report.micro, step.numbers())
"""


def test_the_types_are_those_of_the_options():
    assert list(SessionOptions.__annotations__) == list(
        inspect.signature(session_options).parameters
    )


@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="needs mypy")
def test_a_users_script(tmp_path):
    """It passes mypy --strict; a slip in the name of an option, or in its value, is underlined."""
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(SCRIPT)
    bad.write_text(
        SCRIPT.replace("micro_start=4", "micro_strat=4").replace("learn=False", 'learn="no"')
    )
    folder = pathlib.Path(rebatch.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(good), str(bad)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": "" if folder.name == "site-packages" else str(folder)},
    )
    said = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in said if line.startswith("good.py")], done.stdout + done.stderr
    assert any('"micro_strat"' in line for line in said), done.stdout + done.stderr
    assert any('"learn" to "Step" has incompatible type' in line for line in said), done.stdout
