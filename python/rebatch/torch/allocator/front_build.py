"""Compiles the allocator in front of PyTorch's (front.cpp) for one PyTorch.

install() does so for the PyTorch that is installed (front_library.py), and scripts/wheel-fronts for
those that a wheel brings libraries for. That script has no PyTorch: this file imports neither
PyTorch nor the rest of the package.
"""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess

SOURCE = pathlib.Path(__file__).resolve().with_name("front.cpp")
LAST_INCLUDE = SOURCE.parent  # has a folder crt, which pip's packages of CUDA lack
OLDEST = (2, 8)


def source_files() -> list[pathlib.Path]:
    """front.cpp, the headers beside it, and this file, which has the compiler's flags."""
    return [SOURCE, *sorted(SOURCE.parent.glob("front_*.h")), pathlib.Path(__file__)]


class FrontError(RuntimeError):
    """The allocator cannot be compiled or loaded; the message says what to do."""


def minor_of(version: str) -> tuple[int, int]:
    """Major and minor of a version. Raises FrontError when it is none, or too old a PyTorch's."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise FrontError(f"rebatch: {version!r} is no version of PyTorch; expected one such as 2.9")
    minor = int(found[1]), int(found[2])
    if minor < OLDEST:
        raise FrontError(
            f"rebatch: PyTorch {version} is too old; expected {OLDEST[0]}.{OLDEST[1]} or later"
        )
    return minor


@dataclasses.dataclass(frozen=True)
class Torch:
    """A PyTorch to compile for."""

    folder: pathlib.Path  # of the package torch; include/ and lib/ are in it
    version: str  # torch.__version__
    cuda: str  # torch.version.cuda
    cxx11_abi: bool  # torch._C._GLIBCXX_USE_CXX11_ABI

    @property
    def minor(self) -> tuple[int, int]:
        """Major and minor version. Raises FrontError when it is too old."""
        return minor_of(self.version)

    @property
    def is_release(self) -> bool:
        """Whether it is no alpha, beta, candidate or nightly build."""
        return bool(re.fullmatch(r"\d+(\.\d+)+", self.version.split("+")[0]))

    @property
    def cuda_major(self) -> str:
        """The major version of CUDA that it was built with, for example "13"."""
        return self.cuda.split(".")[0]

    @property
    def prebuilt_name(self) -> str:
        """The name of the library that a wheel has for it.

        One library serves all versions of Python, as it needs none of its headers, and all
        releases of a minor version.
        """
        major, minor = self.minor
        return f"front-torch{major}.{minor}-cu{self.cuda_major}.so"


def compiler() -> list[str]:
    """The command of the C++ compiler: the variable CXX, or the system's. Raises FrontError."""
    wanted = os.environ.get("CXX", "").split()
    for candidate in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(candidate[0]):
            return candidate
    raise FrontError(
        "rebatch: no C++ compiler was found, which install() needs once for a PyTorch that this "
        "package brings no allocator for; install g++, set CXX, or leave install() out: Step works "
        "without it"
    )


def has_cuda_runtime(folder: pathlib.Path, major: str) -> bool:
    """Whether the header of the CUDA runtime is there, in this major version."""
    try:
        text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return False
    version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return version is not None and str(int(version.group(1)) // 1000) == major


def cuda_package(torch: Torch) -> str:
    """The package that has the headers of CUDA, as pip takes it."""
    version = ".".join(torch.cuda.split(".")[:2])
    suffix = "-cu12" if torch.cuda_major == "12" else ""
    return f"nvidia-cuda-runtime{suffix}=={version}.*"


def cuda_include(torch: Torch, folders: list[pathlib.Path]) -> pathlib.Path:
    """The first of the folders that has CUDA's headers. Raises FrontError."""
    major = torch.cuda_major
    for folder in folders:
        if has_cuda_runtime(folder, major):
            return folder
    raise FrontError(
        f"rebatch: the headers of CUDA {major} were not found, which install() needs once; "
        f"run `pip install '{cuda_package(torch)}'`, or set CUDA_HOME to a CUDA {major} toolkit"
    )


def command_line(
    torch: Torch, includes: list[pathlib.Path], output: str | os.PathLike[str]
) -> list[str]:
    """The compiler's command; `includes` are the folders of rebatch's and CUDA's headers.

    It names neither librebatch.so nor CUDA's runtime, of which there may be several: the front uses
    the functions of those that are loaded.
    """
    return [
        *compiler(),
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}",
        *(f"-I{folder}" for folder in [torch.folder / "include", *includes]),
        f"-idirafter{LAST_INCLUDE}",
        str(SOURCE),
        "-o",
        str(output),
        f"-L{torch.folder / 'lib'}",
        "-lc10",
        "-lc10_cuda",
        "-Wl,-soname,librebatch_torch.so",
    ]


def first_error(log: str) -> str:
    """The line of a compiler's output that says most."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if "error" in line:
            return line
    return lines[0] if lines else "it printed nothing"


def compile_front(torch: Torch, command: list[str], log: pathlib.Path) -> None:
    """Run the compiler. Raises FrontError, with the compiler's output in `log`."""
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        said = result.stderr + result.stdout
        log.write_text(" ".join(command) + "\n" + said)
        raise FrontError(
            f"rebatch: the allocator cannot be compiled for PyTorch {torch.version}: "
            f"{first_error(said)} (all of it: {log})"
        )
