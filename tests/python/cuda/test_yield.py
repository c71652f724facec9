"""A training that another process asks for memory: yield_to(), REBATCH_YIELD, `rebatch ask`."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

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
said = []
while True:  # a line for each of the first steps and each change: a full pipe would hold the next
    step(samples)
    assert step.report.samples == 32
    line = f"{step.report.micro} {step.report.short_of_memory > 0}"
    if len(said) < 3 or line != said[-1]:
        said.append(line)
        print(line, flush=True)
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


def status_of(path):
    """A busy machine may not give the training the two seconds that a status has."""
    while True:
        answer, code = ask(path, "status")
        if code == 0:
            return json.loads(answer)
        assert "no answer within 2 seconds" in answer, answer


@pytest.fixture
def start(tmp_path):
    """Starts the training, and ends it; a hang is a failure."""
    started = []

    def start(*arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINING, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), **environment},
        )
        timer = threading.Timer(300, process.kill)
        timer.start()
        started.append((process, timer))
        for _ in range(3):
            assert process.stdout.readline().split()[0] == "32"
        return process

    yield start
    for process, timer in started:
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(process, condition):
    """The first line of which that is true."""
    for line in process.stdout:
        micro, is_short = line.split()
        if condition(int(micro), is_short == "True"):
            return
    raise AssertionError("it did not come to that")


def test_a_training_gives_half_and_grows_back(start, tmp_path):
    path = tmp_path / "train.sock"
    process = start(str(path))
    status = status_of(path)
    assert status["held_bytes"] > 128 * MIB > status["needs_bytes"] > 0
    answer, code = ask(path, f"give {status['held_bytes'] // 2}")
    assert code == 0 and answer.startswith("ok: gave "), answer
    after = status_of(path)
    assert after["held_bytes"] <= status["held_bytes"] - status["held_bytes"] // 2
    wait_for(process, lambda micro, is_short: micro <= 16 and is_short)
    assert ask(path, "wake")[1] == 0
    wait_for(process, lambda micro, _: micro == 32)


def test_a_training_sleeps_until_it_is_woken(start, tmp_path):
    path = tmp_path / "train.sock"
    process = start(str(path))
    answer, code = ask(path, "sleep")
    assert code == 0 and answer.startswith("ok: asleep after "), answer
    status = status_of(path)
    assert status["state"] == "asleep" and status["held_bytes"] == 0
    assert ask(path, "wake")[1] == 0
    steps = status["steps"]
    while status_of(path)["steps"] <= steps + 2:
        assert process.poll() is None


def test_ctrl_c_ends_a_training_that_sleeps(start, tmp_path):
    path = tmp_path / "train.sock"
    process = start(str(path))
    assert ask(path, "sleep")[1] == 0
    process.send_signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT


def test_the_variable_makes_a_socket_that_top_lists(start, tmp_path):
    process = start(REBATCH_YIELD="1")
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    top = [str(COMMAND), "top", "--json"]
    rows = []
    while not rows:  # a training that a busy machine keeps from answering is left out
        assert process.poll() is None
        done = subprocess.run(top, capture_output=True, text=True, env=environment)
        rows = json.loads(done.stdout)
    (row,) = rows
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
