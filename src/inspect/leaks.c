/* Owns the report of what a scope leaves in use.
 * Must not know the pool's structs. */
#include <inttypes.h>
#include <string.h>

#include "inspect/inspect.h"

/* ---- gathering ---- */

struct leaks {
    const rebatch_pool *pool;
    rebatch_leak_report *report;
    uint64_t blocks[RBI_POOL_TAGS], live_bytes[RBI_POOL_TAGS]; /* what each tag has left */
};

static void copy_name(char *to, const struct leaks *leaks, size_t tag)
{
    memcpy(to, rbi_view_tag_name(leaks->pool, (rebatch_tag)tag),
           sizeof leaks->report->tags[0].name);
}

/* Blocks come oldest first, which is the order of equal ones. */
static void add_block(struct leaks *leaks, const struct rbi_view_piece *block)
{
    rebatch_leak_report *report = leaks->report;
    size_t at = report->block_count;
    while (at > 0 && report->largest[at - 1].bytes < block->bytes)
        at--;
    if (at == REBATCH_LEAK_BLOCKS)
        return;
    const size_t last = rbi_min(report->block_count, REBATCH_LEAK_BLOCKS - 1);
    memmove(&report->largest[at + 1], &report->largest[at],
            (last - at) * sizeof report->largest[0]);
    rebatch_leak_block *to = &report->largest[at];
    *to = (rebatch_leak_block){
        .address = block->address, .bytes = block->bytes, .allocation = block->allocation};
    copy_name(to->tag, leaks, block->tag);
    report->block_count = (uint32_t)last + 1;
}

static void add_tag(struct leaks *leaks, size_t tag)
{
    rebatch_leak_report *report = leaks->report;
    size_t at = report->tag_count;
    while (at > 0 && report->tags[at - 1].live_bytes < leaks->live_bytes[tag])
        at--;
    if (at == REBATCH_LEAK_TAGS)
        return;
    const size_t last = rbi_min(report->tag_count, REBATCH_LEAK_TAGS - 1);
    memmove(&report->tags[at + 1], &report->tags[at], (last - at) * sizeof report->tags[0]);
    rebatch_leak_tag *to = &report->tags[at];
    *to = (rebatch_leak_tag){.blocks = leaks->blocks[tag], .live_bytes = leaks->live_bytes[tag]};
    copy_name(to->name, leaks, tag);
    report->tag_count = (uint32_t)last + 1;
}

static void show(void *user, const struct rbi_view_piece *block)
{
    struct leaks *leaks = user;
    if (block->state == RBI_VIEW_DEFERRED)
        return; /* it has been freed */
    leaks->report->blocks++;
    leaks->report->live_bytes += block->bytes;
    leaks->report->requested_bytes += block->requested_bytes;
    leaks->blocks[block->tag]++;
    leaks->live_bytes[block->tag] += block->bytes;
    add_block(leaks, block);
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
    struct leaks leaks = {.pool = pool, .report = out};
    struct rbi_extent extent;
    rbi_view_open(pool);
    status = rbi_scope_get_extent(&extent, pool, scope);
    if (status == REBATCH_OK)
        rbi_view_each_live(pool, &extent, show, &leaks);
    for (size_t i = 0; i < rbi_view_tag_count(pool); i++)
        if (leaks.blocks[i] > 0)
            add_tag(&leaks, i);
    rbi_view_close(pool);
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
