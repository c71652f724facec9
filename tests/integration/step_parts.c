/* Owns the tests of batches that are made of parts: no micro-batch goes from one into another.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

static size_t parts[SCRIPT_SAMPLES]; /* their sizes; 0 ends them */

static size_t left_in_part(size_t first, void *user)
{
    (void)user;
    size_t end = 0;
    for (size_t i = 0; parts[i] && end <= first; i++)
        end += parts[i];
    cr_assert_gt(end, first, "no part has sample %zu", first);
    return end - first;
}

static void set_parts(struct rig *rig, const size_t *sizes, size_t count)
{
    memset(parts, 0, sizeof parts);
    memcpy(parts, sizes, count * sizeof *sizes);
    rig->ops.part = left_in_part;
}

#define SET_PARTS(rig, ...)                                                                        \
    set_parts(rig, (const size_t[]){__VA_ARGS__}, sizeof(size_t[]){__VA_ARGS__} / sizeof(size_t))

Test(step_parts, each_part_is_cut_as_a_batch_of_its_own)
{
    static const struct {
        const char *what;
        size_t start, smallest;
        const char *trace;
    } cases[] = {
        {.what = "parts that fit run as they are", .trace = "z f0+5 f5+8 f13+3 u"},
        {.what = "the rest of a part runs alone",
         .start = 4,
         .trace = "z f0+4 f4+1 f5+4 f9+4 f13+3 u"},
        {.what = "the rest of a part has an allowed size",
         .start = 4,
         .smallest = 2,
         .trace = "z f0+3 f3+2 f5+4 f9+4 f13+3 u"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OPEN(rig, rig, MIB(64),
             &OPTIONS(.micro_start = cases[i].start, .micro_smallest = cases[i].smallest,
                      .growth = REBATCH_OFF));
        SET_PARTS(&rig, 5, 8, 3);
        OK(rig_step(&rig, 16));
        cr_assert_str_eq(script_trace(&rig.script), cases[i].trace, "%s: %s", cases[i].what,
                         script_trace(&rig.script));
    }
}

Test(step_parts, the_longest_part_is_the_largest_size)
{
    OPEN(rig, rig, MIB(64), NULL);
    SET_PARTS(&rig, 5, 8, 3);
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.micro_after, 8);
    SET_PARTS(&rig, 16);
    STEP(&rig, 16, REBATCH_OK, "z f0+16 u");
}

Test(step_parts, an_oom_cuts_the_part_that_it_struck)
{
    OPEN(rig, rig, KIB(64) * 6, &OPTIONS(.growth = REBATCH_OFF));
    rig.script.sample_bytes = KIB(64);
    SET_PARTS(&rig, 5, 8, 3);
    STEP(&rig, 16, REBATCH_OK, "z f0+5 f5+8! f5+4~1 f9+4~1 f13+3 u");
    cr_assert_eq(rig.report.redone_samples, 8);
    STEP(&rig, 16, REBATCH_OK, "z f0+4 f4+1 f5+4 f9+4 f13+3 u");
}

Test(step_parts, a_cost_is_asked_within_a_part)
{
    size_t lengths[SCRIPT_SAMPLES];
    for (size_t i = 0; i < SCRIPT_SAMPLES; i++)
        lengths[i] = i < 5 ? 2 : 1;
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_start = 3, .growth = REBATCH_OFF));
    rig.script.lengths = lengths;
    SET_PARTS(&rig, 5, 8, 3);
    STEP(&rig, 16, REBATCH_OK, "z f0+3 f3+2 f5+6 f11+2 f13+3 u");
}
