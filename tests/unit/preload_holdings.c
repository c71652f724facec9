/* Owns the tests of the table of allocations in use and of the sentence about them.
 * Must not know where they come from. */
#include <criterion/criterion.h>
#include <string.h>

#include "preload/preload.h"

/* ---- the table ---- */

#define KEYS 600

static uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Keys that are taken out and put in again at random, beside a plain array. Seed 1. */
Test(preload_holdings, random_keys_are_found_as_in_an_array)
{
    struct rbi_holdings holdings = {NULL, 0, 0};
    static uint64_t bytes[KEYS][2];
    uint64_t state = 1;
    size_t used = 0;
    for (unsigned i = 0; i < 200000; i++) {
        const uint64_t key = random_next(&state) % KEYS;
        const enum rbi_holding_kind kind =
            random_next(&state) & 1 ? RBI_HOLDING_PHYSICAL : RBI_HOLDING_POINTER;
        uint64_t *const expected = &bytes[key][kind];
        if (*expected) {
            const struct rbi_holding taken = rbi_holdings_take(&holdings, key << 9, kind);
            cr_assert_eq(taken.bytes, *expected);
            cr_assert(taken.device == 3 && taken.key == key << 9 && taken.kind == kind);
            *expected = 0;
            used--;
        } else {
            cr_assert_eq(rbi_holdings_take(&holdings, key << 9, kind).device, -1);
            *expected = i + 1;
            const struct rbi_holding holding = {
                .key = key << 9, .bytes = *expected, .device = 3, .kind = kind};
            cr_assert(rbi_holdings_add(&holdings, &holding));
            used++;
        }
        cr_assert_eq(holdings.used, used);
        cr_assert_leq(2 * holdings.used, holdings.capacity);
    }
    rbi_holdings_free(&holdings);
    cr_expect_eq(rbi_heap_live(), 0);
}

Test(preload_holdings, without_host_memory_nothing_changes)
{
    struct rbi_holdings holdings = {NULL, 0, 0};
    struct rbi_holding holding = {.key = 1, .bytes = 1, .device = 0};
    rbi_heap_fail(1, 1);
    cr_expect_not(rbi_holdings_add(&holdings, &holding));
    cr_expect_eq(rbi_holdings_take(&holdings, 1, RBI_HOLDING_POINTER).device, -1);
    for (holding.key = 1; holding.key <= 128; holding.key++)
        cr_assert(rbi_holdings_add(&holdings, &holding));
    rbi_heap_fail(1, 1);
    cr_expect_not(rbi_holdings_add(&holdings, &holding), "half of 256 is full");
    cr_expect_eq(holdings.used, 128);
    cr_expect_eq(rbi_holdings_take(&holdings, 128, RBI_HOLDING_POINTER).bytes, 1);
    rbi_holdings_free(&holdings);
}

/* ---- the sentence ---- */

static void expect_sentence(const struct rbi_run_settings *settings,
                            const struct rbi_ledger_figures *figures, const char *expected)
{
    char text[256];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_summary_add(&t, settings, figures);
    cr_expect_str_eq(text, expected, "\"%s\", not \"%s\"", text, expected);
}

Test(preload_holdings, what_is_said)
{
    const struct rbi_run_settings plain = {.report = -1}, failing = {.oom = 3},
                                  shrinking = {.shrink_count = 1};
    struct rbi_ledger_figures figures = {.requests = 5310, .is_final = true};
    expect_sentence(&plain, &figures, "5,310 allocations");
    figures.injected = 12;
    figures.peak_bytes = UINT64_C(3435973837);
    figures.cap_bytes = UINT64_C(12) << 30;
    expect_sentence(&failing, &figures,
                    "12 of 5,310 allocations failed on purpose, 0 beyond the cap, peak 3.20 GiB of "
                    "12.0 GiB");
    figures = (struct rbi_ledger_figures){.requests = 1, .beyond_cap = 1234567, .cap_bytes = 1024};
    expect_sentence(&plain, &figures,
                    "at least 1 allocation, 1,234,567 beyond the cap, peak 0 B of 1.00 KiB");
    figures = (struct rbi_ledger_figures){
        .requests = 1000, .device_ooms = 1, .trace = "/x", .is_final = true};
    expect_sentence(&shrinking, &figures,
                    "1,000 allocations, 1 beyond what the device has; recorded in /x; without "
                    "rebatch_step() there is nothing to shrink");
    figures = (struct rbi_ledger_figures){.requests = 0};
    expect_sentence(&failing, &figures, "0 of at least 0 allocations failed on purpose");
}
