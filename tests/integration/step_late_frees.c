/* Owns the tests of a resize that frees its old buffers itself, at a moment of its choice: a free
 * of an address that was taken back never frees the block that has it by then, and is told.
 * Must not know the library's inside. */
#include <stdio.h>

#include "rig.h"

#define BUFFERS 3

/* When resize frees what it made before. */
enum manner {
    FREES_NOTHING,
    FREES_FIRST,
    FREES_EACH_BEFORE, /* each before the new one is made */
    FREES_EACH_AFTER   /* each after the new one is made, as realloc() does */
};

struct trainer {
    rebatch *rb;
    rebatch_pool *pool;
    enum manner manner;
    bool backwards;         /* the last buffer first */
    bool forgets;           /* the pointer is NULL once its buffer is freed */
    bool has_scratch;       /* resize allocates a block, and frees it */
    void *buffers[BUFFERS]; /* may be guarded */
    size_t room;            /* their samples */
    unsigned id;
    size_t fails_at; /* what the next resize fails with after so many buffers; 0: it does not */
    size_t fails_in; /* so does its so-manieth allocation, from 1, once an old buffer is freed */
    rebatch_status answer; /* of the next forward_backward */
    void *other;           /* a block of the program's */
};

static rebatch_device *device;
static rebatch *rb;
static char told[1024];

static void on_event(const rebatch_event *event, void *user)
{
    (void)user;
    if (event->kind == REBATCH_EVENT_LATE_FREE)
        (void)rebatch_event_format(told + strlen(told), sizeof told - strlen(told), event);
}

static void session_open(size_t capacity)
{
    told[0] = '\0';
    open_on_host(&device, &rb, capacity, &OPTIONS(.on_event = on_event, .grow_after = 100));
}

static void session_close(void)
{
    rebatch_close(rb);
    rebatch_device_close(device);
}

static void *allocate(size_t bytes, unsigned char value)
{
    void *block = NULL;
    if (rebatch_pool_alloc(&block, rebatch_get_pool(rb), bytes, NULL, 0) == REBATCH_OK)
        memset(block, value, bytes);
    return block;
}

static void give_back(void *block)
{
    OK(rebatch_pool_free(rebatch_get_pool(rb), block));
}

static unsigned char mark_of(const struct trainer *t, size_t i)
{
    return (unsigned char)(16 * t->id + i + 1);
}

static size_t bytes_of(size_t samples, size_t i)
{
    return samples * (i + 1) * MIB(1) / 4;
}

static void check_block(void *block, size_t bytes, unsigned char value)
{
    size_t has = 0;
    OK(rebatch_pool_block_bytes(&has, rebatch_get_pool(rb), block));
    cr_assert_geq(has, bytes);
    for (size_t k = 0; k < bytes; k += 4096)
        cr_assert_eq(((unsigned char *)block)[k], value, "a block was overwritten");
}

static void check_buffers(const struct trainer *t)
{
    for (size_t i = 0; i < BUFFERS; i++)
        check_block(t->buffers[i], bytes_of(t->room, i), mark_of(t, i));
}

static rebatch_status make(struct trainer *t, size_t samples, size_t i)
{
    void *const old = t->buffers[i];
    if (t->manner == FREES_EACH_BEFORE)
        give_back(old);
    if (t->forgets && t->manner != FREES_EACH_AFTER)
        t->buffers[i] = NULL;
    const bool fails = t->fails_in && --t->fails_in == 0;
    void *const block = fails ? NULL : allocate(bytes_of(samples, i), mark_of(t, i));
    if (!block)
        return REBATCH_OOM;
    if (t->manner == FREES_EACH_AFTER)
        give_back(old);
    t->buffers[i] = block;
    return REBATCH_OK;
}

static rebatch_status resize(size_t samples, void *user)
{
    struct trainer *const t = user;
    t->room = 0;
    for (size_t i = 0; i < BUFFERS && t->manner == FREES_FIRST; i++)
        give_back(t->buffers[i]);
    if (t->has_scratch) {
        void *const scratch = allocate(MIB(1), 0);
        if (!scratch)
            return REBATCH_OOM;
        give_back(scratch);
    }
    for (size_t k = 0; k < BUFFERS; k++) {
        if (t->fails_at && t->fails_at == k) {
            t->fails_at = 0;
            return REBATCH_OOM;
        }
        const rebatch_status status = make(t, samples, t->backwards ? BUFFERS - 1 - k : k);
        if (status)
            return status;
    }
    t->room = samples;
    return REBATCH_OK;
}

static rebatch_status zero_grad(void *user)
{
    check_buffers(user);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *const t = user;
    check_buffers(t);
    cr_assert_leq(mb->count, t->room);
    const rebatch_status answer = t->answer;
    t->answer = REBATCH_OK;
    if (!answer)
        rebatch_mutating(rb);
    return answer;
}

static rebatch_status optimizer_step(void *user)
{
    check_buffers(user);
    rebatch_mutating(rb);
    return REBATCH_OK;
}

static rebatch_status step(struct trainer *t, size_t batch)
{
    const rebatch_step_ops ops = OPS(zero_grad, forward_backward, optimizer_step,
                                     .flags = REBATCH_DECLARES_MUTATION, .resize = resize);
    return rebatch_step(rb, &ops, batch, t, NULL);
}

static void expect_step(struct trainer *t, size_t batch)
{
    OK(step(t, batch));
}

static uint64_t live_bytes(void)
{
    return pool_stats_of(rebatch_get_pool(rb)).live_bytes;
}

static uint64_t buffer_bytes(size_t samples)
{
    return bytes_of(samples, 0) + bytes_of(samples, 1) + bytes_of(samples, 2);
}

/* ---- buffers are whole whenever they are freed ---- */

/* The size falls after an OOM and rises with the batch, back and forth. */
static void resize_often(struct trainer *t)
{
    static const size_t batches[] = {4, 16, 8, 32, 32, 16, 64};
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        t->answer = i % 2 ? REBATCH_OOM : REBATCH_OK;
        t->fails_at = i % 3;
        expect_step(t, batches[i]);
        cr_expect_eq(live_bytes(), buffer_bytes(t->room), "%zu bytes for %zu samples",
                     (size_t)live_bytes(), t->room);
    }
}

/* What frees as many old buffers as it makes has nothing doubtful about it. */
static void resize_in_all_manners(bool is_guarded)
{
    for (int backwards = 0; backwards < 2; backwards++)
        for (int manner = FREES_NOTHING; manner <= FREES_EACH_AFTER; manner++) {
            struct trainer t = {.manner = (enum manner)manner, .backwards = backwards};
            session_open(MIB(400));
            if (is_guarded)
                OK(rebatch_guard(rb, t.buffers, sizeof t.buffers, REBATCH_GUARD_HOST));
            resize_often(&t);
            cr_expect_str_eq(told, "", "manner %d", manner);
            session_close();
        }
}

Test(step_late_frees, old_buffers_may_be_freed_at_any_moment_of_resize)
{
    resize_in_all_manners(false);
}

Test(step_late_frees, so_they_may_where_their_pointers_are_guarded)
{
    resize_in_all_manners(true);
}

/* ---- blocks of others that have the address of an old buffer ---- */

/* A step that fails takes the buffers back that it made; the program then has their memory. */
Test(step_late_frees, a_block_of_the_program_with_an_old_address_is_left_alone)
{
    struct trainer t = {.manner = FREES_FIRST};
    session_open(MIB(400));
    t.answer = REBATCH_E_USER;
    cr_assert_eq(step(&t, 8), REBATCH_E_USER);
    cr_assert_eq(live_bytes(), 0);
    t.other = allocate(MIB(1), 200);
    cr_assert(t.other == t.buffers[0] || t.other == t.buffers[1] || t.other == t.buffers[2],
              "the test needs an address that is given out again");
    expect_step(&t, 8);
    check_block(t.other, MIB(1), 200);
    cr_expect_neq(told[0], '\0', "the program may have meant its own block");
    session_close();
}

/* Each has its buffers taken back for the other's. */
Test(step_late_frees, two_trainers_leave_each_others_buffers_and_blocks_alone)
{
    static struct trainer t[2];
    memset(t, 0, sizeof t);
    session_open(MIB(400));
    for (unsigned i = 0; i < 2; i++)
        t[i] = (struct trainer){.id = i, .manner = FREES_EACH_AFTER};
    for (unsigned i = 0; i < 8; i++) {
        struct trainer *const mine = &t[i % 2];
        expect_step(mine, 4 << i % 3);
        if (i == 3) /* at an address that the other one still holds */
            mine->other = allocate(MIB(1), 200);
    }
    check_block(t[1].other, MIB(1), 200);
    cr_expect_eq(live_bytes(), MIB(1) + buffer_bytes(t[1].room));
    session_close();
}

/* ---- what stays is told, and goes with the buffers ---- */

Test(step_late_frees, scratch_with_an_old_address_stays_until_the_next_size_and_is_told)
{
    struct trainer t = {.has_scratch = true};
    session_open(MIB(400));
    expect_step(&t, 4);
    cr_expect_eq(live_bytes(), buffer_bytes(4));
    cr_expect_str_eq(told, "");
    expect_step(&t, 8);
    cr_expect_eq(live_bytes(), buffer_bytes(8) + MIB(1), "%zu bytes", (size_t)live_bytes());
    cr_expect(strstr(told, "where a new block is: 0x") && strstr(told, "stays"), "%s", told);
    told[0] = '\0';
    expect_step(&t, 16);
    cr_expect_str_eq(told, "", "once a session");
    t.has_scratch = false;
    expect_step(&t, 32);
    cr_expect_eq(live_bytes(), buffer_bytes(32), "%zu bytes", (size_t)live_bytes());
    session_close();
}

/* Nothing is doubtful where old buffers are freed first. */
Test(step_late_frees, old_buffers_that_are_freed_first_are_no_event)
{
    struct trainer t = {.manner = FREES_FIRST, .has_scratch = true};
    session_open(MIB(400));
    for (size_t batch = 4; batch <= 64; batch *= 2) {
        t.answer = batch > 16 ? REBATCH_OOM : REBATCH_OK;
        expect_step(&t, batch);
        cr_expect_eq(live_bytes(), buffer_bytes(t.room), "%zu bytes", (size_t)live_bytes());
    }
    cr_expect_str_eq(told, "");
    session_close();
}

/* The second free of an address in a call is that of the new block. */
static rebatch_status resize_twice(size_t samples, void *user)
{
    struct trainer *const t = user;
    void *const old = t->buffers[0];
    give_back(old);
    void *const block = allocate(samples * MIB(1), 1);
    if (!block)
        return REBATCH_OOM;
    give_back(block);
    t->buffers[0] = allocate(samples * MIB(1), 1);
    return t->buffers[0] ? REBATCH_OK : REBATCH_OOM;
}

static rebatch_status do_nothing(void *user)
{
    (void)user;
    rebatch_mutating(rb);
    return REBATCH_OK;
}

static rebatch_status run_nothing(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    return do_nothing(user);
}

Test(step_late_frees, a_new_block_is_freed_once_the_old_one_was)
{
    struct trainer t = {0};
    const rebatch_step_ops ops = OPS(do_nothing, run_nothing, do_nothing,
                                     .flags = REBATCH_DECLARES_MUTATION, .resize = resize_twice);
    session_open(MIB(400));
    for (size_t batch = 4; batch <= 32; batch *= 2) {
        OK(rebatch_step(rb, &ops, batch, &t, NULL));
        cr_expect_eq(live_bytes(), batch * MIB(1), "%zu bytes", (size_t)live_bytes());
    }
    cr_expect_str_eq(told, "");
    session_close();
}

/* ---- buffers of before the first step ---- */

static void make_before(struct trainer *t)
{
    for (size_t i = 0; i < BUFFERS; i++)
        t->buffers[i] = allocate(bytes_of(1, i), mark_of(t, i));
    t->room = 1;
}

/* Each old buffer is freed, and its new one does not fit: that free is not undone, as nobody knows
 * the old address any more. */
Test(step_late_frees, buffers_made_before_the_first_step_may_be_freed_in_resize)
{
    for (int backwards = 0; backwards < 2; backwards++)
        for (int manner = FREES_FIRST; manner <= FREES_EACH_AFTER; manner++) {
            struct trainer t = {.manner = (enum manner)manner, .backwards = backwards};
            session_open(MIB(8));
            make_before(&t);
            expect_step(&t, 64);
            cr_expect_eq(t.room, 4);
            cr_expect_eq(live_bytes(), buffer_bytes(4), "manner %d: %zu bytes", manner,
                         (size_t)live_bytes());
            resize_often(&t);
            cr_expect_str_eq(told, "", "manner %d", manner);
            session_close();
        }
}

/* A resize that fails leaves old pointers and new ones, NULL where it had come to, or none for the
 * buffers that it had not; also one that fails again, at another buffer. */
Test(step_late_frees, a_resize_that_frees_what_it_has_is_no_event_after_it_failed)
{
    for (int way = 0; way < 8 * 64; way += 7)
        for (int manner = FREES_FIRST; manner <= FREES_EACH_AFTER; manner++) {
            struct trainer t = {
                .manner = (enum manner)manner, .backwards = way % 2, .forgets = way / 2 % 2};
            session_open(MIB(16));
            if (way / 4 % 2)
                make_before(&t);
            for (int i = 0; i < 3; i++) {
                t.fails_in = (size_t)(way / 8 >> 2 * i) % 4;
                expect_step(&t, (size_t)i + 2);
            }
            cr_expect_str_eq(told, "", "way %d, manner %d", way, manner);
            session_close();
        }
}

/* So it is where resize fails for good; and a later step makes all of them. */
Test(step_late_frees, what_resize_frees_stays_freed_when_it_fails)
{
    struct trainer t = {.manner = FREES_EACH_BEFORE, .fails_at = 2};
    open_on_host(&device, &rb, MIB(400), &OPTIONS(.max_attempts = 1));
    make_before(&t);
    cr_assert_eq(step(&t, 8), REBATCH_E_EXHAUSTED);
    cr_expect_eq(live_bytes(), bytes_of(1, 2), "%zu bytes", (size_t)live_bytes());
    expect_step(&t, 8);
    cr_expect_eq(live_bytes(), buffer_bytes(8), "%zu bytes", (size_t)live_bytes());
    session_close();
}

/* A pointer that a guard puts back points to memory. */
Test(step_late_frees, what_a_guarded_pointer_points_to_is_back_when_resize_fails)
{
    struct trainer t = {.manner = FREES_EACH_BEFORE, .fails_at = 2};
    open_on_host(&device, &rb, MIB(400), &OPTIONS(.max_attempts = 1));
    OK(rebatch_guard(rb, t.buffers, sizeof t.buffers, REBATCH_GUARD_HOST));
    make_before(&t);
    cr_assert_eq(step(&t, 8), REBATCH_E_EXHAUSTED);
    t.room = 1;
    check_buffers(&t);
    expect_step(&t, 8);
    cr_expect_eq(live_bytes(), buffer_bytes(8), "%zu bytes", (size_t)live_bytes());
    session_close();
}
