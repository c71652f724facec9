"""rebatch's pool as PyTorch's allocator: install() in every order, and compiling it.

install() cannot be undone, so it is called in child processes only.
"""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from conftest import ALLOC_CONF

from rebatch.torch import _front

GIB = 1 << 30


def child(script, **variables):
    """Run a script in a process of its own; returns what it prints. It must not complain."""
    head = (
        "import gc, torch\n"
        "from rebatch.torch import _allocator as rebatch\n"
        "def tensor(n, device='cuda'):\n"
        "    return torch.empty(n, dtype=torch.uint8, device=device)\n"
        "MIB = 1 << 20\n"
    )
    environment = {**os.environ, **variables}
    result = subprocess.run(
        [sys.executable, "-c", head + script], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == "", result.stderr
    return result.stdout


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiles the allocator, which prints a line, before the tests."""
    _front.find_or_compile()


def test_pytorch_on_rebatchs_pool():
    """The tests of installed.py."""
    file = pathlib.Path(__file__).with_name("installed.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", file], capture_output=True, text=True
    )
    print(result.stdout + result.stderr)
    assert result.returncode == 0


# ---- the order of things, each in a process of its own ----


def test_install_before_cuda_starts():
    script = (
        "rebatch.install('1GiB')\n"
        "assert not torch.cuda.is_initialized()\n"
        "x = tensor(MIB)\n"
        "assert torch.cuda.memory_allocated() == rebatch.stats()['live_bytes'] == MIB\n"
    )
    child(script)


def test_install_after_tensors_exist():
    script = (
        "x = [tensor(3 * MIB) for _ in range(5)]\n"
        "rebatch.install()\n"
        "y = tensor(MIB)\n"
        "assert torch.cuda.memory_allocated() == 16 * MIB\n"
        "assert rebatch.stats()['live_bytes'] == MIB\n"
        "del x\n"
        "assert torch.cuda.memory_allocated() == MIB\n"
        "y.copy_(tensor(MIB))\n"
    )
    child(script)


def test_the_pool_takes_what_the_native_allocator_cached_before_install():
    script = (
        "x = tensor(256 * MIB)\n"
        "del x\n"
        "rebatch.install()\n"
        "free, _ = torch.cuda.mem_get_info()\n"
        "y = tensor(free + 100 * MIB)\n"
        "assert torch.cuda.memory_stats()['num_ooms'] == 0\n"
    )
    child(script, STANDIN_MEMORY=str(GIB))


def test_options_can_change_until_the_first_allocation():
    script = (
        "rebatch.install()\n"
        "rebatch.install('64MiB', headroom='16MiB')\n"
        "try:\n"
        "    tensor(100 * MIB)\n"
        "except torch.OutOfMemoryError:\n"
        "    print('oom')\n"
    )
    assert child(script) == "oom\n"


@pytest.mark.parametrize(
    "script",
    [
        "keep = tensor(MIB)\n",
        "import atexit\nkeep = tensor(MIB)\natexit.register(lambda: keep.add_(1))\n",
        "import builtins\nbuiltins.keep = [tensor(MIB), tensor(2 * MIB)]\n",
        "class Late:\n"
        "    def __init__(self): self.x, self.me = tensor(MIB), self\n"
        "    def __del__(self): del self.x; self.y = tensor(MIB)\n"
        "keep = Late()\n",
        "import threading\n"
        "def hold(x, e=threading.Event()): e.wait()\n"
        "threading.Thread(target=hold, args=(tensor(MIB),), daemon=True).start()\n",
        "x = tensor(MIB)\nx.record_stream(torch.cuda.Stream())\nkeep = x\n",
        "import sys\nsys.modules['keep'] = tensor(MIB)\ngc.disable()\n",
        "graph = torch.cuda.CUDAGraph()\nx = tensor(MIB)\n"
        "with torch.cuda.graph(graph): y = x + 1\n",
    ],
    ids=["global", "atexit", "builtin", "cycle", "thread", "recorded", "module", "graph"],
)
def test_the_process_ends_quietly(script):
    child("old = tensor(MIB)\nrebatch.install()\n" + script)


def test_pytorchs_variable_turns_caching_off():
    script = (
        "rebatch.install()\n"
        "x = tensor(8 * MIB)\n"
        "del x\n"
        "assert torch.cuda.memory_reserved() == 0\n"
    )
    child(script, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def test_two_gpus():
    script = (
        "if torch.cuda.device_count() < 2: raise SystemExit\n"
        "rebatch.install('256MiB')\n"
        "x, y = tensor(MIB, 'cuda:0'), tensor(2 * MIB, 'cuda:1')\n"
        "assert rebatch.stats(0)['live_bytes'] == MIB\n"
        "assert rebatch.stats(1)['live_bytes'] == 2 * MIB\n"
        "with rebatch.tag('both'):\n"
        "    a, b = tensor(MIB, 'cuda:0'), tensor(MIB, 'cuda:1')\n"
        "assert 'both' in rebatch.summary(0) and 'both' in rebatch.summary(1)\n"
        "z = torch.arange(100).to('cuda:0').to('cuda:1')\n"
        "assert torch.equal(z.cpu(), torch.arange(100))\n"
        "try: tensor(300 * MIB, 'cuda:1')\n"
        "except torch.OutOfMemoryError as error: assert 'GPU 1' in str(error)\n"
        "with torch.cuda.device(1): address = torch.cuda.caching_allocator_alloc(MIB)\n"
        "torch.cuda.caching_allocator_delete(address)\n"
        "y.record_stream(torch.cuda.Stream(1))\n"
        "del x, y, z, a, b\n"
        "torch.cuda.empty_cache()\n"
        "assert torch.cuda.memory_reserved(0) == torch.cuda.memory_reserved(1) == 0\n"
    )
    child(script, STANDIN_GPUS="2")


def test_another_backend_is_refused_in_one_sentence():
    script = (
        "try: rebatch.install()\n"
        "except RuntimeError as error: print(error)\n"
        "assert not rebatch.installed()\n"
    )
    said = child(script, **{ALLOC_CONF: "backend:cudaMallocAsync"})
    assert "install() needs the native one" in said


# ---- compiling ----


def test_several_processes_compile_at_once(tmp_path):
    script = "import rebatch.torch._front as f; f.load()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    (library,) = (tmp_path / "rebatch").iterdir()
    assert library.suffix == ".so"


@pytest.fixture
def empty_cache_folder(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_pytorch_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(_front.FrontError, match="is built without CUDA"):
        _front.find_or_compile()


def test_an_old_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    with pytest.raises(_front.FrontError, match="too old; expected 2.8 or later"):
        _front.find_or_compile()


def test_without_a_compiler_there_is_one_sentence(monkeypatch, empty_cache_folder):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(_front.FrontError, match="no C[+][+] compiler was found"):
        _front.find_or_compile()


def test_without_cudas_headers_there_is_one_sentence(monkeypatch, empty_cache_folder):
    monkeypatch.setattr(_front, "cuda_folders", lambda: [empty_cache_folder])
    with pytest.raises(_front.FrontError, match="pip install 'nvidia-cuda-runtime"):
        _front.find_or_compile()


def test_a_compilation_that_fails_says_why(monkeypatch, empty_cache_folder):
    broken = empty_cache_folder / "front.cpp"
    broken.write_text("int main() { return apples; }\n")
    monkeypatch.setattr(_front, "SOURCE", broken)
    with pytest.raises(_front.FrontError, match="error: .*apples") as caught:
        _front.find_or_compile()
    log = pathlib.Path(str(caught.value).split("all of it: ")[1].rstrip(")"))
    assert "apples" in log.read_text()


def test_a_cache_folder_that_cannot_be_made_says_so(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(_front.FrontError, match="set XDG_CACHE_HOME"):
        _front.find_or_compile()
