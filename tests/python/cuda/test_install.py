"""rebatch's pool as PyTorch's allocator: install() in every order, compiled or from a wheel.

install() cannot be undone, so it is called in child processes only.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

import forked
from conftest import ALLOC_CONF, IS_OLD, REST, SUMS_ON_HOST, complaints

from rebatch.torch.allocator import front_library
from rebatch.torch.allocator import front_build

GIB = 1 << 30


HEAD = (
    "import gc, torch\n"
    "from rebatch.torch.allocator import install as rebatch\n"
    "def tensor(n, device='cuda'):\n"
    "    return torch.empty(n, dtype=torch.uint8, device=device)\n"
    "MIB = 1 << 20\n" + SUMS_ON_HOST
)


def run_to_the_end(script, **variables):
    """Run a script in a process that Python takes down at its end."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", f"{HEAD}{script}\n{REST}"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def run(script, **variables):
    """Run a script in a process of its own; in a fork, where nothing is read on import."""
    if all(name.startswith(("STANDIN_", "REBATCH_")) for name in variables):
        return forked.run(HEAD + script, env={**os.environ, **variables})
    return run_to_the_end(script, **variables)


def said(result):
    """What the script printed. It must not have complained."""
    assert result.returncode == 0, result.stdout + result.stderr
    assert complaints(result.stderr) == "", result.stderr
    return result.stdout


def child(script, **variables):
    """Run a script in a process of its own; returns what it prints."""
    return said(run(script, **variables))


def find():
    """The compiled allocator that install() loads."""
    return front_library.find_or_compile(front_library.this_torch())


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiles the allocator, which prints a line, before the tests."""
    return find()


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


def test_the_pool_takes_what_the_native_allocator_caches_after_install():
    script = (
        "x = tensor(256 * MIB)\n"
        "rebatch.install()\n"
        "del x\n"
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


# ---- what was set before install() ----

LARGEST = (
    "def fits(mib):\n"
    "    try:\n"
    "        tensor(mib * MIB)\n"
    "    except torch.OutOfMemoryError:\n"
    "        return False\n"
    "    return True\n"
    "def fits_part(part):\n"
    "    return fits(int(part * torch.cuda.get_device_properties(0).total_memory) // MIB)\n"
)


@pytest.mark.parametrize("late", ["", "rebatch.install()\n"], ids=["before", "after"])
def test_a_memory_fraction_that_is_set_before_the_first_allocation_holds(late):
    script = (
        "torch.cuda.init()\n"
        + late
        + "torch.cuda.set_per_process_memory_fraction(0.1)\n"
        + ("" if late else "rebatch.install()\n")
        + "def holds():\n"
        "    fraction = round(torch.cuda.get_per_process_memory_fraction(), 4)\n"
        "    print(fits_part(0.15), fraction)\n"
        "holds()\n"
        "rebatch.install(0)\n"
        "holds()\n"
        "torch.cuda.set_per_process_memory_fraction(1.0)\n"
        "holds()\n"
    )
    printed = child(LARGEST + script, STANDIN_MEMORY=str(GIB))
    assert printed == "False 0.1\nFalse 0.1\nTrue 1.0\n"


@pytest.mark.skipif(IS_OLD, reason="PyTorch 2.10 and newer have the setting")
def test_the_memory_fraction_of_the_environment_holds():
    script = (
        "rebatch.install()\n"
        "fraction = round(torch.cuda.get_per_process_memory_fraction(), 4)\n"
        "print(fits_part(0.15), fraction, fits_part(0.08))\n"
    )
    conf = {ALLOC_CONF: "per_process_memory_fraction:0.1"}
    assert child(LARGEST + script, STANDIN_MEMORY=str(GIB), **conf) == "False 0.1 True\n"


def test_what_existed_before_counts_towards_the_limit():
    script = (
        "keep = tensor(40 * MIB)\n"
        "rebatch.install('128MiB')\n"
        "print(fits(100), fits(80))\n"
        "del keep\n"
        "print(fits(100))\n"
    )
    assert child(LARGEST + script) == "False True\nTrue\n"


def test_observers_of_ooms_that_were_attached_before_are_told_once():
    script = (
        "torch.cuda.init()\n"
        "told = []\n"
        "torch._C._cuda_attach_out_of_memory_observer(lambda *each: told.append(each[:2]))\n"
        "rebatch.install('64MiB')\n"
        "print(fits(100), told)\n"
    )
    assert child(LARGEST + script) == f"False [(0, {100 << 20})]\n"


def test_an_observer_may_run_out_of_memory_itself():
    script = (
        "rebatch.install('64MiB')\n"
        "told = []\n"
        "def observe(device, size, *_):\n"
        "    told.append(size // MIB)\n"
        "    assert size > 200 * MIB or not fits(300)\n"
        "torch._C._cuda_attach_out_of_memory_observer(observe)\n"
        "try: tensor(100 * MIB)\n"
        "except torch.OutOfMemoryError as error: print(str(error)[:52], told)\n"
    )
    expected = "CUDA out of memory. Tried to allocate 100.00 MiB. GP [100, 300]\n"
    assert child(LARGEST + script) == expected


def test_caching_that_was_turned_off_before_stays_off():
    script = (
        "torch.cuda.init()\n"
        "torch.cuda.caching_allocator_enable(False)\n"
        "rebatch.install()\n"
        "x = tensor(MIB)\n"
        "print(rebatch.stats()['allocations'])\n"
        "torch.cuda.caching_allocator_enable(True)\n"
        "x = tensor(MIB)\n"
        "print(rebatch.stats()['allocations'])\n"
    )
    assert child(script) == "0\n1\n"


@pytest.mark.parametrize(
    "conf, divisions, named",
    [
        ("roundup_power2_divisions:4", 4, ""),
        ("roundup_power2_divisions:1", 0, ""),
        ("roundup_power2_divisions:[256:1,>:8]", 0, "roundup_power2_divisions"),
        ("expandable_segments:True,pinned_num_register_threads:2", 0, ""),
        (
            "max_split_size_mb:64, garbage_collection_threshold:0.8,roundup_power2_divisions:8",
            8,
            "max_split_size_mb, garbage_collection_threshold",
        ),
    ],
)
def test_allocator_settings_reach_the_pool_or_are_named(conf, divisions, named):
    script = (
        "rebatch.install()\n"
        "rebatch.install()\n"
        "x = tensor(5 * MIB + MIB // 8)\n"
        "print(torch.cuda.memory_allocated() * 8 // MIB)\n"
    )
    result = run(script, **{ALLOC_CONF: conf})
    step = {0: 1, 4: 8, 8: 4}[divisions]  # of 4 to 8 MiB, in eighths of a MiB
    assert result.stdout == f"{-(-41 // step) * step}\n", result.stderr
    complained = complaints(result.stderr)
    expected = f"do not reach rebatch's pool: {named}; they hold for CUDA graphs and MemPools"
    assert complained.count("do not reach") == bool(named)
    assert not named or expected in complained


def test_an_argument_goes_before_the_setting():
    script = (
        "rebatch.install(rounding_divisions=8)\n"
        "x = tensor(5 * MIB + MIB // 8)\n"
        "print(torch.cuda.memory_allocated() * 8 // MIB)\n"
    )
    assert child(script, **{ALLOC_CONF: "roundup_power2_divisions:4"}) == "44\n"


# ---- the limit of the environment ----


@pytest.mark.parametrize(
    "variable, arguments, limit",
    [
        ("64MiB", "", "64"),
        ("64MiB", "0", "64"),
        ("64MiB", "'32MiB'", "32"),
        ("32MiB", "'64MiB'", "32"),
        ("5%", "", "total // MIB // 20"),
        ("none", "'32MiB'", "32"),
    ],
)
def test_the_smaller_limit_of_argument_and_environment_holds(variable, arguments, limit):
    script = (
        f"rebatch.install({arguments})\n"
        "total = torch.cuda.mem_get_info()[1]\n"
        f"print(fits({limit} - 2), fits({limit} + 2))\n"
    )
    printed = child(LARGEST + script, REBATCH_MEMORY_LIMIT=variable, STANDIN_MEMORY=str(GIB))
    assert printed == "True False\n"


def test_the_environments_limit_holds_when_the_limit_changes():
    script = (
        "rebatch.install('16MiB')\nkeep = tensor(MIB)\n"
        "rebatch.install('128MiB')\nprint(fits(30), fits(64))\n"
        "rebatch.install(0)\nprint(fits(30), fits(64))\n"
    )
    assert child(LARGEST + script, REBATCH_MEMORY_LIMIT="64MiB") == "True False\n" * 2


@pytest.mark.parametrize(
    "variables, arguments, most",
    [
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=32M,1=8M"}, "", 32),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=32M"}, "'16MiB'", 16),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=64M"}, "'50%'", 32),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "32m", "CUDA_DEVICE_MEMORY_LIMIT": "8m"}, "'64MiB'", 32),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "64m", "REBATCH_MEMORY_LIMIT": "32MiB"}, "", 32),
    ],
)
def test_the_limits_of_mps_and_hami_hold(variables, arguments, most):
    script = f"rebatch.install({arguments})\nprint(fits({most - 2}), fits({most + 2}))\n"
    script += "print(rebatch.summary().splitlines()[0])\n"
    holds, line = child(LARGEST + script, STANDIN_MEMORY=str(GIB), **variables).splitlines()
    assert holds == "True False"
    others = [name for name in variables if name.startswith("CUDA_")]
    assert line.startswith("limit ") and others[0] in line


def test_a_limit_of_others_that_is_no_size_is_told_and_not_obeyed():
    script = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    rebatch.install()\n"
        "print(fits(128), *{str(w.message) for w in said}, sep='\\n')\n"
    )
    printed = child(LARGEST + script, STANDIN_MEMORY=str(GIB), CUDA_DEVICE_MEMORY_LIMIT="all")
    assert printed == (
        'True\nrebatch: CUDA_DEVICE_MEMORY_LIMIT is "all": expected a size such as 4g, so it is no '
        "limit here\n"
    )


def test_a_step_without_install_has_the_environments_limit():
    script = (
        "import rebatch.torch\n"
        "weight = torch.nn.Linear(8, 1, device='cuda')\n"
        "optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)\n"
        "step = rebatch.torch.Step(weight, optimizer, lambda m, x: m(x).mean())\n"
        "print(fits(300))\n"
        "torch.cuda.empty_cache()\n"
        "step(torch.ones(4, 8, device='cuda'))\n"
        "print(fits(150), fits(300))\n"
        "lower = torch.cuda.get_per_process_memory_fraction() / 2\n"
        "torch.cuda.set_per_process_memory_fraction(lower)\n"
        "rebatch.torch.map(weight, torch.ones(4, 8, device='cuda'))\n"
        "print(abs(torch.cuda.get_per_process_memory_fraction() / lower - 1) < 1e-3)\n"
    )
    for variables in (
        {"REBATCH_MEMORY_LIMIT": "256MiB"},
        {"CUDA_DEVICE_MEMORY_LIMIT_0": "256m"},
        {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=512M", "REBATCH_MEMORY_LIMIT": "50%"},
    ):
        printed = child(LARGEST + script, STANDIN_MEMORY=str(GIB), **variables)
        assert printed == "True\nTrue False\nTrue\n"


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
    said(run_to_the_end("old = tensor(MIB)\nrebatch.install()\n" + script))


def test_pytorchs_variable_turns_caching_off():
    script = (
        "rebatch.install()\nx = tensor(8 * MIB)\ndel x\nassert torch.cuda.memory_reserved() == 0\n"
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
    printed = child(script, **{ALLOC_CONF: "backend:cudaMallocAsync"})
    assert "install() needs the native one" in printed


def test_what_the_native_allocator_has_cached_goes_back():
    script = (
        "del_me = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')\n"
        "del del_me\n"
        "x = torch.ones(64, 64, device='cuda') @ torch.ones(64, 64, device='cuda')\n"
        "assert torch.cuda.memory_reserved() >= 1 << 30\n"
        "rebatch.install()\n"
        "print(torch.cuda.memory_reserved() >> 20)\n"
    )
    assert int(child(script)) <= 64


# ---- compiling ----


def test_several_processes_compile_at_once(tmp_path):
    script = "import rebatch.torch.allocator.front_library as f; f.load()"
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
    with pytest.raises(front_library.FrontError, match="is built without CUDA"):
        find()


def test_an_old_pytorch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    with pytest.raises(front_library.FrontError, match="too old; expected 2.8 or later"):
        find()


def test_without_a_compiler_there_is_one_sentence(monkeypatch, empty_cache_folder):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(front_library.FrontError, match="no C[+][+] compiler was found"):
        find()


def test_without_cudas_headers_there_is_one_sentence(monkeypatch, empty_cache_folder):
    monkeypatch.setattr(front_library, "cuda_folders", lambda: [empty_cache_folder])
    with pytest.raises(front_library.FrontError, match="pip install 'nvidia-cuda-runtime"):
        find()


def test_cudas_headers_are_those_of_its_major_version(tmp_path):
    runtime = tmp_path / "nvidia" / "cuda_runtime" / "include"
    runtime.mkdir(parents=True)
    (runtime / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    cuda_12 = front_build.Torch(tmp_path, "2.8.0", "12.8", cxx11_abi=True)
    assert front_build.cuda_include(cuda_12, [tmp_path, runtime]) == runtime
    cuda_13 = dataclasses.replace(cuda_12, cuda="13.0")
    with pytest.raises(front_library.FrontError, match="headers of CUDA 13 were not found"):
        front_build.cuda_include(cuda_13, [tmp_path, runtime])


def test_pips_headers_of_cuda_lack_crt(tmp_path):
    wanted = front_library.this_torch()
    whole = front_build.cuda_include(wanted, front_library.cuda_folders())
    for file in whole.iterdir():
        if file.name != "crt":
            (tmp_path / file.name).symlink_to(file)
    includes = [front_library.rebatch_include(), tmp_path]
    command = front_build.command_line(wanted, includes, tmp_path / "front.so")
    front_build.compile_front(wanted, command, tmp_path / "log")


def test_a_compilation_that_fails_says_why(monkeypatch, empty_cache_folder):
    broken = empty_cache_folder / "front.cpp"
    broken.write_text("int main() { return apples; }\n")
    monkeypatch.setattr(front_build, "SOURCE", broken)
    with pytest.raises(front_library.FrontError, match="error: .*apples") as caught:
        find()
    log = pathlib.Path(str(caught.value).split("all of it: ")[1].rstrip(")"))
    assert "apples" in log.read_text()


def test_a_cache_folder_that_cannot_be_made_says_so(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(front_library.FrontError, match="set XDG_CACHE_HOME"):
        find()


# ---- a library that the wheel brings ----

INSTALL = "rebatch.install()\nx = tensor(MIB)\nprint(rebatch.stats()['live_bytes'] == MIB)\n"


@dataclasses.dataclass
class Wheel:
    """A copy of the package, on a machine without a compiler where nothing is compiled yet."""

    folder: pathlib.Path

    @property
    def prebuilt(self):
        """Where the library for this PyTorch belongs."""
        return self.folder / "rebatch/torch/allocator" / front_library.this_torch().prebuilt_name

    def install(self, script=INSTALL, **variables):
        """Run a script that calls install()."""
        machine = {"PATH": "", "CXX": "no-compiler", "XDG_CACHE_HOME": str(self.folder / "cache")}
        return run(script, PYTHONPATH=str(self.folder), **{**machine, **variables})


@pytest.fixture
def wheel(tmp_path):
    package = front_library.FOLDER.parents[1]
    no_fronts = shutil.ignore_patterns("__pycache__", "front-*.so")
    shutil.copytree(package, tmp_path / "rebatch", ignore=no_fronts)
    return Wheel(tmp_path)


def is_refused(result):
    """Whether install() ended as it does without a compiler."""
    return result.returncode != 0 and "FrontError: rebatch: no C++ compiler" in result.stderr


def test_a_prebuilt_library_needs_no_compiler(wheel, compiled):
    shutil.copy(compiled, wheel.prebuilt)
    result = wheel.install()
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")
    assert not (wheel.folder / "cache").exists()


def test_a_prebuilt_library_for_another_pytorch_is_not_used(wheel, compiled):
    for name in "front-torch2.7-cu12.so", "front-torch2.7-cu13.so":
        shutil.copy(compiled, wheel.prebuilt.with_name(name))
    assert is_refused(wheel.install())


def test_a_prebuilt_library_is_not_used_between_two_releases(wheel, compiled):
    shutil.copy(compiled, wheel.prebuilt)
    version = "{}.{}.0a0+git1234567".format(*front_library.this_torch().minor)
    assert is_refused(wheel.install(f"torch.__version__ = {version!r}\n" + INSTALL))


def build_misnamed(path):
    """Build a library that says it is for PyTorch 2.7.1."""
    source = 'extern "C" const char *rebatch_torch_version(void) { return "2.7.1"; }\n'
    command = [*front_build.compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def test_a_prebuilt_library_with_the_wrong_name_is_refused(wheel):
    build_misnamed(wheel.prebuilt)
    result = wheel.install()
    assert is_refused(result)
    assert f"is built for PyTorch 2.7.1, not for {torch.__version__}" in result.stderr


def test_a_prebuilt_library_that_cannot_be_loaded_is_compiled_instead(wheel):
    wheel.prebuilt.write_bytes(b"cut off")
    result = wheel.install(PATH=os.environ["PATH"], CXX=os.environ.get("CXX", ""))
    assert (result.returncode, result.stdout) == (0, "True\n")
    refused, compiling = result.stderr.splitlines()
    assert f"{wheel.prebuilt} cannot be loaded" in refused
    assert "compiling the allocator" in compiling


# ---- rebatch probe ----

PROBED = """
from rebatch.torch import Step
rebatch.install()
model = torch.nn.Linear(8, 1).cuda()
def loss_fn(model, samples):
    return model(samples.{attribute}).mean()
step = Step(model, torch.optim.AdamW(model.parameters()), loss_fn)
step(torch.zeros(64, 8, device="cuda"))
print("trained")
"""


def test_a_program_is_probed_as_it_is_and_ends():
    found = run(PROBED.format(attribute="data"), REBATCH_PROBE_ONLY="1")
    assert found.returncode == 0 and "largest micro-batch: 64, " in found.stdout, found.stderr
    wrong = run(PROBED.format(attribute="labels"), REBATCH_PROBE_ONLY="1")
    assert wrong.returncode == 1 and "trained" not in found.stdout + wrong.stdout
    assert "forward_backward of sample 0 returned 1000: AttributeError: 'Tensor'" in wrong.stderr
