/* The driver's calls for virtual memory, counted and timed: chunks.c and addresses.c make them
 * here. Must not be included elsewhere. */
#ifndef RBI_POOL_VM_CALLS_H
#define RBI_POOL_VM_CALLS_H

#include "pool/vm/vm.h"

/* A chunk of the device's memory, or of the host's. */
enum rbi_memory { RBI_MEMORY_OWN, RBI_MEMORY_SHARED, RBI_MEMORY_HOST };
rebatch_status rbi_call_create(struct rbi_vm *vm, rbi_physical *out, size_t bytes,
                               enum rbi_memory kind);
rebatch_status rbi_call_release(struct rbi_vm *vm, rbi_physical chunk, size_t bytes, bool of_host);
rebatch_status rbi_call_map(struct rbi_vm *vm, void *at, size_t bytes, rbi_physical chunk);
rebatch_status rbi_call_unmap(struct rbi_vm *vm, void *at, size_t bytes);
/* `pieces`: the chunks in the range. */
rebatch_status rbi_call_set_access(struct rbi_vm *vm, void *at, size_t bytes, size_t pieces);

#endif
