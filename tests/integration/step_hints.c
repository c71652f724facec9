/* Owns the tests of what a session says of a step's mistakes while it trains.
 * Must not know more of the library than its public headers say. */
#include "rig.h"

#define LINES 64

enum mistake { NONE, SWALLOWS, RETURNS_ONE, NEVER_FREES, UPDATE_NEVER_FREES, KEEPS_A_LITTLE };

struct trainer {
    enum mistake mistake;
    rebatch_device *device;
    rebatch *rb;
    rebatch_tag tag;
    char lines[LINES][512]; /* events of level WARN and above */
    rebatch_event_kind kinds[LINES];
    size_t count;
};

static void collect(const rebatch_event *event, void *user)
{
    struct trainer *t = user;
    if (event->level > REBATCH_LOG_WARN || t->count == LINES)
        return;
    (void)rebatch_event_format(t->lines[t->count], sizeof t->lines[0], event);
    t->kinds[t->count++] = event->kind;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *memory, *left;
    rebatch_status status = REBATCH_OK;
    if (t->mistake == RETURNS_ONE)
        return (rebatch_status)1;
    if (t->mistake == NEVER_FREES)
        status = rebatch_pool_alloc(&left, mb->pool, KIB(256), mb->stream, t->tag);
    if (t->mistake == KEEPS_A_LITTLE)
        status = rebatch_pool_alloc(&left, mb->pool, mb->step ? 512 : MIB(1), mb->stream, t->tag);
    if (!status)
        status = rebatch_pool_alloc(&memory, mb->pool, mb->count * KIB(64), mb->stream, 0);
    if (status)
        return t->mistake == SWALLOWS ? REBATCH_OK : status;
    rebatch_mutating(t->rb);
    return rebatch_pool_free(mb->pool, memory);
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    void *left;
    if (t->mistake == UPDATE_NEVER_FREES &&
        rebatch_pool_alloc(&left, rebatch_get_pool(t->rb), KIB(256), NULL, 0))
        return REBATCH_OOM;
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

static void open_trainer_with(struct trainer *t, enum mistake mistake, rebatch_options options)
{
    memset(t, 0, sizeof *t);
    t->mistake = mistake;
    options.on_event = collect;
    options.on_event_user = t;
    open_on_host(&t->device, &t->rb, MIB(64), &options);
    OK(rebatch_pool_tag(&t->tag, rebatch_get_pool(t->rb), "attention"));
}

static rebatch_options limited_to(size_t bytes)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool.limit_bytes = bytes;
    return options;
}

static void trainer_open(struct trainer *t, enum mistake mistake, size_t limit_bytes)
{
    open_trainer_with(t, mistake, limited_to(limit_bytes));
}

CLOSE_BOTH(trainer)

static rebatch_status step(struct trainer *t)
{
    rebatch_step_ops ops = OPS(nothing_to_do, forward_backward, optimizer_step,
                               .flags = t->mistake == SWALLOWS ? 0 : REBATCH_DECLARES_MUTATION);
    return rebatch_step(t->rb, &ops, 8, t, NULL);
}

static const char *find(const struct trainer *t, rebatch_event_kind kind, size_t nth)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->kinds[i] == kind && nth-- == 0)
            return t->lines[i];
    return "no such event";
}

Test(step_hints, an_allocation_that_failed_in_a_callback_that_succeeds_is_said_each_time)
{
    static struct trainer t;
    trainer_open(&t, SWALLOWS, KIB(256));
    OK(step(&t));
    OK(step(&t));
    cr_assert_eq(t.count, 2);
    cr_assert_str_eq(find(&t, REBATCH_EVENT_SWALLOWED, 0),
                     "step 0: an allocation failed in forward_backward of samples 0-7, of 512 KiB, "
                     "and the callback returned REBATCH_OK: correct only if it copes");
    HAS(find(&t, REBATCH_EVENT_SWALLOWED, 1), "step 1");
    trainer_close(&t);
}

Test(step_hints, the_samples_of_a_swallowed_allocation_are_named)
{
    static struct trainer t;
    rebatch_options options = limited_to(KIB(128));
    options.micro_start = 4;
    open_trainer_with(&t, SWALLOWS, options);
    OK(step(&t));
    cr_assert_eq(t.count, 2);
    HAS(find(&t, REBATCH_EVENT_SWALLOWED, 0), "forward_backward of samples 0-3,");
    HAS(find(&t, REBATCH_EVENT_SWALLOWED, 1), "forward_backward of samples 4-7,");
    trainer_close(&t);
}

Test(step_hints, an_oom_without_an_allocation_that_failed_is_said)
{
    static struct trainer t;
    trainer_open(&t, RETURNS_ONE, MIB(4));
    cr_assert_eq(step(&t), REBATCH_E_EXHAUSTED);
    HAS(find(&t, REBATCH_EVENT_SHRINK, 0),
        "REBATCH_OOM was returned, but no allocation is known to have failed");
    SAYS("REBATCH_OOM, which is 1, was returned");
    cr_assert_null(strstr(rebatch_last_error(), "raise the limit"));
    trainer_close(&t);
}

Test(step_hints, memory_that_is_never_freed_is_named)
{
    static struct trainer t;
    rebatch_status status;
    size_t steps = 0;
    trainer_open(&t, NEVER_FREES, MIB(3));
    while ((status = step(&t)) == REBATCH_OK && steps < 100)
        steps++;
    cr_assert_eq(status, REBATCH_E_EXHAUSTED);
    cr_assert_str_eq(find(&t, REBATCH_EVENT_LEAK, 0),
                     "step 3: memory grows: each of the last 3 steps left more memory allocated, "
                     "768 KiB in all; the last one left 1 block of up to 256 KiB (attention), of "
                     "zero_grad or forward_backward");
    SAYS("steps left more memory allocated");
    cr_assert_null(strstr(rebatch_last_error(), "raise the limit"));
    trainer_close(&t);
    trainer_open(&t, UPDATE_NEVER_FREES, MIB(8));
    for (int i = 0; i < 4; i++)
        OK(step(&t));
    HAS(find(&t, REBATCH_EVENT_LEAK, 0), "of optimizer_step");
    trainer_close(&t);
}

/* As another training of the process, or data that is moved to the device. */
Test(step_hints, what_a_program_allocates_once_between_steps_is_no_growth_of_each)
{
    static struct trainer t;
    void *others;
    trainer_open(&t, KEEPS_A_LITTLE, MIB(32));
    for (int i = 0; i < 8; i++) {
        if (i == 3)
            OK(rebatch_pool_alloc(&others, rebatch_get_pool(t.rb), MIB(16), NULL, 0));
        OK(step(&t));
    }
    HAS(find(&t, REBATCH_EVENT_LEAK, 0), "no such event");
    trainer_close(&t);
}

static void expect_said(const char *part)
{
    cr_expect(strstr(rebatch_last_error(), part), "%s", rebatch_last_error());
}

/* Trains until a step is exhausted. */
static void exhaust(struct trainer *t)
{
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < 100 && status == REBATCH_OK; i++)
        status = step(t);
    cr_assert_eq(status, REBATCH_E_EXHAUSTED, "%s", rebatch_last_error());
}

Test(step_hints, exhausted_names_the_limit_and_what_was_in_use_before_the_step)
{
    static struct trainer t;
    void *held;
    trainer_open(&t, NONE, MIB(4));
    cr_assert_eq(rebatch_pool_alloc(&held, rebatch_get_pool(t.rb), MIB(4), NULL, t.tag), 0);
    exhaust(&t);
    expect_said("; limit 4.00 MiB, of which 4.00 MiB were in use before the step; there is "
                "nothing smaller or lighter to try: free memory, or raise the limit");
    const rebatch_map_ops map = {.struct_size = sizeof map, .run = forward_backward};
    cr_expect_eq(rebatch_map(t.rb, &map, 8, &t, NULL), REBATCH_E_EXHAUSTED);
    expect_said("; limit 4.00 MiB, of which 4.00 MiB were in use before the map; ");
    OK(rebatch_pool_free(rebatch_get_pool(t.rb), held));
    cr_expect_eq(step(&t), REBATCH_OK);
    trainer_close(&t);
}

/* Without a limit, and with one that is more than the device has left. */
Test(step_hints, exhausted_names_the_device_where_that_is_the_bound)
{
    for (size_t limit_bytes = 0; limit_bytes <= MIB(48); limit_bytes += MIB(48)) {
        static struct trainer t;
        rebatch_pool *other;
        void *held, *others;
        trainer_open(&t, NONE, limit_bytes);
        OK(rebatch_pool_create(&other, t.device, NULL));
        OK(rebatch_pool_alloc(&others, other, MIB(24), NULL, 0));
        cr_assert_eq(rebatch_pool_alloc(&held, rebatch_get_pool(t.rb), MIB(40), NULL, 0), 0);
        exhaust(&t);
        expect_said("; the device has 64.0 MiB, of which 40.0 MiB were in use before the step and "
                    "24.0 MiB are outside the pool; there is nothing smaller");
        rebatch_pool_destroy(other);
        trainer_close(&t);
    }
}

/* A limit that was lowered, a device that became smaller, and memory that lies on the host. */
Test(step_hints, exhausted_says_that_more_is_in_use_than_there_may_be)
{
    static const struct {
        size_t limit, capacity, overflow;
        const char *said;
    } rows[] = {
        {MIB(2), MIB(64), 0, "; limit 2.00 MiB, but 8.00 MiB were in use before the step; "},
        {0, MIB(4), 0, "; the device has 4.00 MiB, but 8.00 MiB were in use before the step; "},
        {MIB(2), MIB(4), 0, "; limit 2.00 MiB, but 8.00 MiB were in use before the step; "},
        {MIB(8), MIB(64), MIB(16), "; limit 8.00 MiB, but 16.0 MiB were in use before the step; "},
        {MIB(8), MIB(64), 0, "; limit 8.00 MiB, of which 8.00 MiB were in use before the step; "},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static struct trainer t;
        rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
        const rebatch_options options = limited_to(MIB(8));
        void *held[2] = {NULL, NULL};
        t = (struct trainer){.mistake = NONE};
        host.overflow_bytes = rows[i].overflow;
        OK(rebatch_device_open_host(&t.device, MIB(64), &host));
        OK(rebatch_open(&t.rb, t.device, &options));
        rebatch_pool *const pool = rebatch_get_pool(t.rb);
        OK(rebatch_pool_alloc(&held[0], pool, MIB(8), NULL, 0));
        OK(rebatch_pool_allow_overflow(pool, true));
        if (rows[i].overflow)
            OK(rebatch_pool_alloc(&held[1], pool, MIB(8), NULL, 0));
        OK(rebatch_pool_allow_overflow(pool, false));
        OK(rebatch_pool_set_limit(pool, rows[i].limit));
        OK(rebatch_device_set_capacity(t.device, rows[i].capacity));
        exhaust(&t);
        expect_said(rows[i].said);
        trainer_close(&t);
    }
}

/* Whatever else ended the step. */
Test(step_hints, exhausted_names_who_holds_what_grew)
{
    static struct trainer t;
    rebatch_options options = limited_to(MIB(3));
    options.micro_smallest = 2;
    open_trainer_with(&t, NEVER_FREES, options);
    exhaust(&t);
    expect_said("; limit 3.00 MiB, of which ");
    expect_said("; the smallest micro-batch allowed is 2: lower it; each of the last ");
    expect_said("the last one left 1 block of up to 256 KiB (attention)");
    expect_said(": free what is not needed");
    trainer_close(&t);
}

/* A batch that is longer than the one before leaves more, too; not so often in a row. */
Test(step_hints, a_little_more_in_each_step_is_said_later)
{
    static struct trainer t;
    trainer_open(&t, KEEPS_A_LITTLE, MIB(3));
    for (int i = 0; i < 16; i++)
        OK(step(&t));
    cr_assert_eq(t.count, 0, "%s", t.lines[0]);
    OK(step(&t));
    HAS(find(&t, REBATCH_EVENT_LEAK, 0), "step 16: memory grows");
    trainer_close(&t);
}

Test(step_hints, a_step_without_mistakes_says_nothing)
{
    static struct trainer t;
    trainer_open(&t, NONE, MIB(3));
    for (int i = 0; i < 100; i++)
        OK(step(&t));
    cr_assert_eq(t.count, 0, "%s", t.lines[0]);
    trainer_close(&t);
}
