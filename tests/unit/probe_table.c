/* Owns the tests of what the table of `rebatch probe` says in words. Must not know how a probe
 * searches. */
#include <criterion/criterion.h>
#include <string.h>

#include "launch/launch.h"

#define MIB(n) ((uint64_t)(n) << 20)

/* Sizes 2, which was found, and 4, which needs 5 of `limit` MiB. */
static void write_table(char *text, size_t room, uint64_t limit_mib, bool fits)
{
    static struct rbi_probe_result result;
    struct rbi_text t = {text, room, 0};
    result = (struct rbi_probe_result){.batch = 8,
                                       .total = 8,
                                       .device = "host",
                                       .device_bytes = UINT64_MAX,
                                       .limit_bytes = MIB(limit_mib),
                                       .report = {.size = 2, .twice_bytes = MIB(5)},
                                       .row_count = 2};
    for (size_t i = 0; i < 2; i++)
        result.rows[i] = (struct rbi_probe_row){
            .prediction = {.size = 2 + 2 * i}, .has_prediction = true, .remark = ""};
    result.rows[0].prediction.fits = true;
    result.rows[1].prediction.fits = fits;
    rbi_probe_add_table(&t, &result);
}

Test(probe_table, twice_the_size_is_there_only_where_its_row_fits)
{
    char text[4096];
    write_table(text, sizeof text, 6, true);
    cr_assert(strstr(text, "twice that, 4, needs 5.00 MiB, which is there\n"), "%s", text);
    write_table(text, sizeof text, 6, false);
    cr_assert(strstr(text, "twice that, 4, needs 5.00 MiB, which does not fit\n"), "%s", text);
    write_table(text, sizeof text, 4, false);
    cr_assert(strstr(text, "twice that, 4, needs 5.00 MiB, 1.00 MiB more than there is\n"), "%s",
              text);
}
