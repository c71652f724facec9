/* Owns the pool's reports as text: the summary, and why a request failed.
 * Must not know the pool's structs. */
#include <inttypes.h>
#include <string.h>

#include "inspect/inspect.h"

#define CELL_BYTES 24
#define NAME_WIDTH 31
#define CELL_WIDTH 15
#define WIDTH (NAME_WIDTH + 4 * (CELL_WIDTH + 1))

/* ---- out of memory ---- */

static const char *stage_text(rebatch_pool_stage stage)
{
    switch (stage) {
#define STAGE_CASE(name, text)                                                                     \
    case REBATCH_STAGE_##name:                                                                     \
        return text;
        REBATCH_POOL_STAGES(STAGE_CASE)
#undef STAGE_CASE
    }
    return "nothing known";
}

/* An empty text of `size` bytes, or one that only counts. */
static struct rbi_text begin_text(char *text, size_t size)
{
    if (!text)
        size = 0;
    if (size > 0)
        text[0] = '\0';
    return (struct rbi_text){text, size, 0};
}

static void add_named_bytes(struct rbi_text *t, uint64_t bytes, const char *name)
{
    rbi_text_add_bytes(t, bytes);
    rbi_text_add(t, "%s", name);
}

static void add_holders(struct rbi_text *t, const rebatch_oom_report *report)
{
    const uint32_t count =
        report->tag_count < REBATCH_OOM_TAGS ? report->tag_count : REBATCH_OOM_TAGS;
    for (uint32_t i = 0; i < count; i++) {
        const rebatch_tag_usage *usage = &report->tags[i];
        rbi_text_add(t, "%s%-31.31s ", i == 0 ? "  held by: " : "           ", usage->name);
        add_named_bytes(t, usage->live_bytes, " now, ");
        add_named_bytes(t, usage->peak_bytes, " at most\n");
    }
}

size_t rebatch_oom_format(char *text, size_t size, const rebatch_oom_report *report)
{
    struct rbi_text t = begin_text(text, size);
    if (!report)
        return 0;
    if (report->asked_bytes == 0) {
        rbi_text_add(&t, "no request has failed yet\n");
        return t.length;
    }
    rbi_text_add(&t, "out of memory: asked for ");
    rbi_text_add_bytes(&t, report->asked_bytes);
    rbi_text_add(&t, " for %.31s\n  tried last: %s\n  pool:    ", report->tag,
                 stage_text(report->stage));
    add_named_bytes(&t, report->live_bytes, " live, ");
    add_named_bytes(&t, report->reserved_bytes, " reserved, ");
    if (report->limit_bytes == UINT64_MAX)
        rbi_text_add(&t, "no limit, ");
    else
        add_named_bytes(&t, report->limit_bytes, " limit, ");
    rbi_text_add(&t, "largest hole ");
    add_named_bytes(&t, report->largest_hole_bytes, "\n  device:  ");
    add_named_bytes(&t, report->device_free_bytes, " free of ");
    add_named_bytes(&t, report->device_total_bytes, ", room for ");
    add_named_bytes(&t, report->room_bytes, " within limit and headroom\n");
    add_holders(&t, report);
    rbi_text_add(&t, "  a request of up to ");
    add_named_bytes(&t, report->would_fit_bytes, " would have been served\n");
    return t.length;
}

/* ---- summary ---- */

/* A number as wide as a column; in bytes with their unit. */
static void add_cell(struct rbi_text *t, uint64_t value, bool is_bytes)
{
    char cell[CELL_BYTES] = "";
    struct rbi_text c = {cell, sizeof cell, 0};
    if (is_bytes)
        rbi_text_add_bytes(&c, value);
    else
        rbi_text_add(&c, "%" PRIu64, value);
    rbi_text_add(t, " %*s", CELL_WIDTH, cell);
}

static void add_line(struct rbi_text *t)
{
    for (int i = 0; i < WIDTH; i++)
        rbi_text_add(t, "-");
    rbi_text_add(t, "\n");
}

static void add_head(struct rbi_text *t, const char *name, const char *const *columns)
{
    add_line(t);
    rbi_text_add(t, "%-*s", NAME_WIDTH, name);
    for (; *columns; columns++)
        rbi_text_add(t, " %*s", CELL_WIDTH, *columns);
    rbi_text_add(t, "\n");
    add_line(t);
}

static void add_row(struct rbi_text *t, const char *name, bool is_bytes, const uint64_t *values,
                    size_t count)
{
    rbi_text_add(t, "%-*s", NAME_WIDTH, name);
    for (size_t i = 0; i < count; i++)
        add_cell(t, values[i], is_bytes);
    rbi_text_add(t, "\n");
}

/* Which limit holds. */
static void add_limit(struct rbi_text *t, const struct rbi_view_facts *facts)
{
    if (facts->limit_bytes == SIZE_MAX)
        return;
    rbi_text_add(t, "limit ");
    rbi_text_add_bytes(t, facts->limit_bytes);
    if (facts->others_bytes != SIZE_MAX) {
        rbi_text_add(t, "; %s sets ", facts->others_variable);
        rbi_text_add_bytes(t, facts->others_bytes);
    }
    rbi_text_add(t, "\n");
}

static void add_memory(struct rbi_text *t, const struct rbi_view_facts *facts,
                       const rebatch_pool_stats *s)
{
    static const char *const columns[] = {"current", "peak", "total allocated", "total freed",
                                          NULL};
    const uint64_t live[] = {s->live_bytes, s->live_peak_bytes, s->allocated_total_bytes,
                             s->freed_total_bytes};
    const uint64_t reserved[] = {s->reserved_bytes, s->reserved_peak_bytes, facts->taken_bytes,
                                 facts->given_bytes};
    const uint64_t blocks[] = {s->blocks, s->blocks_peak, s->allocations,
                               s->frees + s->rolled_back_blocks};
    add_head(t, "memory", columns);
    add_row(t, "live", true, live, 4);
    add_row(t, "reserved from the device", true, reserved, 4);
    if (facts->floor_bytes)
        add_row(t, "floor: never given back", true, &facts->floor_bytes, 1);
    if (facts->asleep_bytes)
        add_row(t, "asleep: given until the wake", true, &facts->asleep_bytes, 1);
    add_row(t, "blocks", false, blocks, 4);
}

static void add_tags(struct rbi_text *t, const rebatch_pool *pool)
{
    static const char *const columns[] = {"current", "peak", "at pool's peak", NULL};
    add_head(t, "tag", columns);
    for (size_t i = 0; i < rbi_view_tag_count(pool); i++) {
        rebatch_tag_usage usage;
        rbi_tag_get_usage(pool, i, &usage);
        const uint64_t values[] = {usage.live_bytes, usage.peak_bytes, usage.at_peak_bytes};
        if (i > 0 || usage.peak_bytes > 0)
            add_row(t, usage.name, true, values, 3);
    }
}

static void add_statistic(struct rbi_text *t, const char *name, uint64_t value, const char *unit,
                          const char *what)
{
    const bool is_bytes = !strcmp(unit, "bytes");
    rbi_text_add(t, "%-21s", name);
    add_cell(t, value, is_bytes);
    rbi_text_add(t, "  %s%s%s\n", is_bytes ? "" : unit, is_bytes ? "" : " ", what);
}

static void add_statistics(struct rbi_text *t, const rebatch_pool_stats *stats)
{
    add_line(t);
#define ADD_STATISTIC(name, unit, what) add_statistic(t, #name, stats->name, unit, what);
    REBATCH_POOL_STATISTICS(ADD_STATISTIC)
#undef ADD_STATISTIC
}

static void add_stages(struct rbi_text *t, const struct rbi_view_facts *facts)
{
    add_line(t);
#define ADD_STAGE(name, text)                                                                      \
    if (facts->stages[REBATCH_STAGE_##name] > 0) {                                                 \
        rbi_text_add(t, "%-21s", #name);                                                           \
        add_cell(t, facts->stages[REBATCH_STAGE_##name], false);                                   \
        rbi_text_add(t, "  %s\n", text);                                                           \
    }
    REBATCH_POOL_STAGES(ADD_STAGE)
#undef ADD_STAGE
}

size_t rebatch_pool_format_summary(char *text, size_t size, rebatch_pool *pool)
{
    struct rbi_text t = begin_text(text, size);
    if (!pool)
        return 0;
    rbi_view_open(pool);
    rebatch_pool_stats stats;
    struct rbi_view_facts facts;
    rbi_pool_get_stats(&stats, pool);
    rbi_view_get_facts(&facts, pool);
    add_limit(&t, &facts);
    add_memory(&t, &facts, &stats);
    add_tags(&t, pool);
    add_statistics(&t, &stats);
    add_stages(&t, &facts);
    add_line(&t);
    rbi_view_close(pool);
    return t.length;
}
