/* Owns how certain a predicted size is: models are drawn that explain what ran, and the next size
 * is chosen by how many accept it (docs/probe.md, "Models that are drawn"). Must not know how a
 * trial runs. */
#include <stdlib.h>

#include "probe/probe.h"

/* Models that are drawn at most, and that are kept. */
#define DRAWS 96
#define KEPT 32

/* The largest size that fits by each model, sorted; 0: none above what ran. */
struct sizes {
    size_t at[KEPT];
    size_t count;
};

static int by_size(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a;
    const size_t y = *(const size_t *)b;
    return (x > y) - (x < y);
}

/* A model by which a size fits that failed is wrong, and is dropped. */
static rebatch_status draw(struct sizes *sizes, struct rbi_search *s, size_t near)
{
    const size_t least = s->fits + 1, most = rbi_min(s->most, s->fails);
    rbi_assert(s->fits < s->fails);
    struct rbi_model model;
    rebatch_status status = rbi_search_make(&model, s);
    near = rbi_min(rbi_max(near, least), most);
    for (uint64_t i = 1; i <= DRAWS && sizes->count < KEPT && !status; i++) {
        size_t size;
        rbi_model_draw(&model, i);
        status = rbi_forecast_near(&size, &model, &s->setting, least, most, s->batch, near);
        if (!status && size < s->fails)
            sizes->at[sizes->count++] = size ? rbi_search_allowed(s, size) : 0;
    }
    rbi_model_release(&model);
    qsort(sizes->at, sizes->count, sizeof *sizes->at, by_size);
    return status;
}

/* The size that most models give, the smaller one of two, and how many do. */
static size_t most_said(size_t *times, const struct sizes *sizes)
{
    size_t said = 0;
    *times = 0;
    for (size_t i = 0, end; i < sizes->count; i = end) {
        for (end = i; end < sizes->count && sizes->at[end] == sizes->at[i];)
            end++;
        if (end - i <= *times)
            continue;
        *times = end - i;
        said = sizes->at[i];
    }
    return said;
}

/* Most models say that nothing larger fits: the next size is tried if this share accepts one. */
#define MAYBE 0.3
static size_t next_larger(const struct rbi_search *s, const struct sizes *sizes)
{
    const size_t next = rbi_search_next_larger(s);
    size_t larger = 0;
    for (size_t i = 0; i < sizes->count; i++)
        larger += sizes->at[i] > 0;
    return (double)larger >= MAYBE * (double)sizes->count ? next : 0;
}

/* While trials are left, a size runs that all but CERTAIN of the models accept, as its trial rules
 * models out. It must be at least a WAY-th of the way to the likely size, else one that EVEN accept
 * is taken, else half of the way. */
#define CERTAIN 0.15
#define EVEN 0.5
#define WAY 3
static size_t certain_of(const struct rbi_search *s, const struct sizes *sizes, size_t said)
{
    const size_t first = (size_t)(CERTAIN * (double)sizes->count);
    const size_t last = (size_t)(EVEN * (double)sizes->count);
    for (size_t i = first; i < last; i++)
        if (sizes->at[i] > s->fits && sizes->at[i] - s->fits >= (said - s->fits) / WAY)
            return sizes->at[i];
    return rbi_min(said, rbi_search_allowed_near(s, s->fits + (said - s->fits + 1) / 2));
}

/* The likely size is tried at once if this share of the models give it. */
#define AGREED 0.85

rebatch_status rbi_search_weigh(size_t *predicted, bool *is_weighed, struct rbi_search *s)
{
    struct sizes sizes = {.count = 0};
    size_t times;
    *is_weighed = false;
    if (!s->model.has_events || !s->model.is_doubtful || (s->setting.is_work && *predicted == 0))
        return REBATCH_OK;
    const rebatch_status status = draw(&sizes, s, *predicted);
    if (status || sizes.count == 0)
        return status;
    *is_weighed = true;
    const size_t said = most_said(&times, &sizes);
    rbi_assert(s->report.microbatches < s->max_trials && times <= sizes.count);
    const bool is_last = s->max_trials - s->report.microbatches == 1;
    const bool is_agreed = (double)times >= AGREED * (double)sizes.count;
    if (said == 0)
        *predicted = next_larger(s, &sizes);
    else
        *predicted = is_last || is_agreed ? said : certain_of(s, &sizes, said);
    return status;
}
