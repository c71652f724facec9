"""What the stand-in promises to the other tests, shown on PyTorch itself, without rebatch."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from conftest import ALLOC_CONF, REST, complaints
from rebatch import _library

MIB = 1 << 20
PAGE = 2 * MIB


def tensor_of(size_bytes, device="cuda"):
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def count(name):
    """A counter of PyTorch's allocator, which counts from the start of the process."""
    return torch.cuda.memory_stats().get(name, 0)


def train(net, batch, steps=2):
    """Some steps as a program makes them: backward runs in autograd's thread."""
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(steps):
        net(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def linear():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 8))


def convolution():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GELU(), nn.MaxPool2d(2))


def attention():
    return nn.TransformerEncoderLayer(64, 4, batch_first=True)


SHAPES = {linear: (32, 64), convolution: (4, 3, 32, 32), attention: (2, 16, 64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
def test_layers_train(standin, make, dtype):
    ooms = count("num_ooms")
    net = make().cuda()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        train(net, torch.randn(SHAPES[make], device="cuda"))
    assert count("num_ooms") == ooms
    assert all(p.grad is None for p in net.parameters())


def test_statistics_are_pytorchs_own(standin):
    def used():
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), standin.standin_used(0)

    allocated, reserved, taken = used()  # the workspace of cuBLAS stays
    asked = standin.standin_allocations()
    x = tensor_of(30 * MIB)
    assert used() == (allocated + 30 * MIB, reserved + 30 * MIB, taken + 30 * MIB)
    assert standin.standin_allocations() == asked + 1
    del x
    assert used() == (allocated, reserved + 30 * MIB, taken + 30 * MIB)
    torch.cuda.empty_cache()
    assert used() == (allocated, reserved, taken)


def test_the_cap_gives_an_oom(standin):
    total = torch.cuda.mem_get_info()[1]
    ooms = count("num_ooms")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        tensor_of(total + PAGE)
    assert count("num_ooms") == ooms + 1
    assert tensor_of(16 * MIB).is_cuda


def test_an_oom_in_backward_reaches_the_caller(standin):
    x = torch.randn(30 << 20, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    loss = x.sin().sum()
    torch.cuda.empty_cache()
    standin.standin_fail_from(1)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert x.grad is None


def test_memory_goes_and_comes_back(standin):
    free, total = torch.cuda.mem_get_info()
    standin.standin_set_memory(0, 64 * MIB)
    assert torch.cuda.mem_get_info()[0] <= 64 * MIB
    assert torch.cuda.mem_get_info()[1] == total
    with pytest.raises(torch.OutOfMemoryError):
        tensor_of(100 * MIB)
    standin.standin_set_memory(0, total)
    assert torch.cuda.mem_get_info()[0] == free
    tensor_of(100 * MIB)


def test_one_allocation_fails(standin):
    standin.standin_fail_at(2)
    retries = count("num_alloc_retries")
    tensors = [tensor_of(30 * MIB) for _ in range(3)]
    assert len(tensors) == 3
    assert count("num_alloc_retries") == retries + 1
    standin.standin_fail_from(1)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_of(30 * MIB)
    standin.standin_fail_from(0)
    tensor_of(30 * MIB)


def test_copies_copy(standin):
    numbers = torch.arange(1000)
    there = numbers.cuda()
    assert torch.equal(there.cpu(), numbers)
    assert torch.equal(there.clone().cpu(), numbers)
    first = torch.zeros(1000, dtype=torch.int64).pin_memory()
    first.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(first, numbers)


def test_streams_and_events(standin):
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = tensor_of(30 * MIB)
    address = x.data_ptr()
    with torch.cuda.stream(stream):
        start.record()
        x.add_(1)
        end.record()
    x.record_stream(stream)
    torch.cuda.current_stream().wait_event(end)
    end.synchronize()
    assert end.query() and stream.query()
    assert start.elapsed_time(end) >= 0
    del x
    y = tensor_of(30 * MIB)
    assert y.data_ptr() == address  # the event that record_stream left is ready


def test_pinned_memory(standin):
    x = torch.arange(10.0).pin_memory()
    assert x.is_pinned() and not torch.arange(10.0).is_pinned()
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(data, batch_size=16, pin_memory=True, num_workers=1)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    there = [batch.cuda(non_blocking=True) for batch in batches]
    assert torch.equal(torch.cat([batch.cpu() for batch in there]), torch.arange(64.0))


def test_graph_capture(standin):
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        x = tensor_of(4 * MIB)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            assert torch.cuda.is_current_stream_capturing()
            x.add_(1)
        torch.cuda.current_stream().wait_stream(other)
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(other):
        assert not torch.cuda.is_current_stream_capturing()
    graph.replay()


@pytest.mark.gpus(2)
def test_two_gpus_have_memory_each(standin):
    before = standin.standin_used(0), standin.standin_used(1)
    x = tensor_of(30 * MIB, "cuda:1")
    assert (standin.standin_used(0), standin.standin_used(1)) == (before[0], before[1] + 30 * MIB)
    assert x.device.index == 1
    numbers = torch.arange(1000, device="cpu")
    assert torch.equal(numbers.to("cuda:0").to("cuda:1").cpu(), numbers)
    standin.standin_set_memory(1, 32 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1"):
        tensor_of(64 * MIB, "cuda:1")
    tensor_of(64 * MIB, "cuda:0")
    standin.standin_set_memory(1, 1 << 30)
    train(nn.Linear(8, 8).to("cuda:1"), torch.randn(4, 8, device="cuda:1"))


class Driver:
    """Calls of the driver, each of which must succeed."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            assert function(*arguments) == 0, name

        return call


class MemoryKind(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", ctypes.c_int * 2),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


def test_physical_memory_keeps_its_content(standin):
    u64 = ctypes.c_uint64
    driver, kind = Driver(), MemoryKind(type=1, location=(1, 0))
    access = (ctypes.c_int * 3)(1, 0, 3)
    handle, address = u64(), u64()
    before = standin.standin_used(0)
    driver.cuMemAddressReserve(ctypes.byref(address), u64(4 * PAGE), u64(0), u64(0), u64(0))
    driver.cuMemCreate(ctypes.byref(handle), u64(PAGE), ctypes.byref(kind), u64(0))
    assert standin.standin_used(0) == before + PAGE
    for page in 0, 2:
        at = u64(address.value + page * PAGE)
        driver.cuMemMap(at, u64(PAGE), u64(0), handle, u64(0))
        driver.cuMemSetAccess(at, u64(PAGE), access, u64(1))
        if page == 0:
            ctypes.memmove(at.value, b"content", 7)
        assert ctypes.string_at(at.value, 7) == b"content"
        driver.cuMemUnmap(at, u64(PAGE))
    driver.cuMemRelease(handle)
    driver.cuMemAddressFree(address, u64(4 * PAGE))
    assert standin.standin_used(0) == before
    # What a GPU's driver refuses is refused.
    assert driver.library.cuMemRelease(handle) != 0
    assert driver.library.cuMemUnmap(address, u64(PAGE)) != 0
    assert driver.library.cuMemFree_v2(u64(0x1234)) != 0


def test_expandable_segments_and_a_clean_exit(standin):
    program = """
import torch
net = torch.nn.Linear(512, 512).cuda()
blocks = [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (30, 60)]
del blocks[0]
net(torch.randn(64, 512, device="cuda")).sum().backward()
blocks.append(torch.empty(80 << 20, dtype=torch.uint8, device="cuda"))
assert any(s["is_expandable"] for s in torch.cuda.memory_snapshot())
torch.cuda.Stream().synchronize()
print("end")
"""
    variables = {**os.environ, ALLOC_CONF: "expandable_segments:True"}
    command = [sys.executable, "-c", program + REST]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, complaints(done.stderr)) == (0, "end\n", "")


# What PyTorch does not call, and then a function that nobody wrote.
LACKING = "cublasLtDestroy, cublasSspmv_v2, cudaMallocPitch, cudaMemAdvise"
TRAIN = """
int cudaMalloc(), cublasCreate_v2(), cublasSspmv_v2(), cublasLtDestroy(),
    cudaMemAdvise(), cudaMallocPitch();

int train(int more)
{
    void *p, *handle;
    long pitch;
    return cudaMalloc(&p, 1L << 20) || cublasCreate_v2(&handle) ||
           cublasSspmv_v2(handle) || cublasLtDestroy(handle) ||
           cudaMemAdvise(p, 1L << 20, 0, 0) || (more && cudaMallocPitch(&p, &pitch, 100L, 100L));
}
"""
MAIN = "int train(int); int main(int count, char **words) { return train(count > 1); }"
KNOWN = "int cudaMalloc(); int train(int more) { void *p; return cudaMalloc(&p, 1L << 20); }"


def compile_train(folder, name, *parts):
    """A program of these parts, each a source or a library."""
    libraries = pathlib.Path(torch.__file__).parents[1] / "nvidia"
    found = [
        next(libraries.glob(f"cu*/lib/lib{n}.so.1?")) for n in ("cudart", "cublas", "cublasLt")
    ]
    rows = []
    for i, part in enumerate(parts):
        rows.append(part if os.path.exists(part) else folder / f"{name}{i}.c")
        if rows[-1] != part:
            rows[-1].write_text(part)
    command = ["cc", "-fPIC", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed", *rows, *found]
    places = ":".join(str(path) for path in (folder, *(library.parent for library in found)))
    command += [f"-Wl,-rpath,{places}", "-o", folder / name]
    subprocess.run([*command, *(["-shared"] if name.endswith(".so") else [])], check=True)
    return folder / name


def test_a_compiled_program_is_told_what_the_stand_in_lacks(standin, tmp_path):
    library = compile_train(tmp_path, "libtrain.so", TRAIN)
    within = compile_train(tmp_path, "within", MAIN, TRAIN)
    beside = compile_train(tmp_path, "beside", MAIN, str(library))
    known = compile_train(tmp_path, "known", MAIN, KNOWN)
    build = pathlib.Path(_library.__file__).parent / "fit/standin/build"
    subprocess.run([build, within, tmp_path / "own"], check=True, capture_output=True)
    own = {**os.environ, "LD_PRELOAD": str(tmp_path / "own/libcuda.so.1")}
    for environment, command, status, said in (
        (os.environ, [within], 1, f"for another program, and lacks {LACKING}, which within calls"),
        (os.environ, [beside], 1, f"for another program, and lacks {LACKING}, which beside calls"),
        (os.environ, [known], 0, ""),
        (own, [within], 0, ""),
        (own, [beside], 0, ""),
        (own, [within, "more"], 1, 'lacks cudaMallocPitch: it answers "not supported"'),
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == status and said in done.stderr, (command, done)
        assert said or not done.stderr
