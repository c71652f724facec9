"""Builds what of the package is in C: librebatch.so, the headers beside it, the version.

It needs a C compiler (the environment variable CC, or cc) and no library. setup.py uses it; as a
program it makes a package that can be imported, without setuptools:

    python3 python/native.py FOLDER     # then PYTHONPATH=FOLDER
"""

import concurrent.futures
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
COPY = HERE / "native"  # in a source distribution, which has its own copy of the C sources
ROOT = COPY if COPY.is_dir() else HERE.parent

# The flags of the Makefile that change what the library does.
FLAGS = "-std=c17 -D_GNU_SOURCE -pthread -fPIC -fvisibility=hidden -Iinclude -Isrc -O2".split()
POOL_FLAGS = ["-fno-tree-slp-vectorize"]
# Folders of src that are programs of their own, not the library.
PROGRAMS = {"cli"}
# Their stand-ins, settings_file_absent.c and store_absent.c, need no libconfig.
NEED_LIBCONFIG = {Path("src/config/settings_file.c"), Path("src/probe/store.c")}


def sources() -> list[Path]:
    """The library's C files, relative to ROOT."""
    found = sorted(path.relative_to(ROOT) for path in ROOT.glob("src/**/*.c"))
    if not found:
        raise SystemExit(
            f"rebatch: the C sources are not in {ROOT}/src; "
            "install from a whole checkout, with pip 21.3 or newer"
        )
    return [f for f in found if f.parts[1] not in PROGRAMS and f not in NEED_LIBCONFIG]


def version() -> str:
    """MAJOR.MINOR.PATCH, from include/rebatch/version.h."""
    text = (ROOT / "include/rebatch/version.h").read_text()
    number = re.compile(r"^#define REBATCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", re.MULTILINE)
    return ".".join(number.findall(text))


def run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise SystemExit(
            f"rebatch: there is no C compiler '{command[0]}': install one, or set CC"
        ) from None
    if done.returncode:
        raise SystemExit(f"rebatch: this failed: {shlex.join(command)}\n{done.stderr}")


def build_library(path: Path) -> None:
    """Compiles the library into one file."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = FLAGS + shlex.split(os.environ.get("CFLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:

        def build(source: Path) -> str:
            target = os.path.join(folder, "-".join(source.parts) + ".o")
            extra = POOL_FLAGS if source.parts[1] == "pool" else []
            run([*compiler, *flags, *extra, "-c", "-o", target, str(source)])
            return target

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(build, sources()))
        # It is named without a number: it belongs to this package alone.
        link = ["-shared", "-Wl,-soname,librebatch.so", "-Wl,--no-undefined"]
        linker = shlex.split(os.environ.get("LDFLAGS", ""))
        run([*compiler, *link, *linker, "-o", str(path), *objects, "-lm", "-pthread", "-ldl"])


def build_into(package: str | Path) -> None:
    """Puts everything that is not Python into a folder that is, or becomes, the package."""
    package = Path(package).resolve()
    headers = package / "include" / "rebatch"
    shutil.rmtree(headers, ignore_errors=True)
    shutil.copytree(ROOT / "include" / "rebatch", headers)
    (package / "_version.py").write_text(f'version = "{version()}"\n')
    fresh = package / ".librebatch.so"
    build_library(fresh)
    os.replace(fresh, package / "librebatch.so")  # a process may have the old one loaded


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: native.py FOLDER")
    package = Path(sys.argv[1]).resolve() / "rebatch"
    if package.exists():
        shutil.rmtree(package)
    shutil.copytree(HERE / "rebatch", package, ignore=shutil.ignore_patterns("__pycache__"))
    build_into(package)


if __name__ == "__main__":
    main()
