// What PyTorch's native CUDA allocator is asked as it is: graphs and MemPools, other processes.
// Must not know pools.
//
// CUDAAllocator gains virtual functions from one minor version of PyTorch to the next: those of
// newer ones stand behind SINCE().
#ifndef REBATCH_FRONT_FORWARD_H
#define REBATCH_FRONT_FORWARD_H

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/api/include/torch/version.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#define SINCE(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace
{
namespace native = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::cuda::MempoolId_t;

class Forward : public native::CUDAAllocator
{
  public:
    explicit Forward(native::CUDAAllocator *inner) : inner_(inner)
    {
    }

    void init(int devices) override
    {
        inner_->init(devices);
    }
    bool initialized() override
    {
        return inner_->initialized();
    }
    bool isEnabled() const override
    {
        return inner_->isEnabled();
    }
    std::string name() override
    {
        return inner_->name();
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
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override
    {
        return inner_->getIpcDevPtr(std::move(handle));
    }
    bool isHistoryEnabled() override
    {
        return inner_->isHistoryEnabled();
    }
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>> &pairs) override
    {
        inner_->recordAnnotation(pairs);
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
    void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override
    {
        inner_->attachAllocatorTraceTracker(std::move(tracker));
    }

  protected:
    native::CUDAAllocator *const inner_;
};
} // namespace

#endif
