/* Owns settings as a whole: defaults, the order of sources, their use.
 * Must not know how a value is written. */
#include "config/settings.h"

#include <string.h>

#include "rebatch/cuda.h"

/* ---- loading ---- */

static const char *origin_of(const struct rbi_entry *entry)
{
    return entry->origin ? entry->origin : "default";
}

static rebatch_status set_defaults(struct rebatch_config *config)
{
    const struct rbi_place place = {NULL, 0, "default"};
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < RBI_SETTING_COUNT && !status; i++)
        status = rbi_entry_set_bare(&config->entries[i], &rbi_settings[i], rbi_settings[i].initial,
                                    &place);
    return status;
}

rebatch_status rebatch_config_load(rebatch_config **out, const char *path)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    struct rebatch_config *config = rbi_heap_calloc(1, sizeof *config);
    if (!config)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for settings");
    rebatch_status status = set_defaults(config);
    if (!status && path)
        status = rbi_config_read_file(config, path);
    if (!status)
        status = rbi_config_read_environment(config);
    if (!status)
        status = rbi_config_check_together(config);
    if (status)
        rebatch_config_free(config);
    else
        *out = config;
    return status;
}

void rebatch_config_free(rebatch_config *config)
{
    if (!config)
        return;
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++)
        rbi_heap_free(config->entries[i].origin);
    rbi_heap_free(config);
}

/* ---- looking ---- */

const char *rebatch_config_key(size_t n)
{
    return n < RBI_SETTING_COUNT ? rbi_settings[n].key : NULL;
}

const char *rebatch_config_get(const rebatch_config *config, const char *key, const char **origin)
{
    if (origin)
        *origin = NULL;
    if (!config || !key) {
        rbi_error(REBATCH_E_INVALID, "%s is NULL", config ? "key" : "config");
        return NULL;
    }
    const struct rbi_setting *setting = rbi_setting_find(key);
    if (!setting) {
        const struct rbi_setting *nearest = rbi_nearest_setting(NULL, key, strlen(key));
        rbi_error(REBATCH_E_INVALID, "%s is not a setting%s%s%s",
                  rbi_shown_text(key, strlen(key)).text, nearest ? "; did you mean " : "",
                  nearest ? nearest->key : "", nearest ? "?" : "");
        return NULL;
    }
    const struct rbi_entry *entry = &config->entries[setting - rbi_settings];
    if (origin)
        *origin = origin_of(entry);
    return entry->text;
}

/* ---- using ---- */

static rebatch_toggle toggle_of(const struct rebatch_config *config, enum rbi_setting_id id)
{
    return config->entries[id].number ? REBATCH_ON : REBATCH_OFF;
}

static void fill_pool(rebatch_pool_options *pool, const struct rebatch_config *config)
{
    const struct rbi_entry *limit = &config->entries[RBI_MEMORY_LIMIT];
    pool->struct_size = sizeof *pool;
    pool->limit_bytes = limit->number;
    pool->limit_permille = limit->permille;
    pool->headroom_bytes = config->entries[RBI_MEMORY_HEADROOM].number;
    pool->caching = toggle_of(config, RBI_MEMORY_CACHING);
    pool->replay = toggle_of(config, RBI_MEMORY_REPLAY);
    pool->ballast_bytes = config->entries[RBI_MEMORY_BALLAST].number;
    pool->max_split_bytes = config->entries[RBI_MEMORY_MAX_SPLIT].number;
    pool->gc_threshold_permille = config->entries[RBI_MEMORY_GC_THRESHOLD].permille;
    pool->keep_room_permille = config->entries[RBI_MEMORY_KEEP_ROOM].permille;
    pool->rounding_divisions = (uint32_t)config->entries[RBI_MEMORY_ROUNDING].number;
    pool->guard = toggle_of(config, RBI_MEMORY_GUARD);
    pool->events = (uint32_t)config->entries[RBI_MEMORY_EVENTS].number;
}

static void fill(rebatch_options *o, const struct rebatch_config *config)
{
    static const rebatch_on_oom on_oom[] = {REBATCH_ON_OOM_HALVE, REBATCH_ON_OOM_FIT,
                                            REBATCH_ON_OOM_STOP};
    static const rebatch_log_level levels[] = {REBATCH_LOG_QUIET, REBATCH_LOG_ERROR,
                                               REBATCH_LOG_WARN, REBATCH_LOG_INFO,
                                               REBATCH_LOG_DEBUG};
    const struct rbi_entry *e = config->entries;
    fill_pool(&o->pool, config);
    o->micro_start = e[RBI_BATCH_START].number;
    o->micro_smallest = e[RBI_BATCH_SMALLEST].number;
    o->micro_largest = e[RBI_BATCH_LARGEST].number;
    o->on_oom = on_oom[e[RBI_RECOVERY_ON_OOM].number];
    o->admission = toggle_of(config, RBI_RECOVERY_ADMISSION);
    o->lighten = toggle_of(config, RBI_RECOVERY_LIGHTEN);
    o->max_attempts = (uint32_t)e[RBI_RECOVERY_MAX_ATTEMPTS].number;
    o->growth = toggle_of(config, RBI_GROWTH_ENABLED);
    o->grow_after = (uint32_t)e[RBI_GROWTH_AFTER].number;
    o->grow_wait_max = (uint32_t)e[RBI_GROWTH_WAIT_MAX].number;
    o->log_level = levels[e[RBI_LOG_LEVEL].number];
    o->micro_multiple_of = e[RBI_BATCH_MULTIPLE_OF].number;
    memcpy(o->micro_allowed, e[RBI_BATCH_ALLOWED].list, sizeof o->micro_allowed);
    o->max_ooms_in_row = (uint32_t)e[RBI_RECOVERY_MAX_OOMS_IN_ROW].number;
    o->learn = toggle_of(config, RBI_BATCH_LEARN);
}

rebatch_status rebatch_config_options(rebatch_options *options, const rebatch_config *config)
{
    if (!options || !config)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", options ? "config" : "options");
    rebatch_options ours = REBATCH_OPTIONS_INIT;
    const rebatch_status status = rbi_options_copy(
        &ours, sizeof ours, RBI_SIZE_TO(rebatch_options, learn), options, "rebatch_options");
    if (status)
        return status;
    const size_t given = options->struct_size;
    fill(&ours, config);
    ours.struct_size = given;
    memcpy(options, &ours, rbi_min(given, sizeof ours));
    return REBATCH_OK;
}

rebatch_status rebatch_config_probe_options(rebatch_probe_options *options,
                                            const rebatch_config *config)
{
    static const rebatch_probe_choice choices[] = {REBATCH_PROBE_LARGEST, REBATCH_PROBE_FASTEST};
    if (!options || !config)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", options ? "config" : "options");
    if (options->struct_size != sizeof *options)
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_probe_options.struct_size is %zu: expected %zu, or settings "
                         "would be lost",
                         options->struct_size, sizeof *options);
    const struct rbi_entry *e = config->entries;
    options->max_trials = (uint32_t)e[RBI_PROBE_MAX_TRIALS].number;
    options->max_seconds = (uint32_t)e[RBI_PROBE_MAX_SECONDS].number;
    options->choose = choices[e[RBI_PROBE_CHOOSE].number];
    options->file = e[RBI_PROBE_FILE].is_none ? NULL : e[RBI_PROBE_FILE].words;
    if (!e[RBI_PROBE_KEY].is_none)
        options->key = e[RBI_PROBE_KEY].words;
    return REBATCH_OK;
}

/* The bytes that device.capacity stands for; a share is of what the machine has. */
static rebatch_status set_capacity(rebatch_device *device, const struct rbi_entry *entry)
{
    if (entry->permille == 0)
        return rebatch_device_set_capacity(device, entry->number);
    rebatch_memory_info machine;
    const rebatch_status status = rebatch_device_memory(device, &machine);
    if (status)
        return status;
    if (machine.total_bytes == REBATCH_UNLIMITED)
        return rbi_error(REBATCH_E_UNSUPPORTED,
                         "device.capacity is %s (%s), but the machine does not report its memory: "
                         "expected bytes",
                         entry->text, rbi_shown_path(origin_of(entry)).text);
    return rebatch_device_set_capacity(device, machine.total_bytes / 1000 * entry->permille);
}

/* device.kind's choices, in their order. */
enum { KIND_HOST, KIND_CUDA };

static rebatch_status open_kind(rebatch_device **out, const rebatch_config *config)
{
    if (config->entries[RBI_DEVICE_KIND].number == KIND_HOST)
        return rebatch_device_open_host(out, REBATCH_UNLIMITED, NULL);
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    options.ordinal = (int)config->entries[RBI_DEVICE_ORDINAL].number;
    return rebatch_device_open_cuda(out, &options);
}

rebatch_status rebatch_config_open_device(rebatch_device **out, const rebatch_config *config)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    if (!config)
        return rbi_error(REBATCH_E_INVALID, "config is NULL");
    rebatch_device *device = NULL;
    rebatch_status status = open_kind(&device, config);
    const struct rbi_entry *capacity = &config->entries[RBI_DEVICE_CAPACITY];
    if (!status && !capacity->is_none)
        status = set_capacity(device, capacity);
    if (status) {
        rebatch_device_close(device);
        return status;
    }
    *out = device;
    return REBATCH_OK;
}
