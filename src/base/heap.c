/* Owns the one place where the library gets host memory, with a failure that tests can order.
 * Must not know who asks. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

static atomic_uint_fast64_t calls;
static atomic_int_fast64_t live;
static struct rbi_countdown failure;

void rbi_heap_fail(uint64_t nth, uint64_t times)
{
    rbi_countdown_set(&failure, nth, times);
}

static bool fails_now(void)
{
    return rbi_countdown_strikes(&failure);
}

static void *counted(void *memory)
{
    if (memory) {
        atomic_fetch_add(&calls, 1);
        atomic_fetch_add(&live, 1);
    }
    return memory;
}

void *rbi_heap_calloc(size_t count, size_t size)
{
    size_t bytes;
    return fails_now() || !rbi_mul(count, size, &bytes) ? NULL : counted(calloc(1, bytes));
}

void *rbi_heap_calloc_lines(size_t count, size_t size)
{
    size_t bytes;
    if (fails_now() || !rbi_mul(count, size, &bytes) ||
        !rbi_round_up(bytes, RBI_LINE_BYTES, &bytes))
        return NULL;
    void *memory = counted(aligned_alloc(RBI_LINE_BYTES, bytes));
    if (memory)
        memset(memory, 0, bytes);
    return memory;
}

void *rbi_heap_resize(void *old, size_t count, size_t size)
{
    size_t bytes;
    if (fails_now() || !rbi_mul(count, size, &bytes))
        return NULL;
    if (!old)
        return counted(malloc(bytes));
    void *memory = realloc(old, bytes);
    if (memory)
        atomic_fetch_add(&calls, 1);
    return memory;
}

void rbi_heap_free(void *memory)
{
    if (!memory)
        return;
    atomic_fetch_sub(&live, 1);
    free(memory);
}

uint64_t rbi_heap_calls(void)
{
    return atomic_load(&calls);
}

int64_t rbi_heap_live(void)
{
    return atomic_load(&live);
}
