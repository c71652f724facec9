/* Owns the one place where the library gets host memory, with a failure that tests can order.
 * Must not know who asks. */
#include <stdatomic.h>
#include <stdlib.h>

#include "base/base.h"

static atomic_uint_fast64_t calls;
static atomic_int_fast64_t live;

/* Calls left until the ordered failure, and failures left from there on; 0 calls left: none. */
static atomic_uint_fast64_t fail_in;
static atomic_uint_fast64_t fail_times;

void rbi_heap_fail(uint64_t nth, uint64_t times)
{
    atomic_store(&fail_times, times);
    atomic_store(&fail_in, nth);
}

static bool fails_now(void)
{
    uint64_t left = atomic_load(&fail_in);
    if (left == 0)
        return false;
    if (left > 1) {
        atomic_store(&fail_in, left - 1);
        return false;
    }
    const uint64_t times = atomic_load(&fail_times);
    if (times == 0) {
        atomic_store(&fail_in, 0);
        return false;
    }
    if (times != UINT64_MAX)
        atomic_store(&fail_times, times - 1);
    return true;
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
