/* Holds the pool when the heap or the device fails: at every call, once and for ever, nothing
 * leaks, the pool stays valid, and it works again when memory is there. Seeds: none. */
#include <unistd.h>

#include "fault/fault_common.h"
#include "fault/fault_device.h"
#include "unit/pool_help.h"

struct world {
    rebatch_device *host, *fault;
    rebatch_pool *pool;
    rebatch_stream stream;
    void *spare;            /* what the pressure callback gives up */
    rebatch_status allowed; /* the one failure that may be seen besides OOM and no host memory */
};

static void expect(const struct world *w, rebatch_status status)
{
    cr_assert(status == REBATCH_OK || status == REBATCH_OOM || status == REBATCH_E_HOST_OOM ||
                  status == w->allowed,
              "%s: %s", rebatch_status_name(status), rebatch_last_error());
}

static void *get(const struct world *w, size_t bytes, rebatch_stream stream, rebatch_tag tag)
{
    void *pointer;
    const rebatch_status status = rebatch_pool_alloc(&pointer, w->pool, bytes, stream, tag);
    expect(w, status);
    cr_assert_eq(pointer != NULL, status == REBATCH_OK);
    if (pointer)
        memset(pointer, 0x3c, bytes);
    return pointer;
}

static size_t give_spare(size_t wanted_bytes, void *user)
{
    struct world *w = user;
    if (w->pool->depth > 0)
        return 0; /* a free would wait for the scope, or be undone with it */
    void *spare = w->spare;
    w->spare = NULL;
    (void)rebatch_pool_free(w->pool, spare);
    return spare ? wanted_bytes : 0;
}

static void put_all(const struct world *w, void **blocks, size_t count)
{
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(rebatch_pool_free(w->pool, blocks[i]), REBATCH_OK, "%s", rebatch_last_error());
}

/* Scopes in scopes, with frees of older blocks in both; undone, or kept. */
static void nest(const struct world *w, bool keep)
{
    void *blocks[8];
    void *older = get(w, 3 * KIB, NULL, 0);
    const rebatch_scope outer = begin(w->pool);
    for (size_t i = 0; i < 4; i++)
        blocks[i] = get(w, (i * 40 + 1) * KIB, i % 2 ? w->stream : NULL, 0);
    const rebatch_scope inner = begin(w->pool);
    put_all(w, &older, 1);
    for (size_t i = 4; i < 8; i++)
        blocks[i] = get(w, (i * 30 + 1) * KIB, NULL, 0);
    if (blocks[5])
        expect(w, rebatch_pool_use_on(w->pool, blocks[5], w->stream));
    put_all(w, &blocks[2], 2);
    assert_valid(w->pool);
    if (keep) {
        cr_assert_eq(rebatch_scope_commit(w->pool, inner), REBATCH_OK);
        cr_assert_eq(rebatch_scope_commit(w->pool, outer), REBATCH_OK);
    } else {
        cr_assert_eq(rebatch_scope_rollback(w->pool, outer), REBATCH_OK);
        put_all(w, &older, 1);
    }
    put_all(w, blocks, 2); /* late when undone */
    put_all(w, &blocks[4], 4);
    assert_valid(w->pool);
}

/* A block of an arena; NULL where it has no memory for one. */
static void *get_from(const struct world *w, rebatch_arena *arena, size_t bytes)
{
    void *block;
    const rebatch_status status = rebatch_arena_alloc(&block, arena, bytes, NULL, 0);
    expect(w, status);
    if (block)
        memset(block, 0x5a, bytes);
    return block;
}

/* A claim that fails leaves the arena lent, and what is kept in it is what it was. */
static void lend_and_claim(const struct world *w)
{
    rebatch_arena *arena;
    rebatch_status status = rebatch_arena_create(&arena, w->pool);
    if (status == REBATCH_E_UNSUPPORTED)
        return;
    expect(w, status);
    if (arena && (status = rebatch_arena_open(arena, NULL)) == REBATCH_OK) {
        unsigned char *const kept = get_from(w, arena, PAGE + 3 * KIB);
        void *activations = get_from(w, arena, 9 * PAGE);
        put_all(w, &activations, 1);
        cr_assert_eq(rebatch_arena_lend(arena), REBATCH_OK);
        void *others = get(w, 13 * PAGE, w->stream, 0);
        assert_valid(w->pool);
        put_all(w, &others, 1);
        status = rebatch_arena_claim(arena);
        assert_valid(w->pool);
        if (status == REBATCH_OK && activations)
            memset(activations, 0x77, 9 * PAGE);
        for (size_t i = 0; kept && i < PAGE + 3 * KIB; i++)
            cr_assert_eq(kept[i], 0x5a);
        put_all(w, (void *[]){kept}, 1);
    }
    if (status != REBATCH_E_DEVICE) /* of an address that was lost */
        expect(w, status);
    rebatch_arena_destroy(arena);
    assert_valid(w->pool);
}

/* Touches every rung, both streams, scopes, tags, arenas, reserve, admit and trim. */
static void work(struct world *w)
{
    rebatch_tag tag;
    void *blocks[6];
    cr_assert_eq(rebatch_pool_tag(&tag, w->pool, "work"), REBATCH_OK);
    cr_assert_eq(rebatch_pool_add_pressure(w->pool, give_spare, w), REBATCH_OK);
    w->spare = get(w, 4 * PAGE, NULL, tag);
    for (size_t i = 0; i < 6; i++)
        blocks[i] = get(w, (i + 1) * 20 * KIB, i % 3 ? NULL : w->stream, tag);
    for (size_t i = 0; i < 6; i += 2)
        if (blocks[i])
            expect(w, rebatch_pool_use_on(w->pool, blocks[i], i % 4 ? w->stream : NULL));
    put_all(w, blocks, 6);
    nest(w, true);
    nest(w, false);
    lend_and_claim(w);
    expect(w, rebatch_pool_reserve(w->pool, 8 * PAGE, NULL));
    expect(w, rebatch_pool_reserve(w->pool, 6 * PAGE, w->stream));
    expect(w, rbi_pool_admit(w->pool, 10 * PAGE, NULL));
    for (size_t i = 0; i < 6; i++) /* more than there is */
        blocks[i] = get(w, 4 * PAGE, i % 2 ? NULL : w->stream, 0);
    assert_valid(w->pool);
    put_all(w, blocks, 6);
    expect(w, rebatch_pool_trim(w->pool, 2 * PAGE, NULL));
    cr_assert_eq(rebatch_pool_set_limit(w->pool, 12 * PAGE), REBATCH_OK);
    blocks[0] = get(w, 11 * PAGE, w->stream, tag);
    put_all(w, blocks, 1);
    put_all(w, &w->spare, 1);
    w->spare = NULL;
    assert_valid(w->pool);
}

static void build(struct world *w)
{
    memset(w, 0, sizeof *w);
    fault_open(&w->host, &w->fault, 20 * PAGE);
    cr_assert_eq(rebatch_stream_create(&w->stream, w->fault), REBATCH_OK);
}

/* After the failures: everything works, and everything goes back. */
static void tear_down(struct world *w)
{
    rbi_heap_fail(0, 0);
    fault_arm(w->fault, NULL);
    if (w->pool) {
        cr_assert_eq(rebatch_pool_set_limit(w->pool, 0), REBATCH_OK);
        cr_assert_eq(stats_of(w->pool).live_bytes, 0);
        /* What the device did not unmap is out of use, and counted; all else is there. */
        const size_t there = 20 * PAGE - stats_of(w->pool).quarantined_bytes;
        cr_assert_leq(there, 20 * PAGE);
        if (there > PAGE) {
            put_all(w, (void *[]){take(w->pool, there)}, 1);
            put_all(w, (void *[]){take_on(w->pool, there - PAGE, w->stream)}, 1);
        }
        assert_valid(w->pool);
        rebatch_pool_destroy(w->pool);
    }
    rebatch_stream_destroy(w->fault, w->stream);
    fault_close(w->host, w->fault);
}

static const rebatch_toggle cachings[] = {REBATCH_ON, REBATCH_OFF};

static void create_pool(struct world *w, rebatch_toggle caching)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = caching;
    expect(w, rebatch_pool_create(&w->pool, w->fault, &options));
}

/* The heap fails at every call of create and work, once and for ever. */
Test(pool_faults, the_heap_fails_at_every_call)
{
    const int64_t live = rbi_heap_live();
    for (int forever = 0; forever < 2; forever++) {
        for (size_t c = 0; c < 2; c++) {
            uint64_t calls = 0;
            /* `calls` is what a run without failures makes; a few more for the streams' own. */
            for (uint64_t nth = 0; nth <= calls + 3; nth++) {
                struct world w;
                build(&w);
                const uint64_t before = rbi_heap_calls();
                rbi_heap_fail(nth, forever ? UINT64_MAX : 1);
                create_pool(&w, cachings[c]);
                if (w.pool)
                    work(&w);
                if (nth == 0)
                    calls = rbi_heap_calls() - before;
                tear_down(&w);
                cr_assert_eq(rbi_heap_live(), live);
            }
            cr_assert_gt(calls, 5);
        }
    }
}

/* Fails the device's calls of these kinds one after the other with `status`. */
static void fail_device(uint32_t kinds, rebatch_status status, bool forever, rebatch_toggle caching)
{
    const int64_t live = rbi_heap_live();
    uint64_t seen = 1;
    for (uint64_t nth = 0; nth <= seen; nth++) {
        struct world w;
        build(&w);
        w.allowed = status;
        create_pool(&w, caching);
        const rebatch_fault_plan plan =
            fault_plan(kinds, status, nth, forever ? REBATCH_FAULT_FOREVER : 1);
        fault_arm(w.fault, &plan);
        work(&w);
        if (nth == 0)
            cr_assert_eq(rebatch_fault_counts(w.fault, &seen, NULL), REBATCH_OK);
        tear_down(&w);
        cr_assert_eq(rbi_heap_live(), live);
    }
    cr_assert_gt(seen, 1);
}

/* The device fails at every call, of each kind and of all, with an OOM and with another error, once
 * and for ever. */
Test(pool_faults, the_device_fails_at_every_call)
{
    static const uint32_t kinds[] = {REBATCH_FAULT_ANY,
                                     REBATCH_FAULT_EVENT,
                                     REBATCH_FAULT_CREATE,
                                     REBATCH_FAULT_MAP,
                                     REBATCH_FAULT_ACCESS,
                                     REBATCH_FAULT_UNMAP,
                                     REBATCH_FAULT_RESERVE,
                                     REBATCH_FAULT_RELEASE,
                                     REBATCH_FAULT_ALLOC | REBATCH_FAULT_STREAM |
                                         REBATCH_FAULT_EVENT};
    static const rebatch_status statuses[] = {REBATCH_OOM, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (size_t s = 0; s < sizeof statuses / sizeof *statuses; s++)
            for (int forever = 0; forever < 2; forever++)
                fail_device(kinds[k], statuses[s], forever, REBATCH_ON);
    for (size_t s = 0; s < sizeof statuses / sizeof *statuses; s++)
        for (int forever = 0; forever < 2; forever++)
            fail_device(kinds[8], statuses[s], forever, REBATCH_OFF);
}

/* An arena for other processes while the device fails, as above: what it gives stays valid, and
 * nothing leaks. */
Test(pool_faults, the_device_fails_at_every_call_of_an_export)
{
    static const uint32_t kinds[] = {REBATCH_FAULT_CREATE, REBATCH_FAULT_MAP, REBATCH_FAULT_ACCESS,
                                     REBATCH_FAULT_CREATE | REBATCH_FAULT_UNMAP, REBATCH_FAULT_ANY};
    static const rebatch_status statuses[] = {REBATCH_OOM, REBATCH_E_DEVICE};
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof *kinds; i++)
        for (uint64_t nth = 1; nth < 30; nth++) {
            struct world w;
            rebatch_arena *arena;
            const int64_t live = rbi_heap_live();
            build(&w);
            w.allowed = statuses[i % 2];
            create_pool(&w, REBATCH_ON);
            const rebatch_fault_plan plan = fault_plan(kinds[i / 2], statuses[i % 2], nth, 1);
            fault_arm(w.fault, &plan);
            if (rebatch_arena_create_shared(&arena, w.pool) == REBATCH_OK) {
                void *blocks[3];
                const void *begin;
                rebatch_export_piece pieces[4];
                size_t count;
                may_fail(rebatch_arena_open(arena, NULL));
                for (size_t k = 0; k < 3; k++) {
                    may_fail(rebatch_arena_alloc(&blocks[k], arena, 3 * PAGE, NULL, 0));
                    assert_valid(w.pool);
                }
                if (rebatch_arena_export(&begin, pieces, 4, &count, arena) == REBATCH_OK)
                    for (size_t k = 0; k < count; k++)
                        cr_assert_eq(close(pieces[k].fd), 0);
                for (size_t k = 0; k < 3; k++)
                    give(w.pool, blocks[k]);
                rebatch_arena_destroy(arena);
            }
            tear_down(&w);
            cr_assert_eq(rbi_heap_live(), live);
        }
}

/* A device that fails by chance, a quarter of all calls, and whose capacity comes and goes. */
Test(pool_faults, the_device_fails_by_chance)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct world w;
        build(&w);
        w.allowed = REBATCH_OOM;
        create_pool(&w, cachings[seed % 2]);
        const rebatch_fault_room rooms[] = {{5, 8 * PAGE}, {15, 20 * PAGE}};
        fault_arm(w.fault, &FAULTS(.calls = REBATCH_FAULT_ANY & ~(uint32_t)REBATCH_FAULT_FILL,
                                   .permille = 250, .seed = seed, .rooms = rooms, .room_count = 2));
        work(&w);
        cr_assert_eq(rebatch_device_set_capacity(w.host, 20 * PAGE), REBATCH_OK);
        tear_down(&w);
    }
}
