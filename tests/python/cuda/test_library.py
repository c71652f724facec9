"""The library in the package on a GPU: it finds the driver, and its pool takes memory of it."""

import ctypes
from pathlib import Path

import pytest
import torch

import rebatch

MIB = 1 << 20


@pytest.fixture
def library():
    loaded = ctypes.CDLL(str(Path(rebatch.__file__).parent / "librebatch.so"))
    loaded.rebatch_last_error.restype = ctypes.c_char_p
    return loaded


def test_pool_on_the_gpu(library):
    def ok(status):
        assert status == 0, library.rebatch_last_error()

    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    device, pool, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    ok(library.rebatch_device_open_cuda(ctypes.byref(device), None))
    ok(library.rebatch_pool_create(ctypes.byref(pool), device, None))
    size = ctypes.c_size_t(64 * MIB)
    ok(library.rebatch_pool_alloc(ctypes.byref(memory), pool, size, None, ctypes.c_uint32(0)))
    assert memory.value
    assert torch.cuda.mem_get_info()[0] <= before - 64 * MIB
    ok(library.rebatch_pool_free(pool, memory))
    library.rebatch_pool_destroy(pool)
    library.rebatch_device_close(device)
    assert torch.cuda.mem_get_info()[0] >= before - 16 * MIB
