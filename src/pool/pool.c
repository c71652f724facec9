/* Owns a pool's life, and that of its blocks between allocation and free.
 * Must not know how memory is found. */
#include "pool/pool.h"

#define COLD __attribute__((cold, noinline))

rebatch_status rbi_pool_check(const rebatch_pool *pool)
{
    if (pool)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID, "pool is NULL: expected one from rebatch_pool_create()");
}

static rebatch_status check_options(const rebatch_pool_options *options,
                                    const rebatch_device *device)
{
    if (options->limit_permille > 1000)
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.limit_permille is %u: expected 0 to 1000",
                         (unsigned)options->limit_permille);
    if (options->gc_threshold_permille > 1000)
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.gc_threshold_permille is %u: expected 0 to 1000",
                         (unsigned)options->gc_threshold_permille);
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
    rebatch_status status = rbi_check_toggle(options->guard, "rebatch_pool_options.guard");
    if (status == REBATCH_OK)
        status = rbi_check_toggle(options->caching, "rebatch_pool_options.caching");
    if (status == REBATCH_OK)
        status = rbi_check_toggle(options->cycles, "rebatch_pool_options.cycles");
    if (status == REBATCH_OK && options->guard == REBATCH_ON &&
        (!rbi_device_has_virtual_memory(device) || !rbi_is_on(options->caching)))
        return rbi_error(REBATCH_E_UNSUPPORTED,
                         "rebatch_pool_options.guard is on: expected caching to be on too, and a "
                         "device with virtual memory, which %s has%s",
                         rebatch_device_name(device),
                         rbi_device_has_virtual_memory(device) ? "" : " not");
    return status;
}

static void set_options(rebatch_pool *pool, const rebatch_pool_options *options)
{
    pool->granule_bytes = rbi_device_granule_bytes(pool->device);
    pool->limit_bytes = options->limit_bytes ? options->limit_bytes : SIZE_MAX;
    pool->limit_permille = options->limit_permille;
    pool->gc_permille = options->gc_threshold_permille;
    pool->keep_room_permille =
        options->keep_room_permille ? options->keep_room_permille : RBI_POOL_KEEP_ROOM;
    pool->headroom_bytes = options->headroom_bytes;
    pool->max_split_bytes = options->max_split_bytes ? options->max_split_bytes : SIZE_MAX;
    pool->rounding_divisions = options->rounding_divisions;
    pool->caching = rbi_is_on(options->caching);
    pool->guard = options->guard == REBATCH_ON;
    pool->plain = pool->caching && !pool->guard;
    pool->has_space = pool->caching && rbi_device_has_virtual_memory(pool->device);
    pool->medium_bytes = pool->has_space ? pool->granule_bytes / RBI_ZONE_SMALL_PARTS : SIZE_MAX;
    pool->large_bytes = pool->has_space ? pool->granule_bytes * RBI_ZONE_LARGE_GRANULES : SIZE_MAX;
    rbi_pool_set_care(pool, true);
    pool->block_nodes.node_bytes = sizeof(struct rbi_block);
    pool->range_nodes.node_bytes = sizeof(struct rbi_range);
    pool->use_nodes.node_bytes = sizeof(struct rbi_block_use);
}

/* A closed trail remembers nothing, so that no call ever seems to repeat. */
static bool prepare_trail(struct rbi_trail *trail, const rebatch_pool_options *options)
{
    if (rbi_is_on(options->cycles))
        return rbi_trail_open(trail);
    rbi_trail_close(trail);
    return true;
}

/* What create takes of the heap, and of the device. */
static rebatch_status take_parts(rebatch_pool *pool, const rebatch_pool_options *options)
{
    pool->space = rbi_heap_calloc(1, sizeof *pool->space);
    if (!pool->space || !rbi_table_prepare(&pool->table, 1) || !rbi_late_prepare(&pool->late, 1) ||
        !prepare_trail(&pool->trail, options))
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a pool");
    pool->space->stream = (rebatch_stream)pool->space; /* nobody has a stream of that name */
    pool->space->next_mark = UINT64_MAX;
    pool->last_stream = pool->space;
    if (options->events) {
        pool->ring.events = rbi_heap_calloc(options->events, sizeof *pool->ring.events);
        pool->ring.capacity = options->events;
        if (!pool->ring.events)
            return rbi_error(REBATCH_E_HOST_OOM, "no host memory for %u events",
                             (unsigned)options->events);
    }
    if (!rbi_round_up(options->ballast_bytes, pool->granule_bytes, &pool->ballast_bytes))
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.ballast_bytes is %zu: expected a "
                         "size that can be rounded up",
                         options->ballast_bytes);
    size_t room;
    if (pool->ballast_bytes && rbi_pool_room(&room, pool, NULL) == REBATCH_OK)
        rbi_ballast_arm(pool, room); /* where there is no room yet, later */
    return REBATCH_OK;
}

/* Larger requests, and all where calls do more than most pools ask of them, are for the careful
 * way: where sizes are rounded further, calls recorded, or blocks guarded or passed through. */
static void set_fast_bytes(rebatch_pool *pool)
{
    const bool is_plain = pool->plain && pool->rounding_divisions == 0 && !pool->ring.events &&
                          !pool->recorder.on_call && !pool->fault.strikes;
    pool->fast_bytes = is_plain ? RBI_CYCLE_UNITS_MOST * (size_t)REBATCH_POOL_UNIT_BYTES : 0;
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
        rbi_options_copy(&ours, sizeof ours, RBI_SIZE_TO(rebatch_pool_options, cycles), options,
                         "rebatch_pool_options");
    if (status != REBATCH_OK || (status = check_options(&ours, device)) != REBATCH_OK ||
        (status = rbi_pool_check_sizes(&ours, device)) != REBATCH_OK)
        return status;
    rebatch_pool *pool = rbi_heap_calloc(1, sizeof *pool);
    if (!pool)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a pool");
    pool->device = device;
    rbi_device_hold(device);
    pool->by_birth.next = pool->by_birth.previous = &pool->by_birth;
    rbi_lock_init(&pool->lock);
    rbi_tags_init(pool);
    set_options(pool, &ours);
    status = take_parts(pool, &ours);
    set_fast_bytes(pool);
    if (status == REBATCH_OK)
        *out = pool;
    else
        rebatch_pool_destroy(pool);
    return status;
}

void rebatch_pool_destroy(rebatch_pool *pool)
{
    if (!pool || rbi_pool_check_caller(pool, "rebatch_pool_destroy"))
        return;
    if (pool->is_sessions) {
        (void)rbi_error(REBATCH_E_STATE,
                        "the pool is a session's: expected rebatch_close() to destroy it");
        return;
    }
    rbi_pool_leave_cycle(pool);
    rbi_tcaches_fold(pool);
    rbi_tcaches_destroy(pool);
    /* Also on streams of which nothing was freed: blocks in use go back as well. */
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        (void)rbi_pool_await(pool, s, ++s->frees);
    rbi_pool_destroy_ranges(pool);
    rbi_pool_destroy_streams(pool);
    rbi_nodes_destroy(&pool->block_nodes);
    rbi_nodes_destroy(&pool->range_nodes);
    rbi_nodes_destroy(&pool->use_nodes);
    rbi_table_destroy(&pool->table);
    rbi_late_destroy(&pool->late);
    rbi_trail_close(&pool->trail);
    rbi_cycle_close(&pool->cycle);
    rbi_heap_free(pool->ring.events);
    rbi_heap_free(pool->space);
    rbi_device_let_go(pool->device);
    rbi_heap_free(pool);
}

rebatch_device *rebatch_pool_device(const rebatch_pool *pool)
{
    return pool ? pool->device : NULL;
}

/* ---- who listens ---- */

void rbi_pool_set_recorder(rebatch_pool *pool, const struct rbi_pool_recorder *recorder)
{
    rbi_pool_enter(pool);
    pool->recorder = recorder ? *recorder : (struct rbi_pool_recorder){NULL, NULL};
    set_fast_bytes(pool);
    rbi_lock_give(&pool->lock);
}

void rbi_pool_watch_pressure(rebatch_pool *pool, const struct rbi_pool_pressure_watch *watch)
{
    rbi_lock_take(&pool->lock);
    pool->pressure_watch = *watch;
    rbi_lock_give(&pool->lock);
}

void rbi_pool_set_fault(rebatch_pool *pool, const struct rbi_pool_fault *fault)
{
    rbi_pool_enter(pool);
    pool->fault = *fault;
    set_fast_bytes(pool);
    rbi_lock_give(&pool->lock);
}

rebatch_status rbi_pool_strike(rebatch_pool *pool, size_t bytes, size_t rounded,
                               rebatch_stream stream, const char *tag)
{
    struct rbi_request request;
    if (!pool->fault.strikes || rbi_pool_is_outside(pool, pool->insider) ||
        pool->promised_bytes >= rounded || !pool->fault.strikes(pool->fault.user))
        return REBATCH_OK;
    rebatch_status status = rbi_request_open(&request, pool, rounded, stream);
    if (status != REBATCH_OK)
        return status;
    status = rbi_pool_report_oom(pool, &request, bytes, tag);
    rbi_request_close(&request);
    char text[320] = "";
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "%s", rebatch_last_error());
    return rbi_error(status, "injected: %s", text);
}

void rbi_pool_each_live(rebatch_pool *pool, const struct rbi_extent *extent,
                        void (*show)(void *user, const void *address, size_t bytes), void *user)
{
    rbi_pool_enter(pool);
    const struct rbi_block *const ring = &pool->by_birth;
    const struct rbi_block *block = ring;
    while (block->previous != ring && block->previous->birth >= extent->first_birth)
        block = block->previous;
    for (; block != ring; block = block->next)
        if (!block->outside || !extent->leaves_out)
            show(user, block->address, block->requested_bytes);
    rbi_lock_give(&pool->lock);
}

uint64_t rbi_pool_births(rebatch_pool *pool)
{
    rbi_pool_enter_to_count(pool);
    const uint64_t births = pool->births;
    rbi_lock_give(&pool->lock);
    return births;
}

/* ---- allocate ---- */

/* Steps an octave: a size is rounded up to a multiple of its highest bit's step. */
static bool round_size(size_t *rounded, const rebatch_pool *pool, size_t bytes)
{
    if (!rbi_round_up(bytes, REBATCH_POOL_UNIT_BYTES, rounded))
        return false;
    if (__builtin_expect(pool->rounding_divisions == 0, 1))
        return true;
    const size_t octave = (size_t)1 << (63 - __builtin_clzll(*rounded));
    const size_t step = octave / pool->rounding_divisions;
    return step <= REBATCH_POOL_UNIT_BYTES || rbi_round_up(*rounded, step, rounded);
}

rebatch_status rbi_pool_check_size(size_t *rounded, const rebatch_pool *pool, size_t bytes)
{
    size_t whole;
    if (round_size(rounded, pool, bytes) && rbi_round_up(*rounded, pool->granule_bytes, &whole))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID,
                     "bytes is %zu: expected a size that can be rounded up to %zu bytes", bytes,
                     pool->granule_bytes);
}

rebatch_status rbi_pool_check_stream(const rebatch_pool *pool, rebatch_stream stream)
{
    if (!stream || rbi_device_stream_is_valid(pool->device, stream))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID, "stream is %p: expected a stream of device \"%s\"",
                     (void *)stream, rebatch_device_name(pool->device));
}

rebatch_status rbi_pool_check_caller(const rebatch_pool *pool, const char *function)
{
    if (!rbi_pool_is_pressing(pool))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_STATE,
                     "%s called from within a pressure callback: expected only frees there",
                     function);
}

rebatch_status rbi_request_open(struct rbi_request *request, rebatch_pool *pool, size_t bytes,
                                rebatch_stream stream)
{
    const rebatch_status status = rbi_pool_prepare(pool);
    if (status != REBATCH_OK)
        return status;
    *request = (struct rbi_request){.bytes = bytes, .stream = rbi_pool_open_stream(pool, stream)};
    if (!request->stream)
        return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another stream");
    request->stream->pins++;
    return REBATCH_OK;
}

void rbi_request_close(struct rbi_request *request)
{
    request->stream->pins--;
}

static void use_block(rebatch_pool *pool, struct rbi_block *block, size_t bytes, rebatch_tag tag)
{
    if (rbi_pool_use_block(pool, block, bytes, tag))
        rbi_pool_raise_peaks(pool);
    rbi_cycle_note(pool, block, pool->stats.live_bytes, false);
    RBI_RECORD(pool, ALLOC, block->address, block->bytes, block->stream->stream, tag);
}

static rebatch_status alloc_by_search(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                                      size_t rounded, rebatch_stream stream, rebatch_tag tag)
{
    struct rbi_request request;
    rebatch_status status = rbi_request_open(&request, pool, rounded, stream);
    if (status != REBATCH_OK)
        return status;
    request.beside = rbi_pool_is_beside_promise(pool);
    status = rbi_pool_search(out, pool, &request);
    if (status == REBATCH_OK)
        rbi_pool_list_block(pool, *out);
    if (status == REBATCH_OOM)
        status = rbi_pool_report_oom(pool, &request, bytes, pool->tags[tag].name);
    rbi_request_close(&request);
    return status;
}

/* The ladder's first rung, with nothing around it: NULL when that does not do, or might need the
 * heap first. */
static inline struct rbi_block *take_cached(rebatch_pool *pool, struct rbi_pool_stream *stream,
                                            size_t rounded)
{
    if (pool->block_nodes.spare < rbi_pool_promised(pool) || pool->late.crowded ||
        rbi_pool_is_beside_promise(pool))
        return NULL;
    if (stream->misses < RBI_POOL_MISSES)
        stream->misses++;
    struct rbi_block *block = rbi_pool_take_own_fast(pool, stream, rounded);
    if (!block && !(block = rbi_pool_take_own(pool, stream, rounded)))
        return NULL;
    pool->rungs[REBATCH_RUNG_CACHE]++;
    rbi_pool_list_block(pool, block);
    return block;
}

static rebatch_status alloc_locked(void **out, rebatch_pool *pool, size_t bytes, size_t rounded,
                                   rebatch_stream stream, rebatch_tag tag)
{
    if (tag >= pool->tag_count)
        return rbi_error(REBATCH_E_INVALID,
                         "tag is %u: expected one from rebatch_pool_tag(), 0 to %zu", (unsigned)tag,
                         pool->tag_count - 1);
    const rebatch_status struck =
        pool->fault.strikes ? rbi_pool_strike(pool, bytes, rounded, stream, pool->tags[tag].name)
                            : REBATCH_OK;
    if (struck != REBATCH_OK)
        return struck;
    struct rbi_pool_stream *known = rbi_pool_find_stream(pool, stream);
    struct rbi_block *block = NULL;
    if (known) {
        pool->last_stream = known;
        block = rbi_quick_pop(known, rounded);
        if (!block && pool->plain)
            block = take_cached(pool, known, rounded);
    }
    rebatch_status status = REBATCH_OK;
    if (!block)
        status = alloc_by_search(&block, pool, bytes, rounded, stream, tag);
    if (status != REBATCH_OK)
        return status;
    if (!rbi_tcache_wants(pool, rounded) || !rbi_tcache_lend(pool, block, bytes, tag))
        use_block(pool, block, bytes, tag);
    *out = block->address;
    rbi_pool_tell(pool, RBI_POOL_ALLOC, *out, bytes, stream);
    return REBATCH_OK;
}

static COLD rebatch_status alloc_carefully(void **out, rebatch_pool *pool, size_t bytes,
                                           rebatch_stream stream, rebatch_tag tag)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the pointer");
    *out = NULL;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || bytes == 0)
        return status;
    size_t rounded = 0;
    if ((status = rbi_pool_check_size(&rounded, pool, bytes)) != REBATCH_OK ||
        (status = rbi_pool_check_stream(pool, stream)) != REBATCH_OK ||
        (status = rbi_pool_check_caller(pool, "rebatch_pool_alloc")) != REBATCH_OK)
        return status;
    rbi_pool_take_lock(pool);
    status = alloc_locked(out, pool, bytes, rounded, stream, tag);
    rbi_lock_give(&pool->lock);
    return status;
}

/* The last step of a call on the fast path. */
static COLD rebatch_status raise_peaks_and_give(rebatch_pool *pool)
{
    rbi_pool_raise_peaks(pool);
    rbi_lock_give(&pool->lock);
    return REBATCH_OK;
}

static inline rebatch_status use_and_give(void **out, rebatch_pool *pool, struct rbi_block *block,
                                          size_t bytes, rebatch_tag tag)
{
    const bool is_peak = rbi_pool_use_block(pool, block, bytes, tag);
    *out = block->address;
    if (RBI_UNLIKELY(is_peak))
        return raise_peaks_and_give(pool);
    rbi_lock_give(&pool->lock);
    return REBATCH_OK;
}

/* The same of one that waited for other streams. */
static __attribute__((noinline)) rebatch_status use_waited_and_give(void **out, rebatch_pool *pool,
                                                                    struct rbi_block *block,
                                                                    size_t bytes, rebatch_tag tag)
{
    return use_and_give(out, pool, block, bytes, tag);
}

static inline rebatch_status note_and_give(void **out, rebatch_pool *pool, struct rbi_block *block,
                                           size_t bytes, rebatch_tag tag)
{
    const bool is_peak = rbi_pool_use_block(pool, block, bytes, tag);
    *out = block->address;
    rbi_cycle_note(pool, block, pool->stats.live_bytes, false);
    if (RBI_UNLIKELY(is_peak))
        return raise_peaks_and_give(pool);
    rbi_lock_give(&pool->lock);
    return REBATCH_OK;
}

static __attribute__((noinline)) rebatch_status cut_and_give(void **out, rebatch_pool *pool,
                                                             size_t bytes,
                                                             struct rbi_pool_stream *stream,
                                                             rebatch_tag tag)
{
    struct rbi_block *block = take_cached(pool, stream, rbi_round_to_unit(bytes));
    if (RBI_LIKELY(block))
        return note_and_give(out, pool, block, bytes, tag);
    rbi_lock_give(&pool->lock);
    return alloc_carefully(out, pool, bytes, stream->stream, tag);
}

/* What most calls are, with the lock held: nothing special is asked of the pool (fast_bytes), and a
 * cycle serves them, or they are for the stream of the call before. All others go the careful
 * way. */
static inline __attribute__((always_inline)) rebatch_status
alloc_expected(void **out, rebatch_pool *pool, size_t bytes, rebatch_stream stream, rebatch_tag tag)
{
    if (RBI_UNLIKELY(bytes - 1 >= pool->fast_bytes || tag >= pool->tag_count ||
                     rbi_pool_is_pressing(pool))) {
        rbi_lock_give(&pool->lock);
        return alloc_carefully(out, pool, bytes, stream, tag);
    }
    struct rbi_block *block;
    if (rbi_cycle_runs(pool)) {
        const bool beside = rbi_pool_is_beside_promise(pool);
        if (RBI_LIKELY(rbi_cycle_expects(pool, rbi_round_to_unit(bytes), stream) && !beside)) {
            block = rbi_cycle_hand_out(pool, rbi_round_to_unit(bytes));
            return use_and_give(out, pool, block, bytes, tag);
        }
        block = beside ? NULL : rbi_cycle_take_when_done(pool, rbi_round_to_unit(bytes), stream);
        if (block)
            return use_waited_and_give(out, pool, block, bytes, tag);
        rbi_cycle_leave(pool);
    }
    struct rbi_pool_stream *const known = pool->last_stream;
    if (RBI_UNLIKELY(known->stream != stream)) {
        rbi_lock_give(&pool->lock);
        return alloc_carefully(out, pool, bytes, stream, tag);
    }
    block = rbi_quick_pop(known, rbi_round_to_unit(bytes));
    if (block)
        return note_and_give(out, pool, block, bytes, tag);
    return cut_and_give(out, pool, bytes, known, tag);
}

/* Of a thread that does not own the lock. */
static __attribute__((noinline)) rebatch_status
alloc_shared(void **out, rebatch_pool *pool, size_t bytes, rebatch_stream stream, rebatch_tag tag)
{
    if (RBI_LIKELY(out && pool) && rbi_tcache_alloc(out, pool, bytes, stream, tag))
        return REBATCH_OK;
    if (RBI_UNLIKELY(!out || !pool || rbi_lock_is_contended(&pool->lock)))
        return alloc_carefully(out, pool, bytes, stream, tag);
    rbi_lock_take(&pool->lock);
    rbi_tcaches_fold(pool); /* of the time when they were wanted */
    return alloc_expected(out, pool, bytes, stream, tag);
}

static inline rebatch_status alloc_fast(void **out, rebatch_pool *pool, size_t bytes,
                                        rebatch_stream stream, rebatch_tag tag)
{
    if (RBI_UNLIKELY(!out || !pool || !rbi_lock_take_as_owner(&pool->lock)))
        return alloc_shared(out, pool, bytes, stream, tag);
    return alloc_expected(out, pool, bytes, stream, tag);
}

static __attribute__((noinline)) rebatch_status alloc_on_stream(void **out, rebatch_pool *pool,
                                                                size_t bytes, rebatch_stream stream,
                                                                rebatch_tag tag)
{
    if (!pool || !rbi_device_stream_is_valid(pool->device, stream))
        return alloc_carefully(out, pool, bytes, stream, tag);
    return alloc_fast(out, pool, bytes, stream, tag);
}

rebatch_status rebatch_pool_alloc(void **out, rebatch_pool *pool, size_t bytes,
                                  rebatch_stream stream, rebatch_tag tag)
{
    if (stream)
        return alloc_on_stream(out, pool, bytes, stream, tag);
    return alloc_fast(out, pool, bytes, NULL, tag);
}

/* ---- free ---- */

/* With caching off a block is all that its segment holds. What the device does not take back now
 * stays cached, and every trim tries it again. */
static void pass_back(rebatch_pool *pool, struct rbi_range *range)
{
    for (struct rbi_block_use *use = range->first->uses; use; use = use->next)
        (void)rbi_pool_await(pool, use->stream, use->until);
    if (pool->pending)
        (void)rbi_pool_poll_streams(pool);
    rbi_quick_flush_all(pool);
    if (range->first->state == RBI_BLOCK_FREE)
        (void)rbi_range_free(pool, range);
}

void rbi_pool_drop_block(rebatch_pool *pool, struct rbi_block *block, bool rolled_back)
{
    if (block->used)
        RBI_RECORD(pool, FREE_REQUESTED, block->address, block->bytes, block->stream->stream,
                   block->tag);
    else
        RBI_RECORD(pool, FREE, block->address, block->bytes, block->stream->stream, block->tag);
    rbi_pool_count_free(pool, block);
    pool->stats.rolled_back_blocks += rolled_back;
    rbi_pool_leave_use(block);
    block->late = rolled_back;
    struct rbi_range *range = block->range;
    rbi_pool_retire_block(pool, block);
    if (!pool->caching)
        pass_back(pool, range);
}

/* Did a rollback take back what began there? `block` is what the table knows of it. */
static bool is_late(const rebatch_pool *pool, const struct rbi_block *block, const void *pointer)
{
    return block ? block->late : rbi_late_has(&pool->late, pointer);
}

/* Says what is wrong with a pointer that is no block in use. */
static rebatch_status refuse_pointer(rebatch_pool *pool, const void *pointer)
{
    rbi_tcaches_fold(pool);
    if (pointer && is_late(pool, rbi_table_find(&pool->table, pointer), pointer))
        return rbi_error(REBATCH_E_INVALID,
                         "pointer is %p, which a rollback took back: expected a block in use",
                         pointer);
    const struct rbi_block *block = rbi_pool_block_around(pool, pointer);
    if (!block || block->state == RBI_BLOCK_HOLE || block->state == RBI_BLOCK_LOST ||
        block->state == RBI_BLOCK_GUARD)
        return rbi_error(REBATCH_E_INVALID,
                         "pointer is %p: expected one from rebatch_pool_alloc() of this pool%s",
                         pointer, block ? ", not freed already" : "");
    if (block->state != RBI_BLOCK_LIVE)
        return rbi_error(REBATCH_E_INVALID,
                         "pointer is %p, which has been freed already: "
                         "expected a block in use",
                         pointer);
    return rbi_error(REBATCH_E_INVALID,
                     "pointer is %p, %zu bytes inside a block of %zu: expected its start", pointer,
                     (size_t)((uintptr_t)pointer - (uintptr_t)block->address), block->bytes);
}

/* What the table knows of a pointer, which is then in no thread's cache. */
static struct rbi_block *find_known(rebatch_pool *pool, const void *pointer)
{
    struct rbi_block *block = rbi_table_find(&pool->table, pointer);
    if (!block || block->state != RBI_BLOCK_LENT || rbi_tcache_adopt(pool, block))
        return block;
    rbi_tcaches_fold(pool); /* freed before: which is not what most calls are */
    return rbi_table_find(&pool->table, pointer);
}

/* The block in use that begins at `pointer`. A cycle goes on if it is none of its blocks. */
static rebatch_status find_live(struct rbi_block **out, rebatch_pool *pool, const void *pointer)
{
    *out = pointer ? find_known(pool, pointer) : NULL;
    if (!*out && pool->cycle.phase == RBI_CYCLE_RUNS) {
        rbi_cycle_leave(pool);
        *out = find_known(pool, pointer);
    }
    if (*out && (*out)->state == RBI_BLOCK_LIVE)
        return REBATCH_OK;
    *out = NULL;
    return refuse_pointer(pool, pointer);
}

static rebatch_status free_locked(rebatch_pool *pool, const void *pointer)
{
    struct rbi_block *const block = find_known(pool, pointer);
    const bool is_live = block && block->state == RBI_BLOCK_LIVE;
    const bool is_not_of_scope = is_live && rbi_pool_has_younger_scope(pool, block);
    if (!is_live) {
        if (!is_late(pool, block, pointer))
            return refuse_pointer(pool, pointer);
        pool->stats.late_frees++;
    } else if (is_not_of_scope && !rbi_pool_is_outside(pool, pool->insider) &&
               !rbi_pool_is_pressing(pool)) {
        rbi_pool_defer_free(pool, block);
    } else {
        if (is_not_of_scope)
            rbi_scope_pass_over(pool, block, false);
        rbi_cycle_note(pool, block, pool->stats.live_bytes - block->bytes, true);
        rbi_pool_drop_block(pool, block, false);
    }
    rbi_pool_tell(pool, RBI_POOL_FREE, pointer, 0, NULL);
    return REBATCH_OK;
}

static COLD rebatch_status free_carefully(rebatch_pool *pool, const void *pointer)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || !pointer)
        return status;
    rbi_pool_take_lock(pool);
    status = free_locked(pool, pointer);
    rbi_lock_give(&pool->lock);
    return status;
}

static COLD rebatch_status leave_to_careful(rebatch_pool *pool, const void *pointer)
{
    rbi_lock_give(&pool->lock);
    return free_carefully(pool, pointer);
}

/* Finds the block and frees it. It stands in free_expected() twice, for addresses where small
 * blocks lie and for others: which one is known at once, long before the block is found, and in
 * each of the two it is then foretold well what becomes of the block. */
static inline __attribute__((always_inline)) rebatch_status free_found(rebatch_pool *pool,
                                                                       void *pointer, bool small)
{
    struct rbi_block *const block = rbi_table_find(&pool->table, pointer);
    if (RBI_UNLIKELY(!block || block->state != RBI_BLOCK_LIVE || pool->fast_bytes == 0 ||
                     rbi_pool_has_younger_scope(pool, block) || !rbi_pool_retires_at_once(block)))
        return leave_to_careful(pool, pointer);
    rbi_cycle_note(pool, block, pool->stats.live_bytes - block->bytes, true);
    rbi_pool_count_free(pool, block);
    rbi_pool_leave_use(block);
    rbi_pool_note_free(pool, block);
    if (__builtin_expect(rbi_pool_wants_quick(block), small))
        rbi_quick_push(block);
    else
        rbi_pool_merge_block(pool, block);
    rbi_lock_give(&pool->lock);
    return REBATCH_OK;
}

/* What most calls are, as in alloc_expected(): of a block that no other stream uses, and no scope
 * keeps. */
static inline __attribute__((always_inline)) rebatch_status free_expected(rebatch_pool *pool,
                                                                          void *pointer)
{
    if (rbi_cycle_runs(pool)) {
        if (RBI_UNLIKELY(!rbi_cycle_give(pool, pointer)))
            return leave_to_careful(pool, pointer);
        rbi_lock_give(&pool->lock);
        return REBATCH_OK;
    }
    if ((uintptr_t)pointer - pool->small_address < pool->small_span)
        return free_found(pool, pointer, true);
    return free_found(pool, pointer, false);
}

/* Of a thread that does not own the lock. */
static __attribute__((noinline)) rebatch_status free_shared(rebatch_pool *pool, void *pointer)
{
    if (RBI_LIKELY(pool && pointer) && rbi_tcache_free(pool, pointer))
        return REBATCH_OK;
    if (RBI_UNLIKELY(!pool || !pointer || rbi_lock_is_contended(&pool->lock)))
        return free_carefully(pool, pointer);
    rbi_lock_take(&pool->lock);
    rbi_tcaches_fold(pool);
    return free_expected(pool, pointer);
}

rebatch_status rebatch_pool_free(rebatch_pool *pool, void *pointer)
{
    if (RBI_UNLIKELY(!pool || !pointer || !rbi_lock_take_as_owner(&pool->lock)))
        return free_shared(pool, pointer);
    return free_expected(pool, pointer);
}

/* ---- blocks in use ---- */

/* The stream of that handle, when the block is its own or it uses it already; NULL: neither. */
static struct rbi_pool_stream *find_user(const struct rbi_block *block, rebatch_stream stream)
{
    if (block->stream->stream == stream)
        return block->stream;
    const struct rbi_block_use *use = block->uses;
    while (use && use->stream->stream != stream)
        use = use->next;
    return use ? use->stream : NULL;
}

static rebatch_status use_on_locked(rebatch_pool *pool, const void *pointer, rebatch_stream stream)
{
    struct rbi_block *block;
    const rebatch_status status = find_live(&block, pool, pointer);
    if (status != REBATCH_OK)
        return status;
    struct rbi_pool_stream *user = find_user(block, stream);
    if (!user) {
        if (rbi_nodes_prepare(&pool->use_nodes, 1))
            user = rbi_pool_open_stream(pool, stream);
        if (!user)
            return rbi_error(REBATCH_E_HOST_OOM,
                             "no host memory to note that a stream uses a block");
        rbi_block_add_use(pool, block, user);
    }
    rbi_cycle_note_use(pool, block, user);
    return REBATCH_OK;
}

rebatch_status rebatch_pool_use_on(rebatch_pool *pool, void *pointer, rebatch_stream stream)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || (status = rbi_pool_check_stream(pool, stream)) != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    pool->use_calls++;
    if (!rbi_cycle_use(pool, pointer, stream)) {
        rbi_pool_leave_cycle(pool);
        status = use_on_locked(pool, pointer, stream);
    }
    rbi_lock_give(&pool->lock);
    return status;
}

rebatch_status rebatch_pool_block_bytes(size_t *bytes, rebatch_pool *pool, const void *pointer)
{
    if (!bytes)
        return rbi_error(REBATCH_E_INVALID, "bytes is NULL: expected where to put the size");
    *bytes = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    struct rbi_block *block;
    status = find_live(&block, pool, pointer);
    if (status == REBATCH_OK)
        *bytes = block->bytes;
    rbi_lock_give(&pool->lock);
    return status;
}
