"""Which exceptions are an out-of-memory (OOM), and how to let go of what one holds."""

from __future__ import annotations

import dis
import re
import traceback
from typing import Iterator, List, Optional, Set

import torch

from rebatch._user_code import is_own
from rebatch.torch.private import mem_get_info, memory_stats

# Texts of exceptions that are not torch.OutOfMemoryError. Each is the library's own wording, so a
# user's text that merely speaks of memory is none.
_TEXTS = (
    "CUDA out of memory.",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "HIP driver error: out of memory",
    "MPS backend out of memory",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",  # XPU
    "Triton Error [CUDA]: out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "hipErrorOutOfMemory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "CUFFT_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "HIPSOLVER_STATUS_ALLOC_FAILED",
    "rocblas_status_memory_error",
    "miopenStatusAllocFailed",
    "HIPSPARSE_STATUS_ALLOC_FAILED",
    "HIPFFT_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_PATTERNS = (
    re.compile(r"(Cuda|HIP) failure:? (\d+ )?'out of memory'"),  # NCCL, RCCL
    re.compile(r"^Invalid buffer size: [\d.]+ [KMGT]i?B"),  # MPS: one tensor is too large
    # On MIG and Jetson PyTorch 2.8 to 2.13 fail while they write the message of an OOM: NVML does
    # not list there what processes use. Nothing else in this file of PyTorch asks NVML.
    re.compile(r'NVML_SUCCESS == .*INTERNAL ASSERT FAILED at ".*CUDACachingAllocator\.cpp"'),
)

# What libraries say when memory runs out, and when something else is wrong too: an OOM only where
# an allocation has failed, or the device has no memory left.
_AMBIGUOUS = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUSOLVER_STATUS_INTERNAL_ERROR",
    "CUFFT_INTERNAL_ERROR",
    "HIPBLAS_STATUS_NOT_INITIALIZED",
    "HIPBLAS_STATUS_INTERNAL_ERROR",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",  # XPU
    "CUDA driver error: device not ready",
    "CUDA error: unrecognized error code",  # of libraries that share a GPU out
    "CUDA error: invalid argument",  # of HAMi, which refuses to say what is free
    "CUDA error: shared object initialization failed",  # a kernel that is loaded when it first runs
    "CUDA error: operation failed due to a previous error during capture",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input",
    "Unable to find an engine to execute this computation",
    "unable to find an engine",
    "handles_.at(i)",
)
# Less free memory than this counts as none: what libraries ask for at a time.
_SHORT_BYTES = 256 << 20


def _chain(error: Optional[BaseException]) -> Iterator[BaseException]:
    """An exception, and those that it was raised from. What was raised while an OOM was handled,
    but not from it, is an error of the handler."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _memory_is_short() -> bool:
    for gpu, ask in ((torch.cuda, mem_get_info), (torch.xpu, torch.xpu.mem_get_info)):
        if gpu.is_available() and gpu.is_initialized():
            try:
                return ask()[0] < _SHORT_BYTES
            except RuntimeError:  # the device is lost
                return False
    return False


def _is_oom_itself(error: BaseException, allocation_failed: bool) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(known in text for known in _TEXTS) or any(p.search(text) for p in _PATTERNS):
        return True
    is_ambiguous = any(known in text for known in _AMBIGUOUS)
    return is_ambiguous and (allocation_failed or _memory_is_short())


def failed_allocations() -> int:
    """Allocations on all GPUs that have failed until now, whoever coped with it."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0
    return sum(memory_stats(device)["num_ooms"] for device in range(torch.cuda.device_count()))


def is_oom(error: BaseException, allocation_failed: bool = False) -> bool:
    """Whether an exception, or one that it was raised from, says that memory has run out.

    Texts of CUDA, HIP, MPS, XPU, their libraries and the CPU allocator count. Those that may have
    another reason, such as that of a convolution without a workspace, count only while the GPU has
    no free memory, or where an allocation has failed under a limit (`allocation_failed`): a Step,
    a map and find_batch_size() look at torch.cuda.memory_stats()["num_ooms"] before and after."""
    return any(_is_oom_itself(e, allocation_failed) for e in _chain(error))


_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REQUEST = re.compile(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")


def asked_bytes(error: BaseException) -> int:
    """The size of the request that failed, as far as the exception says it; 0: it does not."""
    for e in _chain(error):
        found = _REQUEST.search(str(e))
        if found:
            return int(float(found[1]) * _UNITS[found[2]])
    return 0


def raised_by_program(error: BaseException) -> str:
    """Where a `raise` of the program's own made an OOM: "loss_fn, train.py:12"; "": PyTorch did."""
    if error.__cause__ is not None or error.__context__ is not None or not error.__traceback__:
        return ""
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    code = last.tb_frame.f_code
    is_raise = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    package = str(last.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    if not is_raise or not is_own(package):
        return ""
    return f"{code.co_name}, {code.co_filename}:{last.tb_lineno}"


def let_go(error: BaseException) -> None:
    """Drop what an exception holds: the frames of its traceback, whose locals are the activations,
    and the exceptions that it came from."""
    left: List[Optional[BaseException]] = [error]
    seen: Set[int] = set()
    while left:
        e = left.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        left += [e.__cause__, e.__context__]
        if e.__traceback__ is not None:
            traceback.clear_frames(e.__traceback__)
        e.__traceback__ = e.__cause__ = e.__context__ = None
