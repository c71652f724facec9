// An allocator in front of PyTorch's native CUDA allocator: ordinary memory comes from a rebatch
// pool of each GPU; CUDA graphs, MemPools, IPC and memory history stay with the native allocator.
// It must not know of steps and sessions.
//
// Each pointer is freed by the allocator that gave it. The deleter of a storage names the pool, so
// a free searches nothing, and the front can be installed when tensors exist already. Nothing here
// is ever destroyed: tensors may be freed after the interpreter has ended.
//
// Compiled against the headers of the PyTorch that is installed, 2.8 or later. CUDAAllocator gains
// virtual functions from one minor version to the next: those of newer ones stand behind SINCE().
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/api/include/torch/version.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "rebatch/rebatch.h"

#define SINCE(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))
#define FRONT_API extern "C" __attribute__((visibility("default")))

namespace
{
namespace native = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::CUDAStream;
using c10::cuda::MempoolId_t;

constexpr int MOST_DEVICES = 64;
constexpr int MOST_TAGS = 256; // as many as a pool has, the one for untagged memory included

// ---- tags ----

// A tag of this process is an index into `tag_names`; each pool has its own number for it. 0:
// untagged.
std::mutex tags_lock;
std::vector<std::string> *const tag_names = new std::vector<std::string>{""};

// A thread within a `with tag()` block has the block's tag. All other threads, autograd's among
// them, have the tag of the leading thread: the main thread while it is within a block, otherwise
// the thread that first entered one.
constexpr int NO_TAG = -1;
#define FRONT_TLS __attribute__((tls_model("initial-exec")))
thread_local int thread_tag FRONT_TLS = NO_TAG;
std::atomic<int> common_tag{0};
std::atomic<pid_t> leading_thread{0}; // 0: none

int current_tag()
{
    return __builtin_expect(thread_tag != NO_TAG, 0) ? thread_tag
                                                     : common_tag.load(std::memory_order_relaxed);
}

// ---- the pools ----

struct Slot {
    std::atomic<rebatch_pool *> pool{nullptr};
    rebatch_device *device = nullptr;
    size_t total_bytes = 0;
    std::atomic<double> fraction{1.0}; // set_per_process_memory_fraction()
    std::array<std::atomic<rebatch_tag>, MOST_TAGS> tags{};
    std::atomic<int64_t> ooms{0};  // raised to the program
    std::atomic<int64_t> trims{0}; // by empty_cache() and for the native allocator
    rebatch_pool_stats since{};    // the totals when they were last reset
    int64_t ooms_since = 0, trims_since = 0;
};

Slot slots[MOST_DEVICES];
std::mutex slots_lock; // opening, limits, and totals that were reset
rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
std::atomic<uint64_t> refused_frees{0};

// The limit in bytes: the lowest of limit_bytes, limit_permille and the memory fraction. 0: none.
size_t limit_of(const Slot &slot)
{
    size_t limit = SIZE_MAX;
    if (options.limit_bytes)
        limit = options.limit_bytes;
    if (options.limit_permille)
        limit = std::min(limit, slot.total_bytes / 1000 * options.limit_permille);
    const double fraction = slot.fraction.load();
    if (fraction < 1.0)
        limit = std::min(limit, static_cast<size_t>(fraction * double(slot.total_bytes)));
    return limit == SIZE_MAX ? 0 : std::max<size_t>(limit, 1);
}

size_t release_native_cache(size_t wanted_bytes, void *user);

void name_tags(Slot &slot, rebatch_pool *pool)
{
    std::lock_guard<std::mutex> hold(tags_lock);
    for (size_t i = 1; i < tag_names->size(); i++) {
        rebatch_tag tag = 0;
        (void)rebatch_pool_tag(&tag, pool, (*tag_names)[i].c_str());
        slot.tags[i].store(tag);
    }
}

// With slots_lock held. On failure rebatch_last_error() has the reason.
rebatch_status open_locked(Slot &slot, int device)
{
    rebatch_cuda_options cuda = REBATCH_CUDA_OPTIONS_INIT;
    cuda.ordinal = device;
    rebatch_memory_info memory;
    rebatch_pool *pool = nullptr;
    rebatch_status status = rebatch_device_open_cuda(&slot.device, &cuda);
    if (status != REBATCH_OK)
        return status;
    status = rebatch_device_memory(slot.device, &memory);
    if (status == REBATCH_OK) {
        slot.total_bytes = memory.total_bytes;
        rebatch_pool_options own = options;
        own.limit_bytes = limit_of(slot);
        own.limit_permille = 0;
        status = rebatch_pool_create(&pool, slot.device, &own);
    }
    if (status == REBATCH_OK)
        status = rebatch_pool_add_pressure(pool, release_native_cache, &slot);
    if (status != REBATCH_OK) {
        rebatch_pool_destroy(pool);
        rebatch_device_close(slot.device);
        slot.device = nullptr;
        return status;
    }
    name_tags(slot, pool);
    slot.pool.store(pool, std::memory_order_release);
    name_tags(slot, pool); // and those that were named meanwhile
    return REBATCH_OK;
}

rebatch_status open_pool(rebatch_pool **out, int device)
{
    *out = slots[device].pool.load(std::memory_order_acquire);
    if (*out)
        return REBATCH_OK;
    std::lock_guard<std::mutex> hold(slots_lock);
    if (!slots[device].pool.load()) {
        const rebatch_status status = open_locked(slots[device], device);
        if (status != REBATCH_OK)
            return status;
    }
    *out = slots[device].pool.load();
    return REBATCH_OK;
}

bool is_slot(int device)
{
    return device >= 0 && device < MOST_DEVICES;
}

// NULL: not open.
rebatch_pool *find_pool(int device)
{
    return is_slot(device) ? slots[device].pool.load(std::memory_order_acquire) : nullptr;
}

C10_NOINLINE rebatch_pool *need_pool(int device)
{
    TORCH_CHECK(is_slot(device), "rebatch: GPU ", device, " is beyond the ", MOST_DEVICES,
                " GPUs that rebatch can use");
    rebatch_pool *pool;
    TORCH_CHECK(open_pool(&pool, device) == REBATCH_OK, "rebatch: no pool on GPU ", device, ": ",
                rebatch_last_error());
    return pool;
}

rebatch_pool *pool_of(int device)
{
    rebatch_pool *const pool = find_pool(device);
    return __builtin_expect(pool != nullptr, 1) ? pool : need_pool(device);
}

size_t trim(Slot &slot)
{
    size_t released = 0;
    rebatch_pool *const pool = slot.pool.load(std::memory_order_acquire);
    if (pool && rebatch_pool_trim(pool, 0, &released) == REBATCH_OK && released > 0)
        slot.trims++;
    return released;
}

// ---- freeing ----

void tell_profiler(int device, void *pointer, int64_t bytes)
{
    rebatch_pool_stats stats;
    if (rebatch_pool_get_stats(&stats, slots[device].pool.load()) == REBATCH_OK)
        c10::reportMemoryUsageToProfiler(
            pointer, bytes, stats.live_bytes, stats.reserved_bytes,
            c10::Device(c10::DeviceType::CUDA, static_cast<DeviceIndex>(device)));
}

C10_NOINLINE void tell_profiler_of_free(int device, void *pointer)
{
    size_t bytes = 0;
    if (rebatch_pool_block_bytes(&bytes, slots[device].pool.load(), pointer) == REBATCH_OK)
        tell_profiler(device, pointer, -static_cast<int64_t>(bytes));
}

// Memory of the pool on `device`. Nothing leaves it: it is a deleter.
void give_back(int device, void *pointer) noexcept
try {
    if (!pointer)
        return;
    if (const auto *const trace = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(trace != nullptr))
        (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
    if (C10_UNLIKELY(c10::memoryProfilingEnabled()))
        tell_profiler_of_free(device, pointer);
    if (C10_UNLIKELY(rebatch_pool_free(slots[device].pool.load(std::memory_order_acquire),
                                       pointer) != REBATCH_OK))
        refused_frees++;
} catch (...) {
    refused_frees++;
}

template <int device> void delete_on(void *pointer)
{
    give_back(device, pointer);
}

template <int... devices>
constexpr std::array<c10::DeleterFnPtr, sizeof...(devices)>
make_deleters(std::integer_sequence<int, devices...>)
{
    return {&delete_on<devices>...};
}

constexpr auto deleters = make_deleters(std::make_integer_sequence<int, MOST_DEVICES>{});

// Memory of the pools and of the native allocator.
void delete_any(void *pointer);

// ---- texts ----

std::string size_text(uint64_t bytes)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB"};
    double value = double(bytes);
    int unit = 0;
    for (; unit < 3 && value >= 1024; unit++)
        value /= 1024;
    char text[48];
    snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", value, units[unit]);
    return text;
}

std::string oom_text(int device, size_t bytes, const rebatch_oom_report &oom,
                     const DeviceStats &native_stats)
{
    std::string text = "CUDA out of memory. Tried to allocate " + size_text(bytes) + ". GPU " +
                       std::to_string(device) + " has a total capacity of " +
                       size_text(oom.device_total_bytes) + " of which " +
                       size_text(oom.device_free_bytes) + " is free. rebatch holds " +
                       size_text(oom.reserved_bytes);
    if (oom.limit_bytes != UINT64_MAX)
        text += " of its limit of " + size_text(oom.limit_bytes);
    text += ", with " + size_text(oom.live_bytes) + " in use";
    for (uint32_t i = 0; i < oom.tag_count; i++)
        text += (i ? ", " : ": ") + std::string(oom.tags[i].name) + " " +
                size_text(oom.tags[i].live_bytes);
    text += ". The largest request that would have succeeded is " + size_text(oom.would_fit_bytes) +
            ".";
    const int64_t reserved = native_stats.reserved_bytes[0].current;
    if (reserved > 0)
        text += " PyTorch's native allocator holds " + size_text(uint64_t(reserved)) + ", with " +
                size_text(uint64_t(native_stats.allocated_bytes[0].current)) + " in use.";
    return text;
}

// ---- snapshots ----

rebatch_status append_text(const void *data, size_t size, void *user)
try {
    static_cast<std::string *>(user)->append(static_cast<const char *>(data), size);
    return REBATCH_OK;
} catch (const std::exception &) {
    return REBATCH_E_HOST_OOM;
}

void add_block(native::SegmentInfo &segment, size_t bytes, size_t requested_bytes,
               const std::string &state)
{
    native::BlockInfo block;
    block.size = bytes;
    block.requested_size = requested_bytes;
    block.allocated = state == "live" || state == "deferred";
    block.active = block.allocated || state == "pending";
    segment.allocated_size += block.allocated ? bytes : 0;
    segment.requested_size += requested_bytes;
    segment.active_size += block.active ? bytes : 0;
    segment.blocks.push_back(std::move(block));
}

// The pool's blocks as PyTorch has them, from the CSV that docs/snapshot.md describes.
void add_segments(std::vector<native::SegmentInfo> &segments, DeviceIndex device,
                  rebatch_pool *pool)
{
    std::string csv;
    if (rebatch_pool_write_snapshot(pool, REBATCH_SNAPSHOT_BLOCKS_CSV, append_text, &csv) !=
        REBATCH_OK)
        return;
    size_t previous = 0;
    for (size_t begin = 0, end; (end = csv.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
        size_t segment, segment_bytes, address, bytes, requested_bytes;
        char state[16];
        if (sscanf(csv.c_str() + begin, "0x%zx,%zu,0x%zx,%zu,%zu,%15[^,]", &segment, &segment_bytes,
                   &address, &bytes, &requested_bytes, state) != 6)
            continue; // the head, or memory that is mapped nowhere
        if (segment != previous) {
            native::SegmentInfo info;
            info.device = device;
            info.address = previous = segment;
            info.total_size = segment_bytes;
            info.is_large = info.is_expandable = true;
            segments.push_back(std::move(info));
        }
        add_block(segments.back(), bytes, requested_bytes, state);
    }
}

// ---- the allocator ----

class Front final : public native::CUDAAllocator
{
  public:
    explicit Front(native::CUDAAllocator *inner) : inner_(inner)
    {
    }
    native::CUDAAllocator *inner() const
    {
        return inner_;
    }

    c10::DataPtr allocate(size_t bytes) override
    {
        const DeviceIndex device = c10::cuda::current_device();
        const c10::Device where(c10::DeviceType::CUDA, device);
        if (C10_UNLIKELY(!enabled_.load(std::memory_order_relaxed)))
            return inner_->allocate(bytes);
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
        if (C10_UNLIKELY(is_routed(device, stream))) {
            void *const pointer = get_native(bytes, device, stream);
            return {pointer, pointer, &delete_any, where};
        }
        void *const pointer = get(bytes, device, stream);
        return {pointer, pointer, deleters[static_cast<size_t>(device)], where};
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

    void init(int devices) override
    {
        inner_->init(devices);
    }
    bool initialized() override
    {
        return inner_->initialized();
    }
    void enable(bool value) override
    {
        inner_->enable(value);
        enabled_ = value;
    }
    bool isEnabled() const override
    {
        return inner_->isEnabled();
    }
    std::string name() override
    {
        return inner_->name();
    }

    // The same fraction limits the pool and the native allocator.
    double getMemoryFraction(DeviceIndex device) override
    {
        return is_slot(device) ? slots[device].fraction.load() : inner_->getMemoryFraction(device);
    }
    void setMemoryFraction(double fraction, DeviceIndex device) override
    {
        rebatch_pool *const pool = need_pool(device);
        inner_->setMemoryFraction(fraction, device);
        std::lock_guard<std::mutex> hold(slots_lock);
        slots[device].fraction = fraction;
        TORCH_CHECK(rebatch_pool_set_limit(pool, limit_of(slots[device])) == REBATCH_OK,
                    "rebatch: ", rebatch_last_error());
    }

    void emptyCache(MempoolId_t id = {0, 0}) override
    {
        if (id == MempoolId_t{0, 0})
            for (Slot &slot : slots)
                (void)trim(slot);
        inner_->emptyCache(id);
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
        slot.ooms_since = slot.ooms;
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
        return add_pools(inner_->snapshot(id, traces), id);
    }
#else
    native::SnapshotInfo snapshot(MempoolId_t id = {0, 0}) override
    {
        return add_pools(inner_->snapshot(id), id);
    }
#endif

    // ---- graphs and MemPools: the native allocator's ----

    void beginAllocateToPool(DeviceIndex device, MempoolId_t id,
                             std::function<bool(cudaStream_t)> filter) override
    {
        {
            std::lock_guard<std::mutex> hold(routes_lock_);
            routes_.push_back({device, id, filter});
            route_count_ = static_cast<int>(routes_.size());
        }
        inner_->beginAllocateToPool(device, id, std::move(filter));
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
            route_count_ = static_cast<int>(routes_.size());
        }
        inner_->endAllocateToPool(device, id);
    }
    void releasePool(DeviceIndex device, MempoolId_t id) override
    {
        inner_->releasePool(device, id);
    }
    int getPoolUseCount(DeviceIndex device, MempoolId_t id) override
    {
        return inner_->getPoolUseCount(device, id);
    }
#if SINCE(11)
    void createOrIncrefPool(DeviceIndex device, MempoolId_t id,
                            std::shared_ptr<CUDAAllocator> allocator = nullptr) override
    {
        inner_->createOrIncrefPool(device, id, std::move(allocator));
    }
    void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use) override
    {
        inner_->setUseOnOOM(device, id, use);
    }
#else
    void createOrIncrefPool(DeviceIndex device, MempoolId_t id,
                            CUDAAllocator *allocator = nullptr) override
    {
        inner_->createOrIncrefPool(device, id, allocator);
    }
    void setUseOnOOM(DeviceIndex device, MempoolId_t id) override
    {
        inner_->setUseOnOOM(device, id);
    }
#endif
#if SINCE(10)
    void setNoSplit(DeviceIndex device, MempoolId_t id) override
    {
        inner_->setNoSplit(device, id);
    }
    std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override
    {
        return inner_->getExpandableSegmentSizes(device);
    }
#endif
#if SINCE(13)
    void markCaptureBegin(DeviceIndex device) override
    {
        inner_->markCaptureBegin(device);
    }
    void markCaptureEnd(DeviceIndex device) override
    {
        inner_->markCaptureEnd(device);
    }
    c10::DataPtr allocateWithAddress(size_t bytes, void *address) override
    {
        return inner_->allocateWithAddress(bytes, address);
    }
#endif
    bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id,
                                  const std::unordered_set<void *> &live) override
    {
        return inner_->checkPoolLiveAllocations(device, id, live);
    }
    std::shared_ptr<native::AllocatorState> getCheckpointState(DeviceIndex device,
                                                               MempoolId_t id) override
    {
        return inner_->getCheckpointState(device, id);
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
                    "allocate the tensor within torch.cuda.use_mem_pool(torch.cuda.MemPool())");
        return inner_->shareIpcHandle(pointer);
    }
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override
    {
        return inner_->getIpcDevPtr(std::move(handle));
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

    // ---- history and observers ----

    bool isHistoryEnabled() override
    {
        return inner_->isHistoryEnabled();
    }
#if SINCE(11)
    void recordHistory(bool enabled, native::CreateContextFn recorder, size_t most,
                       native::RecordContext when, bool clear,
                       const std::vector<std::string> &skip) override
    {
        inner_->recordHistory(enabled, recorder, most, when, clear, skip);
    }
#else
    void recordHistory(bool enabled, native::CreateContextFn recorder, size_t most,
                       native::RecordContext when, bool clear) override
    {
        inner_->recordHistory(enabled, recorder, most, when, clear);
    }
#endif
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>> &pairs) override
    {
        inner_->recordAnnotation(pairs);
    }
    void pushCompileContext(std::string &context) override
    {
        inner_->pushCompileContext(context);
    }
    void popCompileContext() override
    {
        inner_->popCompileContext();
    }
#if SINCE(10)
    void setUserMetadata(const std::string &metadata) override
    {
        inner_->setUserMetadata(metadata);
    }
    std::string getUserMetadata() override
    {
        return inner_->getUserMetadata();
    }
#endif
#if SINCE(12)
    std::shared_ptr<c10::GatheredContext> getContextForPointer(const void *pointer) override
    {
        return inner_->getContextForPointer(pointer);
    }
    void attachOomRejectionObserver(native::OomRejectionObserver observer) override
    {
        inner_->attachOomRejectionObserver(std::move(observer));
    }
#endif
#if SINCE(14)
    bool supportsUserMetadata() override
    {
        return inner_->supportsUserMetadata();
    }
    void annotateMemory(const void *pointer, const std::string &metadata) override
    {
        inner_->annotateMemory(pointer, metadata);
    }
#endif
    void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override
    {
        {
            std::lock_guard<std::mutex> hold(observers_lock_);
            observers_.push_back(observer);
        }
        inner_->attachOutOfMemoryObserver(std::move(observer));
    }
    void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override
    {
        inner_->attachAllocatorTraceTracker(std::move(tracker));
    }

    // Frees what the native allocator caches on a GPU: returns the bytes.
    size_t release_cache(DeviceIndex device)
    {
        // While a graph is captured the native allocator must not free.
        if (route_count_.load() != 0 || !inner_->initialized())
            return 0;
        const int64_t before = cached_bytes(device);
        if (before <= 0)
            return 0;
        inner_->emptyCache({0, 0});
        return size_t(std::max<int64_t>(before - cached_bytes(device), 0));
    }

  private:
    struct Route {
        DeviceIndex device;
        MempoolId_t id;
        std::function<bool(cudaStream_t)> takes;
    };

    int64_t cached_bytes(DeviceIndex device)
    {
        const DeviceStats stats = inner_->getDeviceStats(device);
        return stats.reserved_bytes[0].current - stats.allocated_bytes[0].current;
    }

    bool is_routed(DeviceIndex device, cudaStream_t stream)
    {
        return C10_UNLIKELY(route_count_.load(std::memory_order_acquire) != 0) &&
               takes_route(device, stream);
    }
    C10_NOINLINE bool takes_route(DeviceIndex device, cudaStream_t stream)
    {
        std::lock_guard<std::mutex> hold(routes_lock_);
        for (const Route &route : routes_)
            if (route.device == device && route.takes(stream))
                return true;
        return false;
    }

    void *get_any(size_t bytes, DeviceIndex device, cudaStream_t stream)
    {
        return is_routed(device, stream) ? get_native(bytes, device, stream)
                                         : get(bytes, device, stream);
    }

    void *get(size_t bytes, DeviceIndex device, cudaStream_t stream)
    {
        rebatch_pool *const pool = pool_of(device);
        const rebatch_tag tag =
            slots[device].tags[size_t(current_tag())].load(std::memory_order_relaxed);
        void *pointer;
        if (C10_UNLIKELY(route_count_.load(std::memory_order_relaxed) != 0)) {
            // The pool's calls to the driver do not end a capture.
            c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
            pointer = get_from(pool, bytes, device, stream, tag);
        } else {
            pointer = get_from(pool, bytes, device, stream, tag);
        }
        if (const auto *const trace = c10::impl::GPUTrace::get_trace();
            C10_UNLIKELY(trace != nullptr) && pointer)
            (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
        if (C10_UNLIKELY(c10::memoryProfilingEnabled()) && pointer)
            tell_profiler_of(device, pointer);
        return pointer;
    }

    void *get_from(rebatch_pool *pool, size_t bytes, DeviceIndex device, cudaStream_t stream,
                   rebatch_tag tag)
    {
        void *pointer;
        const rebatch_status status = rebatch_pool_alloc(
            &pointer, pool, bytes, reinterpret_cast<rebatch_stream>(stream), tag);
        if (C10_LIKELY(status == REBATCH_OK))
            return pointer;
        fail(status, bytes, device, pool);
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
        try {
            return inner_->raw_alloc_with_stream(bytes, stream);
        } catch (const c10::OutOfMemoryError &) {
            c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
            if (!is_slot(device) || trim(slots[device]) == 0)
                throw;
        }
        return inner_->raw_alloc_with_stream(bytes, stream);
    }

    [[noreturn]] C10_NOINLINE void fail(rebatch_status status, size_t bytes, DeviceIndex device,
                                        rebatch_pool *pool)
    {
        TORCH_CHECK(status == REBATCH_OOM, "rebatch: ", rebatch_last_error());
        rebatch_oom_report oom;
        rebatch_pool_stats stats;
        (void)rebatch_pool_last_oom(&oom, pool);
        (void)rebatch_pool_get_stats(&stats, pool);
        slots[device].ooms++;
        const std::string text = oom_text(device, bytes, oom, inner_->getDeviceStats(device));
        c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(bytes), stats.live_bytes,
                                         stats.reserved_bytes,
                                         c10::Device(c10::DeviceType::CUDA, device));
        std::vector<native::OutOfMemoryObserver> observers;
        {
            std::lock_guard<std::mutex> hold(observers_lock_);
            observers = observers_;
        }
        for (const auto &observer : observers)
            observer(device, bytes, std::min(oom.limit_bytes, oom.device_total_bytes),
                     oom.device_free_bytes);
        C10_THROW_ERROR(OutOfMemoryError, text);
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

    static void use_on(int device, void *pointer, CUDAStream stream)
    {
        // What a graph captures runs later: who made the graph keeps its inputs.
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        if (cudaStreamIsCapturing(stream.stream(), &capture) == cudaSuccess &&
            capture != cudaStreamCaptureStatusNone)
            return;
        const rebatch_status status = rebatch_pool_use_on(
            find_pool(device), pointer, reinterpret_cast<rebatch_stream>(stream.stream()));
        TORCH_CHECK(status == REBATCH_OK, "rebatch: ", rebatch_last_error());
    }

    static void add(c10::CachingAllocator::StatArray &to, uint64_t current, uint64_t peak,
                    uint64_t allocated, uint64_t freed)
    {
        to[0].current += int64_t(current);
        to[0].peak += int64_t(peak);
        to[0].allocated += int64_t(allocated);
        to[0].freed += int64_t(freed);
    }

    static void add_stats(DeviceStats &out, const Slot &slot, const rebatch_pool_stats &now)
    {
        std::lock_guard<std::mutex> hold(slots_lock);
        const rebatch_pool_stats &since = slot.since;
        const uint64_t calls = now.allocations - since.allocations;
        const uint64_t frees = now.frees - since.frees;
        const uint64_t bytes = now.allocated_total_bytes - since.allocated_total_bytes;
        const uint64_t freed = now.freed_total_bytes - since.freed_total_bytes;
        add(out.allocation, now.blocks, now.blocks_peak, calls, frees);
        add(out.active, now.blocks, now.blocks_peak, calls, frees);
        add(out.allocated_bytes, now.live_bytes, now.live_peak_bytes, bytes, freed);
        add(out.active_bytes, now.live_bytes, now.live_peak_bytes, bytes, freed);
        add(out.requested_bytes, now.requested_bytes, now.requested_bytes, bytes, freed);
        add(out.reserved_bytes, now.reserved_bytes, now.reserved_peak_bytes, now.reserved_bytes, 0);
        out.num_ooms += slot.ooms - slot.ooms_since;
        out.num_alloc_retries += int64_t(now.trims - since.trims) - (slot.trims - slot.trims_since);
        out.num_device_alloc += int64_t(now.device_allocations - since.device_allocations);
        out.num_device_free += int64_t(now.device_frees - since.device_frees);
    }

    static native::SnapshotInfo add_pools(native::SnapshotInfo info, const MempoolId_t &id)
    {
        if (id == MempoolId_t{0, 0})
            for (int device = 0; device < MOST_DEVICES; device++)
                if (rebatch_pool *const pool = find_pool(device))
                    add_segments(info.segments, static_cast<DeviceIndex>(device), pool);
        return info;
    }

    native::CUDAAllocator *const inner_;
    std::atomic<bool> enabled_{true};
    std::mutex routes_lock_;
    std::vector<Route> routes_; // to the native allocator
    std::atomic<int> route_count_{0};
    std::mutex observers_lock_;
    std::vector<native::OutOfMemoryObserver> observers_;
};

Front *front;

void delete_any(void *pointer)
try {
    front->raw_delete(pointer);
} catch (...) {
    refused_frees++;
}

// A pressure callback of the pool.
size_t release_native_cache(size_t, void *user)
try {
    return front->release_cache(static_cast<DeviceIndex>(static_cast<Slot *>(user) - slots));
} catch (...) {
    return 0;
}

bool is_main_thread()
{
    return syscall(SYS_gettid) == getpid();
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
    std::lock_guard<std::mutex> hold(slots_lock);
    const rebatch_pool_options before = options;
    options.limit_bytes = limit_bytes;
    options.limit_permille = limit_permille;
    for (Slot &slot : slots) {
        if (!slot.pool.load())
            continue;
        const rebatch_status status = rebatch_pool_set_limit(slot.pool.load(), limit_of(slot));
        if (status != REBATCH_OK) {
            options = before;
            return status;
        }
    }
    return REBATCH_OK;
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
    const int before = thread_tag;
    const pid_t self = static_cast<pid_t>(syscall(SYS_gettid));
    thread_tag = tag;
    pid_t leader = 0;
    if (is_main_thread())
        leading_thread = self;
    else
        leading_thread.compare_exchange_strong(leader, self);
    if (leading_thread == self)
        common_tag = tag;
    return before;
}

FRONT_API void rebatch_torch_leave_tag(int before)
{
    thread_tag = before;
    if (leading_thread != static_cast<pid_t>(syscall(SYS_gettid)))
        return;
    common_tag = before == NO_TAG ? 0 : before;
    if (before == NO_TAG)
        leading_thread = 0;
}
