/* Owns the tuner of a session that learns from real micro-batches: it watches them as a probe
 * watches its trials, and the same search says which size is next.
 * Must not know when a micro-batch runs, or what is done about an OOM. */
#include "probe/tuner.h"
#include "probe/probe.h"
#include "recover/interface.h"

/* Micro-batches that are watched, at the most: a search that has found nothing in these will not
 * find more. */
#define WATCHED_MOST 8

struct tuner {
    rebatch *rb;
    struct rbi_search search;
    struct rbi_trace trace; /* of the micro-batch that runs */
    uint64_t live_before;   /* it */
    bool is_warm; /* where nothing is taken back: a micro-batch has made what later ones find */
};

static rebatch_status next(size_t *out, void *user, size_t upper, size_t batch, size_t left)
{
    struct tuner *tuner = user;
    struct rbi_search *search = &tuner->search;
    rebatch *rb = tuner->rb;
    search->least = rbi_min(rbi_round_size_up(rbi_session_options(rb), 1), upper);
    search->most = upper;
    search->batch = batch;
    search->left = left;
    search->setting = rbi_probe_setting(rb, search->least);
    search->setting.is_work = true;
    const rebatch_status status = rbi_search_next(out, search);
    if (status)
        rbi_need_set_model(rb, NULL);
    else if (search->whole_count > 1)
        rbi_probe_lend(rb, &search->model);
    return status;
}

static rebatch_status prepare(void *user, size_t size)
{
    struct tuner *tuner = user;
    return rbi_search_prepare(&tuner->search, size);
}

static void begin(void *user, size_t count)
{
    struct tuner *tuner = user;
    rebatch_pool *pool = rebatch_get_pool(tuner->rb);
    rebatch_pool_stats stats = {0};
    (void)rebatch_pool_get_stats(&stats, pool);
    tuner->live_before = stats.live_bytes;
    rbi_trace_begin(&tuner->trace, pool, count);
}

static rebatch_status end(void *user, size_t count, rebatch_status status)
{
    struct tuner *tuner = user;
    struct rbi_trace *trace = &tuner->trace;
    const bool is_warm = tuner->is_warm;
    const rebatch_status ended =
        rbi_trace_end(trace, rebatch_get_pool(tuner->rb), rbi_search_latest(&tuner->search));
    tuner->is_warm |= status == REBATCH_OK;
    if (ended || (status && status != REBATCH_OOM) || (!is_warm && !status)) {
        rbi_trace_release(trace);
        return ended;
    }
    rbi_probe_note_need(trace, tuner->rb, status);
    rbi_search_note(&tuner->search, count, status, trace, tuner->live_before + trace->peak_bytes);
    *trace = (struct rbi_trace){0};
    return REBATCH_OK;
}

static void failed(void *user, size_t count)
{
    struct tuner *tuner = user;
    rbi_search_note(&tuner->search, count, REBATCH_OOM, &(struct rbi_trace){0}, 0);
}

static size_t largest(const void *user)
{
    const struct tuner *tuner = user;
    return tuner->search.fits;
}

static bool is_done(const void *user, size_t upper)
{
    const struct tuner *tuner = user;
    return tuner->search.fits < upper;
}

/* With the lighten level and kind of size that it was made for, which may have changed since. */
static void leave_model(rebatch *rb, struct rbi_model *model)
{
    const struct rbi_memory_model lent = *rbi_need_get_model(rb);
    if (rbi_probe_hand_over(rb, model, lent.lighten, lent.by_cost)) {
        rbi_need_set_model(rb, NULL);
        rebatch_clear_error();
    }
}

static void destroy(void *user)
{
    struct tuner *tuner = user;
    struct rbi_search *search = &tuner->search;
    if (rbi_probe_model(tuner->rb) == &search->model)
        leave_model(tuner->rb, &search->model);
    rbi_search_release(search);
    rbi_heap_free(tuner);
}

rebatch_status rbi_tuner_create(struct rbi_tuner *out, rebatch *rb)
{
    struct tuner *tuner = rbi_heap_calloc(1, sizeof *tuner);
    if (!tuner)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to learn the micro-batch size");
    tuner->rb = rb;
    tuner->is_warm = rbi_is_on(rbi_session_options(rb)->reclaim);
    tuner->search = (struct rbi_search){.round = rbi_probe_round,
                                        .round_up = rbi_probe_round_up,
                                        .limits = rb,
                                        .max_trials = WATCHED_MOST,
                                        .now = rbi_now_ns};
    rbi_search_begin(&tuner->search);
    *out = (struct rbi_tuner){.next = next,
                              .prepare = prepare,
                              .begin = begin,
                              .end = end,
                              .failed = failed,
                              .largest = largest,
                              .is_done = is_done,
                              .destroy = destroy,
                              .user = tuner};
    return REBATCH_OK;
}
