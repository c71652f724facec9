"""python3 -m rebatch.doctor, on this machine; cuda/test_doctor.py has GPUs of several kinds."""

import os
import subprocess
import sys

import pytest
import torch

import rebatch


def doctor(*before, **environment):
    """What it prints, after other statements, and its exit status."""
    code = "; ".join(
        [*before, "import sys", "from rebatch import doctor", "sys.exit(doctor.main())"]
    )
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stderr == "", done.stderr
    return done.stdout.splitlines(), done.returncode


def test_it_says_which_pytorch_there_is():
    lines, status = doctor()
    assert lines[0] == f"rebatch       {rebatch.__version__}"
    assert lines[1].endswith(sys.executable)
    assert lines[2].startswith(f"PyTorch       {torch.__version__}, built ")
    assert status == (0 if torch.cuda.is_available() else 1)


def test_without_pytorch_it_says_what_is_missing():
    lines, status = doctor("import sys", "sys.modules['torch'] = None")
    [trouble] = [line for line in lines if "PyTorch 2.8 or newer" in line]
    assert trouble.startswith("not here      rebatch.torch needs PyTorch") and status == 1


@pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's CUDA build")
def test_without_a_compiler_it_says_what_install_lacks(tmp_path):
    lines, _ = doctor(CXX="no-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert any(
        line.startswith("not here      install(): no C++ compiler was found") for line in lines
    )


@pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's CUDA build")
def test_without_cudas_headers_it_says_what_install_lacks(tmp_path):
    lines, _ = doctor(
        "from rebatch.torch.allocator import front_library",
        "front_library.cuda_folders = list",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert any(line.startswith("not here      install(): the headers of CUDA ") for line in lines)


def test_variables_of_pytorchs_allocator_are_shown():
    lines, _ = doctor(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert "allocator     PYTORCH_NO_CUDA_MEMORY_CACHING=1" in lines


def test_it_says_why_pytorch_sees_no_gpu():
    old = (
        "import torch\n"
        "def init(): raise RuntimeError('The NVIDIA driver on your system is too old.\\nMore.')\n"
        "torch.cuda.init = init\n"
    )
    lines, status = doctor(f"exec({old!r})")
    assert "not here      PyTorch: The NVIDIA driver on your system is too old." in lines
    assert status == 1
