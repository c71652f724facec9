/* Feeds the pool sequences of calls made of bytes: for a fuzzer as LLVMFuzzerTestOneInput(), and
 * without one on seeded random inputs. Every call must end in a status, and the pool be valid
 * after it. Seeds: 1 to 50,000, times REBATCH_TEST_SCALE. */
#include <stdlib.h>
#include <unistd.h>

#include "fault/fault_device.h"
#include "unit/pool_help.h"

enum { SLOTS = 32, PAGES = 24 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct session {
    rebatch_device *device, *fault;
    rebatch_pool *pool;
    rebatch_stream streams[2];
    void *slots[SLOTS];
    rebatch_scope scopes[4];
    size_t depth;
    uint8_t taken; /* where the pressure callback is in the slots */
};

static void configure(rebatch_pool_options *options, uint8_t byte)
{
    options->caching = byte % 16 == 1 ? REBATCH_OFF : REBATCH_DEFAULT;
    options->keep_room_permille = byte & 128 ? 1000 : 0;
    options->rounding_divisions = byte & 128 ? 8 : 0;
    options->events = byte % 3;
}

/* Frees a block or two, and calls what must not be called from there. */
static size_t give_up(size_t wanted_bytes, void *user)
{
    struct session *s = user;
    void *pointer;
    if (rebatch_pool_alloc(&pointer, s->pool, wanted_bytes, NULL, 0) != REBATCH_E_STATE)
        abort();
    size_t given = 0;
    for (int i = 0; i < 2; i++)
        given += rebatch_pool_free(s->pool, s->slots[s->taken++ % SLOTS]) == REBATCH_OK;
    return given * PAGE;
}

static void open_session(struct session *s, uint8_t byte, uint8_t more)
{
    memset(s, 0, sizeof *s);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    configure(&options, byte);
    const bool plain = more % 4 == 1;
    options.headroom_bytes = more & 4 ? 3 * PAGE + 1 : 0;
    if (rbi_device_open_dry(&s->device, PAGES * PAGE, PAGE, !plain) != REBATCH_OK ||
        rebatch_device_open_fault(&s->fault, s->device, NULL) != REBATCH_OK ||
        rebatch_pool_create(&s->pool, s->fault, &options) != REBATCH_OK ||
        rebatch_stream_create(&s->streams[1], s->device) != REBATCH_OK ||
        ((more & 8) && rebatch_pool_add_pressure(s->pool, give_up, s) != REBATCH_OK))
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

static rebatch_status discard(const void *data, size_t size, void *user)
{
    const uint8_t *fails = user;
    return data && size && *fails % 4 ? REBATCH_OK : REBATCH_E_USER;
}

/* Calls that look, or change who may do what. */
static void call_other(struct session *s, uint8_t kind, uint8_t a, uint8_t b)
{
    rebatch_tag tag;
    size_t bytes;
    rebatch_oom_report report;
    const char name[2] = {(char)('a' + b % 8), 0};
    switch (kind % 6) {
    case 0:
        (void)rebatch_pool_tag(&tag, s->pool, name);
        break;
    case 1:
        (void)rebatch_pool_write_snapshot(s->pool, (rebatch_snapshot_format)(b % 4), discard, &a);
        break;
    case 2:
        rebatch_stream_destroy(s->device, s->streams[1]);
        if (rebatch_stream_create(&s->streams[1], s->device) != REBATCH_OK)
            abort();
        break;
    case 3:
        (void)rebatch_device_set_capacity(s->device, (size_t)(a % PAGES + 1) * PAGE);
        (void)rbi_pool_keep_headroom(s->pool);
        break;
    case 4:
        (void)rebatch_pool_available(&bytes, s->pool);
        (void)rebatch_pool_last_oom(&report, s->pool);
        (void)rebatch_pool_block_bytes(&bytes, s->pool, s->slots[a % SLOTS]);
        break;
    default:
        (void)rebatch_pool_reset_peaks(s->pool);
    }
}

static void call(struct session *s, uint8_t kind, uint8_t a, uint8_t b)
{
    void **slot = &s->slots[a % SLOTS];
    const size_t bytes = b < 128 ? (size_t)(b + 1) * 700 : (size_t)(b - 127) * PAGE / 6;
    const rebatch_stream stream = s->streams[a >> 7];
    switch (kind % 13) {
    case 0:
    case 1:
    case 2:
        (void)rebatch_pool_free(s->pool, *slot);
        may_fail(rebatch_pool_alloc(slot, s->pool, bytes, stream, b % 4));
        break;
    case 3:
    case 4:
        (void)rebatch_pool_free(s->pool, *slot); /* sometimes twice, sometimes late */
        break;
    case 5:
        (void)rebatch_pool_free(s->pool, (void *)((uintptr_t)*slot + b));
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
    case 11:
        call_other(s, kind / 13, a, b);
        break;
    default:
        may_fail(b % 4 == 0   ? rebatch_pool_trim(s->pool, (size_t)a * 1000, NULL)
                 : b % 4 == 1 ? rebatch_pool_reserve(s->pool, bytes, stream)
                 : b % 4 == 2 ? rbi_pool_admit(s->pool, bytes, stream)
                              : rebatch_pool_set_limit(s->pool, a * PAGE / 8));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    struct session s;
    open_session(&s, data[0], data[1]);
    for (size_t at = 2; at + 3 <= size; at += 3) {
        call(&s, data[at], data[at + 1], data[at + 2]);
        if (at % 8 == 2 && !rbi_pool_is_valid(s.pool))
            abort();
    }
    if (!rbi_pool_is_valid(s.pool))
        abort();
    close_session(&s);
    return 0;
}

/* Random calls, of which many fail, never break the pool. */
Test(pool_calls, random_calls_never_break_the_pool)
{
    (void)alarm(300);
    const char *scale = getenv("REBATCH_TEST_SCALE");
    const char *stride = getenv("REBATCH_TEST_STRIDE"); /* slow kinds of run take every n-th */
    const uint64_t inputs = 50000 * (scale ? strtoull(scale, NULL, 10) : 1);
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
