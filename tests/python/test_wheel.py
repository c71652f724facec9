"""What `make wheel` builds: a wheel for glibc 2.28, and sources that build anywhere."""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = re.compile(r"rebatch-[\d.]+-py3-none-(manylinux_2_2[0-8]_\w+)\.whl")


def link(output, *arguments):
    """Links a library that does nothing, with the name of its file."""
    source = output.with_suffix(".c")
    source.write_text("int nothing;\n")
    soname = f"-Wl,-soname,{output.name}"
    subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", output, source, *arguments], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, with an allocator that needs a library which PyTorch brings, and the source
    distribution."""
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
    (wheel,) = (folder / "out").glob("*.whl")
    (sources,) = (folder / "out").glob("*.tar.gz")
    assert result.stdout == f"built {wheel}\nbuilt {sources}\n"
    return wheel, sources


@pytest.fixture(scope="module")
def wheel(built):
    return built[0]


@pytest.mark.night
def test_the_tag_is_of_glibc_2_28(wheel):
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
        "rebatch/librebatch_wrap.so",
        "rebatch/torch/allocator/front-torch2.9-cu13.so",
    ]


def test_pip_installs_it_where_it_was_built(wheel, tmp_path):
    pip = [ROOT / "build/wheel-venv/bin/python", "-m", "pip", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--target", tmp_path, wheel], check=True)
    assert (tmp_path / "rebatch/librebatch.so").stat().st_size > 0
    # The command on PATH is the program in the package.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = [
        subprocess.run([*command, "run", "--help"], capture_output=True, env=environment)
        for command in ([tmp_path / "bin/rebatch"], [tmp_path / "rebatch/rebatch"])
    ]
    assert said[0].returncode == 0 and said[0].stdout == said[1].stdout


@pytest.mark.night
def test_the_source_distribution_builds_the_same_package(built, wheel, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    environment = {**os.environ, "CFLAGS": "-O0"}
    native = [sys.executable, folder / "native.py", tmp_path / "out"]
    subprocess.run(native, check=True, env=environment, cwd=tmp_path)
    made = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    expected = {name for name in names if name.startswith("rebatch/")}
    assert expected - made == {"rebatch/torch/allocator/front-torch2.9-cu13.so"}
