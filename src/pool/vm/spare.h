/* The spare chunks, between chunks.c, which makes them, and addresses.c, which maps them.
 * Must not be included elsewhere. */
#ifndef RBI_POOL_VM_SPARE_H
#define RBI_POOL_VM_SPARE_H

#include "pool/vm/vm.h"

void rbi_spare_put(struct rbi_vm *vm, rbi_physical chunk, unsigned size);
rbi_physical rbi_spare_newest(const struct rbi_vm *vm, unsigned size);
/* The newest chunk of the size is spare no longer. */
void rbi_spare_drop(struct rbi_vm *vm, unsigned size);
/* The largest size of at most `most` pages that is spare, else the smallest above; there must be
 * one. */
unsigned rbi_spare_choose(const struct rbi_vm *vm, size_t most);
/* Makes a chunk of a size; it is spare. */
rebatch_status rbi_spare_make(struct rbi_vm *vm, unsigned size);
/* The same, of what other processes can have, and of up to `most` pages; *size is its own. */
rebatch_status rbi_spare_make_shared(struct rbi_vm *vm, size_t most, unsigned *size);
void rbi_spare_give_back(struct rbi_vm *vm, unsigned size);
/* Counts what was taken from the device or the host, or given back. */
void rbi_vm_note_taken(struct rbi_vm *vm, size_t bytes);
void rbi_vm_note_given(struct rbi_vm *vm, size_t bytes);

/* ---- chunks of host memory, between host_chunks.c and addresses.c ---- */

/* The largest of at most `most` pages that is mapped nowhere; NULL: none. */
struct rbi_host_chunk *rbi_overflow_next(const struct rbi_vm *vm, size_t most);
/* Makes smaller chunks, of at most `most` pages, of one that is mapped nowhere. */
rebatch_status rbi_overflow_break(struct rbi_vm *vm, size_t most);
/* The one that is mapped at an address; NULL: none. */
struct rbi_host_chunk *rbi_overflow_find(const struct rbi_vm *vm, const char *at);

/* Makes smaller chunks of a spare one, down to single pages. Its memory is the device's in between:
 * somebody else may be quicker to take it. */
rebatch_status rbi_spare_break(struct rbi_vm *vm, unsigned size);

#endif
