/* Owns the report of what a scope leaves in use.
 * Must not know how memory is found. */
#include <inttypes.h>
#include <string.h>

#include "pool/pool.h"

/* ---- gathering ---- */

/* What each tag has left. */
struct shares {
    uint64_t blocks[RBI_POOL_TAGS], live_bytes[RBI_POOL_TAGS];
};

static void copy_name(char *to, const struct rbi_tag *tag)
{
    memcpy(to, tag->name, sizeof tag->name);
}

/* Blocks come newest first; of equal ones the oldest shall be first. */
static void add_block(rebatch_leak_report *report, const rebatch_pool *pool,
                      const struct rbi_block *block)
{
    size_t at = report->block_count;
    while (at > 0 && report->largest[at - 1].bytes <= block->bytes)
        at--;
    if (at == REBATCH_LEAK_BLOCKS)
        return;
    const size_t last = rbi_min(report->block_count, REBATCH_LEAK_BLOCKS - 1);
    memmove(&report->largest[at + 1], &report->largest[at],
            (last - at) * sizeof report->largest[0]);
    rebatch_leak_block *to = &report->largest[at];
    *to = (rebatch_leak_block){
        .address = block->address, .bytes = block->bytes, .allocation = block->birth};
    copy_name(to->tag, &pool->tags[block->tag]);
    report->block_count = (uint32_t)last + 1;
}

static void add_tag(rebatch_leak_report *report, const rebatch_pool *pool,
                    const struct shares *shares, size_t tag)
{
    size_t at = report->tag_count;
    while (at > 0 && report->tags[at - 1].live_bytes < shares->live_bytes[tag])
        at--;
    if (at == REBATCH_LEAK_TAGS)
        return;
    const size_t last = rbi_min(report->tag_count, REBATCH_LEAK_TAGS - 1);
    memmove(&report->tags[at + 1], &report->tags[at], (last - at) * sizeof report->tags[0]);
    rebatch_leak_tag *to = &report->tags[at];
    *to = (rebatch_leak_tag){.blocks = shares->blocks[tag], .live_bytes = shares->live_bytes[tag]};
    copy_name(to->name, &pool->tags[tag]);
    report->tag_count = (uint32_t)last + 1;
}

/* Blocks in use stand in the order of their births: a scope's are the end of the list, but for
 * those from outside. One whose free waits for a commit has been freed. */
static void gather(rebatch_leak_report *report, const rebatch_pool *pool,
                   const struct rbi_extent *extent)
{
    struct shares shares;
    memset(&shares, 0, sizeof shares);
    const struct rbi_block *const ring = &pool->by_birth;
    for (const struct rbi_block *b = ring->previous; b != ring && b->birth >= extent->first_birth;
         b = b->previous) {
        if (b->state == RBI_BLOCK_DEFERRED || (b->outside && extent->leaves_out))
            continue;
        report->blocks++;
        report->live_bytes += b->bytes;
        report->requested_bytes += b->requested_bytes;
        shares.blocks[b->tag]++;
        shares.live_bytes[b->tag] += b->bytes;
        add_block(report, pool, b);
    }
    for (size_t i = 0; i < pool->tag_count; i++)
        if (shares.blocks[i] > 0)
            add_tag(report, pool, &shares, i);
}

rebatch_status rebatch_scope_get_leaks(rebatch_leak_report *out, rebatch_pool *pool,
                                       rebatch_scope scope)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the report");
    memset(out, 0, sizeof *out);
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_take_lock(pool);
    struct rbi_extent extent;
    status = rbi_scope_get_extent(&extent, pool, scope);
    if (status == REBATCH_OK)
        gather(out, pool, &extent);
    rbi_lock_give(&pool->lock);
    return status;
}

/* ---- as text ---- */

static void add_blocks(struct rbi_text *t, uint64_t count)
{
    rbi_text_add(t, "%" PRIu64 " block%s", count, count == 1 ? "" : "s");
}

size_t rebatch_leak_format(char *text, size_t size, const rebatch_leak_report *report)
{
    struct rbi_text t = {text, text ? size : 0, 0};
    if (t.size > 0)
        text[0] = '\0';
    if (!report)
        return 0;
    if (report->blocks == 0) {
        rbi_text_add(&t, "nothing is left in use\n");
        return t.length;
    }
    add_blocks(&t, report->blocks);
    rbi_text_add(&t, " %s left in use, ", report->blocks == 1 ? "is" : "are");
    rbi_text_add_bytes(&t, report->live_bytes);
    rbi_text_add(&t, "\n");
    for (size_t i = 0; i < rbi_min(report->tag_count, REBATCH_LEAK_TAGS); i++) {
        const rebatch_leak_tag *tag = &report->tags[i];
        rbi_text_add(&t, "%s%-31.31s ", i == 0 ? "  held by: " : "           ", tag->name);
        rbi_text_add_bytes(&t, tag->live_bytes);
        rbi_text_add(&t, " in ");
        add_blocks(&t, tag->blocks);
        rbi_text_add(&t, "\n");
    }
    for (size_t i = 0; i < rbi_min(report->block_count, REBATCH_LEAK_BLOCKS); i++) {
        const rebatch_leak_block *block = &report->largest[i];
        rbi_text_add(&t, "%s%p ", i == 0 ? "  largest: " : "           ", block->address);
        rbi_text_add_bytes(&t, block->bytes);
        rbi_text_add(&t, ", allocation %" PRIu64 ", %.31s\n", block->allocation, block->tag);
    }
    return t.length;
}
