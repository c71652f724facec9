"""Finds, compiles, keeps and loads the allocator in front of PyTorch's (front.cpp).

The interface of PyTorch's allocator changes from one minor version to the next. A wheel may bring
a library for this one; otherwise the first install() compiles front.cpp (front_build.py).
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import re
import shutil
import sys
import tempfile

import torch

from rebatch import _library
from rebatch.torch.allocator import front_build
from rebatch.torch.allocator.front_build import FrontError, Torch
from rebatch.torch.private import USES_CXX11_ABI

FOLDER = pathlib.Path(__file__).resolve().parent

# Name, result, arguments of the functions of front.cpp.
FUNCTIONS = [
    ("rebatch_torch_install", ctypes.c_int, [ctypes.POINTER(_library.PoolOptions)]),
    ("rebatch_torch_is_installed", ctypes.c_int, []),
    ("rebatch_torch_configure", ctypes.c_int, [ctypes.POINTER(_library.PoolOptions)]),
    ("rebatch_torch_set_limit", ctypes.c_int, [ctypes.c_size_t, ctypes.c_uint32]),
    ("rebatch_torch_set_floor", ctypes.c_int, [ctypes.c_size_t]),
    ("rebatch_torch_pool_count", ctypes.c_int, []),
    ("rebatch_torch_pool", ctypes.c_int, [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]),
    ("rebatch_torch_find_pool", ctypes.c_void_p, [ctypes.c_int]),
    ("rebatch_torch_native_bytes", ctypes.c_uint64, []),
    (
        "rebatch_torch_make_arena",
        ctypes.c_int,
        [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            ctypes.c_bool,
            ctypes.c_uint64,
            ctypes.c_uint64,
        ],
    ),
    ("rebatch_torch_drop_arena", None, [ctypes.c_void_p]),
    ("rebatch_torch_refused_frees", ctypes.c_uint64, []),
    ("rebatch_torch_tag", ctypes.c_int, [ctypes.c_char_p]),
    ("rebatch_torch_enter_tag", ctypes.c_int, [ctypes.c_int]),
    ("rebatch_torch_leave_tag", None, [ctypes.c_int]),
]


def this_torch() -> Torch:
    """The PyTorch that is installed. Raises FrontError when it cannot have another allocator."""
    if torch.version.cuda is None:
        raise FrontError(
            f"rebatch: PyTorch {torch.__version__} is built without CUDA; install a CUDA build"
        )
    front_build.minor_of(torch.__version__)  # or it is too old
    return Torch(
        folder=pathlib.Path(torch.__file__).resolve().parent,
        version=torch.__version__,
        cuda=torch.version.cuda,
        cxx11_abi=USES_CXX11_ABI,
    )


# ---- where headers are ----


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


def rebatch_include() -> pathlib.Path:
    """The folder of rebatch's headers: in the package, else of the source tree or the system."""
    package = FOLDER.parents[1]
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


# ---- the library in the cache ----


def cache_folder() -> pathlib.Path:
    """The folder for compiled libraries."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(root) / "rebatch"


def cached(wanted: Torch) -> pathlib.Path:
    """The compiled library in the cache; it need not exist.

    Its name has the versions of PyTorch and CUDA, and a hash of its sources and rebatch's headers.
    """
    digest = hashlib.sha256()
    for file in [
        *front_build.source_files(),
        *sorted((rebatch_include() / "rebatch").glob("*.h")),
    ]:
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(repr((wanted.version, wanted.cxx11_abi)).encode())
    version = re.sub(r"[^\w.]", "_", wanted.version)
    name = f"front-torch{version}-cuda{wanted.cuda}-{digest.hexdigest()[:16]}.so"
    return cache_folder() / name


def _compile_command(wanted: Torch, target: str) -> list[str]:
    """What compiles front.cpp. Raises FrontError where a compiler or headers are missing."""
    includes = [rebatch_include(), front_build.cuda_include(wanted, cuda_folders())]
    return front_build.command_line(wanted, includes, target)


def compile_to(target: pathlib.Path, wanted: Torch) -> None:
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
        command = _compile_command(wanted, temporary)
        front_build.compile_front(wanted, command, target.with_suffix(".log"))
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def find_or_compile(wanted: Torch) -> pathlib.Path:
    """The library in the cache, compiled if need be (about five seconds). Raises FrontError."""
    target = cached(wanted)
    if not target.exists():
        print(
            f"rebatch: compiling the allocator for PyTorch {wanted.version}, once", file=sys.stderr
        )
        compile_to(target, wanted)
    return target


# ---- loading ----


def open_front(path: pathlib.Path, wanted: Torch) -> ctypes.CDLL:
    """The library in a file, loaded. Raises FrontError when it is not one for this PyTorch."""
    try:
        # The front finds the functions of librebatch.so, which is loaded already.
        ctypes.CDLL(_library.lib._name, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
        front = ctypes.CDLL(str(path))
    except OSError as error:
        raise FrontError(f"rebatch: {path} cannot be loaded: {error}") from None
    front.rebatch_torch_version.restype = ctypes.c_char_p
    built_for = front.rebatch_torch_version().decode()
    if not built_for.startswith("{}.{}.".format(*wanted.minor)):
        raise FrontError(
            f"rebatch: {path} is built for PyTorch {built_for}, not for {wanted.version}; delete it"
        )
    for name, result, arguments in FUNCTIONS:
        function = getattr(front, name)
        function.restype = result
        function.argtypes = arguments
    return front


def open_prebuilt(wanted: Torch) -> ctypes.CDLL | None:
    """The library that a wheel has for this PyTorch, loaded; None: it has none that fits."""
    path = FOLDER / wanted.prebuilt_name
    # Between two releases the interface is that of neither.
    if not wanted.is_release or not path.exists():
        return None
    try:
        return open_front(path, wanted)
    except FrontError as error:  # for example, a C library that is older than the wheel's
        print(error, file=sys.stderr)
        return None


def source_of(wanted: Torch) -> str:
    """Where load() would have the library from. Raises FrontError where it has none."""
    if wanted.is_release and (FOLDER / wanted.prebuilt_name).exists():
        return f"from the package, for PyTorch {wanted.version}"
    if cached(wanted).exists():
        return f"compiled before, {cached(wanted)}"
    return f"compiled at the first install() by {_compile_command(wanted, '')[0]}"


@functools.lru_cache(maxsize=None)
def load() -> ctypes.CDLL:
    """The library with the allocator, loaded. Raises FrontError."""
    wanted = this_torch()
    return open_prebuilt(wanted) or open_front(find_or_compile(wanted), wanted)
