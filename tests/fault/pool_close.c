/* Holds that a pool is destroyed beside a stream that cannot be waited for without taking memory
 * from under its work, and that no more is left behind than that work may use. Seeds: none. */
#include <semaphore.h>
#include <stdatomic.h>

#include "fault/fault_common.h"
#include "fault/fault_device.h"
#include "unit/pool_help.h"

enum { PAGES = 64 };

enum device_kind { SPACE, PLAIN, NO_CACHE, KINDS };

struct world {
    rebatch_device *host, *fault;
    rebatch_pool *pool;
    rebatch_stream stuck, other;
    sem_t gate;
    unsigned char *block; /* what the work writes to */
    size_t bytes;
    atomic_int done;
};

/* A host device without virtual memory, where `kind` asks for one. */
static void build(struct world *w, enum device_kind kind)
{
    static struct rbi_device_ops plain;
    memset(w, 0, sizeof *w);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = kind == NO_CACHE ? REBATCH_OFF : REBATCH_ON;
    cr_assert_eq(rebatch_device_open_host(&w->host, PAGES * PAGE, NULL), REBATCH_OK);
    if (kind == PLAIN) {
        plain = *w->host->ops;
        plain.reserve = NULL;
        w->host->ops = &plain;
    }
    cr_assert_eq(rebatch_device_open_fault(&w->fault, w->host, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&w->stuck, w->fault), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&w->other, w->fault), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&w->pool, w->fault, &options), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_assert_eq(sem_init(&w->gate, 0, 0), 0);
}

static void write_behind_gate(void *user)
{
    struct world *w = user;
    (void)sem_wait(&w->gate);
    memset(w->block, 0x5a, w->bytes); /* faults if the memory is gone */
    atomic_store(&w->done, w->block[0] == 0x5a && w->block[w->bytes - 1] == 0x5a);
}

/* Every wait fails from here on. */
static void fail_waits(const struct world *w, rebatch_status status)
{
    const rebatch_fault_plan plan =
        fault_plan(REBATCH_FAULT_STREAM | REBATCH_FAULT_EVENT, status, 1, REBATCH_FAULT_FOREVER);
    fault_arm(w->fault, &plan);
}

/* The pool goes, the work runs, and what is left behind is at most `left` bytes. */
static void destroy_and_run(struct world *w, size_t left)
{
    const int64_t live = rbi_heap_live();
    rebatch_pool_destroy(w->pool);
    cr_assert_lt(rbi_heap_live(), live);
    cr_assert_eq(sem_post(&w->gate), 0);
    fault_arm(w->fault, NULL);
    cr_assert_eq(rebatch_stream_synchronize(w->fault, w->stuck), REBATCH_OK);
    cr_assert_eq(atomic_load(&w->done), 1);
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(w->host, &info), REBATCH_OK);
    cr_assert(info.used_bytes >= w->bytes && info.used_bytes <= left, "%zu bytes stay of %zu",
              (size_t)info.used_bytes, left);
    rebatch_stream_destroy(w->fault, w->stuck);
    rebatch_stream_destroy(w->fault, w->other);
    rebatch_device_close(w->fault);
    rebatch_device_close(w->host);
}

/* How the work came to use the block. */
enum way { LIVE, FREED, ROLLED_BACK, USED_ON, USED_ON_AND_FREED, WAYS };

static void give_work(struct world *w, enum way way)
{
    const bool shared = way == USED_ON || way == USED_ON_AND_FREED;
    w->bytes = 3 * PAGE;
    const rebatch_scope scope = begin(w->pool);
    w->block = take_on(w->pool, w->bytes, shared ? w->other : w->stuck);
    if (shared)
        cr_assert_eq(rebatch_pool_use_on(w->pool, w->block, w->stuck), REBATCH_OK);
    cr_assert_eq(rebatch_stream_call(w->fault, w->stuck, write_behind_gate, w), REBATCH_OK);
    if (way == ROLLED_BACK)
        cr_assert_eq(rebatch_scope_rollback(w->pool, scope), REBATCH_OK);
    else
        cr_assert_eq(rebatch_scope_commit(w->pool, scope), REBATCH_OK);
    fail_waits(w, REBATCH_E_DEVICE);
    if (way == FREED || way == USED_ON_AND_FREED)
        give(w->pool, w->block);
}

/* However a block came to be used by the work that cannot be waited for, it stays. With caching off
 * a rollback waits for the work itself, which is not what is looked at here. */
Test(pool_close, memory_of_work_that_cannot_be_waited_for_stays)
{
    for (int kind = 0; kind < KINDS; kind++) {
        for (int way = 0; way < WAYS; way++) {
            if (kind == NO_CACHE && way == ROLLED_BACK)
                continue;
            struct world w;
            build(&w, (enum device_kind)kind);
            give_work(&w, (enum way)way);
            assert_valid(w.pool);
            destroy_and_run(&w, kind == PLAIN ? 4 * PAGE : 3 * PAGE);
        }
    }
}

/* What was known to be free long before goes back all the same. */
Test(pool_close, memory_that_was_free_before_goes_back)
{
    struct world w;
    build(&w, SPACE);
    give(w.pool, take_on(w.pool, 20 * PAGE, w.other));
    cr_assert_eq(rbi_pool_await_all(w.pool), REBATCH_OK);
    w.bytes = 2 * PAGE;
    w.block = take_on(w.pool, w.bytes, w.stuck);
    cr_assert_eq(rebatch_stream_call(w.fault, w.stuck, write_behind_gate, &w), REBATCH_OK);
    fail_waits(&w, REBATCH_E_DEVICE);
    destroy_and_run(&w, 3 * PAGE);
}

/* Streams that can be waited for leave nothing, whatever was in use. */
Test(pool_close, nothing_stays_when_the_streams_can_be_waited_for)
{
    for (int kind = 0; kind < KINDS; kind++) {
        struct world w;
        build(&w, (enum device_kind)kind);
        w.bytes = PAGE;
        w.block = take_on(w.pool, w.bytes, w.stuck);
        cr_assert_eq(rebatch_pool_use_on(w.pool, w.block, w.other), REBATCH_OK);
        (void)take_on(w.pool, 5 * PAGE, w.other);
        (void)begin(w.pool);
        give(w.pool, take(w.pool, PAGE));
        cr_assert_eq(rebatch_stream_call(w.fault, w.stuck, write_behind_gate, &w), REBATCH_OK);
        cr_assert_eq(sem_post(&w.gate), 0);
        rebatch_pool_destroy(w.pool);
        cr_assert_eq(atomic_load(&w.done), 1, "destroyed before the work was done");
        rebatch_memory_info info;
        cr_assert_eq(rebatch_device_memory(w.host, &info), REBATCH_OK);
        cr_assert_eq(info.used_bytes, 0);
        rebatch_stream_destroy(w.fault, w.stuck);
        rebatch_stream_destroy(w.fault, w.other);
        rebatch_device_close(w.fault);
        rebatch_device_close(w.host);
    }
}
