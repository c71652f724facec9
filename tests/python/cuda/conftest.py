"""Tests on a GPU: a real one, or the stand-in that is preloaded (python/rebatch/fit/standin)."""

import ctypes
import gc
import os
import pathlib
import subprocess
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # models.py, forked.py

# The variable of PyTorch's allocator, which has another name since 2.10.
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF" if IS_OLD else "PYTORCH_ALLOC_CONF"


def pytest_collection_finish():
    """What imports made stays until the end: a garbage collection, which a Step has after an OOM,
    takes 0.2 s of a processor where it looks at that too."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


# Whether this process runs a file's tests on rebatch's pool.
INSTALLED = bool(os.environ.get("REBATCH_TEST_INSTALL"))


def assert_passes_installed(file):
    """All tests of the file pass in a process whose tests run on rebatch's pool."""
    environment = {**os.environ, "REBATCH_TEST_INSTALL": "1"}
    command = [sys.executable, "-m", "pytest", "-q", file]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def complaints(stderr):
    """What a process said, but for PyTorch 2.9, which warns of the one name and does not read the
    other."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if "PYTORCH_CUDA_ALLOC_CONF is deprecated" not in line)


def load_standin():
    """The stand-in's own functions; None on a real GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.standin_used.restype = ctypes.c_size_t
        library.standin_allocations.restype = ctypes.c_size_t
    except (OSError, AttributeError):
        return None
    library.standin_used.argtypes = [ctypes.c_size_t]
    library.standin_allocations.argtypes = []
    library.standin_set_memory.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.standin_set_memory.restype = None
    library.standin_can_access.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
    for function in library.standin_fail_at, library.standin_fail_from:
        function.argtypes = [ctypes.c_size_t]
        function.restype = None
    return library


STANDIN = load_standin()


def pytest_configure(config):
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/python/cuda need a GPU, or make test-python-standin")


def pytest_runtest_setup(item):
    needed = item.get_closest_marker("gpus")
    if needed and torch.cuda.device_count() < needed.args[0]:
        pytest.skip(f"needs {needed.args[0]} GPUs")


# On the stand-in no kernel runs, so a sum would be what its memory held before: a Step's sums of
# contents are computed on the host. For the beginning of a script, and below for each test.
SUMS_ON_HOST = (
    "from rebatch.torch.undo import copies\n"
    "_sum_of = copies._sum_of\n"
    "copies._sum_of = lambda tensor: _sum_of(tensor.detach().cpu())\n"
    if STANDIN is not None
    else ""
)


# For the end of a script: waits until its other threads do. A thread of autograd that lets go of a
# tensor while Python ends aborts the process, also in PyTorch alone.
REST = """
import os, pathlib, time
def _is_at_rest():
    try:
        tasks = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
        stats = [pathlib.Path(f"/proc/self/task/{task}/stat").read_text() for task in tasks]
    except OSError:  # one that ends
        return False
    return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)
_until = time.monotonic() + 60
time.sleep(0.05)
while not _is_at_rest() and time.monotonic() < _until:
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def contents(monkeypatch):
    if STANDIN is not None:
        from rebatch.torch.undo import copies

        sum_of = copies._sum_of
        monkeypatch.setattr(copies, "_sum_of", lambda tensor: sum_of(tensor.detach().cpu()))


@pytest.fixture
def standin():
    """The stand-in's controls, put back afterwards. Skips the test on a real GPU."""
    if STANDIN is None:
        pytest.skip("needs the stand-in")
    totals = [torch.cuda.mem_get_info(gpu)[1] for gpu in range(torch.cuda.device_count())]
    yield STANDIN
    STANDIN.standin_fail_at(0)
    for gpu, total in enumerate(totals):
        STANDIN.standin_set_memory(gpu, total)


@pytest.fixture(autouse=True)
def clean_memory():
    """Each test begins and ends with an empty cache."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
