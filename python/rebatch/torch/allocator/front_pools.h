// The pool of each GPU: how it is opened and limited, how its blocks are freed, and what is said of
// it in PyTorch's words. Must not know which of the two allocators is asked.
//
// One limit holds for both. The native allocator is told what the pool leaves of it before it
// allocates, and the pool what the native allocator leaves of it after that, and under pressure.
#ifndef REBATCH_FRONT_POOLS_H
#define REBATCH_FRONT_POOLS_H

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "front_history.h"
#include "front_tags.h"
#include "rebatch/rebatch.h"

namespace
{
namespace native = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr int MOST_DEVICES = 64;

// ---- opening and limits ----

struct Slot {
    std::atomic<rebatch_pool *> pool{nullptr};
    rebatch_device *device = nullptr;
    size_t total_bytes = 0;
    size_t others_bytes = 0;           // what MPS or HAMi leave of it; 0: all
    std::atomic<double> fraction{1.0}; // set_per_process_memory_fraction()
    // What each may hold, as it was last told. SIZE_MAX: any; 0: it was not told.
    std::atomic<size_t> pool_limit{0}, native_limit{SIZE_MAX};
    std::array<std::atomic<rebatch_tag>, MOST_TAGS> tags{};
    std::atomic<int64_t> ooms{0};  // that the native allocator has not counted
    std::atomic<int64_t> trims{0}; // by empty_cache() and for the native allocator
    rebatch_pool_stats since{};    // the totals when they were last reset
    int64_t trims_since = 0;
};

Slot slots[MOST_DEVICES];
std::mutex slots_lock; // opening, limits, and totals that were reset
rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
size_t floor_bytes = 0; // of each pool
std::atomic<uint64_t> refused_frees{0};
std::atomic<int> route_count{0}; // captures and MemPools that are in use (front.cpp)

size_t less(size_t bytes, size_t taken)
{
    return bytes > taken ? bytes - taken : 0;
}

// The limit in bytes: the lowest of limit_bytes, limit_permille, the memory fraction and others'.
// SIZE_MAX: none.
size_t limit_of(const Slot &slot)
{
    size_t limit = slot.others_bytes ? slot.others_bytes : SIZE_MAX;
    const size_t most = std::min(slot.total_bytes, limit);
    if (options.limit_bytes)
        limit = std::min(limit, options.limit_bytes);
    if (options.limit_permille)
        limit = std::min(limit, most / 1000 * options.limit_permille);
    const double fraction = slot.fraction.load();
    if (fraction < 1.0)
        limit = std::min(limit, static_cast<size_t>(fraction * double(slot.total_bytes)));
    return limit;
}

// What the native allocator holds, and the memory fraction that was set for it; of front.cpp.
size_t native_bytes(int device);
double native_fraction(int device);

// Lets the pool have what the native allocator leaves of the limit. With slots_lock held.
rebatch_status limit_locked(Slot &slot, int device)
{
    const size_t limit = limit_of(slot);
    const size_t left =
        limit == SIZE_MAX ? SIZE_MAX : std::max<size_t>(less(limit, native_bytes(device)), 1);
    if (left == slot.pool_limit)
        return REBATCH_OK;
    slot.pool_limit = left;
    return rebatch_pool_set_limit(slot.pool.load(), left == SIZE_MAX ? 0 : left);
}

// The same; nothing where there is no pool.
rebatch_status limit_pool(int device)
{
    std::lock_guard<std::mutex> hold(slots_lock);
    return slots[device].pool.load() ? limit_locked(slots[device], device) : REBATCH_OK;
}

// A pressure callback, of front.cpp.
size_t release_native_cache(size_t wanted_bytes, void *user);
// Whether the pool may wait for the GPU now, of front.cpp.
bool may_wait_for_gpu(void *);
// Whether Ctrl-C has come for a thread that waits for a wake, of front.cpp.
bool is_interrupted(void *);

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
        (void)rebatch_cuda_limit(&slot.others_bytes, nullptr, 0, device);
        slot.fraction = native_fraction(device);
        rebatch_pool_options own = options;
        own.may_wait = may_wait_for_gpu;
        status = rebatch_pool_create(&pool, slot.device, &own);
    }
    if (status == REBATCH_OK)
        status = rebatch_pool_set_interrupt(pool, is_interrupted, nullptr);
    if (status == REBATCH_OK && floor_bytes) // a limit that was lowered below it holds
        status = rebatch_pool_set_floor(
            pool, std::min(floor_bytes, options.limit_bytes ? options.limit_bytes : SIZE_MAX));
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
    return limit_locked(slot, device);
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

// A limit that was lowered may unmap pages: in the relaxed mode that does not end a capture.
C10_NOINLINE rebatch_status free_in_capture(rebatch_pool *pool, void *pointer)
{
    c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
    return rebatch_pool_free(pool, pointer);
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
    if (C10_UNLIKELY(history_is_on.load(std::memory_order_relaxed)))
        history.freed(static_cast<DeviceIndex>(device), pointer);
    rebatch_pool *const pool = slots[device].pool.load(std::memory_order_acquire);
    const bool is_routed = C10_UNLIKELY(route_count.load(std::memory_order_relaxed) != 0);
    if (C10_UNLIKELY((is_routed ? free_in_capture(pool, pointer)
                                : rebatch_pool_free(pool, pointer)) != REBATCH_OK))
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

std::string oom_text(int device, size_t bytes, const rebatch_oom_report &oom, size_t limit,
                     const DeviceStats &native_stats)
{
    std::string text = "CUDA out of memory. Tried to allocate " + size_text(bytes) + ". GPU " +
                       std::to_string(device) + " has a total capacity of " +
                       size_text(oom.device_total_bytes) + " of which " +
                       size_text(oom.device_free_bytes) + " is free. rebatch holds " +
                       size_text(oom.reserved_bytes);
    if (limit != SIZE_MAX)
        text += " of its limit of " + size_text(limit);
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

void add_block(native::SegmentInfo &segment, size_t address, size_t bytes, size_t requested_bytes,
               const std::string &state)
{
    native::BlockInfo block;
    block.context_when_allocated = history.context_of(address);
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
        add_block(segments.back(), address, bytes, requested_bytes, state);
    }
}

// ---- statistics ----

constexpr auto AGGREGATE = size_t(c10::CachingAllocator::StatType::AGGREGATE);
constexpr auto LARGE_POOL = size_t(c10::CachingAllocator::StatType::LARGE_POOL);

void add(c10::CachingAllocator::Stat &to, uint64_t current, uint64_t peak, uint64_t allocated,
         uint64_t freed)
{
    to.current += int64_t(current);
    to.peak += int64_t(peak);
    to.allocated += int64_t(allocated);
    to.freed += int64_t(freed);
}

void add_stats(DeviceStats &out, const Slot &slot, const rebatch_pool_stats &now)
{
    std::lock_guard<std::mutex> hold(slots_lock);
    const rebatch_pool_stats &since = slot.since;
    const uint64_t calls = now.allocations - since.allocations;
    const uint64_t frees = now.frees - since.frees;
    const uint64_t bytes = now.allocated_total_bytes - since.allocated_total_bytes;
    const uint64_t freed = now.freed_total_bytes - since.freed_total_bytes;
    // All of it counts as large, as in a snapshot.
    for (size_t i : {AGGREGATE, LARGE_POOL}) {
        add(out.allocation[i], now.blocks, now.blocks_peak, calls, frees);
        add(out.active[i], now.blocks, now.blocks_peak, calls, frees);
        add(out.allocated_bytes[i], now.live_bytes, now.live_peak_bytes, bytes, freed);
        add(out.active_bytes[i], now.live_bytes, now.live_peak_bytes, bytes, freed);
        add(out.requested_bytes[i], now.requested_bytes, now.requested_bytes, bytes, freed);
        add(out.reserved_bytes[i], now.reserved_bytes, now.reserved_peak_bytes, now.reserved_bytes,
            0);
    }
    out.num_ooms += slot.ooms;
    out.num_alloc_retries += int64_t(now.trims - since.trims) - (slot.trims - slot.trims_since);
    out.num_device_alloc += int64_t(now.device_allocations - since.device_allocations);
    out.num_device_free += int64_t(now.device_frees - since.device_frees);
}
} // namespace

#endif
