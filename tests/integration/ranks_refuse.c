/* Owns the tests of what calls for several ranks refuse.
 * Must not know more of the library than its public headers say. */
#include "rank_asserts.h"

static rebatch_status all_reduce_nothing(uint64_t *words, size_t count, rebatch_reduction reduction,
                                         uint64_t timeout_ms, void *user)
{
    (void)words, (void)count, (void)reduction, (void)timeout_ms, (void)user;
    return REBATCH_OK;
}

Test(ranks_refuse, a_table_that_is_not_whole_opens_nothing)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, 1 << 20, NULL));
    const rebatch_group whole = {
        .struct_size = sizeof whole, .rank = 1, .size = 2, .all_reduce = all_reduce_nothing};
    rebatch_group tables[] = {whole, whole, whole, whole, whole};
    tables[0].struct_size = 0;
    tables[1].size = 0;
    tables[2].rank = 2;
    tables[3].all_reduce = NULL;
    tables[4].size = (1 << 17) + 1;
    static const char *const sentences[] = {"group->struct_size is 0", "group->size is 0",
                                            "group->rank is 2", "group->all_reduce is NULL",
                                            "group->size is 131073"};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        rebatch *rb;
        cr_assert_eq(rebatch_open(&rb, device, &OPTIONS(.group = &tables[i])), REBATCH_E_INVALID);
        cr_assert(strstr(rebatch_last_error(), sentences[i]), "%s", rebatch_last_error());
    }
    rebatch_device_close(device);
}

Test(ranks_refuse, abandoning_and_explaining_are_checked)
{
    OPEN_WITH(open_ranks, ranks, ranks, 2, NULL);
    cr_assert_eq(rebatch_abandon_step(NULL, "x"), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_abandon_step(ranks.rank[0].rb, NULL), REBATCH_E_INVALID);
    rebatch_explain(ranks.rank[0].rb, "x");
    cr_assert_eq(rebatch_last_status(), REBATCH_E_STATE);
    rebatch_explain(NULL, "x");
    cr_assert_eq(rebatch_last_status(), REBATCH_E_INVALID);
    rebatch *alone;
    OK(rebatch_open(&alone, ranks.rank[0].device, NULL));
    OK(rebatch_abandon_step(alone, "x"));
    rebatch_close(alone);
}
