"""The comparison of PyTorch's own tests, on a folder with one test of each kind."""

import pytest

pytest.importorskip("xdist")
pytest.importorskip("pytest_timeout")

import torchs_own

TESTS = """
import os, signal, unittest
import rebatch.torch

INSTALLED = rebatch.torch.installed()

class TestCuda(unittest.TestCase):
    def test_passes(self):
        pass
    def test_fails(self):
        self.assertEqual(INSTALLED, 2)
    def test_skipped(self):
        self.skipTest("no")
    def test_crashes_installed(self):
        if INSTALLED:
            os.kill(os.getpid(), signal.SIGSEGV)
    def test_fails_installed(self):
        self.assertFalse(INSTALLED, "no history")
    def test_passes_installed(self):
        self.assertTrue(INSTALLED)
"""


def test_what_passes_natively_alone_is_named_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torchs_own, "PARTS", {"default": ("test_cuda.py absent.py", {}, 4)})
    (tmp_path / "test_cuda.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("raise RuntimeError('not to be loaded')")
    work = tmp_path / "work"
    work.mkdir()
    found = torchs_own.compare(tmp_path, work, seconds=400, workers=2)["default"]
    assert found["native"] == {"passed": 3, "failed": 2, "skipped": 1}
    assert found["installed"] == {"passed": 2, "failed": 2, "skipped": 1, "crash": 1}
    name = "test_cuda.py::TestCuda::test_"
    assert found["passes after install() alone"] == [f"{name}passes_installed"]
    assert found["differed once"] == {} and found["in one run alone"] == 0
    assert found["differs"].keys() == {f"{name}crashes_installed", f"{name}fails_installed"}
    assert found["differs"][f"{name}crashes_installed"][0] == "crash"
    assert found["differs"][f"{name}fails_installed"] == (
        "failed",
        "AssertionError: True is not false : no history",
    )
