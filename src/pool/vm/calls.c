/* Owns the count and the time of the driver's calls for virtual memory.
 * Must not know which chunk is where. */
#include "pool/vm/calls.h"

#include "base/base.h"

/* When a call begins; 0 on a device whose calls have prices. */
static uint64_t begin(const struct rbi_vm *vm)
{
    return rbi_device_prices_of(vm->device) ? 0 : rbi_now_ns();
}

static void end(struct rbi_vm *vm, uint64_t *count, uint64_t began, uint64_t price)
{
    ++*count;
    vm->calls.ns += began ? rbi_now_ns() - began : price;
}

#define PRICE(vm, kind)                                                                            \
    (rbi_device_prices_of((vm)->device) ? rbi_device_prices_of((vm)->device)->kind : 0)

rebatch_status rbi_call_create(struct rbi_vm *vm, rbi_physical *out, size_t bytes,
                               enum rbi_memory kind)
{
    static rebatch_status (*const create[])(rebatch_device *, rbi_physical *, size_t) = {
        rbi_device_create_physical, rbi_device_create_shared, rbi_device_create_host};
    const uint64_t began = begin(vm);
    const rebatch_status status = create[kind](vm->device, out, bytes);
    end(vm, &vm->calls.creates, began, PRICE(vm, create));
    return status;
}

rebatch_status rbi_call_release(struct rbi_vm *vm, rbi_physical chunk, size_t bytes, bool of_host)
{
    const uint64_t began = begin(vm);
    const rebatch_status status = of_host ? rbi_device_release_host(vm->device, chunk, bytes)
                                          : rbi_device_release_physical(vm->device, chunk, bytes);
    end(vm, &vm->calls.releases, began, PRICE(vm, release));
    return status;
}

rebatch_status rbi_call_map(struct rbi_vm *vm, void *at, size_t bytes, rbi_physical chunk)
{
    const uint64_t began = begin(vm);
    const rebatch_status status = rbi_device_map(vm->device, at, bytes, chunk);
    end(vm, &vm->calls.maps, began, PRICE(vm, map));
    return status;
}

rebatch_status rbi_call_unmap(struct rbi_vm *vm, void *at, size_t bytes)
{
    const uint64_t began = begin(vm);
    const rebatch_status status = rbi_device_unmap(vm->device, at, bytes);
    end(vm, &vm->calls.unmaps, began, PRICE(vm, unmap));
    return status;
}

rebatch_status rbi_call_set_access(struct rbi_vm *vm, void *at, size_t bytes, size_t pieces)
{
    const uint64_t began = begin(vm);
    const rebatch_status status = rbi_device_set_access(vm->device, at, bytes);
    end(vm, &vm->calls.accesses, began, pieces * PRICE(vm, access));
    vm->calls.pieces += pieces;
    return status;
}
