"""The wheel of `make wheel`: its platform tag is one that a package index takes."""

import os
import pathlib
import re
import subprocess
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = re.compile(r"rebatch-[\d.]+-py3-none-(manylinux_2_\d+_\w+)\.whl")


def link(output, *arguments):
    """Links a library that does nothing, with the name of its file."""
    source = output.with_suffix(".c")
    source.write_text("int nothing;\n")
    soname = f"-Wl,-soname,{output.name}"
    subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", output, source, *arguments], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with an allocator, which needs a library that PyTorch brings."""
    folder = tmp_path_factory.mktemp("wheel")
    fronts = folder / "fronts"
    fronts.mkdir()
    torch_library = folder / "libc10.so"
    link(torch_library)
    link(fronts / "front-torch2.9-cu13.so", "-Wl,--no-as-needed", torch_library)
    # No test looks at what the compiler made of the library.
    environment = {**os.environ, "REBATCH_FRONTS": str(fronts), "CFLAGS": "-O0"}
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        [ROOT / "scripts/wheel", folder / "out"], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (folder / "out").glob("*.whl")
    assert result.stdout == f"built {path}\n"
    return path


def test_the_tag_is_one_of_manylinux(wheel):
    tag = NAME.fullmatch(wheel.name)
    assert tag, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (info,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (.*)$", archive.read(info).decode(), re.MULTILINE)
    assert tags == [f"py3-none-{tag[1]}"]


def test_no_library_of_pytorch_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in name]
    assert sorted(libraries) == [
        "rebatch/librebatch.so",
        "rebatch/torch/allocator/front-torch2.9-cu13.so",
    ]


def test_pip_installs_it_where_it_was_built(wheel, tmp_path):
    pip = [ROOT / "build/wheel-venv/bin/python", "-m", "pip", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--target", tmp_path, wheel], check=True)
    assert (tmp_path / "rebatch/librebatch.so").stat().st_size > 0
