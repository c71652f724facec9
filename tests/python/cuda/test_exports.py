"""Weights that a second process reads where the trainer has them: names, values, updates, deaths.

install() cannot be undone, so it is called in child processes only.
"""

import os
import signal
import socket
import subprocess
import sys

import pytest

from conftest import load_standin

TRAINER = """
import json, os, signal, socket, sys, torch
import rebatch.torch as rebatch
MIB = 1 << 20
connection = socket.socket(fileno=int(sys.argv[1]))
def say(word):
    torch.cuda.synchronize()
    connection.sendall(word)
    assert connection.recv(1), "the reader is gone"
def fill(tensor, value):  # a copy, as the stand-in has no kernels
    tensor.detach().copy_(torch.full(tensor.shape, value, dtype=tensor.dtype))
rebatch.install()
with rebatch.exportable("weights"):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 64))
    model = model.bfloat16().to("cuda")
for i, weight in enumerate(model.parameters()):
    fill(weight, i)
exported = rebatch.export("weights")
layout = {"pieces": exported.pieces, "weights": {
    name: (w.data_ptr() - exported.address, str(w.dtype).split(".")[1], list(w.shape))
    for name, w in model.named_parameters()}}
socket.send_fds(connection, [json.dumps(layout).encode()], exported.fds)
for fd in exported.fds:
    os.close(fd)
"""

READER = """
import json, os, socket, sys, torch
import rebatch.torch as rebatch
connection = socket.socket(fileno=int(sys.argv[1]))
text, fds, _, _ = socket.recv_fds(connection, 1 << 20, 253)
layout = json.loads(text)
memory = rebatch.map_export(layout["pieces"], fds)
for fd in fds:
    os.close(fd)
def tensor(offset, dtype, shape):
    dtype = getattr(torch, dtype)
    size = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset:offset + size].view(dtype).view(shape)
weights = {name: tensor(*place) for name, place in layout["weights"].items()}
def values():
    on_host = {name: w.cpu().float() for name, w in weights.items()}
    return {name: (float(w.min()), float(w.max())) for name, w in on_host.items()}
"""


def start(script, fd):
    command = [sys.executable, "-c", script, str(fd)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, pass_fds=[fd], stdout=pipe, stderr=pipe, text=True)


def run(trainer, reader):
    """Both to their ends: status, output and errors of each."""
    ours, theirs = socket.socketpair()
    processes = [start(TRAINER + trainer, ours.fileno()), start(READER + reader, theirs.fileno())]
    ours.close()
    theirs.close()
    said = [process.communicate(timeout=600) for process in processes]
    return [(p.returncode, *text) for p, text in zip(processes, said)]


def test_a_second_process_reads_the_weights_by_name_and_sees_updates_in_place():
    trainer = """
say(b"1")
fill(model[0].weight, 7.0)
torch.cuda.empty_cache()
rebatch.install(limit="64MiB")
say(b"2")
rebatch.sleep()
fill(model[0].weight, 8.0)
say(b"3")
rebatch.wake()
"""
    reader = """
for _ in range(3):
    assert connection.recv(1)
    print(values())
    connection.sendall(b"!")
assert not connection.recv(1)  # the trainer has ended
print(values()["1.bias"], memory.device)
"""
    (code, _, error), (reader_code, said, reader_error) = run(trainer, reader)
    assert (code, reader_code) == (0, 0), error + reader_error
    first = {"0.weight": (0.0, 0.0), "0.bias": (1.0, 1.0), "1.weight": (2.0, 2.0)}
    first["1.bias"] = (3.0, 3.0)
    updates = [{**first, "0.weight": (value, value)} for value in (7.0, 8.0)]
    assert said.splitlines() == [*map(str, [first, *updates]), "(3.0, 3.0) cuda:0"]


def test_a_killed_side_leaves_the_other():
    trainer = "say(b'1')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    reader = """
assert connection.recv(1)
connection.sendall(b"!")
assert not connection.recv(1)
print(values()["1.bias"])
"""
    (code, _, _), (reader_code, said, error) = run(trainer, reader)
    assert code == -signal.SIGKILL
    assert reader_code == 0, error
    assert said == "(3.0, 3.0)\n"
    trainer = """
say(b"1")
assert not connection.recv(1)
fill(model[0].weight, 7.0)
torch.cuda.synchronize()
print(float(model[0].weight.cpu().float().max()), len(rebatch.export("weights").fds) > 0)
"""
    reader = "import signal\nassert connection.recv(1)\nconnection.sendall(b'!')\n"
    reader += "os.kill(os.getpid(), signal.SIGKILL)\n"
    (code, said, error), (reader_code, _, _) = run(trainer, reader)
    assert reader_code == -signal.SIGKILL
    assert code == 0, error
    assert said == "7.0 True\n"


def test_a_reader_that_writes_spoils_nothing():
    trainer = """
say(b"1")
assert not connection.recv(1)
print(float(model[0].weight.cpu().float().max()))
"""
    reader = """
assert connection.recv(1)
connection.sendall(b"!")
weights["0.weight"].copy_(torch.full((512, 256), 9.0, dtype=torch.bfloat16))
torch.cuda.synchronize()
"""
    (code, said, error), (reader_code, _, _) = run(trainer, reader)
    assert code == 0, error
    if reader_code == 0 and load_standin() is None:
        pytest.skip("the driver maps it for writing too")
    assert reader_code != 0 and said == "0.0\n"


def alone(script, **variables):
    head = "import os, torch\nimport rebatch.torch as rebatch\nMIB = 1 << 20\n"
    command = [sys.executable, "-c", head + script]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


def test_pages_of_the_tag_hold_nothing_else_and_no_descriptor_stays_open():
    done = alone("""
rebatch.install()
def make(n):
    return torch.empty(n, dtype=torch.uint8, device="cuda")
inside, outside = [], []
for _ in range(20):
    with rebatch.exportable("weights"):
        inside.append(make(1000))
    outside.append(make(1000))
before = len(os.listdir("/proc/self/fd"))
exported = rebatch.export("weights")
print(len(os.listdir("/proc/self/fd")) - before == len(exported.fds) == len(exported.pieces))
assert not any(os.get_inheritable(fd) for fd in exported.fds)
for fd in exported.fds:
    os.close(fd)
def is_exported(t):
    at = t.data_ptr() - exported.address
    return any(offset <= at < offset + size for offset, size in exported.pieces)
print(all(map(is_exported, inside)), any(map(is_exported, outside)))
tagged = [line for line in rebatch.summary().splitlines() if line.startswith("weights ")]
print(len(tagged))
with rebatch.exportable("empty"):
    pass
for mistake in (
    lambda: rebatch.export("moments"),
    lambda: rebatch.export("empty"),
    lambda: rebatch.map_export(exported.pieces, [0, *exported.fds]),
    lambda: rebatch.map_export([(0, 2 * MIB)], [0]),
):
    try:
        mistake()
    except (KeyError, ValueError, rebatch.Error) as error:
        print(error.args[0])
""")
    lines = done.stdout.splitlines()
    assert lines[:3] == ["True", "True False", "1"]
    assert "nothing of 'moments' can be exported" in lines[3]
    assert "nothing of 'empty' can be exported" in lines[4]
    assert "fds: expected " in lines[5] and ", one a piece" in lines[5]
    assert "bytes in fd 0, which cannot be mapped: expected " in lines[6]


def test_blocks_of_a_tag_nest_and_are_of_one_thread():
    done = alone("""
import threading
rebatch.install()
said = []
def enter():
    try:
        with rebatch.exportable("weights"):
            pass
    except RuntimeError as error:
        said.append(str(error))
with rebatch.exportable("weights"):
    with rebatch.exportable("weights"):
        inner = torch.empty(MIB, device="cuda")
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    outer = torch.empty(MIB, device="cuda")
enter()
exported = rebatch.export("weights")
other = torch.empty(MIB, device="cuda")
def is_exported(t):
    at = t.data_ptr() - exported.address
    return any(offset <= at < offset + size for offset, size in exported.pieces)
print(len(said), *map(is_exported, (inner, outer, other)))
""")
    assert done.stdout == "1 True True False\n"


@pytest.mark.skipif(load_standin() is None, reason="a real GPU gives descriptors")
def test_a_driver_that_refuses_is_told_and_the_training_goes_on():
    done = alone(
        """
rebatch.install()
with rebatch.exportable("weights"):
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
print(kept.numel())
""",
        STANDIN_CARD="name=vGPU,file_descriptors=0",
    )
    assert done.stdout == f"{1 << 20}\n"
    said = "'weights' cannot be exported: device cuda:0 vGPU gives no file descriptors"
    assert said in done.stderr


def test_before_install_the_block_does_nothing():
    done = alone("with rebatch.exportable('weights'):\n    torch.empty(4, device='cuda')\nprint(1)")
    assert done.stdout == "1\n"
