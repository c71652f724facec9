/* Feeds the pool sequences of calls made of bytes: for a fuzzer as LLVMFuzzerTestOneInput(), and
 * without one on seeded random inputs. Every call must end in a status, and the pool be valid
 * after it. Seeds: 1 to 100,000, times REBATCH_TEST_SCALE. */
#include <stdlib.h>

#include "unit/pool_help.h"

enum { SLOTS = 32, GRANULES = 24 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct session {
    rebatch_device *device, *fault;
    rebatch_pool *pool;
    rebatch_stream streams[2];
    void *slots[SLOTS];
    rebatch_scope scopes[4];
    size_t depth;
};

static void configure(rebatch_pool_options *options, uint8_t byte)
{
    options->caching = byte % 16 == 1 ? REBATCH_OFF : REBATCH_DEFAULT;
    options->guard = byte % 16 == 2 ? REBATCH_ON : REBATCH_DEFAULT;
    options->ballast_bytes = byte & 16 ? GRANULE : 0;
    options->max_split_bytes = byte & 32 ? 2 * GRANULE : 0;
    options->gc_threshold_permille = byte & 64 ? 600 : 0;
    options->rounding_divisions = byte & 128 ? 8 : 0;
    options->events = byte % 3;
}

static void open_session(struct session *s, uint8_t byte)
{
    memset(s, 0, sizeof *s);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    configure(&options, byte);
    if (rebatch_device_open_dry(&s->device, GRANULES * GRANULE, GRANULE) != REBATCH_OK ||
        rebatch_device_open_fault(&s->fault, s->device, NULL) != REBATCH_OK ||
        rebatch_pool_create(&s->pool, s->fault, &options) != REBATCH_OK ||
        rebatch_stream_create(&s->streams[1], s->device) != REBATCH_OK)
        abort();
}

static void close_session(struct session *s)
{
    rebatch_memory_info info;
    (void)rebatch_fault_arm(s->fault, NULL);
    rebatch_pool_destroy(s->pool);
    if (rebatch_device_memory(s->device, &info) != REBATCH_OK || info.used_bytes != 0)
        abort();
    rebatch_stream_destroy(s->device, s->streams[1]);
    rebatch_device_close(s->fault);
    rebatch_device_close(s->device);
}

static void arm(struct session *s, uint8_t a, uint8_t b)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = b ? (uint32_t)b << 4 & REBATCH_FAULT_ANY : 0;
    plan.nth = a % 8;
    plan.times = a & 64 ? REBATCH_FAULT_FOREVER : 1;
    plan.status = a & 128 ? REBATCH_E_DEVICE : REBATCH_OOM;
    (void)rebatch_fault_arm(s->fault, &plan);
}

static void call(struct session *s, uint8_t kind, uint8_t a, uint8_t b)
{
    void **slot = &s->slots[a % SLOTS];
    const size_t bytes = b < 128 ? (size_t)(b + 1) * 700 : (size_t)(b - 127) * GRANULE / 6;
    const rebatch_stream stream = s->streams[a >> 7];
    switch (kind % 12) {
    case 0:
    case 1:
    case 2:
        (void)rebatch_pool_free(s->pool, *slot);
        (void)rebatch_pool_alloc(slot, s->pool, bytes, stream, b % 2);
        break;
    case 3:
    case 4:
        (void)rebatch_pool_free(s->pool, *slot); /* sometimes twice, sometimes late */
        break;
    case 5:
        (void)rebatch_pool_free(s->pool, (char *)*slot + b);
        break;
    case 6:
        if (s->depth < 4 && rebatch_scope_begin(&s->scopes[s->depth], s->pool) == REBATCH_OK)
            s->depth++;
        break;
    case 7:
        if (s->depth && rebatch_scope_commit(s->pool, s->scopes[s->depth - 1]) == REBATCH_OK)
            s->depth--;
        break;
    case 8:
        if (s->depth && rebatch_scope_rollback(s->pool, s->scopes[a % s->depth]) == REBATCH_OK)
            s->depth = a % s->depth;
        break;
    case 9:
        (void)rebatch_pool_use_on(s->pool, *slot, stream);
        break;
    case 10:
        arm(s, a, b);
        break;
    default:
        (void)(b % 4 == 0   ? rebatch_pool_trim(s->pool, (size_t)a * 1000, NULL)
               : b % 4 == 1 ? rebatch_pool_reserve(s->pool, bytes, stream)
               : b % 4 == 2 ? rbi_pool_admit(s->pool, bytes, stream)
                            : rebatch_pool_set_limit(s->pool, a * GRANULE / 8));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    struct session s;
    open_session(&s, data[0]);
    for (size_t at = 1; at + 3 <= size; at += 3) {
        call(&s, data[at], data[at + 1], data[at + 2]);
        if (at % 8 == 1 && !rbi_pool_is_valid(s.pool))
            abort();
    }
    if (!rbi_pool_is_valid(s.pool))
        abort();
    close_session(&s);
    return 0;
}

/* Random calls, of which many fail, never break the pool. */
Test(pool_calls, random_calls_never_break_the_pool, .timeout = 300)
{
    const char *scale = getenv("REBATCH_TEST_SCALE");
    const char *stride = getenv("REBATCH_TEST_STRIDE"); /* slow kinds of run take every n-th */
    const uint64_t inputs = 100000 * (scale ? strtoull(scale, NULL, 10) : 1);
    const uint64_t step = stride ? strtoull(stride, NULL, 10) : 1;
    uint8_t data[256];
    for (uint64_t seed = 1; seed <= inputs; seed += step > 0 ? step : 1) {
        uint64_t random = seed;
        const size_t size = seed % 16 ? 40 : sizeof data; /* most are short: there are many */
        for (size_t i = 0; i < size; i++)
            data[i] = (uint8_t)draw(&random);
        cr_assert_eq(LLVMFuzzerTestOneInput(data, size), 0, "seed %ju", (uintmax_t)seed);
    }
}
