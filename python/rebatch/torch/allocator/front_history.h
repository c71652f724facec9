// Memory history of the pools' blocks, as torch.cuda.memory._record_memory_history() asks for it:
// who allocated what is in use, and the latest allocations and frees. Must not know pools.
//
// As the native allocator's, but without segments: a pool maps pages, which its own snapshot has.
// A record for which the host has no memory is left out.
#ifndef REBATCH_FRONT_HISTORY_H
#define REBATCH_FRONT_HISTORY_H

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace
{
namespace native = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using native::RecordContext;
using native::TraceEntry;

std::atomic<bool> history_is_on{false};                 // all that costs without a history
thread_local std::vector<std::string> compile_contexts; // of torch.compile

class History
{
  public:
    using Context = std::shared_ptr<c10::GatheredContext>;

    void set(bool on, native::CreateContextFn recorder, size_t most, RecordContext when, bool clear,
             const std::vector<std::string> &skip)
    {
        std::lock_guard<std::mutex> hold(lock_);
        recorder_ = recorder;
        when_ = on ? when : RecordContext::NEVER;
        most_ = most;
        skip_ = skip;
        if (!on || clear)
            latest_.clear();
        if (!on)
            live_.clear();
        history_is_on = on;
    }

    C10_NOINLINE void allocated(DeviceIndex device, void *pointer, size_t bytes,
                                cudaStream_t stream) noexcept
    try {
        Block block{bytes, stream, gather(RecordContext::STATE)};
        std::lock_guard<std::mutex> hold(lock_);
        if (!history_is_on)
            return; // since a moment ago
        record(TraceEntry::ALLOC, "alloc", device, pointer, block);
        live_[pointer] = std::move(block);
    } catch (...) {
    }

    C10_NOINLINE void freed(DeviceIndex device, void *pointer) noexcept
    try {
        Context context = gather(RecordContext::ALL);
        std::lock_guard<std::mutex> hold(lock_);
        const auto found = live_.find(pointer);
        if (found == live_.end())
            return; // older than the history, or that is over
        Block block = std::move(found->second);
        live_.erase(found);
        if (context)
            block.context = std::move(context);
        record(TraceEntry::FREE_REQUESTED, "free_requested", device, pointer, block);
        record(TraceEntry::FREE_COMPLETED, "free_completed", device, pointer, block);
    } catch (...) {
    }

    // Of what allocated a block that is in use; NULL: not known.
    Context context_of(size_t address)
    {
        std::lock_guard<std::mutex> hold(lock_);
        const auto found = live_.find(reinterpret_cast<void *>(address));
        return found == live_.end() ? nullptr : found->second.context;
    }

    // The latest events of all devices, among those of the native allocator.
    void add_to(std::vector<std::vector<TraceEntry>> &traces)
    {
        std::lock_guard<std::mutex> hold(lock_);
        for (const TraceEntry &entry : latest_)
            if (size_t(entry.device_) < traces.size())
                traces[size_t(entry.device_)].push_back(entry);
        for (std::vector<TraceEntry> &trace : traces)
            std::stable_sort(trace.begin(), trace.end(), [](const auto &one, const auto &other) {
                return one.time_.t_ < other.time_.t_;
            });
    }

  private:
    struct Block {
        size_t bytes;
        cudaStream_t stream;
        Context context;
    };

    // Without the lock: it needs Python's, under which others wait for this one.
    Context gather(RecordContext least)
    {
        const native::CreateContextFn recorder = recorder_;
        return recorder && when_.load() >= least ? recorder() : nullptr;
    }

    void record(TraceEntry::Action action, const char *name, DeviceIndex device, void *pointer,
                const Block &block)
    {
        if (std::find(skip_.begin(), skip_.end(), name) != skip_.end())
            return;
        latest_.emplace_back(action, device, reinterpret_cast<size_t>(pointer), block.bytes,
                             block.stream, c10::cuda::MempoolId_t{0, 0}, 0,
                             when_.load() >= RecordContext::ALLOC ? block.context : nullptr,
                             compile_contexts.empty() ? "N/A" : compile_contexts.back());
        latest_.back().time_.t_ = c10::getTime() / 1000; // as in the native allocator's snapshot
        while (latest_.size() > most_)
            latest_.pop_front();
    }

    std::atomic<native::CreateContextFn> recorder_{nullptr};
    std::atomic<RecordContext> when_{RecordContext::NEVER};
    std::mutex lock_; // of all below
    size_t most_ = 0;
    std::vector<std::string> skip_;
    std::unordered_map<void *, Block> live_;
    std::deque<TraceEntry> latest_;
};

History &history = *new History; // never destroyed
} // namespace

#endif
