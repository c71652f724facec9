/* Virtual memory: address ranges, physical memory in chunks, and which chunk is mapped where.
 * Must not know blocks, free lists, or what memory is asked for.
 *
 * A chunk is a power of two of pages, up to 1 GiB on CUDA devices. It is made, mapped, unmapped and
 * given back as a whole, which takes the device hardly longer than a single page. A chunk that is
 * held is either mapped or spare. Chunks of host memory stand in a list of their own, which is
 * short: host_chunks.c. All with the pool's lock held. Other layers read the fields of
 * struct rbi_vm, and change them by the calls below only. */
#ifndef RBI_POOL_VM_H
#define RBI_POOL_VM_H

#include "device/device.h"
#include "rebatch/pool.h"

#define RBI_CHUNK_SIZES 10

/* Chunks of one size. The spare ones are listed, and the list has space for all that are held. */
struct rbi_spare {
    rbi_physical *chunks;
    size_t count, capacity, held;
};

/* An address range, and the chunks that are mapped into it.
 *   chunks[i] is the chunk that begins at page i, RBI_CHUNK_GOES_ON where one from before goes on,
 *   RBI_CHUNK_ASLEEP where the memory of page i was given away for a while, 0 where nothing is
 *   mapped */
struct rbi_map {
    char *address;
    size_t pages;
    unsigned page_shift;
    rbi_physical chunks[];
};
#define RBI_CHUNK_GOES_ON UINT64_MAX
#define RBI_CHUNK_ASLEEP (UINT64_MAX - 1)

/* The driver's calls for virtual memory since the vm was opened. A price is what a call takes on a
 * GPU; see rbi_device_prices. */
struct rbi_vm_calls {
    uint64_t creates, maps, accesses, unmaps, releases;
    uint64_t pieces; /* that were made accessible */
    uint64_t ns;     /* that all took */
};

/* A chunk of host memory, of 2^size pages, where no device memory was to be had. */
struct rbi_host_chunk {
    char *at; /* where it is mapped; NULL: nowhere yet */
    rbi_physical chunk;
    unsigned size;
};

/* All chunks of host memory. Those that are mapped nowhere are the next to be mapped, until they
 * are dropped.
 *   bytes == sum over the chunks */
struct rbi_overflow {
    struct rbi_host_chunk *chunks;
    size_t count, capacity;
    uint64_t bytes, peak_bytes, total_bytes; /* now, at most, and ever taken */
};

/* Pages in a row that were put to sleep together. Those of them that were unmapped since need no
 * memory any more. */
struct rbi_sleeper {
    struct rbi_map *map;
    size_t first, count;
    bool has_copy;
    size_t copy; /* where its copy begins, in pages of all copies */
};

/* Pinned host memory for copies. */
struct rbi_copy_part {
    void *memory;
    size_t pages;
};

/* What was put to sleep (asleep.c).
 *   pages == number of RBI_CHUNK_ASLEEP in all maps
 *   copied_pages == sum of count over the sleepers with a copy <= copy_pages
 *   copy_pages == sum of pages over the parts */
struct rbi_asleep {
    struct rbi_sleeper *sleepers;
    size_t count, capacity;
    size_t pages, copied_pages;
    struct rbi_copy_part *parts;
    size_t part_count, copy_pages;
    bool access_failed; /* a page was mapped, and neither made accessible nor unmapped */
};

/* All memory that is held, of the device and of the host. spare[i] has the chunks of 2^i pages.
 *   spare_pages == sum of spare[i].count << i
 *   held_pages == sum of spare[i].held << i
 *   taken_bytes - given_bytes ==
 *       held_pages * page_bytes + overflow.bytes + plain allocations */
struct rbi_vm {
    rebatch_device *device;
    size_t page_bytes;
    struct rbi_spare spare[RBI_CHUNK_SIZES];
    size_t spare_pages, held_pages;
    size_t floor_pages;                /* no release goes below them */
    uint64_t taken_bytes, given_bytes; /* since the vm was opened */
    uint64_t peak_bytes;               /* most that was held at once */
    uint64_t broken_bytes;             /* of both, those of chunks that smaller ones replaced */
    uint64_t quarantined_bytes;        /* in chunks that the device did not unmap */
    uint64_t allocations, frees;       /* calls that took or gave back memory */
    struct rbi_vm_calls calls;
    struct rbi_overflow overflow;
    struct rbi_asleep asleep;
};

static inline uint64_t rbi_vm_bytes(const struct rbi_vm *vm)
{
    return vm->taken_bytes - vm->given_bytes;
}
/* Of them, those of the device. */
static inline uint64_t rbi_vm_device_bytes(const struct rbi_vm *vm)
{
    return rbi_vm_bytes(vm) - vm->overflow.bytes;
}
static inline size_t rbi_vm_pages_for(const struct rbi_vm *vm, size_t bytes)
{
    return bytes / vm->page_bytes + (bytes % vm->page_bytes != 0);
}

/* ---- memory of the device (chunks.c) ---- */

/* No call to the device is made before the first of those below. */
void rbi_vm_open(struct rbi_vm *vm, rebatch_device *device);
void rbi_vm_reset_peak(struct rbi_vm *vm);

/* Pages of the chunks, a power of two, in which `count` pages come where the device could still
 * give `room` pages. */
size_t rbi_vm_chunk(const struct rbi_vm *vm, size_t count, size_t room);
/* The same for memory that will be used as a whole. */
size_t rbi_vm_chunk_ahead(size_t count);
/* Makes `count` more spare pages, in chunks of up to `chunk` pages, a power of two. All or none. */
rebatch_status rbi_vm_create(struct rbi_vm *vm, size_t count, size_t chunk);
/* Gives spare pages back until `keep` are left, or fewer where the last chunk is larger, and until
 * floor_pages are held. Returns how many pages it gave back. */
size_t rbi_vm_release(struct rbi_vm *vm, size_t keep);
/* Whether the device exports memory: it is tried with a page. */
rebatch_status rbi_vm_try_export(struct rbi_vm *vm);
/* Whether a chunk of several pages is mapped. */
bool rbi_vm_has_large(const struct rbi_vm *vm);

/* One plain allocation of the device, for devices that map no pages and pools that do not cache. */
rebatch_status rbi_vm_alloc(void **out, struct rbi_vm *vm, size_t bytes);
rebatch_status rbi_vm_free(struct rbi_vm *vm, void *address, size_t bytes);

/* Gives the spare chunks back. */
void rbi_vm_destroy(struct rbi_vm *vm);

/* ---- memory of the host (host_chunks.c) ---- */

/* Makes chunks of host memory for `count` pages, which rbi_map_fill() takes when no chunk of the
 * device is spare. All or none. */
rebatch_status rbi_overflow_make(struct rbi_vm *vm, size_t count);
size_t rbi_overflow_unmapped_pages(const struct rbi_vm *vm);
/* Of `count` pages, those for which it need make none. */
size_t rbi_overflow_pages_at_hand(const struct rbi_vm *vm, size_t count);
/* Gives those back that are mapped nowhere. */
void rbi_overflow_drop(struct rbi_vm *vm);
/* Before rbi_vm_destroy(), when none is mapped. */
void rbi_overflow_close(struct rbi_vm *vm);
/* Replaces the chunk of host memory with this index by one of the device: the same contents at the
 * same address. All work must be done. `beside`: addresses for as many bytes, with nothing mapped.
 *  @return REBATCH_OOM where the device has no room: nothing is changed */
rebatch_status rbi_overflow_move(struct rbi_vm *vm, struct rbi_map *map, size_t index,
                                 void *beside);

/* ---- memory that is given away for a while (asleep.c); all work must be done ---- */

/* `from` is how many sleepers there were before. */
/* Notes that whole chunks are to sleep, with a copy of their contents or without; those of the host
 * stay. */
rebatch_status rbi_asleep_add(struct rbi_vm *vm, size_t from, struct rbi_map *map, size_t first,
                              size_t count, bool has_copy);
/* Whether that is noted of a page. */
bool rbi_asleep_has(const struct rbi_vm *vm, const struct rbi_map *map, size_t page);
/* Copies those that were added since. */
rebatch_status rbi_asleep_save(struct rbi_vm *vm, size_t from);
/* Forgets them: they are mapped still. */
void rbi_asleep_forget(struct rbi_vm *vm, size_t from);
/* Gives the memory of all sleepers back. What the device does not unmap stays. */
void rbi_asleep_unmap(struct rbi_vm *vm);
/* Maps all, with their contents. Where it fails all are asleep as before, but for what the device
 * does not unmap again. */
rebatch_status rbi_asleep_wake(struct rbi_vm *vm);
void rbi_asleep_close(struct rbi_vm *vm);

/* ---- addresses, and what is mapped there (addresses.c) ---- */

/* Reserves addresses, whole pages. */
rebatch_status rbi_map_reserve(struct rbi_map **out, struct rbi_vm *vm, size_t bytes);
/* Maps spare chunks, and then chunks of the host, to `bytes` bytes at `at`, whole pages with
 * nothing mapped; as many must be there. Where it fails, nothing stays mapped but a chunk that the
 * device does not unmap: *quarantined. */
rebatch_status rbi_map_fill(struct rbi_vm *vm, struct rbi_map *map, char *at, size_t bytes,
                            bool *quarantined);
/* The same with new chunks, which other processes can have. */
rebatch_status rbi_map_fill_shared(struct rbi_vm *vm, struct rbi_map *map, char *at, size_t bytes,
                                   bool *quarantined);
/* The chunk that begins at `at`; 0: none does. */
rbi_physical rbi_map_chunk(const struct rbi_map *map, const char *at);
/* Unmaps from `at` to `to`, where chunks begin and end; they are spare then. Returns where it
 * stopped because the device did not unmap a chunk, or `to`. */
char *rbi_map_unmap(struct rbi_vm *vm, struct rbi_map *map, char *at, const char *to);
/* Counts the chunk at `at`, which the device did not unmap, as lost. Returns its bytes. */
size_t rbi_map_quarantine(struct rbi_vm *vm, const struct rbi_map *map, const char *at);

/* Sets the device's access again for all that is mapped. */
rebatch_status rbi_map_set_access(struct rbi_vm *vm, const struct rbi_map *map);

bool rbi_map_is_mapped(const struct rbi_map *map, const char *at);
/* The pages of the chunk that begins at `at`. */
size_t rbi_map_chunk_pages(const struct rbi_map *map, const char *at);
/* Of the chunk that goes on at `at` from what is before it, the pages from there on (`behind`), or
 * those before; 0 where none does. */
size_t rbi_map_cut_off(const struct rbi_map *map, const char *at, bool behind);
/* Of the `count` pages from *first on, those of chunks that lie wholly within. */
size_t rbi_map_shrink(const struct rbi_map *map, char **first, size_t count);
/* Of those pages and more, so that they begin and end with chunks. */
size_t rbi_map_widen(const struct rbi_map *map, char **first, size_t count);

/* Forgets the chunks with pages in [first, end), so that they stay mapped when the map is
 * destroyed. */
void rbi_map_forget(struct rbi_map *map, size_t first, size_t end);
/* Gives back the chunks with pages in [first, end). */
void rbi_map_release(struct rbi_vm *vm, struct rbi_map *map, size_t first, size_t end);
/* Frees the map; its addresses go back to the device where `unreserve`. */
void rbi_map_destroy(struct rbi_vm *vm, struct rbi_map *map, bool unreserve);

/* ---- a copy over a dry device, which only counts bytes (copy.c) ---- */

/* `to` has its device and page size, and nothing else yet. *handle stands for all chunks. */
rebatch_status rbi_vm_copy(rbi_physical *handle, struct rbi_vm *to, const struct rbi_vm *from);
/* A map of the same addresses with nothing mapped; NULL: no host memory. */
struct rbi_map *rbi_map_copy(const struct rbi_map *from);
void rbi_map_copy_chunks(struct rbi_map *to, const struct rbi_map *from, size_t first, size_t end,
                         rbi_physical handle);

#endif
