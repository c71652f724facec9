"""For all tests of the Python package."""

import gc
import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)


def pytest_collection_finish():
    """What imports made stays until the end: a garbage collection, which a Step has after an OOM,
    takes 0.2 s of a processor where it looks at that too."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A run in which every test was skipped has shown nothing: it fails."""
    gc.unfreeze()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
