/* Owns the dry run: a size's calls on a pool like the live one, with nothing behind it.
 * Must not know which sizes are run, nor when. */
#include "probe/dry_run.h"

#include "device/device.h"

/* ---- lists of blocks ---- */

/* 0: there is no host memory. */
static uint32_t take_node(struct rbi_dry *dry)
{
    const uint32_t number = dry->spare;
    if (number) {
        dry->spare = dry->nodes[number].newer;
        return number;
    }
    if (dry->node_count + 1 >= dry->node_room) {
        const uint32_t room = dry->node_room ? 2 * dry->node_room : 256;
        void *nodes = rbi_heap_resize(dry->nodes, room, sizeof *dry->nodes);
        if (!nodes)
            return 0;
        dry->nodes = nodes;
        dry->node_room = room;
    }
    return ++dry->node_count;
}

static bool push(struct rbi_dry *dry, struct rbi_dry_list *list, void *address)
{
    const uint32_t number = take_node(dry);
    if (number == 0)
        return false;
    dry->nodes[number] = (struct rbi_dry_node){address, list->newest, 0};
    if (list->newest)
        dry->nodes[list->newest].newer = number;
    else
        list->oldest = number;
    list->newest = number;
    return true;
}

/* As the oldest. */
static bool put_back(struct rbi_dry *dry, struct rbi_dry_list *list, void *address)
{
    const uint32_t number = take_node(dry);
    if (number == 0)
        return false;
    dry->nodes[number] = (struct rbi_dry_node){address, 0, list->oldest};
    if (list->oldest)
        dry->nodes[list->oldest].older = number;
    else
        list->newest = number;
    list->oldest = number;
    return true;
}

/* NULL when the list is empty. */
static void *pop(struct rbi_dry *dry, struct rbi_dry_list *list, bool is_oldest)
{
    const uint32_t number = is_oldest ? list->oldest : list->newest;
    if (number == 0)
        return NULL;
    struct rbi_dry_node *node = &dry->nodes[number];
    if (node->older)
        dry->nodes[node->older].newer = node->newer;
    else
        list->oldest = node->newer;
    if (node->newer)
        dry->nodes[node->newer].older = node->older;
    else
        list->newest = node->older;
    node->newer = dry->spare;
    dry->spare = number;
    return node->address;
}

/* ---- a dry pool like the live one ---- */

static rebatch_status no_memory(void)
{
    return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a dry run");
}

void rbi_dry_close(struct rbi_dry *dry)
{
    rebatch_pool_destroy(dry->pool);
    rebatch_device_close(dry->device);
    rbi_heap_free(dry->nodes);
    rbi_heap_free(dry->made);
    rbi_heap_free(dry->kept);
    rbi_heap_free(dry->freed);
}

rebatch_status rbi_dry_open(struct rbi_dry *dry, const struct rbi_model *model, rebatch_pool *pool)
{
    *dry = (struct rbi_dry){.model = model};
    dry->made = rbi_heap_calloc((size_t)model->slots + 1, sizeof *dry->made);
    dry->kept = rbi_heap_calloc((size_t)model->slots + 1, sizeof *dry->kept);
    dry->freed = rbi_heap_calloc((size_t)model->slots + 1, sizeof *dry->freed);
    if (!dry->made || !dry->kept || !dry->freed)
        return no_memory();
    const rebatch_status status = rbi_pool_clone(&dry->pool, &dry->device, pool);
    return status ? status : rebatch_pool_reset_peaks(dry->pool);
}

rebatch_status rbi_dry_keep(struct rbi_dry *dry, uint32_t slot, void *address)
{
    rbi_assert(slot < dry->model->slots);
    return push(dry, &dry->kept[slot], address) ? REBATCH_OK : no_memory();
}

/* ---- memory outside the pool ---- */

rebatch_status rbi_outside_growth(size_t *out, const struct rbi_model *model, rebatch_pool *pool,
                                  size_t count)
{
    rebatch_memory_info info;
    rebatch_pool_stats stats;
    *out = 0;
    rebatch_status status = rebatch_device_memory(rebatch_pool_device(pool), &info);
    if (!status)
        status = rebatch_pool_get_stats(&stats, pool);
    if (status)
        return status;
    const size_t taken = info.total_bytes - rbi_min(info.free_bytes, info.total_bytes);
    const size_t wanted = (size_t)stats.reserved_bytes + rbi_line_at(&model->outside, count);
    *out = wanted > taken ? wanted - taken : 0;
    return REBATCH_OK;
}

/* Whether there is room for so much, once the cache is given back. */
static rebatch_status look_for_room(const struct rbi_dry *dry, size_t bytes)
{
    void *memory;
    rebatch_status status = rbi_device_alloc(dry->device, &memory, bytes);
    if (status == REBATCH_OOM && !(status = rebatch_pool_trim(dry->pool, 0, NULL)))
        status = rbi_device_alloc(dry->device, &memory, bytes);
    return status ? status : rbi_device_free(dry->device, memory, bytes);
}

/* What grows is made anew, and what it was is given back only then. */
rebatch_status rbi_dry_hold_outside(const struct rbi_dry *dry, size_t count)
{
    size_t growth;
    void *memory;
    rebatch_status status = rbi_outside_growth(&growth, dry->model, dry->pool, count);
    if (status || growth == 0)
        return status;
    const size_t all = rbi_line_at(&dry->model->outside, count);
    status = look_for_room(dry, rbi_max(growth, all - rbi_min(all, dry->model->outside_fixed)));
    return status ? status : rbi_device_alloc(dry->device, &memory, growth);
}

/* ---- the dry run ---- */

static rebatch_status run_event(struct rbi_dry *dry, const struct rbi_model_event *event,
                                size_t bytes)
{
    void *block;
    rebatch_status status;
    rbi_assert(event->kind == RBI_TRACE_RESERVE || event->slot < dry->model->slots);
    switch (event->kind) {
    case RBI_TRACE_ALLOC:
        status = rebatch_pool_alloc(&block, dry->pool, bytes, event->stream, 0);
        return status || push(dry, &dry->made[event->slot], block) ? status : no_memory();
    case RBI_TRACE_RESERVE:
        return rebatch_pool_reserve(dry->pool, bytes, event->stream);
    case RBI_TRACE_FREE:
        return rebatch_pool_free(dry->pool, pop(dry, &dry->made[event->slot], event->is_queued));
    case RBI_TRACE_FREE_PREVIOUS:
        block = pop(dry, &dry->kept[event->slot], true);
        if (block && !push(dry, &dry->freed[event->slot], block))
            return no_memory();
        return rebatch_pool_free(dry->pool, block);
    default:
        return REBATCH_OK;
    }
}

static void forget(struct rbi_dry *dry, struct rbi_dry_list *lists)
{
    for (uint32_t slot = 0; slot < dry->model->slots; slot++)
        while (pop(dry, &lists[slot], false))
            ;
}

/* What it leaves is what the next one finds as kept. */
static void end_microbatch(struct rbi_dry *dry)
{
    forget(dry, dry->kept);
    forget(dry, dry->freed);
    struct rbi_dry_list *made = dry->made;
    dry->made = dry->kept;
    dry->kept = made;
}

/* What it has freed of the one before lives again. */
static rebatch_status take_back(struct rbi_dry *dry, rebatch_scope scope)
{
    void *block;
    forget(dry, dry->made);
    for (uint32_t slot = 0; slot < dry->model->slots; slot++)
        while ((block = pop(dry, &dry->freed[slot], false)))
            if (!put_back(dry, &dry->kept[slot], block))
                return no_memory();
    const rebatch_status status = rebatch_scope_rollback(dry->pool, scope);
    return status ? status : REBATCH_OOM;
}

rebatch_status rbi_dry_run(struct rbi_dry *dry, size_t count)
{
    struct rbi_cursor cursor = {.model = dry->model, .count = count};
    const struct rbi_model_event *event;
    rebatch_scope scope;
    rebatch_status status = rebatch_scope_begin(&scope, dry->pool);
    while (!status && (event = rbi_model_next(&cursor)))
        status = run_event(dry, event, cursor.bytes);
    if (status == REBATCH_OOM) {
        dry->failing_bytes = cursor.bytes;
        return take_back(dry, scope);
    }
    if (status)
        return status;
    end_microbatch(dry);
    return rebatch_scope_commit(dry->pool, scope);
}

/* ---- the first trial ---- */

/* `blocks`: the address of each block of the trace. */
static rebatch_status rerun_event(struct rbi_dry *dry, void **blocks,
                                  const struct rbi_trace_event *event)
{
    switch (event->kind) {
    case RBI_TRACE_ALLOC:
        return rebatch_pool_alloc(&blocks[event->block], dry->pool, event->bytes, event->stream, 0);
    case RBI_TRACE_RESERVE:
        return rebatch_pool_reserve(dry->pool, event->bytes, event->stream);
    case RBI_TRACE_FREE:
        return rebatch_pool_free(dry->pool, blocks[event->block]);
    default: /* it has no trial before it: what lived when the probe began lives in the copy */
        return rebatch_pool_free(dry->pool, event->address);
    }
}

static rebatch_status rerun(struct rbi_dry *dry, void **blocks, const struct rbi_trace *first)
{
    rebatch_scope scope;
    rebatch_status status = rebatch_scope_begin(&scope, dry->pool);
    for (size_t i = 0; i < first->event_count && !status; i++)
        status = rerun_event(dry, blocks, &first->events[i]);
    if (!status)
        status = rebatch_scope_commit(dry->pool, scope);
    for (size_t i = 0; i < dry->model->first_count && !status; i++)
        status = rbi_dry_keep(dry, dry->model->first[i].slot, blocks[dry->model->first[i].block]);
    return status;
}

rebatch_status rbi_dry_run_first(struct rbi_dry *dry, const struct rbi_trace *first)
{
    void **blocks = rbi_heap_calloc((size_t)first->blocks + 1, sizeof *blocks);
    const rebatch_status status = blocks ? rerun(dry, blocks, first) : no_memory();
    rbi_heap_free(blocks);
    return status;
}
