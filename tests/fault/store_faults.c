/* Holds the file of probe results when the heap or a system call fails: at every call, once and for
 * ever, the file is the old one or the new one, whole, and nothing leaks. Seeds: none. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <unistd.h>

#include "probe/store.h"
#include "unit/config_files.h"

TestSuite(store_faults, .init = config_enter, .fini = config_leave);

#define NAME "results"

static const struct rbi_store_key first = {"first", "host", 1 << 20, "", "0.1.0", "batch=8"};
static const struct rbi_store_key second = {"second", "host", 1 << 20, "", "0.1.0", "batch=8"};

static size_t find(const struct rbi_store_key *key)
{
    struct rbi_store_result result;
    cr_assert_eq(rbi_store_find(&result, NAME, key), REBATCH_OK, "%s", rebatch_last_error());
    return result.size;
}

static rebatch_status put(const struct rbi_store_key *key, size_t size)
{
    const struct rbi_store_result result = {.size = size, .peak_bytes = size};
    return rbi_store_put(NAME, key, &result);
}

static void look_and_put(rebatch_status *found, rebatch_status *kept, size_t *size)
{
    struct rbi_store_result result;
    *found = rbi_store_find(&result, NAME, &first);
    *size = result.size;
    *kept = put(&second, 9);
}

/* Fails each call in turn until a round meets none; `fail` orders it. */
static void fail_each(void (*fail)(uint64_t nth, uint64_t times), uint64_t times,
                      rebatch_status allowed, const char *damaged_too)
{
    const int64_t live = rbi_heap_live();
    size_t failures = 0;
    for (uint64_t nth = 1;; nth++) {
        rebatch_status found, kept;
        size_t size;
        fail(0, 0);
        (void)unlink(NAME);
        cr_assert_eq(put(&first, 5), REBATCH_OK);
        if (damaged_too) {
            char *text = config_read(NAME);
            char *with = calloc(1, strlen(text) + strlen(damaged_too) + 1);
            strcat(strcat(with, text), damaged_too);
            config_write(NAME, with);
            free(text);
            free(with);
        }
        fail(nth, times);
        look_and_put(&found, &kept, &size);
        fail(0, 0);
        const rebatch_status good = damaged_too ? REBATCH_E_PARSE : REBATCH_OK;
        cr_assert(found == good || found == allowed, "%s", rebatch_status_name(found));
        cr_assert_eq(size, found == good ? 5 : 0);
        cr_assert(kept == REBATCH_OK || kept == allowed, "%s", rebatch_status_name(kept));
        cr_assert_eq(rbi_heap_live(), live);
        struct rbi_store_result result;
        (void)rbi_store_find(&result, NAME, &first);
        cr_assert_eq(result.size, 5, "call %zu: what was there stays", (size_t)nth);
        (void)rbi_store_find(&result, NAME, &second);
        cr_assert(result.size == 9 || (kept && result.size == 0));
        cr_assert_eq(put(&second, 11), REBATCH_OK, "%s", rebatch_last_error());
        cr_assert_eq(find(&second), 11, "it works again");
        if (found == good && kept == REBATCH_OK && nth > 1 && failures + 8 < nth)
            break; /* eight calls past the last that matters */
        failures = found != good || kept ? (size_t)nth : failures;
    }
    cr_assert_gt(failures, 2);
}

Test(store_faults, the_heap_fails_at_every_call)
{
    fail_each(rbi_heap_fail, 1, REBATCH_E_HOST_OOM, NULL);
    fail_each(rbi_heap_fail, UINT64_MAX, REBATCH_E_HOST_OOM, NULL);
}

Test(store_faults, every_system_call_fails)
{
    fail_each(rbi_file_fail, 1, REBATCH_E_IO, NULL);
    fail_each(rbi_file_fail, UINT64_MAX, REBATCH_E_IO, NULL);
}

Test(store_faults, every_system_call_fails_beside_damage)
{
    fail_each(rbi_file_fail, 1, REBATCH_E_IO, "half a line");
    fail_each(rbi_file_fail, UINT64_MAX, REBATCH_E_IO, "half a line");
}
