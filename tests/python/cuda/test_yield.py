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
from conftest import load_standin
from rebatch.torch.session.report import NUMBERS

ROOT = pathlib.Path(__file__).resolve().parents[3]
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

def train():
    said = []
    while True:  # a line for each of the first steps and each change: a full pipe holds the next
        step(samples)
        assert step.report.samples == 32
        line = f"{step.report.micro} {step.report.short_of_memory > 0}"
        if len(said) < 3 or line != said[-1]:
            said.append(line)
            print(line, flush=True)

try:
    train()
except KeyboardInterrupt:
    print("interrupted")
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
    assert process.stdout.read().endswith("interrupted\n")
    assert process.wait() == 0


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


# ---- two processes on one GPU: what one gives the other takes ----

NEIGHBOUR = """
import sys, torch
held = []
def take(mib):
    try:
        held.append(torch.empty(mib << 20, dtype=torch.uint8, device="cuda"))
        return True
    except RuntimeError:
        return False
for line in sys.stdin:
    word, mib = line.split()
    if word == "take":
        print(take(int(mib)), flush=True)
    elif word == "fill":
        while take(2):
            pass
        print(True, flush=True)
    else:
        held.pop(0)
        print(True, flush=True)
"""
on_standin = pytest.mark.skipif(load_standin() is None, reason="a real GPU has other users")


@pytest.fixture
def shared(tmp_path):
    """The environment of processes that share a GPU."""
    return {"STANDIN_SHARED": str(tmp_path / "gpu"), "STANDIN_MEMORY": str(256 << 20)}


class Neighbour:
    def __init__(self, environment):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR],
            stdin=pipe,
            stdout=pipe,
            text=True,
            env={**os.environ, **environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )

    def __call__(self, word, mib=0):
        print(word, mib, file=self.process.stdin, flush=True)
        return self.process.stdout.readline() == "True\n"

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def neighbour(shared):
    made = Neighbour(shared)
    yield made
    made.kill()


@on_standin
def test_a_neighbour_takes_what_sleeps_and_a_wake_into_less_grows_back(
    start, shared, neighbour, tmp_path
):
    path = tmp_path / "train.sock"
    process = start(str(path), **shared)
    assert not neighbour("take", 160)
    assert ask(path, "sleep")[1] == 0
    assert neighbour("take", 60) and neighbour("take", 100) and neighbour("fill")
    answer, code = ask(path, "wake")
    assert code == 1 and answer.startswith("no: the blocks in use need "), answer
    assert status_of(path)["state"] == "asleep"
    assert neighbour("free")
    answer, code = ask(path, "wake")
    assert code == 0, answer
    wait_for(process, lambda micro, is_short: micro <= 16 and is_short)
    neighbour.kill()
    wait_for(process, lambda micro, _: micro == 32)


@on_standin
def test_a_training_that_is_killed_asleep_leaves_nothing(start, shared, neighbour, tmp_path):
    path = tmp_path / "train.sock"
    process = start(str(path), **shared)
    assert ask(path, "sleep")[1] == 0
    assert neighbour("take", 100)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert neighbour("take", 140)
    answer, code = ask(path, "wake")
    assert code == 1 and "its process has ended, so the socket is removed" in answer
    assert not path.exists()


def test_the_example_of_a_server_has_its_memory_while_the_trainer_sleeps(shared):
    command = [sys.executable, str(ROOT / "examples" / "python" / "beside_server.py")]
    environment = {**os.environ, **shared}
    done = subprocess.run(
        [*command, "--cache", "160"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    few = subprocess.run(
        [*command, "--cache", "1000000"], capture_output=True, text=True, env=environment
    )
    assert few.returncode == 1 and few.stderr.endswith("the server has ended: no answer came\n")
    gave = [int(line.split("gave ")[1].split()[0]) for line in done.stdout.splitlines()]
    assert len(gave) == 3 and min(gave[1:]) > 100
