/* Owns the tests of streams on the host device: order, independence, waiting, and what is refused.
 * Must not know more of the library than its public headers say. */
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <time.h>

#include "device/device.h"
#include "fault/fault_device.h"
#include "rig.h"

#define CAPACITY_BYTES ((size_t)1 << 20)
#define BLOCK_BYTES ((size_t)64 << 10)

static rebatch_device *open_device(void)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, CAPACITY_BYTES, NULL));
    return device;
}

static rebatch_stream make_stream(rebatch_device *device)
{
    rebatch_stream stream;
    OK(rebatch_stream_create(&stream, device));
    cr_assert_not_null(stream);
    return stream;
}

static void enqueue(rebatch_device *device, rebatch_stream stream, void (*function)(void *),
                    void *user)
{
    OK(rebatch_stream_call(device, stream, function, user));
}

static void wait_for(void *user)
{
    sem_t *semaphore = user;
    (void)sem_wait(semaphore);
}

static void post(void *user)
{
    sem_t *semaphore = user;
    (void)sem_post(semaphore);
}

static void pause_a_little(void)
{
    const struct timespec some_time = {.tv_nsec = 5000000};
    (void)nanosleep(&some_time, NULL);
}

/* ---- order ---- */

#define CALLS 1000

struct order {
    size_t seen;
    bool wrong;
};

struct numbered {
    struct order *order;
    size_t number;
};

static void check_number(void *user)
{
    const struct numbered *n = user;
    n->order->wrong |= n->order->seen++ != n->number;
}

Test(device_stream, work_on_a_stream_runs_in_order)
{
    rebatch_device *device = open_device();
    rebatch_stream streams[3];
    static struct numbered calls[3][CALLS];
    struct order orders[3] = {0};
    for (size_t s = 0; s < 3; s++)
        streams[s] = s ? make_stream(device) : NULL;
    for (size_t i = 0; i < CALLS; i++)
        for (size_t s = 0; s < 3; s++) {
            calls[s][i] = (struct numbered){&orders[s], i};
            enqueue(device, streams[s], check_number, &calls[s][i]);
        }
    for (size_t s = 0; s < 3; s++) {
        OK(rebatch_stream_synchronize(device, streams[s]));
        cr_assert_eq(orders[s].seen, CALLS);
        cr_assert(!orders[s].wrong, "stream %zu", s);
        rebatch_stream_destroy(device, streams[s]);
    }
    rebatch_device_close(device);
}

Test(device_stream, calls_copies_and_fills_keep_one_order)
{
    rebatch_device *device = open_device();
    rebatch_stream stream = make_stream(device);
    static unsigned char a[4096], b[4096], c[4096];
    for (int round = 1; round <= 50; round++) {
        OK(rebatch_fill(device, a, (uint8_t)round, sizeof a, stream));
        OK(rebatch_copy(device, b, a, sizeof a, stream));
        OK(rebatch_fill(device, a, 0, sizeof a, stream));
        OK(rebatch_copy(device, c, b, sizeof b, stream));
        OK(rebatch_stream_synchronize(device, stream));
        for (size_t i = 0; i < sizeof a; i++)
            cr_assert(a[i] == 0 && b[i] == round && c[i] == round);
    }
    rebatch_stream_destroy(device, stream);
    rebatch_device_close(device);
}

Test(device_stream, streams_run_beside_each_other)
{
    rebatch_device *device = open_device();
    rebatch_stream a = make_stream(device);
    rebatch_stream b = make_stream(device);
    sem_t first, second;
    cr_assert_eq(sem_init(&first, 0, 0), 0);
    cr_assert_eq(sem_init(&second, 0, 0), 0);
    enqueue(device, a, wait_for, &first); /* each waits for what the other does later */
    enqueue(device, a, post, &second);
    enqueue(device, b, post, &first);
    enqueue(device, b, wait_for, &second);
    OK(rebatch_stream_synchronize(device, a));
    OK(rebatch_stream_synchronize(device, b));
    rebatch_stream_destroy(device, a);
    rebatch_stream_destroy(device, b);
    rebatch_device_close(device);
}

static void set_flag(void *user)
{
    atomic_store((atomic_int *)user, 1);
}

Test(device_stream, the_default_stream_has_run_when_the_call_returns)
{
    rebatch_device *device = open_device();
    atomic_int flag = 0;
    enqueue(device, NULL, set_flag, &flag);
    cr_assert_eq(atomic_load(&flag), 1);
    unsigned char a[16] = {0};
    unsigned char b[16] = {0};
    OK(rebatch_fill(device, a, 9, sizeof a, NULL));
    OK(rebatch_copy(device, b, a, sizeof a, NULL));
    cr_assert_eq(a[15], 9);
    cr_assert_eq(memcmp(a, b, sizeof a), 0);
    OK(rebatch_stream_synchronize(device, NULL));
    rebatch_device_close(device);
}

static void set_flag_late(void *user)
{
    pause_a_little();
    set_flag(user);
}

Test(device_stream, enqueuing_does_not_wait_and_destroying_does)
{
    rebatch_device *device = open_device();
    rebatch_stream stream = make_stream(device);
    sem_t gate;
    atomic_int flag = 0;
    cr_assert_eq(sem_init(&gate, 0, 0), 0);
    enqueue(device, stream, wait_for, &gate);
    enqueue(device, stream, set_flag_late, &flag);
    cr_assert_eq(atomic_load(&flag), 0); /* it is still behind the gate */
    cr_assert_eq(sem_post(&gate), 0);
    rebatch_stream_destroy(device, stream);
    cr_assert_eq(atomic_load(&flag), 1);
    rebatch_stream_destroy(device, NULL);
    rebatch_device_close(device);
}

Test(device_stream, the_whole_device_is_waited_for)
{
    rebatch_device *device = open_device();
    const rebatch_stream streams[] = {make_stream(device), make_stream(device)};
    atomic_int flags[2] = {0};
    for (size_t i = 0; i < 2; i++)
        enqueue(device, streams[i], set_flag_late, &flags[i]);
    OK(rbi_device_synchronize(device));
    cr_assert(atomic_load(&flags[0]) && atomic_load(&flags[1]));
    for (size_t i = 0; i < 2; i++)
        rebatch_stream_destroy(device, streams[i]);
    OK(rbi_device_synchronize(device));
    rebatch_device_close(device);

    OK(rebatch_device_open_dry(&device, CAPACITY_BYTES, BLOCK_BYTES));
    OK(rbi_device_synchronize(device)); /* nothing ever lags there */
    rebatch_device_close(device);
}

/* ---- events, through the pool ---- */

struct late_use {
    sem_t gate;
    unsigned char *block;
    atomic_int done;
};

static void use_behind_gate(void *user)
{
    struct late_use *use = user;
    (void)sem_wait(&use->gate);
    memset(use->block, 0xaa, BLOCK_BYTES);
    atomic_store(&use->done, 1);
}

static void *open_gate_later(void *user)
{
    struct late_use *use = user;
    pause_a_little();
    (void)sem_post(&use->gate);
    return NULL;
}

Test(device_stream, a_freed_block_is_not_another_streams_before_its_work_is_done)
{
    rebatch_device *device = open_device();
    rebatch_stream a = make_stream(device);
    rebatch_stream b = make_stream(device);
    rebatch_pool *pool;
    OK(rebatch_pool_create(&pool, device, NULL));
    struct late_use use = {0};
    void *other;
    cr_assert_eq(sem_init(&use.gate, 0, 0), 0);
    OK(rebatch_pool_alloc((void **)&use.block, pool, BLOCK_BYTES, a, 0));
    enqueue(device, a, use_behind_gate, &use);
    OK(rebatch_pool_free(pool, use.block));
    OK(rebatch_pool_alloc(&other, pool, BLOCK_BYTES, b, 0));
    cr_assert_neq(other, use.block, "stream b got a block that stream a still writes to");
    cr_assert_eq(sem_post(&use.gate), 0);
    rebatch_pool_destroy(pool);
    rebatch_stream_destroy(device, a);
    rebatch_stream_destroy(device, b);
    rebatch_device_close(device);
}

/* Device memory for one block: whoever wants it has to wait for the stream that uses it. */
static void wait_for_the_only_block(bool by_use_on)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, BLOCK_BYTES, NULL));
    rebatch_stream a = make_stream(device);
    rebatch_stream b = make_stream(device);
    rebatch_pool *pool;
    OK(rebatch_pool_create(&pool, device, NULL));
    struct late_use use = {0};
    void *other;
    pthread_t thread;
    cr_assert_eq(sem_init(&use.gate, 0, 0), 0);
    OK(rebatch_pool_alloc((void **)&use.block, pool, BLOCK_BYTES, by_use_on ? b : a, 0));
    if (by_use_on)
        OK(rebatch_pool_use_on(pool, use.block, a));
    enqueue(device, a, use_behind_gate, &use);
    OK(rebatch_pool_free(pool, use.block));
    cr_assert_eq(pthread_create(&thread, NULL, open_gate_later, &use), 0);
    cr_assert_eq(rebatch_pool_alloc(&other, pool, BLOCK_BYTES, b, 0), REBATCH_OK,
                 "it should wait for the free of stream a: %s", rebatch_last_error());
    cr_assert_eq(atomic_load(&use.done), 1, "the block was given out under stream a's work");
    cr_assert_eq(pthread_join(thread, NULL), 0);
    rebatch_pool_destroy(pool);
    rebatch_stream_destroy(device, a);
    rebatch_stream_destroy(device, b);
    rebatch_device_close(device);
}

Test(device_stream, when_nothing_else_is_left_an_allocation_waits_for_another_streams_free)
{
    wait_for_the_only_block(false);
}

Test(device_stream, a_block_used_on_another_stream_too_waits_for_that)
{
    wait_for_the_only_block(true);
}

/* ---- what is refused ---- */

static void do_nothing(void *user)
{
    (void)user;
}

static void refuse_stream(rebatch_device *device, rebatch_stream stream)
{
    unsigned char a[16], b[16];
    rebatch_clear_error();
    FAILS(rebatch_stream_call(device, stream, do_nothing, NULL), REBATCH_E_INVALID, "stream");
    cr_assert_eq(rebatch_stream_synchronize(device, stream), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_copy(device, a, b, sizeof a, stream), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_fill(device, a, 0, sizeof a, stream), REBATCH_E_INVALID);
    rebatch_stream_destroy(device, stream); /* and this must not destroy it */
}

Test(device_stream, a_stream_of_another_device_is_refused)
{
    rebatch_device *device = open_device();
    rebatch_device *other = open_device();
    rebatch_device *fault;
    OK(rebatch_device_open_fault(&fault, device, NULL));
    rebatch_stream stream = make_stream(other);
    refuse_stream(device, stream);
    refuse_stream(fault, stream);
    OK(rebatch_stream_synchronize(other, stream));
    rebatch_stream_destroy(other, stream);
    refuse_stream(other, stream); /* no longer */
    rebatch_device_close(fault);
    rebatch_device_close(device);
    rebatch_device_close(other);
}

Test(device_stream, ranges_that_overlap_are_refused)
{
    rebatch_device *device = open_device();
    unsigned char buffer[64];
    rebatch_clear_error();
    FAILS(rebatch_copy(device, buffer, buffer, 8, NULL), REBATCH_E_INVALID, "overlap");
    cr_assert_eq(rebatch_copy(device, buffer, buffer + 7, 8, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_copy(device, buffer + 7, buffer, 8, NULL), REBATCH_E_INVALID);
    OK(rebatch_fill(device, buffer, 3, 8, NULL));
    OK(rebatch_copy(device, buffer + 8, buffer, 8, NULL));
    cr_assert_eq(buffer[15], 3);
    OK(rebatch_copy(device, buffer, buffer + 8, 8, NULL));
    rebatch_device_close(device);
}

Test(device_stream, ranges_beyond_the_last_address_are_refused)
{
    rebatch_device *device = open_device();
    unsigned char buffer[64];
    rebatch_clear_error();
    FAILS(rebatch_fill(device, buffer, 0, SIZE_MAX, NULL), REBATCH_E_INVALID,
          "end beyond the last address");
    cr_assert_eq(rebatch_copy(device, buffer, (void *)(UINTPTR_MAX - 8), 64, NULL),
                 REBATCH_E_INVALID);
    cr_assert_eq(rebatch_copy(device, (void *)(UINTPTR_MAX - 8), buffer, 64, NULL),
                 REBATCH_E_INVALID);
    rebatch_device_close(device);
}

Test(device_stream, null_is_refused_where_there_are_bytes)
{
    rebatch_device *device = open_device();
    unsigned char buffer[8];
    rebatch_stream stream = (rebatch_stream)buffer;
    rebatch_clear_error();
    FAILS(rebatch_copy(device, NULL, buffer, 8, NULL), REBATCH_E_INVALID, "to");
    FAILS(rebatch_copy(device, buffer, NULL, 8, NULL), REBATCH_E_INVALID, "from");
    cr_assert_eq(rebatch_fill(device, NULL, 0, 8, NULL), REBATCH_E_INVALID);
    OK(rebatch_copy(device, NULL, NULL, 0, NULL));
    OK(rebatch_fill(device, NULL, 0, 0, NULL));
    FAILS(rebatch_stream_call(device, NULL, NULL, NULL), REBATCH_E_INVALID, "function");
    cr_assert_eq(rebatch_stream_create(NULL, device), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_stream_create(&stream, NULL), REBATCH_E_INVALID);
    cr_assert_null(stream);
    cr_assert_eq(rebatch_copy(NULL, buffer, buffer, 0, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_fill(NULL, buffer, 0, 1, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_stream_call(NULL, NULL, do_nothing, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_stream_synchronize(NULL, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rbi_device_synchronize(NULL), REBATCH_E_INVALID);
    rebatch_stream_destroy(NULL, NULL);
    rebatch_device_close(device);
}
