/* Holds who holds what: tags, peaks, the summary and the report as texts.
 * Seeds: 1 in the random test. */
#include <stdio.h>

#include "unit/pool_help.h"

static void *take_tagged(rebatch_pool *pool, size_t bytes, rebatch_tag tag)
{
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, pool, bytes, NULL, tag), REBATCH_OK);
    return pointer;
}

static rebatch_tag make_tag(rebatch_pool *pool, const char *name)
{
    rebatch_tag tag;
    cr_assert_eq(rebatch_pool_tag(&tag, pool, name), REBATCH_OK);
    return tag;
}

static rebatch_tag_usage usage_of(rebatch_pool *pool, rebatch_tag tag)
{
    rebatch_tag_usage usage;
    cr_assert_eq(rebatch_pool_get_tag_usage(&usage, pool, tag), REBATCH_OK);
    return usage;
}

/* The same name gives the same tag; 31 bytes of it count. */
Test(pool_report, the_same_name_gives_the_same_tag)
{
    AUTO_RIG rig = rig_open(8, NULL);
    const rebatch_tag a = make_tag(rig.pool, "weights");
    cr_assert_neq(a, 0);
    cr_assert_neq(make_tag(rig.pool, "weight"), a);
    cr_assert_eq(make_tag(rig.pool, "weights"), a);
    const rebatch_tag cut = make_tag(rig.pool, "0123456789012345678901234567890123456789");
    cr_assert_eq(make_tag(rig.pool, "0123456789012345678901234567890"), cut);
    cr_assert_str_eq(usage_of(rig.pool, cut).name, "0123456789012345678901234567890");
    cr_assert_eq(make_tag(rig.pool, "untagged"), 0);
    rebatch_tag tag = 5;
    assert_refused(rebatch_pool_tag(&tag, rig.pool, NULL), REBATCH_E_INVALID, "name is NULL");
    assert_refused(rebatch_pool_tag(&tag, rig.pool, ""), REBATCH_E_INVALID, "name is empty");
    cr_assert_eq(tag, 0);
    assert_refused(rebatch_pool_tag(NULL, rig.pool, "a"), REBATCH_E_INVALID, "out is NULL");
    assert_refused(rebatch_pool_tag(&tag, NULL, "a"), REBATCH_E_INVALID, "pool is NULL");
    rebatch_tag_usage usage;
    assert_refused(rebatch_pool_get_tag_usage(&usage, rig.pool, 4), REBATCH_E_INVALID, "tag is 4");
    assert_refused(rebatch_pool_get_tag_usage(NULL, rig.pool, 0), REBATCH_E_INVALID, "out is");
}

/* 255 tags can be made. */
Test(pool_report, two_hundred_and_fifty_five_tags_can_be_made)
{
    AUTO_RIG rig = rig_open(8, NULL);
    char name[16];
    for (int i = 0; i < 255; i++) {
        (void)snprintf(name, sizeof name, "tag %d", i);
        cr_assert_eq(make_tag(rig.pool, name), i + 1);
    }
    rebatch_tag tag;
    assert_refused(rebatch_pool_tag(&tag, rig.pool, "more"), REBATCH_E_UNSUPPORTED, "255 tags");
    cr_assert_eq(make_tag(rig.pool, "tag 254"), 255);
}

/* A tag knows what it holds, the most it held, and what it held at the pool's peak. */
Test(pool_report, a_tag_knows_its_share_of_the_peak)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_tag a = make_tag(rig.pool, "a");
    const rebatch_tag b = make_tag(rig.pool, "b");
    void *a1 = take_tagged(rig.pool, 6 * KIB, a);
    void *b1 = take_tagged(rig.pool, 3 * KIB, b); /* 9, a 6, b 3 */
    give(rig.pool, a1);
    void *b2 = take_tagged(rig.pool, 4 * KIB, b); /* 7: no peak, though b's own */
    cr_assert_eq(usage_of(rig.pool, a).at_peak_bytes, 6 * KIB);
    cr_assert_eq(usage_of(rig.pool, b).at_peak_bytes, 3 * KIB);
    cr_assert_eq(usage_of(rig.pool, b).peak_bytes, 7 * KIB);
    cr_assert_eq(usage_of(rig.pool, a).live_bytes, 0);
    void *a2 = take_tagged(rig.pool, 5 * KIB, a); /* 12: a 5, b 7 */
    give(rig.pool, b1);
    give(rig.pool, b2);
    cr_assert_eq(usage_of(rig.pool, a).at_peak_bytes, 5 * KIB);
    cr_assert_eq(usage_of(rig.pool, b).at_peak_bytes, 7 * KIB);
    cr_assert_eq(usage_of(rig.pool, a).peak_bytes, 6 * KIB);
    cr_assert_eq(rebatch_pool_reset_peaks(rig.pool), REBATCH_OK);
    cr_assert_eq(usage_of(rig.pool, a).at_peak_bytes, 5 * KIB);
    cr_assert_eq(usage_of(rig.pool, a).peak_bytes, 5 * KIB);
    cr_assert_eq(usage_of(rig.pool, b).at_peak_bytes, 0);
    cr_assert_eq(usage_of(rig.pool, b).peak_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).live_peak_bytes, 5 * KIB);
    cr_assert_eq(stats_of(rig.pool).blocks_peak, 1);
    give(rig.pool, a2);
}

/* What was reserved at the most is counted anew from what is. */
Test(pool_report, peaks_are_counted_anew)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *kept = take(rig.pool, PAGE);
    give(rig.pool, take(rig.pool, 20 * PAGE));
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, NULL), REBATCH_OK);
    cr_assert_geq(stats_of(rig.pool).reserved_peak_bytes, 21 * PAGE);
    cr_assert_lt(stats_of(rig.pool).reserved_bytes, 21 * PAGE);
    cr_assert_eq(rebatch_pool_reset_peaks(rig.pool), REBATCH_OK);
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert_eq(stats.reserved_peak_bytes, stats.reserved_bytes);
    cr_assert_eq(stats.live_peak_bytes, stats.live_bytes);
    cr_assert_eq(stats.blocks_peak, stats.blocks);
    give(rig.pool, kept);
}

/* The same by chance, against a naive copy of all tags at each peak. */
Test(pool_report, shares_of_the_peak_are_those_of_a_naive_count)
{
    enum { TAGS = 5, BLOCKS = 40 };
    AUTO_RIG rig = rig_open(512, NULL);
    uint64_t random = 1;
    void *blocks[BLOCKS] = {NULL};
    rebatch_tag tags[BLOCKS] = {0};
    size_t sizes[BLOCKS] = {0};
    uint64_t live[TAGS + 1] = {0}, at_peak[TAGS + 1] = {0}, all = 0, peak = 0;
    for (int i = 0; i < TAGS; i++) {
        char name[2] = {(char)('a' + i), 0};
        (void)make_tag(rig.pool, name);
    }
    for (int n = 0; n < 5000; n++) {
        const size_t at = draw(&random) % BLOCKS;
        if (blocks[at]) {
            give(rig.pool, blocks[at]);
            live[tags[at]] -= sizes[at];
            all -= sizes[at];
            blocks[at] = NULL;
        } else {
            tags[at] = (rebatch_tag)(draw(&random) % (TAGS + 1));
            sizes[at] = (draw(&random) % 32 + 1) * UNIT;
            blocks[at] = take_tagged(rig.pool, sizes[at], tags[at]);
            live[tags[at]] += sizes[at];
            all += sizes[at];
            if (all > peak) {
                peak = all;
                memcpy(at_peak, live, sizeof live);
            }
        }
        if (n % 1000 == 999) {
            cr_assert_eq(rebatch_pool_reset_peaks(rig.pool), REBATCH_OK);
            peak = all;
            memcpy(at_peak, live, sizeof live);
        }
        for (rebatch_tag t = 0; t <= TAGS; t++) {
            cr_assert_eq(usage_of(rig.pool, t).live_bytes, live[t]);
            cr_assert_eq(usage_of(rig.pool, t).at_peak_bytes, at_peak[t]);
        }
    }
}

/* The report names at most six tags, those that hold most first, ties in the order of their
 * making. */
Test(pool_report, an_oom_report_names_the_largest_holders_first)
{
    static const size_t kib[] = {3, 9, 1, 9, 5, 0, 7, 2, 4};
    static const char *const wanted[] = {"b", "d", "g", "e", "i", "a"};
    AUTO_RIG rig = rig_open(8, NULL);
    for (size_t i = 0; i < sizeof kib / sizeof *kib; i++) {
        char name[2] = {(char)('a' + i), 0};
        const rebatch_tag tag = make_tag(rig.pool, name);
        if (kib[i])
            (void)take_tagged(rig.pool, kib[i] * KIB, tag);
    }
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 9 * PAGE, NULL, 0), REBATCH_OOM);
    rebatch_oom_report report;
    cr_assert_eq(rebatch_pool_last_oom(&report, rig.pool), REBATCH_OK);
    cr_assert_eq(report.tag_count, REBATCH_OOM_TAGS);
    for (size_t i = 0; i < REBATCH_OOM_TAGS; i++)
        cr_assert_str_eq(report.tags[i].name, wanted[i]);
    assert_refused(rebatch_pool_last_oom(NULL, rig.pool), REBATCH_E_INVALID, "out is NULL");
    assert_refused(rebatch_pool_last_oom(&report, NULL), REBATCH_E_INVALID, "pool is NULL");
}

static void assert_lines_fit(const char *text)
{
    while (*text) {
        const size_t length = strcspn(text, "\n");
        cr_assert_leq(length, 100, "%.*s", (int)length, text);
        text += length + (text[length] == '\n');
    }
}

/* The summary has every statistic and tag, no line is longer than 100 columns, and the length is
 * that of the whole text however small the buffer. */
Test(pool_report, the_summary_has_every_statistic_and_tag)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_tag tag = make_tag(rig.pool, "activations of the last layer");
    (void)take_tagged(rig.pool, 5 * KIB, tag);
    char text[8192];
    const size_t length = rebatch_pool_format_summary(text, sizeof text, rig.pool);
    cr_assert_eq(length, strlen(text));
    cr_assert_eq(rebatch_pool_format_summary(NULL, 0, rig.pool), length);
#define ASSERT_NAMED(name, unit, what)                                                             \
    cr_assert(strstr(text, #name));                                                                \
    cr_assert(strstr(text, what));
    REBATCH_POOL_STATISTICS(ASSERT_NAMED)
#undef ASSERT_NAMED
    cr_assert(strstr(text, "activations of the last layer"));
    cr_assert(strstr(text, "total allocated"));
    cr_assert(strstr(text, "5.00 KiB"));
    cr_assert_str_eq(text + length - 3, "--\n", "no line below the last rung");
    assert_lines_fit(text);
    char small[32];
    memset(small, 'x', sizeof small);
    cr_assert_eq(rebatch_pool_format_summary(small, 20, rig.pool), length);
    cr_assert_eq(strlen(small), 19);
    cr_assert_eq(small[20], 'x');
    cr_assert_eq(rebatch_pool_format_summary(small, sizeof small, NULL), 0);
    cr_assert_str_eq(small, "");
}

/* The report as text says what was asked, for what, what was there and what would have fitted. */
Test(pool_report, the_oom_report_reads_well)
{
    AUTO_RIG rig = rig_open(32, NULL);
    char text[2048];
    rebatch_oom_report report;
    cr_assert_eq(rebatch_pool_last_oom(&report, rig.pool), REBATCH_OK);
    cr_assert_gt(rebatch_oom_format(text, sizeof text, &report), 0);
    cr_assert(strstr(text, "no request has failed"));
    const rebatch_tag tag = make_tag(rig.pool, "weights");
    (void)take_tagged(rig.pool, PAGE, tag);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 24 * PAGE * 2, NULL, tag), REBATCH_OOM);
    cr_assert_eq(rebatch_pool_last_oom(&report, rig.pool), REBATCH_OK);
    const size_t length = rebatch_oom_format(text, sizeof text, &report);
    cr_assert_eq(length, strlen(text));
    cr_assert(strstr(text, "asked for 3.00 MiB for weights"));
    cr_assert(strstr(text, "no limit"));
    cr_assert(strstr(text, "1.94 MiB free of 2.00 MiB"));
    cr_assert(strstr(text, "up to 1.94 MiB would have been served"));
    assert_lines_fit(text);
    cr_assert_eq(rebatch_oom_format(NULL, 0, &report), length);
    cr_assert_eq(rebatch_oom_format(text, sizeof text, NULL), 0);
    report.tag_count = 1000; /* a report that is not ours must not be read beyond its end */
    report.stage = (rebatch_pool_stage)99;
    cr_assert_gt(rebatch_oom_format(text, sizeof text, &report), 0);
}

/* ---- what there is no more than ---- */

static struct rbi_pool_bound bound_of(rebatch_pool *pool)
{
    struct rbi_pool_bound bound;
    cr_assert_eq(rbi_pool_get_bound(&bound, pool), REBATCH_OK);
    return bound;
}

/* What an OOM is told to come from: the limit, where it leaves no more than the device has, and
 * else the device, with what others have of it. */
Test(pool_report, the_bound_is_whichever_leaves_less)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    void *others;
    struct rig rig = rig_open(16, NULL);
    cr_assert(!bound_of(rig.pool).is_limit, "there is none");
    cr_assert_eq(bound_of(rig.pool).bytes, 16 * PAGE);
    rig_close(&rig);
    options.limit_bytes = 8 * PAGE;
    rig = rig_open(16, &options);
    (void)take_tagged(rig.pool, 2 * PAGE, 0);
    cr_assert_eq(bound_of(rig.pool).bytes, 8 * PAGE);
    cr_assert_eq(bound_of(rig.pool).outside_bytes, 0, "what the pool has is its own");
    cr_assert_eq(rbi_device_alloc(rig.device, &others, 8 * PAGE), REBATCH_OK);
    cr_assert(bound_of(rig.pool).is_limit, "both leave 6 pages");
    cr_assert_eq(rbi_device_free(rig.device, others, 8 * PAGE), REBATCH_OK);
    cr_assert_eq(rbi_device_alloc(rig.device, &others, 9 * PAGE), REBATCH_OK);
    cr_assert(!bound_of(rig.pool).is_limit, "the device leaves 5");
    cr_assert_eq(bound_of(rig.pool).bytes, 16 * PAGE);
    cr_assert_eq(bound_of(rig.pool).outside_bytes, 9 * PAGE);
    cr_assert_eq(rbi_device_free(rig.device, others, 9 * PAGE), REBATCH_OK);
    rig_close(&rig);
}
