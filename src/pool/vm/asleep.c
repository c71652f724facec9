/* Owns memory that is given away for a while: which pages, the copies of their contents, and their
 * way back to the same addresses. Must not know blocks, nor why memory is given away. */
#include <string.h>

#include "base/base.h"
#include "pool/tuning.h"
#include "pool/vm/calls.h"
#include "pool/vm/spare.h"

static char *address_of(const struct rbi_vm *vm, const struct rbi_sleeper *s, size_t page)
{
    return s->map->address + page * vm->page_bytes;
}

/* ---- putting to sleep ---- */

rebatch_status rbi_asleep_add(struct rbi_vm *vm, size_t from, struct rbi_map *map, size_t first,
                              size_t count, bool has_copy)
{
    struct rbi_asleep *const asleep = &vm->asleep;
    struct rbi_sleeper *const last =
        asleep->count > from ? &asleep->sleepers[asleep->count - 1] : NULL;
    const size_t copy = asleep->copied_pages;
    if (rbi_overflow_find(vm, map->address + first * vm->page_bytes))
        return REBATCH_OK; /* host memory, which nobody gains */
    asleep->copied_pages += has_copy ? count : 0;
    if (last && last->map == map && last->first + last->count == first &&
        last->has_copy == has_copy) {
        last->count += count;
        return REBATCH_OK;
    }
    if (asleep->count == asleep->capacity) {
        const size_t capacity = rbi_max(2 * asleep->capacity, 64);
        struct rbi_sleeper *const more = rbi_heap_resize(asleep->sleepers, capacity, sizeof *more);
        if (!more)
            return rbi_error(REBATCH_E_HOST_OOM, "no host memory to note what sleeps");
        asleep->sleepers = more;
        asleep->capacity = capacity;
    }
    asleep->sleepers[asleep->count++] = (struct rbi_sleeper){map, first, count, has_copy, copy};
    return REBATCH_OK;
}

bool rbi_asleep_has(const struct rbi_vm *vm, const struct rbi_map *map, size_t page)
{
    for (size_t i = 0; i < vm->asleep.count; i++) {
        const struct rbi_sleeper *const s = &vm->asleep.sleepers[i];
        if (s->map == map && page - s->first < s->count)
            return true;
    }
    return false;
}

void rbi_asleep_forget(struct rbi_vm *vm, size_t from)
{
    struct rbi_asleep *const asleep = &vm->asleep;
    asleep->count = from;
    asleep->copied_pages = 0;
    for (size_t i = 0; i < from; i++)
        asleep->copied_pages += asleep->sleepers[i].has_copy ? asleep->sleepers[i].count : 0;
}

void rbi_asleep_unmap(struct rbi_vm *vm)
{
    struct rbi_asleep *const asleep = &vm->asleep;
    for (size_t i = 0; i < asleep->count; i++) {
        const struct rbi_sleeper *const s = &asleep->sleepers[i];
        rbi_physical *const chunks = s->map->chunks;
        for (size_t page = s->first, pages; page < s->first + s->count; page += pages) {
            char *const at = address_of(vm, s, page);
            pages = 1;
            if (chunks[page] == 0 || chunks[page] == RBI_CHUNK_ASLEEP)
                continue;
            pages = rbi_map_chunk_pages(s->map, at);
            if (rbi_map_unmap(vm, s->map, at, at + pages * vm->page_bytes) == at)
                continue;
            for (size_t j = 0; j < pages; j++)
                chunks[page + j] = RBI_CHUNK_ASLEEP;
            asleep->pages += pages;
        }
    }
    (void)rbi_vm_release(vm, 0);
}

/* ---- copies ---- */

/* Pinned memory is the host's no longer, so it keeps half of what it has free. */
static size_t host_room(void)
{
    return rbi_host_free_bytes() / 2;
}

static void drop_copies(struct rbi_vm *vm)
{
    struct rbi_asleep *const asleep = &vm->asleep;
    for (size_t i = 0; i < asleep->part_count; i++)
        (void)rebatch_pinned_free(vm->device, asleep->parts[i].memory,
                                  asleep->parts[i].pages * vm->page_bytes);
    rbi_heap_free(asleep->parts);
    asleep->parts = NULL;
    asleep->part_count = asleep->copy_pages = 0;
}

/* Makes room for all copies. */
static rebatch_status make_room(struct rbi_vm *vm)
{
    struct rbi_asleep *const asleep = &vm->asleep;
    if (asleep->copied_pages <= asleep->copy_pages)
        return REBATCH_OK;
    const size_t pages = asleep->copied_pages - asleep->copy_pages;
    const size_t bytes = pages * vm->page_bytes;
    if (bytes > host_room())
        return rbi_error(REBATCH_E_HOST_OOM,
                         "the sleep needs %zu bytes of host memory for copies: expected at most "
                         "half of what the host has free, %zu, or more tags in `keep` or `drop`",
                         bytes, host_room());
    struct rbi_copy_part *const parts =
        rbi_heap_resize(asleep->parts, asleep->part_count + 1, sizeof *parts);
    if (!parts)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to note a copy of %zu bytes", bytes);
    asleep->parts = parts;
    struct rbi_copy_part *const part = &parts[asleep->part_count];
    part->pages = pages;
    const rebatch_status status = rebatch_pinned_alloc(&part->memory, vm->device, bytes);
    if (status != REBATCH_OK)
        return status;
    asleep->part_count++;
    asleep->copy_pages += pages;
    return REBATCH_OK;
}

/* Copies `count` pages at `at` to the pages of the copies from `copy` on, or back. */
static rebatch_status copy_pages(struct rbi_vm *vm, char *at, size_t count, size_t copy, bool back)
{
    const struct rbi_copy_part *part = vm->asleep.parts;
    rebatch_status status = REBATCH_OK;
    for (; copy >= part->pages; part++)
        copy -= part->pages;
    for (; count > 0 && status == REBATCH_OK; part++, copy = 0) {
        const size_t pages = rbi_min(count, part->pages - copy);
        const size_t bytes = pages * vm->page_bytes;
        char *const there = (char *)part->memory + copy * vm->page_bytes;
        status = rebatch_copy(vm->device, back ? at : there, back ? there : at, bytes, NULL);
        at += bytes;
        count -= pages;
    }
    return status;
}

/* Copies what of the sleepers from `from` on is mapped, or what has been mapped again. */
static rebatch_status copy_all(struct rbi_vm *vm, size_t from, bool back)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = from; i < vm->asleep.count && status == REBATCH_OK; i++) {
        const struct rbi_sleeper *const s = &vm->asleep.sleepers[i];
        const size_t end = s->first + s->count;
        for (size_t page = s->first, next; page < end && s->has_copy && !status; page = next) {
            for (next = page; next < end && s->map->chunks[next] != 0; next++)
                ;
            if (next > page)
                status = copy_pages(vm, address_of(vm, s, page), next - page,
                                    s->copy + (page - s->first), back);
            next += next == page;
        }
    }
    const rebatch_status done = rbi_device_synchronize(vm->device);
    return status ? status : done;
}

rebatch_status rbi_asleep_save(struct rbi_vm *vm, size_t from)
{
    if (!rbi_device_has_contents(vm->device))
        return REBATCH_OK;
    const rebatch_status status = make_room(vm);
    return status == REBATCH_OK ? copy_all(vm, from, false) : status;
}

/* ---- waking ---- */

/* The next pages in a row that sleep, from *page on; 0: there are no more. */
static size_t next_asleep(const struct rbi_sleeper *s, size_t *page)
{
    const size_t end = s->first + s->count;
    size_t count = 0;
    while (*page < end && s->map->chunks[*page] != RBI_CHUNK_ASLEEP)
        ++*page;
    while (*page + count < end && s->map->chunks[*page + count] == RBI_CHUNK_ASLEEP)
        count++;
    return count;
}

/* For all that sleeps before any is mapped: where memory does not suffice, none is made in vain. */
static rebatch_status create_run(struct rbi_vm *vm, const struct rbi_sleeper *s, size_t page,
                                 size_t count)
{
    (void)s, (void)page;
    return rbi_vm_create(vm, count, RBI_CHUNK_GROWTH_MOST);
}

static rebatch_status map_run(struct rbi_vm *vm, const struct rbi_sleeper *s, size_t page,
                              size_t count)
{
    rbi_physical *const chunks = &s->map->chunks[page];
    bool quarantined;
    memset(chunks, 0, count * sizeof *chunks);
    const rebatch_status status =
        rbi_map_fill(vm, s->map, address_of(vm, s, page), count * vm->page_bytes, &quarantined);
    vm->asleep.pages -= count;
    for (size_t i = 0, pages; status && i < count; i += pages) {
        pages = chunks[i] ? rbi_map_chunk_pages(s->map, address_of(vm, s, page + i)) : 1;
        if (chunks[i] == 0) {
            chunks[i] = RBI_CHUNK_ASLEEP;
            vm->asleep.pages++;
        } else { /* its blocks are not lost: the next wake makes it accessible */
            vm->quarantined_bytes -= pages * vm->page_bytes;
            vm->asleep.access_failed = true;
        }
    }
    return status;
}

/* Of all that sleeps. */
static rebatch_status each_run(struct rbi_vm *vm,
                               rebatch_status (*run)(struct rbi_vm *vm, const struct rbi_sleeper *s,
                                                     size_t page, size_t count))
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < vm->asleep.count && !status; i++) {
        const struct rbi_sleeper *const s = &vm->asleep.sleepers[i];
        for (size_t page = s->first, count; !status && (count = next_asleep(s, &page)) > 0;
             page += count)
            status = run(vm, s, page, count);
    }
    return status;
}

static rebatch_status make_accessible(struct rbi_vm *vm)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < vm->asleep.count && vm->asleep.access_failed && !status; i++)
        status = rbi_map_set_access(vm, vm->asleep.sleepers[i].map);
    vm->asleep.access_failed &= status != REBATCH_OK;
    return status;
}

rebatch_status rbi_asleep_wake(struct rbi_vm *vm)
{
    (void)rbi_vm_release(vm, 0); /* or what is spare would be cut up */
    rebatch_status status = each_run(vm, create_run);
    if (status == REBATCH_OK)
        status = each_run(vm, map_run);
    if (status == REBATCH_OK)
        status = make_accessible(vm);
    if (status == REBATCH_OK && vm->asleep.copied_pages && rbi_device_has_contents(vm->device))
        status = copy_all(vm, 0, true);
    if (status != REBATCH_OK) {
        rbi_asleep_unmap(vm);
        return status;
    }
    rbi_asleep_forget(vm, 0);
    if (vm->asleep.copy_pages > host_room() / vm->page_bytes)
        drop_copies(vm);
    return status;
}

void rbi_asleep_close(struct rbi_vm *vm)
{
    drop_copies(vm);
    rbi_heap_free(vm->asleep.sleepers);
}
