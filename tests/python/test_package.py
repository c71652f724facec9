"""The package as it is installed: its files, and the library in it, by ctypes alone."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rebatch

PACKAGE = Path(rebatch.__file__).parent
UNSUPPORTED = "REBATCH_E_UNSUPPORTED"
REFUSAL = (
    "settings files need libconfig, which this build was made without: "
    "use options or REBATCH_* variables"
)


@pytest.fixture(scope="module")
def library():
    loaded = ctypes.CDLL(str(PACKAGE / "librebatch.so"))
    for name in "version", "last_error", "status_name":
        getattr(loaded, "rebatch_" + name).restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def load(library):
    """Loads settings: (name of the status, the error's text, the settings)."""
    settings = []

    def call(path=None):
        config = ctypes.c_void_p()
        status = library.rebatch_config_load(ctypes.byref(config), path and os.fsencode(path))
        settings.append(config)
        name = library.rebatch_status_name(status).decode()
        return name, library.rebatch_last_error().decode() if status else "", config

    yield call
    for config in settings:
        library.rebatch_config_free(config)


def test_version_is_the_librarys(library):
    assert rebatch.__version__ == library.rebatch_version().decode()


def test_headers_are_those_of_the_library():
    text = (PACKAGE / "include/rebatch/version.h").read_text()
    numbers = re.findall(r"define REBATCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text)
    assert ".".join(numbers) == rebatch.__version__


def test_library_needs_only_the_c_library():
    listed = subprocess.run(["ldd", PACKAGE / "librebatch.so"], capture_output=True, text=True)
    names = {Path(line.split()[0]).name.split(".")[0] for line in listed.stdout.splitlines()}
    loader = {name for name in names if name.startswith(("ld-linux", "linux-vdso"))}
    assert "libc" in names and names - loader <= {"libc", "libm", "libdl", "libpthread"}


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_settings_file_is_refused(load, tmp_path, monkeypatch, by):
    path = tmp_path / "train.cfg"
    path.write_text('memory = { limit = "1GiB"; };\n')
    if by == "variable":
        monkeypatch.setenv("REBATCH_CONFIG", str(path))
    status, text, config = load(path if by == "argument" else None)
    assert status == UNSUPPORTED and not config
    assert text.endswith("train.cfg: " + REFUSAL)


def test_variables_set_settings(library, load, monkeypatch):
    from rebatch import _library

    monkeypatch.setenv("REBATCH_MEMORY_LIMIT", "22GiB")
    status, _, config = load()
    assert status == "REBATCH_OK"
    options = _library.Options(struct_size=ctypes.sizeof(_library.Options))
    assert library.rebatch_config_options(ctypes.byref(options), config) == 0
    assert options.pool.limit_bytes == 22 << 30


def test_a_wrong_limit_in_the_environment_is_one_sentence(monkeypatch):
    from rebatch.torch import install

    monkeypatch.setenv("REBATCH_MEMORY_LIMIT", "22G")
    expected = 'rebatch: REBATCH_MEMORY_LIMIT: memory.limit is "22G", which may mean 22GiB or 22GB'
    with pytest.raises(rebatch.Error, match=re.escape(expected)):
        install()


def command(*arguments, **options):
    """python3 -m rebatch, which is the program that `make install` installs."""
    line = [sys.executable, "-m", "rebatch", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, **options)


def test_the_command_is_in_the_package():
    assert command("--version").stdout == f"rebatch {rebatch.__version__}\n"
    assert command("config", "show").stdout.startswith("batch = {")
    assert "there is no command 'fix'; did you mean 'fit'" in command("fix").stderr


def test_the_command_has_a_program_load_the_library_beside_it():
    done = command("run", "--limit", "1GiB", "--", "sh", "-c", "echo $LD_PRELOAD; exit 3")
    assert done.stdout.strip().endswith(str(PACKAGE / "librebatch_wrap.so"))
    assert done.returncode == 3 and "no librebatch_wrap.so" not in done.stderr


def test_a_step_of_a_program_is_checked_by_the_command(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, rebatch.torch as rebatch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "step = rebatch.Step(model, optimizer, lambda m, x: m(x).square().sum())\n"
        "step(torch.ones(8, 4))\n"
    )
    done = command("run", "--check", "--", sys.executable, program)
    assert done.returncode == 4 and done.stdout.startswith("sum "), done.stderr


def test_importing_loads_no_torch():
    program = "import sys, rebatch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_importing_without_pytorch_says_what_to_install():
    program = "import sys; sys.modules['torch'] = None; import rebatch.torch"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == (
        "ImportError: rebatch.torch needs PyTorch 2.8 or newer, which is not installed: "
        "run `pip install torch`"
    )
