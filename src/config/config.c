/* Owns settings as a whole: defaults, the order of sources, their use.
 * Must not know how a value is written. */
#include "config/settings.h"

#include <stdlib.h>
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

/* The file that the environment names; *path stays where it names none. */
static rebatch_status find_file(const char **path)
{
    const char *named = getenv(RBI_FILE_VARIABLE);
    if (named && !named[0])
        return rbi_error(REBATCH_E_PARSE,
                         RBI_FILE_VARIABLE " is empty: expected the path of a settings file");
    if (named)
        *path = named;
    return REBATCH_OK;
}

static rebatch_status read_all(struct rebatch_config *config, const char *path, const char *program)
{
    rebatch_status status = set_defaults(config);
    if (!status && program)
        status = rbi_config_read_program(config, program);
    if (!status && !path)
        status = rbi_config_note(config, find_file(&path));
    if (!status && path)
        status = rbi_config_note(config, rbi_config_read_file(config, path));
    if (!status)
        status = rbi_config_read_environment(config);
    if (!status && !config->has_mistake)
        status = rbi_config_note(config, rbi_config_check_conflicts(config));
    return !status && config->has_mistake ? REBATCH_E_PARSE : status;
}

rebatch_status rbi_config_load(rebatch_config **out, const char *path, const char *program)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    struct rebatch_config *config = rbi_heap_calloc(1, sizeof *config);
    if (!config)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for settings");
    const rebatch_status status = read_all(config, path, program);
    if (status)
        rebatch_config_free(config);
    else
        *out = config;
    return status;
}

rebatch_status rebatch_config_load(rebatch_config **out, const char *path)
{
    return rbi_config_load(out, path, NULL);
}

rebatch_status rbi_config_check(const char *path,
                                void (*on_mistake)(const char *sentence, void *user), void *user)
{
    struct rebatch_config *config = rbi_heap_calloc(1, sizeof *config);
    if (!config)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for settings");
    config->on_mistake = on_mistake;
    config->user = user;
    const rebatch_status status = read_all(config, path, NULL);
    rebatch_config_free(config);
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

/* ---- using ---- */

static rebatch_toggle toggle_of(const struct rbi_entry *entry)
{
    return entry->number ? REBATCH_ON : REBATCH_OFF;
}

/* Sets a member to a value of setting `id`; in an override only where the setting is not at its
 * default. */
#define SET(id, member, value)                                                                     \
    do {                                                                                           \
        const struct rbi_entry *const entry = &config->entries[RBI_##id];                          \
        if (!is_override || entry->origin)                                                         \
            (member) = (value);                                                                    \
    } while (0)

static void fill_pool(rebatch_pool_options *pool, const struct rebatch_config *config,
                      bool is_override)
{
    SET(MEMORY_LIMIT, pool->limit_bytes, entry->number);
    SET(MEMORY_LIMIT, pool->limit_permille, entry->permille);
    SET(MEMORY_HEADROOM, pool->headroom_bytes, entry->number);
    SET(MEMORY_CACHING, pool->caching, toggle_of(entry));
    SET(MEMORY_REPLAY, pool->replay, toggle_of(entry));
    SET(MEMORY_OVERFLOW, pool->overflow, toggle_of(entry));
    SET(MEMORY_OVERFLOW_LIMIT, pool->overflow_bytes, entry->number);
    SET(MEMORY_KEEP_ROOM, pool->keep_room_permille, entry->permille);
    SET(MEMORY_ROUNDING, pool->rounding_divisions, (uint32_t)entry->number);
    SET(MEMORY_EVENTS, pool->events, (uint32_t)entry->number);
}

static void fill(rebatch_options *o, const struct rebatch_config *config, bool is_override)
{
    static const rebatch_on_oom on_oom[] = {REBATCH_ON_OOM_DEFAULT, REBATCH_ON_OOM_HALVE,
                                            REBATCH_ON_OOM_FIT, REBATCH_ON_OOM_STOP};
    static const rebatch_log_format formats[] = {REBATCH_LOG_TEXT, REBATCH_LOG_JSON};
    if (o->pool.struct_size == 0 || !is_override)
        o->pool.struct_size = sizeof o->pool;
    fill_pool(&o->pool, config, is_override);
    SET(BATCH_START, o->micro_start, entry->number);
    SET(BATCH_SMALLEST, o->micro_smallest, entry->number);
    SET(BATCH_LARGEST, o->micro_largest, entry->number);
    SET(BATCH_MULTIPLE_OF, o->micro_multiple_of, entry->number);
    for (size_t i = 0; i < REBATCH_ALLOWED_SIZES; i++)
        SET(BATCH_ALLOWED, o->micro_allowed[i], entry->list[i]);
    SET(BATCH_LEARN, o->learn, toggle_of(entry));
    SET(RECOVERY_ON_OOM, o->on_oom, on_oom[entry->number]);
    SET(RECOVERY_ADMISSION, o->admission, toggle_of(entry));
    SET(RECOVERY_LIGHTEN, o->lighten, toggle_of(entry));
    SET(RECOVERY_MAX_ATTEMPTS, o->max_attempts, (uint32_t)entry->number);
    SET(RECOVERY_MAX_OOMS_IN_ROW, o->max_ooms_in_row, (uint32_t)entry->number);
    SET(MEMORY_FLOOR, o->floor_bytes, entry->number);
    SET(RECOVERY_OOM_WAIT_MS, o->oom_wait_ms, (uint32_t)entry->number);
    SET(GROWTH_ENABLED, o->growth, toggle_of(entry));
    SET(GROWTH_AFTER, o->grow_after, (uint32_t)entry->number);
    SET(GROWTH_WAIT_MAX, o->grow_wait_max, (uint32_t)entry->number);
    SET(LOG_LEVEL, o->log_level, rbi_entry_log_level(entry));
    SET(LOG_FILE, o->log_file, entry->is_none ? NULL : entry->words);
    SET(LOG_FORMAT, o->log_format, formats[entry->number]);
}

void rbi_config_override(rebatch_options *options, const struct rebatch_config *config)
{
    fill(options, config, true);
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
    fill(&ours, config, false);
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

/* A GPU that is asked for by its number is asked for. */
static rebatch_status open_kind(rebatch_device **out, const rebatch_config *config)
{
    const struct rbi_entry *e = config->entries;
    uint64_t kind = e[RBI_DEVICE_KIND].number;
    if (kind == RBI_KIND_AUTO && !e[RBI_DEVICE_CAPACITY].is_none)
        kind = RBI_KIND_HOST;
    if (kind == RBI_KIND_HOST)
        return rebatch_device_open_host(out, REBATCH_UNLIMITED, NULL);
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    options.ordinal = (int)e[RBI_DEVICE_ORDINAL].number;
    const rebatch_status status = rebatch_device_open_cuda(out, &options);
    if (status == REBATCH_E_NO_DEVICE && kind == RBI_KIND_AUTO && !e[RBI_DEVICE_ORDINAL].origin)
        return rebatch_device_open_host(out, REBATCH_UNLIMITED, NULL);
    return status;
}

rebatch_status rebatch_config_open_device(rebatch_device **out, const rebatch_config *config)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    if (!config)
        return rbi_error(REBATCH_E_INVALID, "config is NULL");
    rebatch_device *device = NULL;
    rebatch_status status = rbi_config_check_kind(config);
    if (!status)
        status = open_kind(&device, config);
    const struct rbi_entry *capacity = &config->entries[RBI_DEVICE_CAPACITY];
    if (!status && !capacity->is_none)
        status = set_capacity(device, capacity);
    if (!status)
        status = rbi_config_check_device(config, device);
    if (status) {
        rebatch_device_close(device);
        return status;
    }
    *out = device;
    return REBATCH_OK;
}
