/* Owns what is noted of a request that failed, and the sentence about it.
 * Must not know how memory is found. */
#include <string.h>

#include "pool/pool.h"

static bool holds_more(const rebatch_tag_usage *a, const rebatch_tag_usage *b)
{
    return a->live_bytes > b->live_bytes;
}

/* The tags that hold most, by insertion into the few places that there are; ties keep their
 * order. */
static void fill_in_tags(rebatch_oom_report *report, const rebatch_pool *pool)
{
    for (size_t i = 0; i < pool->tag_count; i++) {
        if (pool->tags[i].live_bytes == 0)
            continue;
        rebatch_tag_usage usage;
        rbi_tag_get_usage(pool, i, &usage);
        size_t at = report->tag_count;
        while (at > 0 && holds_more(&usage, &report->tags[at - 1]))
            at--;
        if (at == REBATCH_OOM_TAGS)
            continue;
        const size_t last = rbi_min(report->tag_count, REBATCH_OOM_TAGS - 1);
        memmove(&report->tags[at + 1], &report->tags[at], (last - at) * sizeof usage);
        report->tags[at] = usage;
        if (report->tag_count < REBATCH_OOM_TAGS)
            report->tag_count++;
    }
}

static rebatch_status say_oom(const rebatch_oom_report *report, size_t headroom_bytes)
{
    char text[320];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "asked for ");
    rbi_text_add_bytes(&t, report->asked_bytes);
    rbi_text_add(&t, " for %s: ", report->tag);
    rbi_text_add_bytes(&t, report->device_free_bytes);
    rbi_text_add(&t, " free on the device");
    if (headroom_bytes) {
        rbi_text_add(&t, " less ");
        rbi_text_add_bytes(&t, headroom_bytes);
        rbi_text_add(&t, " headroom");
    }
    rbi_text_add(&t, ", ");
    rbi_text_add_bytes(&t, report->live_bytes);
    rbi_text_add(&t, " live and ");
    rbi_text_add_bytes(&t, report->reserved_bytes);
    rbi_text_add(&t, " reserved in the pool, ");
    if (report->limit_bytes == UINT64_MAX) {
        rbi_text_add(&t, "no limit");
    } else {
        rbi_text_add_bytes(&t, report->limit_bytes);
        rbi_text_add(&t, " limit");
    }
    if (report->would_fit_bytes) {
        rbi_text_add(&t, "; up to ");
        rbi_text_add_bytes(&t, report->would_fit_bytes);
        rbi_text_add(&t, " would have fitted");
    }
    return rbi_error(REBATCH_OOM, "%s", text);
}

static uint64_t would_fit(const rebatch_pool *pool, size_t room, uint64_t largest_hole_bytes)
{
    if (pool->has_space)
        return rbi_window_most(pool, room / pool->page_bytes);
    return pool->caching ? rbi_max(largest_hole_bytes, room) : room;
}

/* The tag whose name this is; what is none of them is untagged. */
static rebatch_tag number_of(const rebatch_pool *pool, const char *tag)
{
    size_t i = pool->tag_count - 1;
    while (i > 0 && pool->tags[i].name != tag)
        i--;
    return (rebatch_tag)i;
}

rebatch_status rbi_pool_report_oom(rebatch_pool *pool, const struct rbi_request *request,
                                   size_t asked_bytes, const char *tag)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    rbi_assert(request->stream && (size_t)request->stage < RBI_POOL_STAGE_COUNT);
    rebatch_oom_report *report = &pool->oom;
    memset(report, 0, sizeof *report);
    size_t room;
    rebatch_memory_info info;
    (void)rbi_pool_room(&room, pool, &info); /* zeros when the device cannot say */
    const size_t limit = rbi_pool_limit(pool, info.total_bytes);
    report->asked_bytes = asked_bytes;
    memcpy(report->tag, tag, strnlen(tag, sizeof report->tag - 1));
    report->stage = request->stage;
    report->limit_bytes = limit == SIZE_MAX ? UINT64_MAX : limit;
    report->live_bytes = pool->stats.live_bytes;
    report->reserved_bytes = rbi_vm_bytes(&pool->vm);
    report->room_bytes = room;
    report->device_total_bytes = info.total_bytes;
    report->device_free_bytes = info.free_bytes;
    report->largest_hole_bytes = rbi_pool_largest_free(pool);
    report->would_fit_bytes = would_fit(pool, room, report->largest_hole_bytes);
    fill_in_tags(report, pool);
    rbi_event_log_add_oom(&pool->log, asked_bytes, info.free_bytes, request->stream->stream,
                          number_of(pool, tag));
    pool->stats.ooms++;
    if (!rbi_pool_is_other_thread(pool, pool->owner_thread)) {
        pool->own_oom = *report;
        __atomic_fetch_add(&pool->own_ooms, 1, __ATOMIC_RELAXED);
    }
    return say_oom(report, pool->headroom_bytes);
}

rebatch_status rbi_pool_inject_failure(rebatch_pool *pool, size_t bytes, size_t rounded,
                                       rebatch_stream stream, const char *tag)
{
    struct rbi_request request;
    if (!pool->fault.strikes || rbi_pool_is_other_thread(pool, pool->owner_thread) ||
        pool->promised_bytes >= rounded || !pool->fault.strikes(pool->fault.user, bytes))
        return REBATCH_OK;
    if (rbi_overflow_is_open(pool)) {
        pool->overflow.is_struck = true;
        return REBATCH_OK;
    }
    rebatch_status status = rbi_request_open(&request, pool, rounded, stream);
    if (status != REBATCH_OK)
        return status;
    status = rbi_pool_report_oom(pool, &request, bytes, tag);
    rbi_request_close(&request);
    char text[320] = "";
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "%s", rebatch_last_error());
    return rbi_error(status, "injected: %s", text);
}

rebatch_status rebatch_pool_last_oom(rebatch_oom_report *out, rebatch_pool *pool)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the report");
    memset(out, 0, sizeof *out);
    const rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    *out = pool->oom;
    rbi_pool_give_lock(pool);
    return REBATCH_OK;
}

void rbi_pool_last_own_oom(rebatch_oom_report *out, rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    *out = pool->own_oom;
    rbi_pool_give_lock(pool);
}
