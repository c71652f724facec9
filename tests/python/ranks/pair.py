"""Runs a function of a module in this folder in several processes, and ends them all when they take
too long: a hang is a failure. RANKS_BACKEND in the environment is the backend of those that name
none (default gloo); with one of NCCL, each rank has a GPU of its own.

    python pair.py MODULE FUNCTION ARGUMENTS_IN_JSON FOLDER BACKEND RANK SIZE ANSWER"""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).parent
_SECONDS = 300  # a pair takes a few; more where other programs run


def run(module, function, *arguments, size=2, killed=(), backend=None):
    """What the function returned on each rank: plain values; None for ranks in `killed`, which end
    themselves. The backend "" is PyTorch's choice for each device."""
    if backend is None:
        backend = os.environ.get("RANKS_BACKEND", "gloo")
    with tempfile.TemporaryDirectory() as folder:
        answers = [os.path.join(folder, str(rank)) for rank in range(size)]
        logs = [open(answer + ".log", "w+") for answer in answers]
        given = [sys.executable, __file__, module, function, json.dumps(arguments), folder, backend]
        processes = [
            subprocess.Popen(
                [*given, str(rank), str(size), answers[rank]],
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(size)
        ]
        try:
            codes = _wait(processes, killed)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [_text_of(log) for log in logs]
        for rank, code in enumerate(codes):
            if rank not in killed:
                assert code == 0, f"rank {rank} of {function}: {code}\n" + "\n".join(texts)
        return [_answer(path) for path in answers]


def _wait(processes, killed):
    """Their exit statuses. Ranks wait for one that failed, so the first failure ends the wait."""
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        waited_for = [code for rank, code in enumerate(codes) if rank not in killed]
        if None not in waited_for or any(code not in (None, 0, -9) for code in codes):
            return codes
        time.sleep(0.02)
    return ["a hang" if process.poll() is None else process.poll() for process in processes]


def _text_of(log):
    log.seek(0)
    text = log.read()[-4000:]
    log.close()
    return text


def _answer(path):
    if not os.path.exists(path):
        return None
    with open(path) as file:
        return json.load(file)


def _main(module, function, arguments, folder, backend, rank, size, answer):
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if "nccl" in (backend or os.environ.get("RANKS_BACKEND", "")):
        import models

        models.DEVICE = torch.device("cuda", int(rank))
        torch.cuda.set_device(models.DEVICE)
    torch.distributed.init_process_group(
        backend or None, init_method=f"file://{folder}/store", rank=int(rank), world_size=int(size)
    )
    result = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    with open(answer, "w") as file:
        json.dump(result, file)
    sys.stdout.flush()
    os._exit(0)  # nothing waits for a rank that is gone


if __name__ == "__main__":
    _main(*sys.argv[1:])
