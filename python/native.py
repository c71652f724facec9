"""Builds what of the package is in C: librebatch.so, the command `rebatch` with the library that it
has programs load, the headers beside them and for ctypes, the version.

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

from bindings import headers_for_ctypes

HERE = Path(__file__).resolve().parent
COPY = HERE / "native"  # in a source distribution, which has its own copy of the C sources
ROOT = COPY if COPY.is_dir() else HERE.parent

# The flags of the Makefile that change what the library does, and those of single folders.
FLAGS = "-std=c17 -D_GNU_SOURCE -pthread -fPIC -fvisibility=hidden -Iinclude -Isrc -O2".split()
FOLDER_FLAGS = {
    "pool": ["-fno-tree-slp-vectorize"],
    "cli": ["-Iexamples"],
    "preload": ["-I.", "-DRBI_DEFINES_DLSYM"],
}
# What is built, beside the library: its folder of sources.
COMMAND, PRELOADED = Path("src/cli"), Path("preload")
# All that a source distribution has a copy of.
SOURCES = ("src", "include", "preload", "examples/output.h")
# Its stand-in, settings_file_absent.c, needs no libconfig.
NEEDS_LIBCONFIG = Path("src/config/settings_file.c")


def sources() -> list[Path]:
    """The C files, relative to ROOT."""
    folders = ("src/**/*.c", f"{PRELOADED}/*.c")
    found = sorted(path.relative_to(ROOT) for glob in folders for path in ROOT.glob(glob))
    if not found:
        raise SystemExit(
            f"rebatch: the C sources are not in {ROOT}/src; "
            "install from a whole checkout, with pip 21.3 or newer"
        )
    return [f for f in found if f != NEEDS_LIBCONFIG]


def version() -> str:
    """MAJOR.MINOR.PATCH, from include/rebatch/version.h."""
    text = (ROOT / "include/rebatch/version.h").read_text()
    number = re.compile(r"^#define REBATCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", re.MULTILINE)
    return ".".join(number.findall(text))


def run(command: Sequence[str]) -> str:
    """What the command prints."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(
            f"rebatch: there is no C compiler '{command[0]}': install one, or set CC"
        ) from None
    if done.returncode:
        raise SystemExit(f"rebatch: this failed: {shlex.join(command)}\n{done.stderr}")
    return done.stdout


def write_headers(package: Path) -> None:
    """_headers.py, of the headers as the compiler sees them."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    text = run([*compiler, "-E", "-P", "-Iinclude", "-x", "c", "include/rebatch/rebatch.h"])
    (package / "_headers.py").write_text(headers_for_ctypes(text))


def build_binaries(target: Path) -> None:
    """The library, the command, and the library that it has programs load, in one folder. They are
    named without a number: they belong to this package alone."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = FLAGS + shlex.split(os.environ.get("CFLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:

        def build(source: Path) -> tuple[Path, str]:
            result = os.path.join(folder, "-".join(source.parts) + ".o")
            extra = FOLDER_FLAGS.get(source.parts[min(1, len(source.parts) - 2)], [])
            run([*compiler, *flags, *extra, "-c", "-o", result, str(source)])
            return source.parent, result

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            built = list(pool.map(build, sources()))
        parts = {part: [o for at, o in built if at == part] for part in (COMMAND, PRELOADED)}
        objects = [o for at, o in built if at not in parts]
        archive = os.path.join(folder, "librebatch.a")
        run([_archiver(compiler), "rcs", archive, *objects])

        def link(name: str, *arguments: str) -> None:
            linker = shlex.split(os.environ.get("LDFLAGS", ""))
            end = [*linker, "-lm", "-pthread", "-ldl"]
            run([*compiler, "-o", str(target / name), *arguments, *end])

        shared = ["-shared", "-Wl,--no-undefined"]
        link("librebatch.so", *shared, "-Wl,-soname,librebatch.so", *objects)
        link("rebatch", *parts[COMMAND], archive)
        # The session is the shared library's; of the archive come private parts, which stay inside.
        beside = [f"-L{target}", "-lrebatch", "-Wl,-rpath,$ORIGIN", "-Wl,--exclude-libs,ALL"]
        soname = "-Wl,-soname,librebatch_wrap.so"
        link("librebatch_wrap.so", *shared, soname, *parts[PRELOADED], *beside, archive)


def _archiver(compiler: Sequence[str]) -> str:
    """That of the compiler, which may be one for another machine."""
    named = subprocess.run(
        [*compiler, "-print-prog-name=ar"], cwd=ROOT, capture_output=True, text=True
    )
    return named.stdout.strip() or "ar"


def build_into(package: str | Path) -> None:
    """Puts everything that is not Python into a folder that is, or becomes, the package."""
    package = Path(package).resolve()
    headers = package / "include" / "rebatch"
    shutil.rmtree(headers, ignore_errors=True)
    shutil.copytree(ROOT / "include" / "rebatch", headers)
    (package / "_version.py").write_text(f'version = "{version()}"\n')
    write_headers(package)
    with tempfile.TemporaryDirectory(dir=package) as fresh:
        build_binaries(Path(fresh))
        for path in Path(fresh).iterdir():
            os.replace(path, package / path.name)  # a process may have the old one loaded


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
