"""Compiles, keeps and loads the allocator in front of PyTorch's (front.cpp).

The interface of PyTorch's allocator changes from one minor version to the next, so front.cpp is
compiled for the PyTorch that is installed, at the first install(). A library that a wheel brings
along for this PyTorch is used instead.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import torch

from .. import _library

FOLDER = pathlib.Path(__file__).resolve().parent
SOURCE = FOLDER / "front.cpp"
OLDEST = (2, 8)

# Name, result, arguments of the functions of front.cpp.
FUNCTIONS = [
    ("rebatch_torch_version", ctypes.c_char_p, []),
    ("rebatch_torch_install", ctypes.c_int, [ctypes.POINTER(_library.PoolOptions)]),
    ("rebatch_torch_is_installed", ctypes.c_int, []),
    ("rebatch_torch_configure", ctypes.c_int, [ctypes.POINTER(_library.PoolOptions)]),
    ("rebatch_torch_set_limit", ctypes.c_int, [ctypes.c_size_t, ctypes.c_uint32]),
    ("rebatch_torch_pool_count", ctypes.c_int, []),
    ("rebatch_torch_pool", ctypes.c_int, [_library.HANDLE_OUT, ctypes.c_int]),
    ("rebatch_torch_refused_frees", ctypes.c_uint64, []),
    ("rebatch_torch_tag", ctypes.c_int, [ctypes.c_char_p]),
    ("rebatch_torch_enter_tag", ctypes.c_int, [ctypes.c_int]),
    ("rebatch_torch_leave_tag", None, [ctypes.c_int]),
]


class FrontError(RuntimeError):
    """The allocator cannot be compiled or loaded; the message says what to do."""


def torch_version() -> tuple[int, int]:
    """Major and minor version of PyTorch."""
    major, minor = re.match(r"(\d+)\.(\d+)", torch.__version__).groups()
    return int(major), int(minor)


def check_torch() -> None:
    """Raise FrontError when this PyTorch cannot have another allocator on its GPUs."""
    if torch.version.cuda is None:
        raise FrontError(
            f"rebatch: PyTorch {torch.__version__} is built without CUDA; install a CUDA build"
        )
    if torch_version() < OLDEST:
        raise FrontError(
            f"rebatch: PyTorch {torch.__version__} is too old; expected {OLDEST[0]}.{OLDEST[1]} "
            "or later"
        )


def cuda_major() -> str:
    """The major version of CUDA that PyTorch was built with, for example "13"."""
    return torch.version.cuda.split(".")[0]


# ---- what to compile with ----


def compiler() -> list[str]:
    """The command of the C++ compiler: the variable CXX, or the system's. Raises FrontError."""
    wanted = os.environ.get("CXX", "").split()
    for candidate in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(candidate[0]):
            return candidate
    raise FrontError(
        "rebatch: no C++ compiler was found, which install() needs once; install g++ (Debian and "
        "Ubuntu: apt-get install g++), or set CXX"
    )


def cuda_folders() -> list[pathlib.Path]:
    """Where CUDA's headers may be: the packages beside PyTorch, then the toolkit."""
    packages = pathlib.Path(torch.__file__).resolve().parents[1]
    folders = sorted(packages.glob("nvidia/*/include"))
    folders.append(packages / "triton" / "backends" / "nvidia" / "include")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            folders.append(pathlib.Path(os.environ[variable]) / "include")
    nvcc = shutil.which("nvcc")
    if nvcc:
        folders.append(pathlib.Path(nvcc).resolve().parents[1] / "include")
    folders.append(pathlib.Path("/usr/local/cuda/include"))
    return folders


def is_cuda_include(folder: pathlib.Path) -> bool:
    """Whether the headers of the CUDA runtime are there, in PyTorch's major version."""
    try:
        text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return False
    version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    is_complete = (folder / "crt" / "host_defines.h").exists()
    return is_complete and bool(version) and str(int(version.group(1)) // 1000) == cuda_major()


def cuda_include() -> pathlib.Path:
    """The folder of CUDA's headers. Raises FrontError."""
    for folder in cuda_folders():
        if is_cuda_include(folder):
            return folder
    version = ".".join(torch.version.cuda.split(".")[:2])
    packages = ["nvidia-cuda-runtime", "nvidia-cuda-crt"]
    if cuda_major() == "12":
        packages = ["nvidia-cuda-runtime-cu12"]
    wanted = " ".join(f"'{package}=={version}.*'" for package in packages)
    raise FrontError(
        f"rebatch: the headers of CUDA {cuda_major()} were not found, which install() needs once; "
        f"run `pip install {wanted}`, or set CUDA_HOME to a CUDA {cuda_major()} toolkit"
    )


def rebatch_include() -> pathlib.Path:
    """The folder of rebatch's headers: in the package, else of the source tree or the system."""
    package = FOLDER.parent
    candidates = [package / "include", package.parents[1] / "include"]
    library = pathlib.Path(_library.library_path())
    if library.is_absolute():
        candidates.append(library.parents[1] / "include")
    candidates += [pathlib.Path("/usr/local/include"), pathlib.Path("/usr/include")]
    for folder in candidates:
        if (folder / "rebatch" / "rebatch.h").exists():
            return folder
    raise FrontError(
        "rebatch: its headers were not found beside the package, the library, or in "
        "/usr/local/include; install rebatch again"
    )


def command_line(output: str) -> list[str]:
    """The compiler's command.

    It does not name librebatch.so, of which there may be several: the front uses the functions of
    the one that is loaded.
    """
    folder = pathlib.Path(torch.__file__).resolve().parent
    return [
        *compiler(),
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{rebatch_include()}",
        f"-isystem{folder / 'include'}",
        f"-isystem{cuda_include()}",
        str(SOURCE),
        "-o",
        output,
        f"-L{folder / 'lib'}",
        "-lc10",
        "-lc10_cuda",
        "-Wl,-soname,librebatch_torch.so",
    ]


# ---- the compiled library ----


def prebuilt() -> pathlib.Path:
    """The library that a wheel has for this PyTorch; it need not exist."""
    major, minor = torch_version()
    return FOLDER / f"front-torch{major}.{minor}-cu{cuda_major()}.so"


def cache_folder() -> pathlib.Path:
    """The folder for compiled libraries."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(root) / "rebatch"


def cached() -> pathlib.Path:
    """The compiled library in the cache; it need not exist.

    Its name has the versions of PyTorch and CUDA, and a hash of front.cpp, rebatch's headers, and
    this file, which has the compiler's flags.
    """
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update(pathlib.Path(__file__).read_bytes())
    for header in sorted((rebatch_include() / "rebatch").glob("*.h")):
        digest.update(header.name.encode() + header.read_bytes())
    digest.update(repr((torch.__version__, torch._C._GLIBCXX_USE_CXX11_ABI)).encode())
    version = re.sub(r"[^\w.]", "_", torch.__version__)
    name = f"front-torch{version}-cuda{torch.version.cuda}-{digest.hexdigest()[:16]}.so"
    return cache_folder() / name


def first_error(log: str) -> str:
    """The line of a compiler's output that says most."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if "error" in line:
            return line
    return lines[0] if lines else "it printed nothing"


def compile_front(target: pathlib.Path) -> None:
    """Compile front.cpp to `target`. Several processes may do so at once. Raises FrontError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=target.name, suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise FrontError(
            f"rebatch: the cache folder {target.parent} cannot be written ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can"
        ) from None
    os.close(handle)
    try:
        command = command_line(temporary)
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if result.returncode != 0:
            log = target.with_suffix(".log")
            output = result.stderr + result.stdout
            log.write_text(" ".join(command) + "\n" + output)
            raise FrontError(
                "rebatch: the allocator cannot be compiled for PyTorch "
                f"{torch.__version__}: {first_error(output)} (all of it: {log})"
            )
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def find_or_compile() -> pathlib.Path:
    """The library for this PyTorch, compiled if need be (about five seconds). Raises FrontError."""
    check_torch()
    if prebuilt().exists():
        return prebuilt()
    target = cached()
    if not target.exists():
        print(
            f"rebatch: compiling the allocator for PyTorch {torch.__version__}, once",
            file=sys.stderr,
        )
        compile_front(target)
    return target


@functools.lru_cache(maxsize=None)
def load() -> ctypes.CDLL:
    """The library with the allocator, loaded. Raises FrontError."""
    path = find_or_compile()
    try:
        # The front finds the functions of librebatch.so, which is loaded already.
        ctypes.CDLL(_library.lib._name, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
        front = ctypes.CDLL(str(path))
    except OSError as error:
        raise FrontError(f"rebatch: {path} cannot be loaded: {error}") from None
    for name, result, arguments in FUNCTIONS:
        function = getattr(front, name)
        function.restype = result
        function.argtypes = arguments
    built_for = front.rebatch_torch_version().decode()
    if not built_for.startswith("{}.{}.".format(*torch_version())):
        raise FrontError(
            f"rebatch: {path} is built for PyTorch {built_for}, not for {torch.__version__}; "
            "delete it"
        )
    return front
