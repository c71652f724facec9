"""rebatch.doctor with GPUs of several kinds, as the stand-in can be."""

import os
import subprocess
import sys

import pytest
from conftest import ALLOC_CONF, load_standin

LONG = "NVIDIA RTX PRO 6000 Blackwell Server Edition"  # a device's name in C is cut


def doctor(status=0, **environment):
    env = {**os.environ, **environment}
    command = [sys.executable, "-m", "rebatch.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_gpu_is_described():
    said = doctor()
    assert "sees a GPU" in said and "cuda:0 " in said and "virtual memory " in said
    assert "no GPU can be used" not in said


def test_the_allocator_in_use_is_named_and_install_needs_the_native_one():
    trouble = "not here      install(): PyTorch uses cudaMallocAsync, not its native allocator\n"
    said = doctor()
    assert "\nallocator     native\n" in said and trouble not in said
    said = doctor(**{ALLOC_CONF: "backend:cudaMallocAsync"})
    assert "\nallocator     cudaMallocAsync\n" in said and trouble in said


@pytest.mark.skipif(load_standin() is None, reason="a real GPU is of one kind")
@pytest.mark.parametrize(
    "card, host, found, trouble",
    [
        (f"name={LONG} MIG 1g.24gb", 1, "virtual memory yes, host memory stands in yes",
         "a MIG instance is no peer of another"),
        ("name=NVIDIA A16-4Q,virtual_memory=0", 0, "virtual memory no, host memory stands in no",
         "no virtual memory, as on some vGPUs"),
        ("name=Orin,integrated=1", 1, "host memory stands in no, integrated yes",
         "the GPU uses the machine's memory"),
        ("name=H100", 0, "virtual memory yes, host memory stands in no",
         "the driver maps no host memory for the GPU"),
        ("name=H100", 1, "virtual memory yes, host memory stands in yes, integrated no", ""),
    ],
)  # fmt: skip
def test_what_would_not_work_is_said_once(card, host, found, trouble):
    said = doctor(
        STANDIN_CARD=card, STANDIN_GPUS="2", **({"STANDIN_HOST": str(1 << 30)} if host else {})
    )
    assert said.count(found) == 2
    troubles = [line for line in said.splitlines() if line.startswith("not here")]
    assert len(troubles) == (1 if trouble else 0), said
    assert not trouble or trouble in troubles[0]


@pytest.mark.skipif(load_standin() is None, reason="a real GPU is of one kind")
def test_host_memory_that_the_driver_has_and_refuses_is_said_with_its_reason():
    said = doctor(STANDIN_GPUS="1", STANDIN_HOST="1048576")  # half a page
    assert "host memory stands in no" in said
    assert "not here      host memory for cuda:0 stand-in for a GPU: " in said
    assert "not here      the driver maps no host memory for the GPU: " in said


@pytest.mark.skipif(load_standin() is None, reason="a real GPU is of one kind")
def test_nvml_says_what_a_gpu_is_also_where_cuda_sees_none():
    mig = "NVML          stand-in; GPU 0 NVIDIA H100, MIG on\n"
    without_instance = "not here      MIG is on, and CUDA sees no instance: "
    card = "name=NVIDIA H100 MIG 1g.10gb"
    said = doctor(STANDIN_GPUS="1", STANDIN_CARD=card)
    assert mig in said and without_instance not in said
    said = doctor(1, STANDIN_GPUS="0", STANDIN_CARD=card)
    assert mig in said and without_instance in said
    said = doctor(STANDIN_GPUS="1", STANDIN_CARD="name=GRID A100-10C")
    assert "NVML          stand-in; GPU 0 GRID A100-10C, a vGPU\n" in said
    said = doctor(1, STANDIN_GPUS="0")
    assert "MIG" not in said
