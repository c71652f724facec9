"""Runs a function of a module in this folder in several processes, and ends them all when they take
too long: a hang is a failure. RANKS_BACKEND in the environment is the backend of those that name
none (default gloo); with one of NCCL, each rank has a GPU of its own.

Each rank is a new process, forked from a server that has imported PyTorch: the import takes longer
than most of them run. The server, which this file is when it is called, ends with the tests."""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback

FOLDER = pathlib.Path(__file__).parent
# A pair takes a few; more where other programs run, or with RANKS_STRIDE=1.
_SECONDS = int(os.environ.get("RANKS_SECONDS", "300"))
_IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "rebatch.torch.ranks.ranks", "trained")


def run(module, function, *arguments, size=2, killed=(), backend=None):
    """What the function returned on each rank: plain values; None for ranks in `killed`, which end
    themselves. The backend "" is PyTorch's choice for each device."""
    if backend is None:
        backend = os.environ.get("RANKS_BACKEND", "gloo")
    with tempfile.TemporaryDirectory() as folder:
        codes = _ask(
            module=module,
            function=function,
            arguments=arguments,
            folder=folder,
            backend=backend,
            size=size,
            killed=killed,
        )
        folder = pathlib.Path(folder)
        texts = [(folder / f"{rank}.log").read_text()[-4000:] for rank in range(size)]
        for rank, code in enumerate(codes):
            if rank not in killed:
                assert code == 0, f"rank {rank} of {function}: {code}\n" + "\n".join(texts)
        answers = [folder / str(rank) for rank in range(size)]
        return [json.loads(a.read_text()) if a.exists() else None for a in answers]


def has_nccl():
    return "nccl" in os.environ.get("RANKS_BACKEND", "")


def seconds_until_seen():
    """A group_timeout for ranks of which one is killed: gloo sees it at once, NCCL then."""
    return 5.0 if has_nccl() else 60.0


def lacks(size):
    """Whether so many ranks need more GPUs than there are."""
    import torch

    return has_nccl() and torch.cuda.device_count() < size


def _ask(**request):
    """The ranks' exit statuses."""
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, f"the server that forks the ranks has ended: {server.wait()}"
    return json.loads(line)


@functools.lru_cache(maxsize=None)
def _server():
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)  # closes its input, and waits
    return server


# ---- the server ----


def _serve():
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    # Looking for GPUs must not start the driver here: it does not outlive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print is no answer
    for module in _IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.suppress(Exception):  # the ranks say what is wrong
            importlib.import_module(request["module"])
        gc.freeze()  # no rank's garbage collection looks at what imports made
        print(json.dumps(_codes_of(request)), file=answers, flush=True)


def _codes_of(request):
    pids = [_fork(rank, request) for rank in range(request["size"])]
    codes = [None] * len(pids)
    until = time.monotonic() + _SECONDS
    while not _are_over(codes, request["killed"]) and time.monotonic() < until:
        time.sleep(0.005)
        _collect(pids, codes, os.WNOHANG)
    found = ["a hang" if code is None else code for code in codes]
    for pid, code in zip(pids, codes):
        if code is None:
            os.kill(pid, 9)
    _collect(pids, codes, 0)
    return found


def _are_over(codes, killed):
    """Ranks wait for one that failed, so the first failure ends the wait."""
    waited_for = [code for rank, code in enumerate(codes) if rank not in killed]
    return None not in waited_for or any(code not in (None, 0, -9) for code in codes)


def _collect(pids, codes, flags):
    for rank, pid in enumerate(pids):
        if codes[rank] is None:
            ended, status = os.waitpid(pid, flags)
            codes[rank] = os.waitstatus_to_exitcode(status) if ended else None


def _fork(rank, request):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(f"{request['folder']}/{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _run_rank(rank, **request)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # nothing waits for a rank that is gone


def _run_rank(rank, module, function, arguments, folder, backend, size, killed):
    import torch

    faulthandler.dump_traceback_later(_SECONDS - 5)  # where a rank hangs
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if "nccl" in (backend or os.environ.get("RANKS_BACKEND", "")):
        import models

        models.DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(models.DEVICE)
    torch.distributed.init_process_group(
        backend or None, init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    result = getattr(importlib.import_module(module), function)(*arguments)
    pathlib.Path(folder, str(rank)).write_text(json.dumps(result))


if __name__ == "__main__":
    _serve()
