/* Owns a pool's life, its options, and who listens to it.
 * Must not know how memory is found. */
#include "pool/pool.h"

static rebatch_status check_options(const rebatch_pool_options *options)
{
    if (options->limit_permille > 1000)
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.limit_permille is %u: expected 0 to 1000",
                         (unsigned)options->limit_permille);
    if (options->keep_room_permille > 1000)
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.keep_room_permille is %u: expected 0 to 1000",
                         (unsigned)options->keep_room_permille);
    const uint32_t divisions = options->rounding_divisions;
    if (divisions != 0 && (!rbi_is_power_of_two(divisions) || divisions > 256))
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.rounding_divisions is %u: expected 0 or a power of "
                         "two up to 256",
                         (unsigned)divisions);
    rebatch_status status = rbi_check_toggle(options->caching, "rebatch_pool_options.caching");
    if (status == REBATCH_OK)
        status = rbi_check_toggle(options->replay, "rebatch_pool_options.replay");
    if (status == REBATCH_OK)
        status = rbi_check_toggle(options->overflow, "rebatch_pool_options.overflow");
    return status;
}

static rebatch_status check_limit(size_t limit_bytes, size_t page_bytes)
{
    if (limit_bytes == 0 || limit_bytes >= page_bytes)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID,
                     "rebatch_pool_options.limit_bytes is %zu: expected 0 or at least one page "
                     "of %zu bytes",
                     limit_bytes, page_bytes);
}

static rebatch_status check_sizes(const rebatch_pool_options *options, rebatch_device *device)
{
    rebatch_status status = check_limit(options->limit_bytes, rbi_device_page_bytes(device));
    if (status || options->headroom_bytes == 0)
        return status;
    rebatch_memory_info info;
    status = rebatch_device_memory(device, &info);
    if (status)
        return status;
    if (options->headroom_bytes > info.total_bytes)
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.headroom_bytes is %zu: expected at most the %zu "
                         "bytes of device %s",
                         options->headroom_bytes, info.total_bytes, device->name);
    return REBATCH_OK;
}

static void set_options(rebatch_pool *pool, const rebatch_pool_options *options)
{
    pool->page_bytes = rbi_device_page_bytes(pool->device);
    pool->limit_bytes = options->limit_bytes ? options->limit_bytes : SIZE_MAX;
    pool->limit_permille = options->limit_permille;
    pool->given_bytes = SIZE_MAX;
    pool->keep_room_permille =
        options->keep_room_permille ? options->keep_room_permille : RBI_POOL_KEEP_ROOM;
    pool->headroom_bytes = options->headroom_bytes;
    pool->rounding_divisions = options->rounding_divisions;
    pool->caching = rbi_is_on(options->caching);
    pool->has_space = pool->caching && rbi_device_has_virtual_memory(pool->device);
    pool->medium_bytes = pool->has_space ? pool->page_bytes / RBI_ZONE_SMALL_PARTS : SIZE_MAX;
    pool->large_bytes = pool->has_space ? pool->page_bytes * RBI_ZONE_LARGE_PAGES : SIZE_MAX;
    pool->plan.is_on = pool->has_space && rbi_is_on(options->replay);
    pool->may_wait = options->may_wait;
    pool->may_wait_user = options->may_wait_user;
    pool->overflow.most_bytes = options->overflow_bytes ? options->overflow_bytes : SIZE_MAX;
    pool->overflow.is_on =
        pool->has_space && rbi_is_on(options->overflow) && rbi_device_has_overflow(pool->device);
    pool->progress.due = UINT64_MAX; /* one stream alone needs no events at its frees */
}

/* What create takes of the heap, and of the device. */
static rebatch_status take_parts(rebatch_pool *pool, const rebatch_pool_options *options)
{
    pool->space = rbi_heap_calloc(1, sizeof *pool->space);
    if (!pool->space || !rbi_blocks_open(&pool->heap, pool->page_bytes, &pool->space->lists))
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a pool");
    pool->space->stream = (rebatch_stream)pool->space; /* nobody has a stream of that name */
    pool->last_stream = pool->space;
    const rebatch_status status = rbi_event_log_open(&pool->log, options->events);
    if (status != REBATCH_OK)
        return status;
    rbi_vm_open(&pool->vm, pool->device);
    return REBATCH_OK;
}

rebatch_status rebatch_pool_create(rebatch_pool **out, rebatch_device *device,
                                   const rebatch_pool_options *options)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the pool");
    *out = NULL;
    if (!device)
        return rbi_error(REBATCH_E_INVALID, "device is NULL: expected an open device");
    rebatch_pool_options ours = REBATCH_POOL_OPTIONS_INIT;
    rebatch_status status =
        rbi_options_copy(&ours, sizeof ours, RBI_SIZE_TO(rebatch_pool_options, replay), options,
                         "rebatch_pool_options");
    if (status != REBATCH_OK || (status = check_options(&ours)) != REBATCH_OK ||
        (status = check_sizes(&ours, device)) != REBATCH_OK)
        return status;
    rebatch_pool *pool = rbi_heap_calloc_lines(1, sizeof *pool);
    if (!pool)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a pool");
    pool->device = device;
    rbi_device_hold(device);
    pool->by_sequence.next = pool->by_sequence.previous = &pool->by_sequence;
    rbi_tags_init(pool);
    set_options(pool, &ours);
    status = take_parts(pool, &ours);
    if (status == REBATCH_OK)
        *out = pool;
    else
        rebatch_pool_destroy(pool);
    return status;
}

static void destroy_arenas(rebatch_pool *pool)
{
    while (pool->first_arena) {
        rebatch_arena *const arena = pool->first_arena;
        pool->first_arena = arena->next;
        rbi_heap_free(arena);
    }
}

void rebatch_pool_destroy(rebatch_pool *pool)
{
    if (!pool || rbi_pool_check_caller(pool, "rebatch_pool_destroy"))
        return;
    if (pool->destroyed_by) {
        (void)rbi_error(REBATCH_E_STATE, "the pool has an owner: expected %s to destroy it",
                        pool->destroyed_by);
        return;
    }
    if (atomic_load(&pool->sessions)) {
        (void)rbi_error(REBATCH_E_STATE, "%zu session%s open on the pool: expected none",
                        atomic_load(&pool->sessions),
                        atomic_load(&pool->sessions) == 1 ? " is" : "s are");
        return;
    }
    pool->may_wait = NULL; /* or its memory would stay mapped for ever */
    (void)rbi_pool_await(pool, ++pool->progress.frees); /* blocks in use go back as well */
    rbi_pool_destroy_ranges(pool);
    destroy_arenas(pool);
    rbi_pool_destroy_streams(pool);
    rbi_blocks_close(&pool->heap);
    rbi_plan_close(&pool->plan);
    rbi_event_log_close(&pool->log);
    rbi_heap_free(pool->space);
    rbi_device_let_go(pool->device);
    rbi_heap_free(pool);
}

void rbi_pool_set_destroyed_by(rebatch_pool *pool, const char *call)
{
    pool->destroyed_by = call;
}

void rbi_pool_hold(rebatch_pool *pool)
{
    (void)atomic_fetch_add(&pool->sessions, 1);
}

void rbi_pool_let_go(rebatch_pool *pool)
{
    (void)atomic_fetch_sub(&pool->sessions, 1);
}

uint64_t rbi_pool_reserved_bytes(const rebatch_pool *pool)
{
    return rbi_vm_bytes(&pool->vm);
}

rebatch_device *rebatch_pool_device(const rebatch_pool *pool)
{
    return pool ? pool->device : NULL;
}

/* ---- who listens ---- */

void rbi_pool_set_recorder(rebatch_pool *pool, const struct rbi_pool_recorder *recorder)
{
    rbi_pool_take_lock(pool);
    pool->recorder = recorder ? *recorder : (struct rbi_pool_recorder){NULL, NULL};
    rbi_pool_give_lock(pool);
}

struct rbi_pool_pressure_watch rbi_pool_watch_pressure(rebatch_pool *pool,
                                                       const struct rbi_pool_pressure_watch *watch)
{
    rbi_lock_take(&pool->lock);
    const struct rbi_pool_pressure_watch before = pool->pressure_watch;
    pool->pressure_watch = *watch;
    rbi_pool_give_lock(pool);
    return before;
}

struct rbi_pool_fault rbi_pool_set_fault(rebatch_pool *pool, const struct rbi_pool_fault *fault)
{
    rbi_lock_take(&pool->lock);
    const struct rbi_pool_fault before = pool->fault;
    pool->fault = *fault;
    rbi_pool_give_lock(pool);
    return before;
}

void rbi_pool_set_fill(rebatch_pool *pool, const struct rbi_pool_fill *fill)
{
    rbi_lock_take(&pool->lock);
    pool->fill = *fill;
    pool->fill.is_on &= rbi_device_has_contents(pool->device);
    rbi_pool_give_lock(pool);
}

size_t rbi_pool_pad(const rebatch_pool *pool, size_t bytes, size_t rounded)
{
    size_t padded;
    const bool is_padded = pool->fill.is_on && pool->fill.pads &&
                           rbi_pool_round_size(&padded, pool, bytes + 1) &&
                           padded <= SIZE_MAX - (pool->page_bytes - 1);
    return is_padded ? padded : rounded;
}

uint64_t rbi_pool_live_between(rebatch_pool *pool, uint64_t from, uint64_t to)
{
    uint64_t bytes = 0;
    rbi_lock_take(&pool->lock);
    const struct rbi_block *const ring = &pool->by_sequence;
    for (const struct rbi_block *b = ring->previous; b != ring && b->sequence >= from;
         b = b->previous)
        if (b->sequence < to && b->state == RBI_BLOCK_LIVE && !b->outside)
            bytes += b->bytes;
    rbi_pool_give_lock(pool);
    return bytes;
}

uint64_t rbi_pool_allocations(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const uint64_t sequence = pool->sequence;
    rbi_pool_give_lock(pool);
    return sequence;
}
