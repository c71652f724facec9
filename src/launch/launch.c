/* Owns what a session does because the environment asks for it.
 * Must not know the program's options. */
#include "launch/launch.h"

/* What a program does not take itself and has not set a level for is the person's who starts it. */
static void set_level(rebatch_options *options, const struct rbi_run_settings *settings)
{
    if (!options->on_event && options->log_level == REBATCH_LOG_DEFAULT)
        options->log_level = settings->log_level;
}

/* The smaller of both holds. */
static void cap(rebatch_options *options, const struct rbi_run_settings *settings)
{
    rebatch_pool_options *pool = &options->pool;
    if (pool->struct_size < RBI_SIZE_TO(rebatch_pool_options, limit_permille))
        return; /* which the pool refuses */
    if (settings->limit_bytes && (!pool->limit_bytes || pool->limit_bytes > settings->limit_bytes))
        pool->limit_bytes = (size_t)settings->limit_bytes;
    if (settings->limit_permille &&
        (!pool->limit_permille || pool->limit_permille > settings->limit_permille))
        pool->limit_permille = settings->limit_permille;
}

static rebatch_status begin(void *user, rebatch *rb)
{
    struct rbi_run *run = user;
    run->rb = rb;
    return rbi_inject_begin(run);
}

/* A program that ends from here on has ended within a step. */
static void say_begun(struct rbi_run *run)
{
    static const char text[] = "begun 0";
    if (!run->has_begun)
        (void)rbi_report_send(run, text, sizeof text - 1);
    run->has_begun = true;
}

static void step_begins(void *user, const rebatch_step_ops *ops, size_t batch, void *step_user)
{
    struct rbi_run *run = user;
    say_begun(run);
    if (run->settings.probe)
        rbi_only_probe(run, ops, batch, step_user, NULL);
    if (run->settings.check)
        rbi_only_check(run, ops, batch, step_user);
    rbi_inject_step_begins(run);
}

static void probe_begins(void *user, const rebatch_step_ops *ops, size_t batch, void *step_user,
                         const rebatch_probe_options *options)
{
    struct rbi_run *run = user;
    if (run->settings.probe)
        rbi_only_probe(run, ops, batch, step_user, options);
}

static void map_ended(void *user, const rebatch_step_report *report)
{
    rbi_inject_map_ended(user, report);
}

static void step_ended(void *user, const rebatch_step_report *report)
{
    rbi_inject_step_ended(user, report);
}

static bool has_injected(const void *user)
{
    const struct rbi_run *run = user;
    return run->injected > 0 && run->last_struck == rbi_pool_oom_count(rebatch_get_pool(run->rb));
}

static void destroy(void *user)
{
    rbi_inject_end(user);
    rbi_heap_free(user);
}

rebatch_status rbi_launch_open(struct rbi_launch *out, rebatch_options *options)
{
    struct rbi_run_settings settings;
    *out = (struct rbi_launch){0};
    const rebatch_status status = rbi_run_settings_read(&settings);
    if (status)
        return status;
    cap(options, &settings);
    set_level(options, &settings);
    if (!settings.probe && !settings.check && !settings.oom && settings.chance <= 0 &&
        !settings.shrink_count && settings.report < 0)
        return REBATCH_OK;
    struct rbi_run *run = rbi_heap_calloc(1, sizeof *run);
    if (!run)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a session");
    run->settings = settings;
    *out = (struct rbi_launch){.begin = begin,
                               .step_begins = step_begins,
                               .probe_begins = probe_begins,
                               .step_ended = step_ended,
                               .map_ended = map_ended,
                               .has_injected = has_injected,
                               .destroy = destroy,
                               .user = run};
    return REBATCH_OK;
}
