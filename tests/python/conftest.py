"""For all tests of the Python package."""

import gc
import os
import textwrap

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)


@pytest.fixture
def program(tmp_path):
    """Writes a program's file, and returns its path."""

    def write(*parts):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent("".join(parts)))
        return str(path)

    return write


def pytest_collection_finish():
    """What imports have made is not looked at again, neither by a garbage collection nor by a
    Backward that looks for optimizers: a fifth of a second each time. So what these are to find is
    made within a test, not with its module."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A run in which every test was skipped has shown nothing: it fails."""
    gc.unfreeze()  # some packages say at the end what was never freed
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
