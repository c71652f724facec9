/* Owns the table of the allocations in use.
 * Must not know why they are counted. */
#include "preload/preload.h"

#define LEAST_CAPACITY ((size_t)1 << 8)

/* The finaliser of SplitMix64: every bit of the key counts in every bit. */
static size_t place_of(const struct rbi_holdings *holdings, uint64_t key,
                       enum rbi_holding_kind kind)
{
    uint64_t x = key ^ (uint64_t)kind << 63;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (size_t)(x ^ x >> 31) & (holdings->capacity - 1);
}

/* The entry of a key, or the empty one where it belongs. */
static struct rbi_holding *probe(const struct rbi_holdings *holdings, uint64_t key,
                                 enum rbi_holding_kind kind)
{
    size_t at = place_of(holdings, key, kind);
    while (holdings->entries[at].bytes &&
           (holdings->entries[at].key != key || holdings->entries[at].kind != kind))
        at = (at + 1) & (holdings->capacity - 1);
    return &holdings->entries[at];
}

static bool grow(struct rbi_holdings *holdings)
{
    struct rbi_holdings larger = {
        .capacity = holdings->capacity ? 2 * holdings->capacity : LEAST_CAPACITY,
        .used = holdings->used,
    };
    larger.entries = rbi_heap_calloc(larger.capacity, sizeof *larger.entries);
    if (!larger.entries)
        return false;
    for (size_t i = 0; i < holdings->capacity; i++)
        if (holdings->entries[i].bytes)
            *probe(&larger, holdings->entries[i].key, holdings->entries[i].kind) =
                holdings->entries[i];
    rbi_heap_free(holdings->entries);
    *holdings = larger;
    return true;
}

bool rbi_holdings_add(struct rbi_holdings *holdings, const struct rbi_holding *holding)
{
    if (2 * (holdings->used + 1) > holdings->capacity && !grow(holdings))
        return false;
    struct rbi_holding *const entry = probe(holdings, holding->key, holding->kind);
    rbi_assert(holding->bytes && !entry->bytes);
    *entry = *holding;
    holdings->used++;
    return true;
}

/* Entries behind a hole move into it, unless they belong behind it. */
static void close_hole(struct rbi_holdings *holdings, size_t hole)
{
    const size_t mask = holdings->capacity - 1;
    for (size_t at = (hole + 1) & mask; holdings->entries[at].bytes; at = (at + 1) & mask) {
        const struct rbi_holding *const entry = &holdings->entries[at];
        const size_t home = place_of(holdings, entry->key, entry->kind);
        if (((at - home) & mask) < ((at - hole) & mask))
            continue;
        holdings->entries[hole] = *entry;
        hole = at;
    }
    holdings->entries[hole] = (struct rbi_holding){.bytes = 0};
}

struct rbi_holding rbi_holdings_take(struct rbi_holdings *holdings, uint64_t key,
                                     enum rbi_holding_kind kind)
{
    struct rbi_holding taken = {.device = -1};
    if (!holdings->capacity)
        return taken;
    const struct rbi_holding *const entry = probe(holdings, key, kind);
    if (!entry->bytes)
        return taken;
    taken = *entry;
    close_hole(holdings, (size_t)(entry - holdings->entries));
    holdings->used--;
    return taken;
}

void rbi_holdings_free(struct rbi_holdings *holdings)
{
    rbi_heap_free(holdings->entries);
    *holdings = (struct rbi_holdings){NULL, 0, 0};
}
