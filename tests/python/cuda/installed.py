"""What PyTorch does and says once rebatch's pool is its allocator.

install() cannot be undone: test_install.py runs this file in a process of its own.
"""

import contextlib
import ctypes
import gc
import threading

import pytest
import torch

from rebatch import _library
from rebatch.torch.allocator import install as rebatch
from rebatch.torch.allocator import front_library

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def tensor(size, device="cuda"):
    """A tensor of so many bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


@pytest.fixture(scope="module", autouse=True)
def front():
    """The library with the allocator, installed while a tensor of the native one exists."""
    before = tensor(4 * MIB)
    native = torch.cuda.memory_allocated()
    rebatch.install(events=64)
    assert rebatch.installed()
    assert torch.cuda.memory_allocated() == native
    del before
    assert torch.cuda.memory_allocated() == native - 4 * MIB
    yield front_library.load()
    assert front_library.load().rebatch_torch_refused_frees() == 0


@pytest.fixture(autouse=True)
def no_limit():
    """Each test begins without a limit."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    rebatch.install(0)


# ---- statistics ----


def test_statistics_are_what_is_allocated():
    before = torch.cuda.memory_allocated()
    live = rebatch.stats()["live_bytes"]
    x = tensor(10 * MIB)
    y = tensor(1000)
    assert torch.cuda.memory_allocated() - before == 10 * MIB + 1024
    assert rebatch.stats()["live_bytes"] - live == 10 * MIB + 1024
    stats = torch.cuda.memory_stats()
    assert stats["requested_bytes.all.current"] >= 10 * MIB + 1000
    assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    del x, y
    assert torch.cuda.memory_allocated() == before


def test_a_tensor_of_no_elements_takes_no_memory():
    before = rebatch.stats()["allocations"]
    x = tensor(0)
    assert x.data_ptr() == 0
    assert rebatch.stats()["allocations"] == before


def test_peaks_and_their_reset():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = tensor(20 * MIB)
    del x
    assert torch.cuda.max_memory_allocated() == before + 20 * MIB
    assert torch.cuda.max_memory_reserved() >= before + 20 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before


def test_totals_and_their_reset():
    torch.cuda.reset_accumulated_memory_stats()
    for _ in range(3):
        tensor(5 * MIB)
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.allocated"] == 3
    assert stats["allocation.all.freed"] == 3
    assert stats["allocated_bytes.all.allocated"] == 15 * MIB
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0


def test_summaries_are_written():
    x = tensor(MIB)
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    assert "live_bytes" in rebatch.summary()
    del x


def test_the_backend_keeps_its_name():
    assert torch.cuda.get_allocator_backend() == "native"


# ---- running out of memory ----


def test_an_oom_has_pytorchs_type_and_says_who_holds_what():
    rebatch.install("256MiB")
    with rebatch.tag("weights"):
        x = tensor(100 * MIB)
    ooms = torch.cuda.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        tensor(300 * MIB)
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total ")
    assert "of its limit of 256.00 MiB" in text
    assert "weights 100.00 MiB" in text
    assert torch.cuda.memory_stats()["num_ooms"] == ooms + 1
    del x


def test_the_largest_request_that_would_have_succeeded_does():
    rebatch.install("256MiB")
    x = tensor(100 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        tensor(200 * MIB)
    size = str(caught.value).split("would have succeeded is ")[1].split(" MiB")[0]
    y = tensor(int(float(size) * MIB))
    del x, y


def test_observers_are_told_of_an_oom():
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *told: seen.append(told))
    rebatch.install("64MiB")
    with pytest.raises(torch.OutOfMemoryError):
        tensor(128 * MIB)
    device, size, total, _ = seen[-1]
    assert (device, size, total) == (torch.cuda.current_device(), 128 * MIB, 64 * MIB)


def test_a_request_of_exabytes_is_an_oom_in_pytorchs_words():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        tensor(1 << 61)
    assert "CUDA out of memory. Tried to allocate more than 1EB memory." in str(caught.value)


def test_memory_history_has_the_oom():
    rebatch.install("64MiB")
    torch.cuda.memory._record_memory_history()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            tensor(128 * MIB)
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    sizes = [e["size"] for trace in traces for e in trace if e["action"] == "oom"]
    assert sizes == [128 * MIB]


def test_the_native_allocator_takes_what_the_pool_caches(standin):
    x = tensor(256 * MIB)
    del x
    used = standin.standin_used(0)
    standin.standin_set_memory(0, used + 64 * MIB)
    returned = rebatch.stats()["device_frees"]
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        y = tensor(200 * MIB)
    assert rebatch.stats()["device_frees"] > returned
    del y, pool


def test_empty_cache_returns_memory_to_the_device(standin):
    used = standin.standin_used(0)
    x = tensor(64 * MIB)
    del x
    assert standin.standin_used(0) >= used + 64 * MIB
    torch.cuda.empty_cache()
    assert standin.standin_used(0) == used


# ---- limits ----


def test_the_memory_fraction_is_a_limit():
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.01)
    assert torch.cuda.get_per_process_memory_fraction() == 0.01
    with pytest.raises(torch.OutOfMemoryError):
        tensor(total // 50)
    torch.cuda.set_per_process_memory_fraction(1.0)
    x = tensor(total // 50)
    del x


def fits(size, pool=None):
    """Whether there is memory for a tensor: of a MemPool, or of none."""
    try:
        with torch.cuda.use_mem_pool(pool) if pool else contextlib.nullcontext():
            tensor(size)
    except torch.OutOfMemoryError:
        return False
    return True


def allow(size):
    """Let the memory fraction be `size` above what is held."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)


@pytest.mark.parametrize("set_limit", [allow, lambda size: rebatch.install(size)])
def test_pool_and_mempool_have_one_limit(set_limit):
    set_limit(96 * MIB)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = tensor(40 * MIB)
    assert not fits(60 * MIB)
    y = tensor(40 * MIB)
    assert not fits(20 * MIB, pool)
    del y  # the pool caches it, and gives it up
    with torch.cuda.use_mem_pool(pool):
        y = tensor(40 * MIB)
    assert not fits(20 * MIB) and not fits(20 * MIB, pool)
    del x, y, pool  # the native allocator caches them, and gives them up
    assert fits(90 * MIB)


def test_a_graphs_memory_counts_towards_the_limit():
    rebatch.install(torch.cuda.memory_reserved() + 96 * MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tensor(60 * MIB)
    assert not fits(60 * MIB)
    del y, graph
    assert fits(60 * MIB)


def test_a_limit_that_is_lifted_holds_for_neither():
    rebatch.install(32 * MIB)
    pool = torch.cuda.MemPool()
    assert not fits(60 * MIB) and not fits(60 * MIB, pool)
    rebatch.install(0)
    assert fits(60 * MIB) and fits(60 * MIB, pool)
    del pool


def test_a_mempool_with_use_on_oom_serves_when_memory_is_short():
    allow(80 * MIB)
    keep, use = torch.cuda.MemPool(), torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(keep):
        a = tensor(40 * MIB)
    with torch.cuda.use_mem_pool(use):
        b = tensor(40 * MIB)
    address, ooms = b.data_ptr(), torch.cuda.memory_stats()["num_ooms"]
    assert not fits(30 * MIB)
    del a, b
    c = tensor(30 * MIB)
    assert c.data_ptr() == address
    assert torch.cuda.memory_stats()["num_ooms"] == ooms + 1
    assert not fits(30 * MIB)  # of `keep`, which has 40
    c.record_stream(torch.cuda.Stream())
    allocated = torch.cuda.memory_allocated()
    del c
    torch.cuda.synchronize()
    assert fits(30 * MIB)
    assert torch.cuda.memory_allocated() == allocated - 30 * MIB
    del keep, use


def test_an_oom_lets_mempools_grow_afterwards():
    rebatch.install(64 * MIB)
    assert not fits(100 * MIB)
    pool = torch.cuda.MemPool()
    assert fits(40 * MIB, pool)
    del pool


def test_a_second_install_changes_the_limit():
    rebatch.install("64MiB")
    rebatch.install()
    with pytest.raises(torch.OutOfMemoryError):
        tensor(100 * MIB)
    rebatch.install(0)
    x = tensor(100 * MIB)
    del x
    rebatch.install("1%")
    with pytest.raises(torch.OutOfMemoryError):
        tensor(torch.cuda.mem_get_info()[1] // 50)


def test_a_second_install_refuses_other_options():
    tensor(MIB)
    with pytest.raises(RuntimeError, match="cannot change headroom_bytes"):
        rebatch.install(headroom="1GiB")
    rebatch.install(events=64, headroom=0)


def test_wrong_sizes_are_refused():
    with pytest.raises(_library.Error, match="apples"):
        rebatch.install("3 apples")
    with pytest.raises(ValueError, match="headroom"):
        rebatch.install(headroom="10%")
    with pytest.raises(TypeError):
        rebatch.install(limit=2.5)


# ---- streams ----


def state_of(address):
    """The state of the block at an address, in PyTorch's words."""
    blocks = [b for segment in torch.cuda.memory_snapshot() for b in segment["blocks"]]
    return [b["state"] for b in blocks if b["address"] == address]


def test_memory_that_another_stream_uses_waits_for_it():
    x = tensor(3 * MIB)
    x.record_stream(torch.cuda.Stream())
    address = x.data_ptr()
    del x
    assert state_of(address) == ["active_pending_free"]


def test_record_stream_of_the_memory_of_a_mempool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = tensor(3 * MIB)
    x.record_stream(torch.cuda.Stream())
    address = x.data_ptr()
    del x
    assert state_of(address) == ["active_pending_free"]
    del pool


# ---- what stays with the native allocator ----


def test_a_mempool_stays_native():
    live = rebatch.stats()["live_bytes"]
    before = torch.cuda.memory_allocated()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = tensor(8 * MIB)
    y = tensor(4 * MIB)
    assert rebatch.stats()["live_bytes"] == live + 4 * MIB
    assert torch.cuda.memory_allocated() == before + 12 * MIB
    assert pool.snapshot()
    del x, y, pool
    assert torch.cuda.memory_allocated() == before


def test_a_graph_stays_native():
    x = tensor(MIB)
    live = rebatch.stats()["live_bytes"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    assert rebatch.stats()["live_bytes"] < live + MIB  # a graph may keep a random seed there
    graph.replay()
    torch.cuda.synchronize()
    del y, graph
    assert rebatch.stats()["live_bytes"] == live
    del x


def test_memory_of_the_pool_is_freed_and_recorded_while_a_graph_is_captured():
    x, y = tensor(MIB), tensor(MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = x + 1
        x.record_stream(torch.cuda.current_stream())
        del x, y
    del z, graph


def test_a_graphs_pool_is_put_back_as_torch_compile_does():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tensor(8 * MIB)
    state = torch._C._cuda_getCheckpointState(0, graph.pool())
    address = y.data_ptr()
    del y
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device(0), 8 * MIB)
    assert not torch._C._has_Standard_Deleter(storage._cdata)
    torch._C._cuda_setCheckpointPoolState(0, state, [], [storage._cdata])
    assert torch._C._has_Standard_Deleter(storage._cdata)
    allocated = torch.cuda.memory_allocated()
    del storage
    assert torch.cuda.memory_allocated() == allocated - 8 * MIB
    del graph


def test_the_cache_can_be_turned_off():
    allocations = rebatch.stats()["allocations"]
    torch.cuda.caching_allocator_enable(False)
    try:
        x = tensor(MIB)
        address = torch.cuda.caching_allocator_alloc(MIB)
        assert rebatch.stats()["allocations"] == allocations
        torch.cuda.caching_allocator_delete(address)
        del x
    finally:
        torch.cuda.caching_allocator_enable(True)


def test_sharing_with_another_process_is_refused_in_one_sentence():
    x = tensor(MIB)
    with pytest.raises(RuntimeError, match="cannot be shared with another process"):
        x.untyped_storage()._share_cuda_()
    del x


def test_memory_by_address():
    live = rebatch.stats()["live_bytes"]
    address = torch.cuda.caching_allocator_alloc(MIB)
    assert rebatch.stats()["live_bytes"] == live + MIB
    torch.cuda.caching_allocator_delete(address)
    assert rebatch.stats()["live_bytes"] == live


# ---- memory history ----


@contextlib.contextmanager
def history(*arguments, **options):
    torch.cuda.memory._record_memory_history(*arguments, stacks="python", **options)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def names(entry):
    return [frame["name"] for frame in entry.get("frames", [])]


def events_at(address):
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    return [e for e in trace if e.get("addr") == address]


def block_at(address):
    blocks = [b for s in torch.cuda.memory._snapshot()["segments"] for b in s["blocks"]]
    return next(b for b in blocks if b["address"] == address)


def allocates():
    return tensor(3 * MIB + 5)


def frees(tensors):
    tensors.clear()


def test_memory_history_has_who_allocated_and_who_freed():
    older = tensor(MIB)
    with history():
        kept = allocates()
        gone = [allocates()]
        address = gone[0].data_ptr()
        frees(gone)
        del older  # not known to the history: no event
        events = events_at(address)
        assert [e["action"] for e in events] == ["alloc", "free_requested", "free_completed"]
        assert {e["size"] for e in events} == {3 * MIB + 5}
        assert "allocates" in names(events[0]) and "frees" not in names(events[0])
        assert "frees" in names(events[1]) and "frees" in names(events[2])
        block = block_at(kept.data_ptr())
        assert block["requested_size"] == 3 * MIB + 5 and "allocates" in names(block)
    assert events_at(address) == [] and names(block_at(kept.data_ptr())) == []


def test_memory_history_keeps_what_it_is_asked_for():
    with history(context="state"):  # who allocated what is in use
        kept = allocates()
        assert "allocates" in names(block_at(kept.data_ptr()))
        assert not any(names(e) for e in events_at(kept.data_ptr()))
    with history(context="alloc"):  # a free has what allocated
        gone = [allocates()]
        address = gone[0].data_ptr()
        frees(gone)
        assert all("allocates" in names(e) for e in events_at(address))
        assert not any("frees" in names(e) for e in events_at(address))
    with history(context=None):
        kept = allocates()
        assert [names(e) for e in events_at(kept.data_ptr())] == [[]]
        assert names(block_at(kept.data_ptr())) == []
    with history(max_entries=4):
        for _ in range(3):
            frees([allocates()])
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        assert len(trace) == 4 and trace[-1]["action"] == "free_completed"


def test_memory_history_is_of_both_allocators_in_order():
    with history():
        one = allocates()
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            two = allocates()
        three = allocates()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        addresses = [e["addr"] for e in trace if e["action"] == "alloc"]
        assert addresses == [x.data_ptr() for x in (one, two, three)]
        assert all("allocates" in names(e) for e in trace if e["action"] == "alloc")


# ---- snapshots ----


def test_pytorchs_snapshot_has_the_pools_blocks():
    x = tensor(6 * MIB)
    blocks = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"]]
    found = [b for b in blocks if b["address"] == x.data_ptr()]
    assert [(b["size"], b["state"]) for b in found] == [(6 * MIB, "active_allocated")]
    active = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
    assert active == torch.cuda.memory_allocated()
    del x


def test_pytorchs_snapshot_and_statistics_agree():
    x, y = tensor(6 * MIB), tensor(1000)
    segments = torch.cuda.memory_snapshot()
    stats = torch.cuda.memory_stats()
    for part, sizes in (
        ("all", segments),
        ("large_pool", [s for s in segments if s["segment_type"] == "large"]),
        ("small_pool", [s for s in segments if s["segment_type"] == "small"]),
    ):
        assert stats[f"allocated_bytes.{part}.current"] == sum(s["allocated_size"] for s in sizes)
        assert stats[f"active_bytes.{part}.current"] == sum(s["active_size"] for s in sizes)
        blocks = [b["state"] for s in sizes for b in s["blocks"]]
        assert stats[f"allocation.{part}.current"] == blocks.count("active_allocated")
    del x, y


def test_rebatchs_snapshot_has_tags():
    with rebatch.tag("encoder"):
        x = tensor(6 * MIB)
    taken = rebatch.snapshot()
    blocks = [b for s in taken["segments"] for b in s["blocks"]]
    frames = [b["frames"] for b in blocks if b["address"] == x.data_ptr()]
    assert "encoder" in str(frames)
    assert taken["device_traces"][0]
    del x


def test_the_profiler_sees_memory():
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        x = tensor(7 * MIB)
    del x
    sizes = {e.key: e.self_device_memory_usage for e in profile.key_averages()}
    assert sizes["aten::empty"] == 7 * MIB


# ---- tags and threads ----


def live_by_tag(name):
    """Live bytes of a tag on the current GPU."""
    number = ctypes.c_uint16()
    usage = _library.TagUsage()
    pool = rebatch.pool()
    _library.check(_library.lib.rebatch_pool_tag(ctypes.byref(number), pool, name.encode()))
    _library.check(_library.lib.rebatch_pool_get_tag_usage(ctypes.byref(usage), pool, number))
    return usage.live_bytes


def run_in_thread(function):
    """Run it in another thread and wait for it; its exception is raised here."""
    result = []

    def run():
        try:
            result.append((function(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = result[0]
    if error:
        raise error
    return value


def test_tags_nest():
    with rebatch.tag("outer"):
        x = tensor(MIB)
        with rebatch.tag("inner"):
            y = tensor(2 * MIB)
        z = tensor(4 * MIB)
    w = tensor(8 * MIB)
    assert (live_by_tag("outer"), live_by_tag("inner")) == (5 * MIB, 2 * MIB)
    del x, y, z, w
    assert (live_by_tag("outer"), live_by_tag("inner")) == (0, 0)


def test_a_tag_ends_with_an_exception():
    with pytest.raises(KeyError):
        with rebatch.tag("failing"):
            raise KeyError
    x = tensor(MIB)
    assert live_by_tag("failing") == 0
    del x


def test_autograds_threads_have_the_tag_of_the_main_thread():
    x = torch.empty(MIB, device="cuda", requires_grad=True)
    loss = (x * 2).sum()
    with rebatch.tag("backward"):
        loss.backward()
    assert live_by_tag("backward") >= 4 * MIB
    del x, loss


def test_a_thread_has_its_own_tag():
    def prefetch():
        with rebatch.tag("prefetch"):
            return tensor(MIB)

    with rebatch.tag("training"):
        x = run_in_thread(prefetch)
        y = tensor(2 * MIB)
        z = run_in_thread(lambda: tensor(4 * MIB))  # in no block of its own
    assert live_by_tag("prefetch") == MIB
    assert live_by_tag("training") == 6 * MIB
    del x, y, z


def test_training_in_another_thread_tags_backward():
    def train():
        x = torch.empty(MIB, device="cuda", requires_grad=True)
        loss = (x * 2).sum()
        with rebatch.tag("thread-backward"):
            loss.backward()
        return x.grad

    grad = run_in_thread(train)
    assert live_by_tag("thread-backward") >= 4 * MIB
    del grad


def test_a_backward_that_runs_out_of_memory_raises_and_frees():
    x = torch.empty(MIB, device="cuda", requires_grad=True)
    y = torch.empty(16 * MIB, device="cuda", requires_grad=True)
    loss = (y * 2).sum() + x.sum()
    live = torch.cuda.memory_allocated()
    rebatch.install(rebatch.stats()["reserved_bytes"])
    filler = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            filler.append(tensor(2 * MIB))
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del filler
    x.grad = y.grad = None
    gc.collect()
    assert torch.cuda.memory_allocated() <= live
    del x, y, loss


def test_many_threads_allocate_and_free():
    live = rebatch.stats()["live_bytes"]

    def work():
        stream = torch.cuda.Stream()
        kept = []
        with torch.cuda.stream(stream), rebatch.tag("worker"):
            for i in range(300):
                kept.append(tensor((i % 17 + 1) * 10 * KIB))
                if i % 3 == 0:
                    kept[-1].record_stream(torch.cuda.default_stream())
                if len(kept) > 20:
                    kept.pop(0)
        return kept

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert rebatch.stats()["live_bytes"] == live


# ---- data ----


def test_a_data_loader_pins_memory():
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(data, batch_size=16, pin_memory=True, num_workers=2)
    count = 0
    for (batch,) in loader:
        assert batch.is_pinned()
        count += len(batch.to("cuda", non_blocking=True))
    assert count == 64


def test_copies_keep_their_contents():
    values = torch.arange(1000)
    assert torch.equal(values.cuda().cpu(), values)
    x = values.cuda()
    x.untyped_storage().resize_(16000)
    assert torch.equal(x.cpu(), values)


def test_a_module_trains():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
