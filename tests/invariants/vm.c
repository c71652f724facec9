/* Owns the check of the equations in vm.h.
 * Must not know how they come to hold. */
#include "base/base.h"
#include "invariants/invariants.h"

bool rbi_map_count(const struct rbi_map *map, uint64_t chunks[static RBI_CHUNK_SIZES],
                   uint64_t *asleep)
{
    for (size_t first = 0, end; first < map->pages; first = end) {
        end = first + 1;
        *asleep += map->chunks[first] == RBI_CHUNK_ASLEEP;
        if (map->chunks[first] == 0 || map->chunks[first] == RBI_CHUNK_ASLEEP)
            continue;
        if (map->chunks[first] == RBI_CHUNK_GOES_ON)
            return false;
        while (end < map->pages && map->chunks[end] == RBI_CHUNK_GOES_ON)
            end++;
        const size_t pages = end - first;
        const unsigned size = (unsigned)__builtin_ctzll(pages);
        if (pages != (size_t)1 << size || size >= RBI_CHUNK_SIZES)
            return false;
        chunks[size]++;
    }
    return true;
}

bool rbi_vm_is_valid(const struct rbi_vm *vm, const uint64_t mapped[static RBI_CHUNK_SIZES],
                     uint64_t plain_bytes)
{
    size_t spare = 0, held = 0;
    uint64_t overflow = 0;
    size_t of_host[RBI_CHUNK_SIZES] = {0};
    for (size_t i = 0; i < vm->overflow.count; i++) {
        of_host[vm->overflow.chunks[i].size] += vm->overflow.chunks[i].at != NULL;
        overflow += vm->page_bytes << vm->overflow.chunks[i].size;
    }
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++) {
        const struct rbi_spare *const of = &vm->spare[size];
        if (of->held + of_host[size] != mapped[size] + of->count || of->held > of->capacity)
            return false;
        spare += of->count << size;
        held += of->held << size;
    }
    return vm->spare_pages == spare && vm->held_pages == held && vm->overflow.bytes == overflow &&
           rbi_vm_bytes(vm) == held * vm->page_bytes + overflow + plain_bytes &&
           rbi_vm_bytes(vm) <= vm->peak_bytes;
}
