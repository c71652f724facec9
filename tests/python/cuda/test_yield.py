"""A training that another process asks for memory: yield_to(), REBATCH_YIELD, `rebatch ask`."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import rebatch
import rebatch.torch
from rebatch.torch.session.report import NUMBERS

COMMAND = pathlib.Path(rebatch.__file__).parent / "rebatch"
MIB = 1 << 20
TRAINING = """
import sys, torch
import rebatch.torch as rebatch

MIB = 1 << 20
rebatch.install()
if sys.argv[1:]:
    rebatch.yield_to(sys.argv[1])
model = torch.nn.Linear(4, 1, device="cuda")

def loss_fn(model, samples):
    activations = torch.empty(len(samples) * 4 * MIB, dtype=torch.uint8, device="cuda")
    return model(samples).square().mean()

step = rebatch.Step(
    model, torch.optim.SGD(model.parameters(), 0.01), loss_fn, grow_after=2, log_level="quiet"
)
samples = torch.randn(32, 4, device="cuda")
while True:
    step(samples)
    print(step.report.micro, step.report.samples, step.report.short_of_memory, flush=True)
"""


def ask(path, request):
    """The answer, and the exit status."""
    done = subprocess.run(
        [str(COMMAND), "ask", str(path), *request.split()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.strip() or done.stderr.strip(), done.returncode


@pytest.fixture
def start(tmp_path):
    """Starts the training, and ends it."""
    started = []

    def start(*arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINING, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), **environment},
        )
        started.append(process)
        for _ in range(3):
            assert process.stdout.readline().split()[0] == "32"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(process, condition):
    """The first line of which that is true."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        micro, samples, short = process.stdout.readline().split()
        assert samples == "32"
        if condition(int(micro), float(short)):
            return
    raise AssertionError("it did not come to that")


def test_a_training_gives_half_and_grows_back(start, tmp_path):
    path = tmp_path / "train.sock"
    process = start(str(path))
    status = json.loads(ask(path, "status")[0])
    assert status["held_bytes"] > 128 * MIB > status["needs_bytes"] > 0
    answer, code = ask(path, f"give {status['held_bytes'] // 2}")
    assert code == 0 and answer.startswith("ok: gave "), answer
    after = json.loads(ask(path, "status")[0])
    assert after["held_bytes"] <= status["held_bytes"] - status["held_bytes"] // 2
    wait_for(process, lambda micro, short: micro <= 16 and short > 0)
    assert ask(path, "wake")[1] == 0
    wait_for(process, lambda micro, short: micro == 32)


def test_a_training_sleeps_until_it_is_woken(start, tmp_path):
    path = tmp_path / "train.sock"
    process = start(str(path))
    answer, code = ask(path, "sleep")
    assert code == 0 and answer.startswith("ok: asleep after "), answer
    status = json.loads(ask(path, "status")[0])
    assert status["state"] == "asleep" and status["held_bytes"] == 0
    assert ask(path, "wake")[1] == 0
    steps = status["steps"]
    wait_for(process, lambda micro, short: json.loads(ask(path, "status")[0])["steps"] > steps + 2)


def test_the_variable_makes_a_socket_that_top_lists(start, tmp_path):
    process = start(REBATCH_YIELD="1")
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    top = [str(COMMAND), "top", "--json"]
    done = subprocess.run(top, capture_output=True, text=True, env=environment)
    (row,) = json.loads(done.stdout)
    assert row["pid"] == process.pid and row["micro"] == 32 and row["samples_per_second"] > 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list((tmp_path / "rebatch").iterdir())) == 1
    done = subprocess.run(top, capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout) == [] and not list((tmp_path / "rebatch").iterdir())


def test_the_number_is_a_gauge_and_of_the_report():
    assert "short_of_memory" in NUMBERS and not NUMBERS["short_of_memory"].endswith("_total")
    assert rebatch.torch.Report().short_of_memory == 0


def test_it_needs_the_pool():
    code = "import rebatch.torch as rebatch; rebatch.yield_to()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "call rebatch.torch.install() first" in done.stderr or "there is no GPU" in done.stderr
