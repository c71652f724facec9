// An allocator in front of PyTorch's native CUDA allocator: ordinary memory comes from a rebatch
// pool of each GPU; CUDA graphs, MemPools and IPC stay with the native allocator, but for graphs
// that are captured with the id of an arena of the pool. This file decides which of the two is
// asked. It must not know of steps and sessions.
//
// Each pointer is freed by the allocator that gave it. The deleter of a storage names the pool, so
// a free searches nothing, and the front can be installed when tensors exist already. Nothing here
// is ever destroyed: tensors may be freed after the interpreter has ended.
//
// Compiled against the headers of the PyTorch that is installed, 2.8 or later (front_forward.h).
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "front_forward.h"
#include "front_history.h"
#include "front_pools.h"
#include "front_tags.h"
#include "rebatch/rebatch.h"

#define FRONT_API extern "C" __attribute__((visibility("default")))

// Of the Python that has loaded this, where one has.
extern "C" {
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int);
__attribute__((weak)) void *PyGILState_GetThisThreadState();
__attribute__((weak)) void *_PyThreadState_UncheckedGet(); // before Python 3.13
__attribute__((weak)) void *PyThreadState_GetUnchecked();
__attribute__((weak)) void *PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void *);
__attribute__((weak)) int PyOS_InterruptOccurred();
__attribute__((weak)) void PyErr_SetInterrupt();
}

namespace
{
using c10::cuda::CUDAStream;

// From here on PyTorch has a message of its own.
constexpr size_t EXABYTE = size_t(1) << 60;

// Memory of the pools and of the native allocator.
void delete_any(void *pointer);

class Front final : public Forward
{
  public:
    explicit Front(native::CUDAAllocator *inner) : Forward(inner), enabled_(inner->isEnabled())
    {
    }

    c10::DataPtr allocate(size_t bytes) override
    {
        const DeviceIndex device = c10::cuda::current_device();
        const c10::Device where(c10::DeviceType::CUDA, device);
        if (C10_UNLIKELY(!enabled_.load(std::memory_order_relaxed)))
            return inner_->allocate(bytes);
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
        rebatch_arena *arena = nullptr;
        if (C10_UNLIKELY(is_routed(device, stream, &arena)) && !arena) {
            void *const pointer = get_native(bytes, device, stream);
            return {pointer, pointer, &delete_any, where};
        }
        c10::DeleterFnPtr deleter = deleters[static_cast<size_t>(device)];
        void *const pointer = get(bytes, device, stream, &deleter, arena);
        return {pointer, pointer, deleter, where};
    }

    c10::DeleterFnPtr raw_deleter() const override
    {
        return &delete_any;
    }

    void *raw_alloc(size_t bytes) override
    {
        const DeviceIndex device = c10::cuda::current_device();
        return get_any(bytes, device, c10::cuda::getCurrentCUDAStream(device).stream());
    }

    void *raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override
    {
        return get_any(bytes, c10::cuda::current_device(), stream);
    }

    void raw_delete(void *pointer) override
    {
        if (!pointer)
            return;
        const int device = owner_of(pointer, nullptr);
        if (device >= 0)
            give_back(device, pointer);
        else
            inner_->raw_delete(pointer);
    }
    void enable(bool value) override
    {
        inner_->enable(value);
        enabled_ = value;
    }

    // Until there is a pool the native allocator keeps the fraction.
    double getMemoryFraction(DeviceIndex device) override
    {
        return find_pool(device) ? slots[device].fraction.load()
                                 : inner_->getMemoryFraction(device);
    }
    void setMemoryFraction(double fraction, DeviceIndex device) override
    {
        inner_->setMemoryFraction(fraction, device);
        if (!find_pool(device))
            return;
        slots[device].fraction = fraction;
        slots[device].native_limit = SIZE_MAX;
        TORCH_CHECK(limit_pool(device) == REBATCH_OK, "rebatch: ", rebatch_last_error());
    }

    void emptyCache(MempoolId_t id = {0, 0}) override
    {
        if (id == MempoolId_t{0, 0})
            for (Slot &slot : slots)
                (void)trim(slot);
        inner_->emptyCache(id);
        for (int device = 0; device < MOST_DEVICES; device++)
            (void)limit_pool(device);
    }

    // How large a workspace a library may try.
    void cacheInfo(DeviceIndex device, size_t *largest) override
    {
        size_t bytes = 0;
        rebatch_pool *const pool = find_pool(device);
        if (pool && rebatch_pool_available(&bytes, pool) == REBATCH_OK)
            *largest = std::max(*largest, bytes);
        else
            inner_->cacheInfo(device, largest);
    }

    void *getBaseAllocation(void *pointer, size_t *size) override
    {
        size_t bytes = 0;
        if (owner_of(pointer, &bytes) < 0)
            return inner_->getBaseAllocation(pointer, size);
        if (size)
            *size = bytes;
        return pointer;
    }

    void recordStream(const c10::DataPtr &data, CUDAStream stream) override
    {
        if (!data.get())
            return;
        const int device = data.device().index();
        const bool is_pools = is_slot(device) && data.get_deleter() == deleters[size_t(device)];
        if (!is_pools && data.get_deleter() != &delete_any)
            return inner_->recordStream(data, stream);
        if (is_pools || owner_of(data.get(), nullptr) == device)
            return use_on(device, data.get(), stream);
        // The native allocator looks at memory with its own deleter only.
        c10::DataPtr alias(data.get(), data.get(), inner_->raw_deleter(), data.device());
        const auto let_go = [](c10::DataPtr *pointer) { (void)pointer->release_context(); };
        const std::unique_ptr<c10::DataPtr, decltype(let_go)> keep(&alias, let_go);
        inner_->recordStream(alias, stream);
    }

    // Counted under "all" only: the pool has no small and large parts. A peak is the sum of the
    // pool's and the native allocator's.
    DeviceStats getDeviceStats(DeviceIndex device) override
    {
        DeviceStats out = inner_->getDeviceStats(device);
        rebatch_pool *const pool = find_pool(device);
        rebatch_pool_stats now;
        if (pool && rebatch_pool_get_stats(&now, pool) == REBATCH_OK)
            add_stats(out, slots[device], now);
        return out;
    }
    void resetAccumulatedStats(DeviceIndex device) override
    {
        inner_->resetAccumulatedStats(device);
        rebatch_pool *const pool = find_pool(device);
        if (!pool)
            return;
        std::lock_guard<std::mutex> hold(slots_lock);
        Slot &slot = slots[device];
        (void)rebatch_pool_get_stats(&slot.since, pool);
        slot.ooms = 0;
        slot.trims_since = slot.trims;
    }
    void resetPeakStats(DeviceIndex device) override
    {
        inner_->resetPeakStats(device);
        if (rebatch_pool *const pool = find_pool(device))
            (void)rebatch_pool_reset_peaks(pool);
    }
#if SINCE(11)

    native::SnapshotInfo snapshot(MempoolId_t id = {0, 0}, bool traces = true) override
    {
        return add_pools(inner_->snapshot(id, traces), id, traces);
    }
#else
    native::SnapshotInfo snapshot(MempoolId_t id = {0, 0}) override
    {
        return add_pools(inner_->snapshot(id), id, true);
    }
#endif
#if SINCE(11)
    void recordHistory(bool enabled, native::CreateContextFn recorder, size_t most,
                       RecordContext when, bool clear,
                       const std::vector<std::string> &skip) override
    {
        inner_->recordHistory(enabled, recorder, most, when, clear, skip);
        history.set(enabled, recorder, most, when, clear, skip);
    }
#else
    void recordHistory(bool enabled, native::CreateContextFn recorder, size_t most,
                       RecordContext when, bool clear) override
    {
        inner_->recordHistory(enabled, recorder, most, when, clear);
        history.set(enabled, recorder, most, when, clear, {});
    }
#endif
    void pushCompileContext(std::string &context) override
    {
        compile_contexts.push_back(context);
        inner_->pushCompileContext(context);
    }
    void popCompileContext() override
    {
        compile_contexts.pop_back();
        inner_->popCompileContext();
    }

    // ---- graphs and MemPools: the native allocator's, or an arena's ----

    // Graphs that are captured with the id of a MemPool are the arena's from here on.
    void add_arena(DeviceIndex device, MempoolId_t id, rebatch_arena *arena)
    {
        inner_->createOrIncrefPool(device, id); // or the id could be used for one graph only
        std::lock_guard<std::mutex> hold(routes_lock_);
        arenas_.push_back({device, id, arena});
    }
    // And no longer; what a capture that failed has left is ended.
    void remove_arena(const rebatch_arena *arena)
    {
        const auto is_it = [arena](const Arena &each) { return each.arena == arena; };
        std::unique_lock<std::mutex> hold(routes_lock_);
        const auto found = std::find_if(arenas_.begin(), arenas_.end(), is_it);
        const Arena gone = *found;
        arenas_.erase(found);
        const auto of_arena = [&gone](const Route &route) {
            return route.device == gone.device && route.id == gone.id;
        };
        const auto left = std::count_if(routes_.begin(), routes_.end(), of_arena);
        hold.unlock();
        for (auto i = left; i > 0; i--) {
            endAllocateToPool(gone.device, gone.id);
            inner_->releasePool(gone.device, gone.id);
        }
        inner_->releasePool(gone.device, gone.id);
    }
    void beginAllocateToPool(DeviceIndex device, MempoolId_t id,
                             std::function<bool(cudaStream_t)> filter) override
    {
        inner_->beginAllocateToPool(device, id, filter); // or it throws
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
        std::lock_guard<std::mutex> hold(routes_lock_);
        routes_.push_back({device, id, std::move(filter), stream, open_arena(device, id, stream)});
        route_count = static_cast<int>(routes_.size());
    }
    void endAllocateToPool(DeviceIndex device, MempoolId_t id) override
    {
        {
            std::lock_guard<std::mutex> hold(routes_lock_);
            for (auto route = routes_.begin(); route != routes_.end(); ++route)
                if (route->device == device && route->id == id) {
                    routes_.erase(route);
                    break;
                }
            route_count = static_cast<int>(routes_.size());
        }
        inner_->endAllocateToPool(device, id);
    }
    native::CheckpointDelta
    setCheckpointPoolState(DeviceIndex device,
                           std::shared_ptr<native::AllocatorState> state) override
    {
        native::CheckpointDelta delta = inner_->setCheckpointPoolState(device, std::move(state));
        // torch.compile's graphs expect the deleter of raw_deleter().
        for (c10::DataPtr &data : delta.dataptrs_allocd)
            (void)data.compare_exchange_deleter(inner_->raw_deleter(), &delete_any);
        return delta;
    }

    // ---- other processes, other GPUs ----

    native::ShareableHandle shareIpcHandle(void *pointer) override
    {
        TORCH_CHECK(owner_of(pointer, nullptr) < 0,
                    "rebatch: memory of rebatch's pool cannot be shared with another process; "
                    "allocate the tensor within torch.cuda.use_mem_pool(torch.cuda.MemPool()), or "
                    "within `with rebatch.exportable(tag)` for rebatch.export(tag)");
        return inner_->shareIpcHandle(pointer);
    }
    // Kernels of `device` will use the memory of `to`.
    void enablePeerAccess(DeviceIndex device, DeviceIndex to) override
    {
        inner_->enablePeerAccess(device, to);
        (void)rebatch_pool_allow_peer(need_pool(to), device);
    }
    // Mapped memory is copied between GPUs by the Peer call alone.
    cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device,
                            size_t bytes, cudaStream_t stream, bool) override
    {
        if (to_device == from_device)
            return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
        return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
    }
    void copy_data(void *to, const void *from, std::size_t bytes) const override
    {
        C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
    }
    // The native allocator tells them, also those that were attached before (ask_native).
    void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override
    {
        inner_->attachOutOfMemoryObserver(
            [told = std::move(observer)](int64_t device, size_t bytes, size_t total, size_t free) {
                if (find_pool(static_cast<int>(device)))
                    total = std::min(limit_of(slots[device]), slots[device].total_bytes);
                told(device, bytes, total, free);
            });
    }

    // While a graph is captured, a wait for the GPU would end that.
    bool may_wait()
    {
        if (C10_LIKELY(route_count.load() == 0))
            return true;
        std::lock_guard<std::mutex> hold(routes_lock_);
        return std::none_of(routes_.begin(), routes_.end(),
                            [](const Route &route) { return is_capturing(route.stream); });
    }

    // The memory fraction that was set for the native allocator before there was a pool.
    double native_fraction(DeviceIndex device)
    {
        return inner_->initialized() ? inner_->getMemoryFraction(device) : 1.0;
    }

    // What the native allocator holds, or of that what is in use.
    size_t inner_bytes(DeviceIndex device, StatArray DeviceStats::*what)
    {
        return inner_->initialized() ? size_t((inner_->getDeviceStats(device).*what)[0].current)
                                     : 0;
    }
    size_t reserved_bytes(DeviceIndex device)
    {
        return inner_bytes(device, &DeviceStats::reserved_bytes);
    }

    // Frees what the native allocator caches on a GPU. Returns how much more the pool may have.
    size_t release_cache(DeviceIndex device)
    {
        const size_t before = reserved_bytes(device), limit_before = slots[device].pool_limit;
        // While a graph is captured the native allocator must not free.
        if (before > inner_bytes(device, &DeviceStats::allocated_bytes) && route_count == 0)
            inner_->emptyCache({0, 0});
        (void)limit_pool(device);
        return less(before, reserved_bytes(device)) + less(slots[device].pool_limit, limit_before);
    }

  private:
    struct Route {
        DeviceIndex device;
        MempoolId_t id;
        std::function<bool(cudaStream_t)> takes;
        cudaStream_t stream;  // that a graph is captured on, if one is
        rebatch_arena *arena; // which serves that stream; NULL: the native allocator serves all
    };
    struct Arena {
        DeviceIndex device;
        MempoolId_t id;
        rebatch_arena *arena;
    };

    // The arena with an id, ready for a capture. Without memory for what it has lent the capture is
    // the native allocator's, whose OOM PyTorch expects later. With routes_lock_ held.
    rebatch_arena *open_arena(DeviceIndex device, const MempoolId_t &id, cudaStream_t stream)
    {
        for (const Arena &each : arenas_)
            if (each.device == device && each.id == id &&
                rebatch_arena_open(each.arena, reinterpret_cast<rebatch_stream>(stream)) ==
                    REBATCH_OK)
                return each.arena;
        return nullptr;
    }
    // Whether it is an address of an arena: what a graph uses on several streams is not given out
    // again while it is captured.
    bool is_of_arena(const void *pointer)
    {
        std::lock_guard<std::mutex> hold(routes_lock_);
        return std::any_of(arenas_.begin(), arenas_.end(), [pointer](const Arena &each) {
            return rebatch_arena_has(each.arena, pointer);
        });
    }

    // Whether the native allocator serves a stream, or, where one is set, an arena.
    bool is_routed(DeviceIndex device, cudaStream_t stream, rebatch_arena **arena)
    {
        return C10_UNLIKELY(route_count.load(std::memory_order_acquire) != 0) &&
               takes_route(device, stream, arena);
    }
    C10_NOINLINE bool takes_route(DeviceIndex device, cudaStream_t stream, rebatch_arena **arena)
    {
        std::lock_guard<std::mutex> hold(routes_lock_);
        for (const Route &route : routes_)
            if (route.device == device && route.takes(stream)) {
                *arena = route.stream == stream ? route.arena : nullptr;
                return true;
            }
        return false;
    }

    void *get_any(size_t bytes, DeviceIndex device, cudaStream_t stream)
    {
        if (!enabled_)
            return inner_->raw_alloc_with_stream(bytes, stream);
        rebatch_arena *arena = nullptr;
        if (is_routed(device, stream, &arena) && !arena)
            return get_native(bytes, device, stream);
        c10::DeleterFnPtr deleter = nullptr;
        return get(bytes, device, stream, &deleter, arena);
    }

    // From an arena, if there is one. Sets the deleter where the memory is not the pool's.
    void *get(size_t bytes, DeviceIndex device, cudaStream_t stream, c10::DeleterFnPtr *deleter,
              rebatch_arena *arena)
    {
        void *pointer;
        if (C10_UNLIKELY(route_count.load(std::memory_order_relaxed) != 0)) {
            // The pool's calls to the driver do not end a capture.
            c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
            pointer = get_from_pool(bytes, device, stream, deleter, arena);
        } else {
            pointer = get_from_pool(bytes, device, stream, deleter, nullptr);
        }
        if (C10_UNLIKELY(*deleter == &delete_any))
            return pointer;
        if (const auto *const trace = c10::impl::GPUTrace::get_trace();
            C10_UNLIKELY(trace != nullptr) && pointer)
            (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
        if (C10_UNLIKELY(c10::memoryProfilingEnabled()) && pointer)
            tell_profiler_of(device, pointer);
        if (C10_UNLIKELY(history_is_on.load(std::memory_order_relaxed)) && pointer)
            history.allocated(device, pointer, bytes, stream);
        return pointer;
    }

    void *get_from_pool(size_t bytes, DeviceIndex device, cudaStream_t stream,
                        c10::DeleterFnPtr *deleter, rebatch_arena *arena)
    {
        rebatch_pool *const pool = pool_of(device);
        const rebatch_tag tag =
            slots[device].tags[size_t(current_tag())].load(std::memory_order_relaxed);
        void *pointer;
        const auto on = reinterpret_cast<rebatch_stream>(stream);
        const rebatch_status status = C10_UNLIKELY(arena != nullptr)
                                          ? rebatch_arena_alloc(&pointer, arena, bytes, on, tag)
                                          : rebatch_pool_alloc(&pointer, pool, bytes, on, tag);
        if (C10_LIKELY(status == REBATCH_OK))
            return pointer;
        *deleter = &delete_any;
        return get_after_oom(status, bytes, device, stream);
    }

    C10_NOINLINE void tell_profiler_of(DeviceIndex device, void *pointer)
    {
        size_t bytes = 0;
        (void)rebatch_pool_block_bytes(&bytes, find_pool(device), pointer);
        tell_profiler(device, pointer, static_cast<int64_t>(bytes));
    }

    // The native allocator cannot use what the pool caches.
    C10_NOINLINE void *get_native(size_t bytes, DeviceIndex device, cudaStream_t stream)
    {
        c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
        try {
            return get_limited(bytes, device, stream);
        } catch (const c10::OutOfMemoryError &) {
            if (trim(slots[device]) == 0)
                throw;
        }
        return get_limited(bytes, device, stream);
    }

    void *get_limited(size_t bytes, DeviceIndex device, cudaStream_t stream)
    {
        rebatch_pool_stats pool;
        (void)rebatch_pool_get_stats(&pool, pool_of(device));
        const size_t limit = limit_of(slots[device]);
        limit_native(device, limit == SIZE_MAX
                                 ? limit
                                 : less(limit, pool.reserved_bytes - pool.overflow_bytes));
        void *const pointer = inner_->raw_alloc_with_stream(bytes, stream);
        (void)limit_pool(device);
        return pointer;
    }

    // SIZE_MAX: no limit.
    void limit_native(DeviceIndex device, size_t bytes)
    {
        Slot &slot = slots[device];
        if (slot.native_limit.exchange(bytes) == bytes)
            return;
        // It rounds the product down.
        const double fraction = (double(bytes) + 0.5) / double(slot.total_bytes);
        inner_->setMemoryFraction(std::min(fraction, 1.0), device);
    }

    // The pool has no memory. NULL is never returned.
    C10_NOINLINE void *get_after_oom(rebatch_status status, size_t bytes, DeviceIndex device,
                                     cudaStream_t stream)
    {
        if (bytes >= EXABYTE)
            (void)inner_->allocate(bytes); // throws
        TORCH_CHECK(status == REBATCH_OOM, "rebatch: ", rebatch_last_error());
        rebatch_oom_report oom;
        (void)rebatch_pool_last_oom(&oom, find_pool(device));
        if (void *const pointer = ask_native(bytes, device, stream))
            return pointer;
        C10_THROW_ERROR(OutOfMemoryError, oom_text(device, bytes, oom, limit_of(slots[device]),
                                                   inner_->getDeviceStats(device)));
    }

    // A MemPool with use_on_oom may serve. Where none does, the native allocator counts the OOM and
    // tells the observers, the profiler and its history of it. It must not grow.
    void *ask_native(size_t bytes, DeviceIndex device, cudaStream_t stream)
    {
        c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
        limit_native(device, reserved_bytes(device));
        try {
            return inner_->raw_alloc_with_stream(bytes, stream);
        } catch (const c10::OutOfMemoryError &) {
        } catch (const c10::Error &error) {
            // On MIG and Jetson, PyTorch 2.8 to 2.13 fail to write the message, before they count.
            if (!strstr(error.what_without_backtrace(), "NVML_SUCCESS =="))
                throw;
            slots[device].ooms++;
        }
        return nullptr;
    }

    // The GPU of the pool in which the block begins; -1: none.
    static int owner_of(const void *pointer, size_t *bytes)
    {
        size_t ignored;
        for (int device = 0; device < MOST_DEVICES; device++) {
            rebatch_pool *const pool = find_pool(device);
            if (pool &&
                rebatch_pool_block_bytes(bytes ? bytes : &ignored, pool, pointer) == REBATCH_OK)
                return device;
        }
        return -1;
    }

    static bool is_capturing(cudaStream_t stream)
    {
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        return cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
               capture != cudaStreamCaptureStatusNone;
    }

    void use_on(int device, void *pointer, CUDAStream stream)
    {
        // What a graph captures runs later: who made the graph keeps its inputs.
        if (is_capturing(stream.stream()) && !is_of_arena(pointer))
            return;
        const rebatch_status status = rebatch_pool_use_on(
            find_pool(device), pointer, reinterpret_cast<rebatch_stream>(stream.stream()));
        TORCH_CHECK(status == REBATCH_OK, "rebatch: ", rebatch_last_error());
    }

    static native::SnapshotInfo add_pools(native::SnapshotInfo info, const MempoolId_t &id,
                                          bool traces)
    {
        if (traces)
            history.add_to(info.device_traces);
        if (id == MempoolId_t{0, 0})
            for (int device = 0; device < MOST_DEVICES; device++)
                if (rebatch_pool *const pool = find_pool(device))
                    add_segments(info.segments, static_cast<DeviceIndex>(device), pool);
        return info;
    }

    std::atomic<bool> enabled_;
    std::mutex routes_lock_;
    std::vector<Route> routes_; // to the native allocator, or an arena
    std::vector<Arena> arenas_;
};

Front *front;

void delete_any(void *pointer)
try {
    front->raw_delete(pointer);
} catch (...) {
    refused_frees++;
}

bool may_wait_for_gpu(void *)
{
    return front->may_wait();
}

// Where PyTorch waits with Python's lock, those that would wake the pool have it for a moment.
// Signals are the main thread's. To ask takes it back, so it comes again, when Python goes on.
bool is_interrupted(void *)
{
    if (!PyOS_InterruptOccurred)
        return false;
    const void *const own = PyGILState_GetThisThreadState();
    const auto current =
        PyThreadState_GetUnchecked ? PyThreadState_GetUnchecked : _PyThreadState_UncheckedGet;
    if (own && current && own == current())
        PyEval_RestoreThread(PyEval_SaveThread());
    if (syscall(SYS_gettid) != getpid())
        return false;
    const int state = PyGILState_Ensure();
    const bool has_come = PyOS_InterruptOccurred();
    if (has_come)
        PyErr_SetInterrupt();
    PyGILState_Release(state);
    return has_come;
}

size_t native_bytes(int device)
{
    return front->reserved_bytes(static_cast<DeviceIndex>(device));
}

double native_fraction(int device)
{
    return front->native_fraction(static_cast<DeviceIndex>(device));
}

// A pressure callback of the pool.
size_t release_native_cache(size_t, void *user)
try {
    return front->release_cache(static_cast<DeviceIndex>(static_cast<Slot *>(user) - slots));
} catch (...) {
    return 0;
}

} // namespace

// ---- what Python calls ----

// The version of PyTorch whose headers this was compiled against.
FRONT_API const char *rebatch_torch_version(void)
{
    return TORCH_VERSION;
}

// Put the front before PyTorch's allocator. 0: done; 1: it was there; 2: PyTorch's allocator is not
// the native one.
FRONT_API int rebatch_torch_install(const rebatch_pool_options *pool_options)
{
    if (front)
        return 1;
    native::CUDAAllocator *const inner = native::get();
    if (inner->name() != "native")
        return 2;
    options = *pool_options;
    front = new Front(inner);
    native::allocator.store(front);
    try {
        if (c10::GetAllocator(c10::DeviceType::CUDA) == inner)
            c10::SetAllocator(c10::DeviceType::CUDA, front, UINT8_MAX);
    } catch (const std::exception &) { // PyTorch has none registered
    }
    return 0;
}

// Whether PyTorch still uses the front.
FRONT_API int rebatch_torch_is_installed(void)
{
    return front && native::get() == front;
}

// Change the limit of all pools, of those too that are opened later. 0 and 0: no limit.
FRONT_API rebatch_status rebatch_torch_set_limit(size_t limit_bytes, uint32_t limit_permille)
{
    {
        std::lock_guard<std::mutex> hold(slots_lock);
        options.limit_bytes = limit_bytes;
        options.limit_permille = limit_permille;
    }
    rebatch_status status = REBATCH_OK;
    for (int device = 0; status == REBATCH_OK && device < MOST_DEVICES; device++)
        status = limit_pool(device);
    return status;
}

// The number of GPUs that have a pool.
FRONT_API int rebatch_torch_pool_count(void)
{
    int count = 0;
    for (const Slot &slot : slots)
        count += slot.pool.load() != nullptr;
    return count;
}

// Set the options of pools that are opened later. REBATCH_E_STATE: there is a pool already.
FRONT_API rebatch_status rebatch_torch_configure(const rebatch_pool_options *pool_options)
{
    std::lock_guard<std::mutex> hold(slots_lock);
    if (rebatch_torch_pool_count() > 0)
        return REBATCH_E_STATE;
    options = *pool_options;
    return REBATCH_OK;
}

// The pool of a GPU, which is opened if need be. `out` is borrowed and stays for ever.
FRONT_API rebatch_status rebatch_torch_pool(rebatch_pool **out, int device)
{
    *out = nullptr;
    if (!is_slot(device))
        return REBATCH_E_NO_DEVICE;
    return open_pool(out, device);
}

// Change the floor of all pools, of those too that are opened later.
FRONT_API rebatch_status rebatch_torch_set_floor(size_t bytes)
{
    std::lock_guard<std::mutex> hold(slots_lock);
    rebatch_status status = REBATCH_OK;
    floor_bytes = bytes;
    for (int device = 0; status == REBATCH_OK && device < MOST_DEVICES; device++)
        if (rebatch_pool *const pool = find_pool(device))
            status = rebatch_pool_set_floor(pool, bytes);
    return status;
}

// The same where it is open; else NULL.
FRONT_API rebatch_pool *rebatch_torch_find_pool(int device)
{
    return find_pool(device);
}

// What the native allocator holds of the GPUs that have a pool.
FRONT_API uint64_t rebatch_torch_native_bytes(void)
{
    uint64_t bytes = 0;
    for (int device = 0; device < MOST_DEVICES; device++)
        bytes += find_pool(device) ? native_bytes(device) : 0;
    return bytes;
}

// Make an arena of a GPU's pool for graphs that are captured with the id of a MempoolId_t, or a
// shared one for what is allocated with that id.
FRONT_API rebatch_status rebatch_torch_make_arena(rebatch_arena **out, int device, bool is_shared,
                                                  uint64_t first, uint64_t second)
try {
    *out = nullptr;
    rebatch_pool *pool;
    rebatch_status status = rebatch_torch_pool(&pool, device);
    if (status == REBATCH_OK)
        status =
            is_shared ? rebatch_arena_create_shared(out, pool) : rebatch_arena_create(out, pool);
    if (status == REBATCH_OK)
        front->add_arena(static_cast<DeviceIndex>(device), {first, second}, *out);
    return status;
} catch (...) {
    rebatch_arena_destroy(*out);
    *out = nullptr;
    return REBATCH_E_DEVICE;
}

FRONT_API void rebatch_torch_drop_arena(rebatch_arena *arena)
try {
    front->remove_arena(arena);
    rebatch_arena_destroy(arena);
} catch (...) {
    rebatch_arena_destroy(arena);
}

// Frees that a pool refused, or that the native allocator did.
FRONT_API uint64_t rebatch_torch_refused_frees(void)
{
    return refused_frees;
}

// The number of a tag; -1: there are too many.
FRONT_API int rebatch_torch_tag(const char *name)
{
    std::lock_guard<std::mutex> hold(tags_lock);
    for (size_t i = 0; i < tag_names->size(); i++)
        if ((*tag_names)[i] == name)
            return static_cast<int>(i);
    if (tag_names->size() == MOST_TAGS)
        return -1;
    const size_t index = tag_names->size();
    tag_names->push_back(name);
    for (Slot &slot : slots) {
        rebatch_tag tag = 0;
        if (rebatch_pool *const pool = slot.pool.load())
            (void)rebatch_pool_tag(&tag, pool, name);
        slot.tags[index].store(tag);
    }
    return static_cast<int>(index);
}

// Begin a block with a tag: returns what rebatch_torch_leave_tag() takes at its end.
FRONT_API int rebatch_torch_enter_tag(int tag)
{
    return enter_tag(tag);
}

FRONT_API void rebatch_torch_leave_tag(int before)
{
    leave_tag(before);
}
