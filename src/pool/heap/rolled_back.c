/* Owns the memory of what rollbacks took back.
 * Must not know blocks. */
#include "pool/heap/rolled_back.h"

#include <string.h>

#include "base/base.h"

#define SMALLEST_CAPACITY 256

/* Where an address is, or an empty entry for it. */
static struct rbi_late_entry *probe(const struct rbi_late *late, const char *address)
{
    const uint64_t unit = (uint64_t)(uintptr_t)address / REBATCH_POOL_ALIGNMENT;
    size_t slot = (size_t)((unit * UINT64_C(0x9e3779b97f4a7c15)) >> 32);
    while (true) {
        struct rbi_late_entry *entry = &late->entries[slot++ & (late->capacity - 1)];
        if (!entry->address || entry->address == address)
            return entry;
    }
}

/* Puts what rollbacks after `last` took back, and what has an owner, into the empty `to`. */
static void move(struct rbi_late *to, const struct rbi_late *from, uint64_t last)
{
    to->used = to->count = 0;
    for (size_t i = 0; i < from->capacity; i++) {
        struct rbi_late_entry entry = from->entries[i];
        if (entry.rollback <= last)
            entry.rollback = 0;
        if (!entry.rollback && !entry.owner)
            continue;
        *probe(to, entry.address) = entry;
        to->used++;
        to->count += entry.rollback != 0;
    }
}

/* Forgets rollbacks up to `last`, and what has been given out again. */
static void clean(struct rbi_late *late, uint64_t last)
{
    struct rbi_late cleaned = *late;
    cleaned.entries = late->other;
    cleaned.other = late->entries;
    move(&cleaned, late, last);
    memset(cleaned.other, 0, cleaned.capacity * sizeof *cleaned.other);
    *late = cleaned;
}

static bool grow(struct rbi_late *late, size_t capacity)
{
    struct rbi_late larger = *late;
    larger.capacity = capacity;
    larger.entries = rbi_heap_calloc(capacity, sizeof *larger.entries);
    larger.other = rbi_heap_calloc(capacity, sizeof *larger.other);
    if (!larger.entries || !larger.other) {
        rbi_late_destroy(&larger);
        return false;
    }
    move(&larger, late, 0);
    rbi_late_destroy(late);
    *late = larger;
    return true;
}

static size_t count_after(const struct rbi_late *late, uint64_t rollback)
{
    size_t count = 0;
    for (size_t i = 0; i < late->capacity; i++)
        count += late->entries[i].rollback > rollback;
    return count;
}

/* The latest rollback that can be forgotten: those after it took back RBI_POOL_LATE_LEAST addresses
 * or more. */
static uint64_t before_latest(const struct rbi_late *late)
{
    uint64_t first = 0, beyond = late->rollback; /* enough came after the first, too few after it */
    while (first + 1 < beyond) {
        const uint64_t middle = first + (beyond - first) / 2;
        if (count_after(late, middle) >= RBI_POOL_LATE_LEAST)
            first = middle;
        else
            beyond = middle;
    }
    return first;
}

static void forget_useless(struct rbi_late *late)
{
    clean(late, late->count > RBI_POOL_LATE_MOST ? before_latest(late) : 0);
    if (late->used - late->count > RBI_POOL_LATE_MOST) {
        rbi_late_disown(late, 0);
        clean(late, 0);
    }
}

static bool is_crowded(const struct rbi_late *late)
{
    return 4 * late->used > late->capacity;
}

bool rbi_late_prepare(struct rbi_late *late, size_t blocks)
{
    if (late->crowded)
        forget_useless(late);
    late->crowded = false;
    size_t needed = rbi_max(SMALLEST_CAPACITY, late->capacity);
    while (needed < 4 * blocks)
        needed *= 2;
    const size_t wanted = is_crowded(late) ? 2 * needed : needed;
    return wanted == late->capacity || grow(late, wanted) || needed == late->capacity ||
           grow(late, needed);
}

/* A quarter of the capacity is enough for all that one rollback takes back. */
static void make_place(struct rbi_late *late)
{
    forget_useless(late);
    if (is_crowded(late))
        clean(late, late->rollback - 1);
    if (is_crowded(late)) {
        rbi_late_disown(late, 0);
        clean(late, late->rollback - 1);
    }
}

/* The entry of an address, which is there from now on. */
static struct rbi_late_entry *open_entry(struct rbi_late *late, const char *address)
{
    rbi_assert(late->capacity != 0 && late->rollback != 0);
    if (2 * late->used >= late->capacity)
        make_place(late);
    struct rbi_late_entry *entry = probe(late, address);
    late->used += !entry->address;
    late->crowded = is_crowded(late);
    entry->address = address;
    return entry;
}

void rbi_late_add(struct rbi_late *late, const char *address)
{
    struct rbi_late_entry *entry = open_entry(late, address);
    late->count += entry->rollback == 0;
    entry->rollback = late->rollback;
}

void rbi_late_remove(struct rbi_late *late, const char *address)
{
    struct rbi_late_entry *entry = probe(late, address);
    late->count -= entry->rollback != 0;
    entry->rollback = 0;
}

bool rbi_late_has(const struct rbi_late *late, const char *address)
{
    return late->capacity != 0 && probe(late, address)->rollback != 0;
}

void rbi_late_own(struct rbi_late *late, const char *address, uint64_t owner)
{
    open_entry(late, address)->owner = owner;
}

uint64_t rbi_late_owner(const struct rbi_late *late, const char *address)
{
    return late->capacity != 0 ? probe(late, address)->owner : 0;
}

void rbi_late_disown(struct rbi_late *late, uint64_t owner)
{
    for (size_t i = 0; i < late->capacity; i++)
        if (owner == 0 || late->entries[i].owner == owner)
            late->entries[i].owner = 0;
}

void rbi_late_destroy(struct rbi_late *late)
{
    rbi_heap_free(late->entries);
    rbi_heap_free(late->other);
    late->entries = late->other = NULL;
}
