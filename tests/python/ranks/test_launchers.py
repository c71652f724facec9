"""Trainings as users start them: by the commands torchrun and accelerate launch."""

import json
import os
import subprocess
import sys

import pytest

import pair

_SECONDS = 300
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# On a machine without a GPU it starts the same processes with gloo.
ACCELERATE = [
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


@pytest.mark.parametrize(
    "launcher, framework",
    [
        (TORCHRUN, "lightning"),
        pytest.param(TORCHRUN, "transformers", marks=pytest.mark.night),
        pytest.param(ACCELERATE, "transformers", marks=pytest.mark.night),
    ],
    ids=["torchrun-lightning", "torchrun-transformers", "accelerate-transformers"],
)
def test_a_command_starts_two_ranks(launcher, framework, tmp_path):
    pytest.importorskip(framework)
    script = [str(pair.FOLDER / "launched.py"), f"with_{framework}", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert not any(found.pop("replays"))
        assert found == {"as_plain": True, "near": True, "same": True, "ranks": [16, 4]}
