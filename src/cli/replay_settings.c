/* Owns the arguments of `rebatch replay`: one table of options.
 * Must not know traces and pools beyond the settings of one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/replay.h"
#include "rebatch/config.h"
#include "rebatch/cuda.h"

#define PAGE_BYTES ((size_t)2 << 20) /* as on CUDA devices */
#define REPEAT_DEFAULT 9
#define REPEAT_MOST 1000
#define EVENTS_DEFAULT 100000
#define EVENTS_MOST 100000000       /* 5 GB of host memory */
#define NUMBER_MOST (SIZE_MAX >> 2) /* so that sums with it do not overflow */

/* ---- values ---- */

bool rbi_replay_has_ending(const char *path, const char *ending)
{
    const size_t length = strlen(path);
    const size_t tail = strlen(ending);
    return length > tail && strcmp(path + length - tail, ending) == 0;
}

static bool set_bytes(size_t *out, const char *text)
{
    return rebatch_config_parse_size(out, NULL, text) == REBATCH_OK && *out > 0 &&
           *out <= NUMBER_MOST;
}

static bool set_capacity(struct rbi_replay_settings *settings, const char *text)
{
    return set_bytes(&settings->capacity_bytes, text);
}

/* As of a dry device. */
#define PAGE_LEAST 4096

static bool set_page(struct rbi_replay_settings *settings, const char *text)
{
    return set_bytes(&settings->page_bytes, text) && settings->page_bytes >= PAGE_LEAST &&
           (settings->page_bytes & (settings->page_bytes - 1)) == 0;
}

static bool set_headroom(struct rbi_replay_settings *settings, const char *text)
{
    return set_bytes(&settings->pool.headroom_bytes, text);
}

static bool set_keep_room(struct rbi_replay_settings *settings, const char *text)
{
    size_t bytes;
    uint32_t *const permille = &settings->pool.keep_room_permille;
    return rebatch_config_parse_size(&bytes, permille, text) == REBATCH_OK && *permille > 0;
}

static bool set_limit(struct rbi_replay_settings *settings, const char *text)
{
    rebatch_pool_options *pool = &settings->pool;
    if (rebatch_config_parse_size(&pool->limit_bytes, &pool->limit_permille, text) != REBATCH_OK)
        return false;
    return pool->limit_permille > 0 || (pool->limit_bytes > 0 && pool->limit_bytes <= NUMBER_MOST);
}

static bool set_toggle(rebatch_toggle *out, const char *text)
{
    const bool is_on = strcmp(text, "on") == 0;
    *out = is_on ? REBATCH_ON : REBATCH_OFF;
    return is_on || strcmp(text, "off") == 0;
}

static bool set_caching(struct rbi_replay_settings *settings, const char *text)
{
    return set_toggle(&settings->pool.caching, text);
}

static bool set_replay(struct rbi_replay_settings *settings, const char *text)
{
    return set_toggle(&settings->pool.replay, text);
}

static bool set_fence(struct rbi_replay_settings *settings, const char *text)
{
    return set_toggle(&settings->pool.fence, text);
}

/* A whole number from 1 to `most`. */
static bool set_number(uint32_t *out, uint32_t most, const char *text)
{
    char *end;
    const unsigned long number = strtoul(text, &end, 10);
    *out = (uint32_t)number;
    return *text >= '0' && *text <= '9' && *end == '\0' && number >= 1 && number <= most;
}

static bool set_repeat(struct rbi_replay_settings *settings, const char *text)
{
    return set_number(&settings->repeat, REPEAT_MOST, text);
}

/* Which numbers it may be, the pool says. */
static bool set_rounding(struct rbi_replay_settings *settings, const char *text)
{
    return set_number(&settings->pool.rounding_divisions, 256, text);
}

static bool set_events(struct rbi_replay_settings *settings, const char *text)
{
    return set_number(&settings->snapshot_events, EVENTS_MOST, text);
}

static bool set_snapshot(struct rbi_replay_settings *settings, const char *text)
{
    settings->snapshot = text;
    return rbi_replay_has_ending(text, ".pickle") || rbi_replay_has_ending(text, ".csv");
}

static bool set_device(struct rbi_replay_settings *settings, const char *text)
{
    settings->is_cuda = strcmp(text, "cuda") == 0;
    return settings->is_cuda || strcmp(text, "dry") == 0;
}

static bool set_smallest(struct rbi_replay_settings *settings, const char *text)
{
    (void)text;
    return settings->smallest = true;
}

static bool set_json(struct rbi_replay_settings *settings, const char *text)
{
    (void)text;
    return settings->json = true;
}

static bool set_help(struct rbi_replay_settings *settings, const char *text)
{
    (void)text;
    return settings->help = true;
}

/* ---- options ---- */

struct option {
    const char *name;
    bool (*set)(struct rbi_replay_settings *settings, const char *text);
    const char *expected; /* of the value; NULL: it takes none */
};

#define A_SIZE "a size of at least 1 byte such as 22GiB, 512 MB or 1048576"
static const struct option options[] = {
    {"--capacity", set_capacity, A_SIZE},
    {"--smallest", set_smallest, NULL},
    {"--json", set_json, NULL},
    {"--limit", set_limit, A_SIZE ", or a share from 0.1% to 100%"},
    {"--headroom", set_headroom, A_SIZE},
    {"--device", set_device, "dry or cuda"},
    {"--caching", set_caching, "on or off"},
    {"--replay", set_replay, "on or off"},
    {"--keep-room", set_keep_room, "a share from 0.1% to 100%"},
    {"--rounding", set_rounding, "a power of two up to 256"},
    {"--fence", set_fence, "on or off"},
    {"--page", set_page, "a power of two from 4KiB"},
    {"--repeat", set_repeat, "a number from 1 to 1000"},
    {"--snapshot", set_snapshot, "a file's name that ends in .pickle or .csv"},
    {"--events", set_events, "a number from 1 to 100000000"},
    {"--help", set_help, NULL},
    {"-h", set_help, NULL},
};

/* The option that an argument names, as `--name` or `--name=value`; NULL when it is none. */
static const struct option *find_option(const char *argument, const char **value)
{
    const size_t length = strcspn(argument, "=");
    *value = argument[length] ? argument + length + 1 : NULL;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (strlen(options[i].name) == length && strncmp(argument, options[i].name, length) == 0)
            return &options[i];
    return NULL;
}

/* One option with its value, which may be the next argument; *at is moved to the last one used. */
static bool read_option(struct rbi_replay_settings *settings, int *at, int count, char **arguments)
{
    const char *value;
    const struct option *option = find_option(arguments[*at], &value);
    if (!option) {
        const bool is_fence = strncmp(arguments[*at], "--guard", 7) == 0;
        fprintf(stderr, "rebatch replay: there is no option '%.60s'; %s\n", arguments[*at],
                is_fence ? "it is --fence" : "see 'rebatch help replay'");
        return false;
    }
    if (!option->expected && value) {
        fprintf(stderr, "rebatch replay: %s is '%.60s': expected no value\n", option->name, value);
        return false;
    }
    if (option->expected && !value && *at + 1 < count)
        value = arguments[++*at];
    if (option->expected && !value) {
        fprintf(stderr, "rebatch replay: %s has no value: expected %s\n", option->name,
                option->expected);
        return false;
    }
    if (option->set(settings, value))
        return true;
    fprintf(stderr, "rebatch replay: %s is '%.60s': expected %s\n", option->name, value,
            option->expected);
    return false;
}

rebatch_status rbi_replay_open_device(rebatch_device **out,
                                      const struct rbi_replay_settings *settings)
{
    if (settings->is_cuda)
        return rebatch_device_open_cuda(out, NULL);
    return rebatch_device_open_dry(out, settings->capacity_bytes, settings->page_bytes);
}

/* What only a real pool and device know about their settings: whether they take them. */
static bool try_settings(const struct rbi_replay_settings *settings)
{
    rebatch_device *device = NULL;
    rebatch_pool *pool = NULL;
    rebatch_status status = rbi_replay_open_device(&device, settings);
    if (!status)
        status = rebatch_pool_create(&pool, device, &settings->pool);
    if (status)
        fprintf(stderr, "rebatch replay: %s\n", rebatch_last_error());
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
    return status == REBATCH_OK;
}

static bool check(const struct rbi_replay_settings *settings)
{
    if (settings->help)
        return true;
    if (settings->path_count == 0) {
        fputs("usage: rebatch replay [OPTION...] TRACE...; see 'rebatch help replay'\n", stderr);
        return false;
    }
    if (settings->snapshot && settings->path_count > 1) {
        fprintf(stderr,
                "rebatch replay: --snapshot is '%.60s', and there are %zu traces: expected one\n",
                settings->snapshot, settings->path_count);
        return false;
    }
    const bool is_sized = settings->smallest || settings->capacity_bytes != REBATCH_UNLIMITED;
    if (settings->is_cuda && is_sized) {
        fprintf(stderr,
                "rebatch replay: --device is 'cuda': expected no %s with it: a GPU's memory "
                "is fixed\n",
                settings->smallest ? "--smallest" : "--capacity");
        return false;
    }
    if (settings->pool.limit_permille && !settings->is_cuda &&
        settings->capacity_bytes == REBATCH_UNLIMITED) {
        fputs("rebatch replay: --limit is a share of the capacity: expected --capacity with it\n",
              stderr);
        return false;
    }
    return try_settings(settings);
}

bool rbi_replay_settings_read(struct rbi_replay_settings *settings, int count, char **arguments)
{
    *settings = (struct rbi_replay_settings){
        .capacity_bytes = REBATCH_UNLIMITED,
        .page_bytes = PAGE_BYTES,
        .pool = REBATCH_POOL_OPTIONS_INIT,
        .repeat = REPEAT_DEFAULT,
        .snapshot_events = EVENTS_DEFAULT,
        .paths = arguments,
    };
    bool are_paths = false; /* after "--" */
    for (int i = 0; i < count; i++) {
        if (are_paths || arguments[i][0] != '-')
            arguments[settings->path_count++] = arguments[i];
        else if (strcmp(arguments[i], "--") == 0)
            are_paths = true;
        else if (!read_option(settings, &i, count, arguments))
            return false;
    }
    return check(settings);
}
