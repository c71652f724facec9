/* Owns the tests of the sums by which ranks see whether their keys are equal.
 * Must not know what the keys are made of. */
#include <criterion/criterion.h>

#include "recover/recover.h"

static struct rbi_agreement sum_of(const uint64_t *keys, uint32_t ranks)
{
    struct rbi_agreement sum = {0};
    for (uint32_t r = 0; r < ranks; r++) {
        struct rbi_agreement words;
        rbi_agreement_set(&words, keys[r]);
        for (unsigned i = 0; i < RBI_KEY_PIECES; i++) {
            sum.sum[i] += words.sum[i];
            sum.sum_of_squares[i] += words.sum_of_squares[i];
        }
    }
    return sum;
}

static bool agree(const uint64_t *keys, uint32_t ranks)
{
    const struct rbi_agreement sum = sum_of(keys, ranks);
    return rbi_agreement_holds(&sum, ranks);
}

static uint64_t keys[RBI_RANKS_MOST];

static void set_all(uint32_t first, uint32_t end, uint64_t key)
{
    for (uint32_t r = first; r < end; r++)
        keys[r] = key;
}

/* Two values, split in the ways in which the sums are largest and smallest. With 32 bits at once
 * four ranks with keys 0, 0, 2^31 and 2^31 would agree modulo 2^64. */
Test(recover_vote, keys_agree_exactly_when_all_are_equal)
{
    static const uint64_t others[] = {
        1,         UINT64_C(1) << 15, UINT64_C(1) << 31, UINT64_C(0xffff), UINT64_C(0xffff) << 48,
        UINT64_MAX};
    static const uint32_t sizes[] = {1, 2, 3, 4, 7, 1024, 16384, RBI_RANKS_MOST};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const uint32_t size = sizes[s];
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
            set_all(0, size, others[i]);
            cr_assert(agree(keys, size));
            for (uint32_t part = 1; part<size; part = part * 2> part + 1 ? part * 2 : part + 1) {
                set_all(0, part, 0);
                cr_assert_not(agree(keys, size), "%u of %u ranks", part, size);
            }
        }
    }
}
