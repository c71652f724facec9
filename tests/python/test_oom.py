"""Which exceptions are OOMs, in all their masks, and which are not."""

import gc
import types
import weakref

import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch import is_oom
from rebatch.torch.session import oom
from models import Unseen, make, out_of_memory, regression_loss, same_bits, state_of

OOMS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ..."),
    torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory. (out of memory)"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("HIP error: out of memory\nHIP kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("hipErrorOutOfMemory"),
    RuntimeError("HIP driver error: out of memory"),
    RuntimeError("cusolver error: HIPSOLVER_STATUS_ALLOC_FAILED, when calling `hipsolverCreate`"),
    RuntimeError("NCCL Error 1: unhandled cuda error\nLast error:\nHIP failure 'out of memory'"),
    RuntimeError("miopenStatusAllocFailed"),
    RuntimeError("Invalid buffer size: 19.45 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 1 GiB)"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("NCCL Error 1: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 8000000000000 bytes."
    ),
    RuntimeError(
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131, '
        "please report a bug to PyTorch. "
    ),
    RuntimeError(
        "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
        '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":963, please report a bug to PyTorch. '
    ),
)

OTHERS = (
    RuntimeError("my buffer is out of memory slots"),
    RuntimeError("Invalid buffer size: expected 4, got 8"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError(
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/PeerToPeerAccess.cpp":87, '
        "please report a bug to PyTorch. "
    ),
    RuntimeError('false INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131'),
    ValueError("CUDA out of memory."),
    MemoryError(),
    KeyboardInterrupt(),
)


@pytest.mark.parametrize("error", OOMS, ids=lambda e: str(e)[:40])
def test_an_oom_is_recognised(error):
    assert is_oom(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda e: f"{type(e).__name__}: {e}"[:40])
def test_nothing_else_is_taken_for_one(error):
    assert not is_oom(error)


def raised(function):
    try:
        function()
    except Exception as error:
        return error


def test_an_oom_that_another_exception_was_raised_from_is_one():
    def wrap():
        try:
            raise OOMS[0]
        except RuntimeError as error:
            raise ValueError("the compiled model failed") from error

    assert is_oom(raised(wrap))


def test_an_error_in_the_handling_of_an_oom_is_none():
    def handle():
        try:
            raise OOMS[0]
        except RuntimeError:
            {}["missing"]

    assert not is_oom(raised(handle))


def test_ambiguous_texts_are_ooms_where_the_gpu_is_full(monkeypatch):
    monkeypatch.setattr(oom, "_memory_is_short", lambda: True)
    assert is_oom(OTHERS[5]) and is_oom(OTHERS[6])
    assert not is_oom(OTHERS[2])


def test_a_gpu_that_does_not_say_what_is_free_is_full(monkeypatch):
    def refuse(device=None):
        raise RuntimeError("CUDA error: invalid argument")  # HAMi, over its limit

    error = RuntimeError("CUDA error: unrecognized error code")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 34, 1 << 35))
    assert not is_oom(error)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    properties = lambda device: types.SimpleNamespace(total_memory=1 << 35)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert is_oom(error) and is_oom(RuntimeError("CUDA error: invalid argument"))


def test_ambiguous_texts_are_asked_of_an_xpu(monkeypatch):
    error = RuntimeError("UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)")
    assert not is_oom(error)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda: (1 << 34, 1 << 35))
    assert not is_oom(error)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda: (1 << 20, 1 << 35))
    assert is_oom(error)


@pytest.mark.parametrize(
    "text",
    (
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation",
        "Unable to find an engine to execute this computation",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
        "non-contiguous input.",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasLtMatmul(...)`",
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnSgetrf(...)`",
        "cuFFT error: CUFFT_INTERNAL_ERROR",
        "!handles_.at(i) INTERNAL ASSERT FAILED",
        "CUDA driver error: device not ready",
        "CUDA error: unrecognized error code",
        "CUDA error: shared object initialization failed",
        "CUDA error: operation failed due to a previous error during capture",
    ),
)
def test_ambiguous_texts_are_ooms_where_an_allocation_has_failed(text):
    engine = RuntimeError(text)
    assert not is_oom(engine) and is_oom(engine, allocation_failed=True)
    assert not is_oom(OTHERS[3], allocation_failed=True)


@pytest.mark.parametrize(
    "text, expected",
    (
        ("CUDA out of memory. Tried to allocate 1.50 GiB.", 3 << 29),
        ("you tried to allocate 800 bytes", 800),
        ("out of memory", 0),
    ),
)
def test_the_size_of_the_request_is_read(text, expected):
    assert oom.asked_bytes(torch.OutOfMemoryError(text)) == expected


def test_what_an_exception_holds_is_let_go():
    class Held:
        pass

    def fail():
        held = Held()
        alive.append(weakref.ref(held))
        try:
            raise RuntimeError("first")
        except RuntimeError as first:
            raise torch.OutOfMemoryError("CUDA out of memory.") from first

    alive = []
    error = raised(fail)
    gc.disable()
    try:
        oom.let_go(error)
        assert alive[0]() is None
    finally:
        gc.enable()


# ---- what runs before the micro-batches ----


@pytest.mark.parametrize("name", ("normalizer", "length", "slice", "cost"))
@pytest.mark.parametrize("times", (1, 2))
def test_an_oom_in_a_function_of_the_batch_is_tried_again(name, times):
    """One that cuts is tried with fewer samples."""
    model, batch, _ = make("mlp")
    left = Unseen(0)

    def failing(function):
        def call(*arguments):
            if left[0]:
                left[0] -= 1
                out_of_memory(None)
            return function(*arguments)

        return call

    functions = {
        "normalizer": lambda batch: len(batch[0]),
        "length": lambda batch: len(batch[0]),
        "slice": lambda batch, first, count: tuple(t[first : first + count] for t in batch),
        "cost": lambda batch, first, count: count,
    }
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda model, samples: regression_loss(model, samples) * len(samples[0]),
        log_level="quiet",
        **{**functions, name: failing(functions[name])},
    )
    step(batch)
    before = state_of(model)
    left[0] = times
    if times == 1 or name == "slice":
        assert step(batch).isfinite()
        return
    with pytest.raises(rebatch.Exhausted, match=f"out of memory in {name}, and once more after"):
        step(batch)
    assert same_bits(before, state_of(model))
    assert step(batch).isfinite()
