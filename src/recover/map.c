/* Owns rebatch_map(): a function over samples, outside of training steps, with sizes of its own.
 * Must not know how samples are cut. */
#include "recover/recover.h"

/* What is known of one function, while it does not run. */
struct rbi_map {
    struct rbi_map *next;
    rebatch_status (*run)(const rebatch_microbatch *mb, void *user);
    const void *key; /* NULL: it is known by `run` */
    struct rbi_sizes sizes;
};

void rbi_maps_release(rebatch *rb)
{
    while (rb->maps) {
        struct rbi_map *const map = rb->maps;
        rb->maps = map->next;
        rbi_heap_free(map);
    }
}

void rbi_maps_forget(rebatch *rb)
{
    for (struct rbi_map *map = rb->maps; map; map = map->next)
        rbi_sizes_forget(&map->sizes);
}

static rebatch_status find(struct rbi_map **out, rebatch *rb, const rebatch_map_ops *ops)
{
    for (struct rbi_map *map = rb->maps; map; map = map->next)
        if (map->key == ops->key && (ops->key || map->run == ops->run)) {
            *out = map;
            return REBATCH_OK;
        }
    struct rbi_map *const map = rbi_heap_calloc(1, sizeof *map);
    if (!map)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for what is learned of a function");
    rbi_sizes_init(&map->sizes, &rb->options);
    map->sizes.micro = SIZE_MAX; /* micro_start is of training */
    map->run = ops->run;
    map->key = ops->key;
    map->next = rb->maps;
    rb->maps = *out = map;
    return REBATCH_OK;
}

static void swap_sizes(rebatch *rb, struct rbi_map *map)
{
    const struct rbi_sizes sizes = rb->sizes;
    rb->sizes = map->sizes;
    map->sizes = sizes;
}

static rebatch_status read_ops(rebatch_map_ops *out, const rebatch *rb,
                               const rebatch_map_ops *given)
{
    if (!rb || !given)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", rb ? "ops" : "rb");
    const rebatch_status status = rbi_session_check_idle(rb, "rebatch_map");
    if (status)
        return status;
    *out = (rebatch_map_ops)REBATCH_MAP_OPS_INIT;
    const rebatch_status read = rbi_options_copy(
        out, sizeof *out, RBI_SIZE_TO(rebatch_map_ops, largest), given, "rebatch_map_ops");
    if (read)
        return read;
    if (!out->run)
        return rbi_error(REBATCH_E_INVALID, "ops.run is NULL: expected a function");
    if (out->flags & ~(uint32_t)REBATCH_SCOPED_MEMORY)
        return rbi_error(REBATCH_E_INVALID,
                         "ops.flags is 0x%x: expected 0 or REBATCH_SCOPED_MEMORY", out->flags);
    if (out->flags && !rbi_is_on(rb->options.reclaim))
        return rbi_error(REBATCH_E_INVALID, "ops.flags has REBATCH_SCOPED_MEMORY and reclaim is "
                                            "off: expected one without the other");
    return REBATCH_OK;
}

static rebatch_status run(rebatch *rb)
{
    rbi_assert(rb->run.samples_callback == RBI_MAP);
    rebatch_status status = rbi_step_open_scope(rb);
    if (status)
        return status;
    status = rbi_samples_run(rb);
    if (status)
        (void)rbi_step_undo(rb);
    else
        rbi_scope_commit_all(rb->pool, rb->run.scope);
    rb->run.scope = 0;
    if (status && rb->buffers.is_new)
        rbi_resize_release(rb);
    return status;
}

rebatch_status rebatch_map(rebatch *rb, const rebatch_map_ops *ops, size_t count, void *user,
                           rebatch_step_report *report)
{
    rebatch_map_ops own;
    struct rbi_map *map = NULL;
    if (report)
        *report = (rebatch_step_report){0};
    rebatch_status status = read_ops(&own, rb, ops);
    if (!status && count > 0)
        status = find(&map, rb, &own);
    if (status || count == 0) {
        rbi_step_report_refused(report, rb, status);
        return status;
    }
    const rebatch_step_ops table = {.struct_size = sizeof table,
                                    .forward_backward = own.run,
                                    .flags = REBATCH_DECLARES_MUTATION | own.flags,
                                    .resize = own.resize};
    swap_sizes(rb, map);
    rbi_run_begin(rb, &(struct rbi_task){.ops = &table,
                                         .user = user,
                                         .batch = count,
                                         .most = own.largest ? own.largest : SIZE_MAX,
                                         .samples_callback = RBI_MAP});
    rbi_resize_begin_map(rb);
    status = run(rb);
    rbi_step_report(rb, status);
    rbi_step_end(rb);
    swap_sizes(rb, map);
    if (rb->launch.user)
        rb->launch.map_ended(rb->launch.user, &rb->run.report);
    if (report)
        *report = rb->run.report;
    return status;
}
