/* Owns the arguments of the replay of traces: one table of options.
 * Must not know traces and pools beyond the settings of one. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rebatch/config.h"
#include "replay.h"

#define PAGE_BYTES ((size_t)2 << 20) /* as on CUDA devices */
#define PAGE_LEAST 4096              /* as of a dry device */
#define REPEAT_DEFAULT 9
#define REPEAT_MOST 1000
#define NUMBER_MOST (SIZE_MAX >> 2) /* so that sums with it do not overflow */

/* ---- values ---- */

static bool set_bytes(size_t *out, const char *text)
{
    return rebatch_config_parse_size(out, NULL, text) == REBATCH_OK && *out > 0 &&
           *out <= NUMBER_MOST;
}

static bool set_capacity(struct replay_settings *settings, const char *text)
{
    return set_bytes(&settings->capacity_bytes, text);
}

static bool set_page(struct replay_settings *settings, const char *text)
{
    return set_bytes(&settings->page_bytes, text) && settings->page_bytes >= PAGE_LEAST &&
           (settings->page_bytes & (settings->page_bytes - 1)) == 0;
}

static bool set_headroom(struct replay_settings *settings, const char *text)
{
    return set_bytes(&settings->pool.headroom_bytes, text);
}

static bool set_keep_room(struct replay_settings *settings, const char *text)
{
    size_t bytes;
    uint32_t *const permille = &settings->pool.keep_room_permille;
    return rebatch_config_parse_size(&bytes, permille, text) == REBATCH_OK && *permille > 0;
}

static bool set_limit(struct replay_settings *settings, const char *text)
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

static bool set_caching(struct replay_settings *settings, const char *text)
{
    return set_toggle(&settings->pool.caching, text);
}

static bool set_replay(struct replay_settings *settings, const char *text)
{
    return set_toggle(&settings->pool.replay, text);
}

/* A whole number from 1 to `most`. */
static bool set_number(uint32_t *out, uint32_t most, const char *text)
{
    char *end;
    const unsigned long number = strtoul(text, &end, 10);
    *out = (uint32_t)number;
    return *text >= '0' && *text <= '9' && *end == '\0' && number >= 1 && number <= most;
}

static bool set_repeat(struct replay_settings *settings, const char *text)
{
    return set_number(&settings->repeat, REPEAT_MOST, text);
}

/* Which numbers it may be, the pool says. */
static bool set_rounding(struct replay_settings *settings, const char *text)
{
    return set_number(&settings->pool.rounding_divisions, 256, text);
}

static bool set_snapshot(struct replay_settings *settings, const char *text)
{
    settings->snapshot = text;
    return text[0] != '\0';
}

static bool set_device(struct replay_settings *settings, const char *text)
{
    settings->is_cuda = strcmp(text, "cuda") == 0;
    return settings->is_cuda || strcmp(text, "dry") == 0;
}

/* ---- options ---- */

#define A_SIZE "a size of at least 1 byte such as 22GiB, 512 MB or 1048576"
static const struct {
    const char *name;
    bool (*set)(struct replay_settings *settings, const char *text);
    const char *expected; /* of the value */
} settable[] = {
    {"capacity", set_capacity, A_SIZE},
    {"limit", set_limit, A_SIZE ", or a share from 0.1% to 100%"},
    {"headroom", set_headroom, A_SIZE},
    {"device", set_device, "dry or cuda"},
    {"caching", set_caching, "on or off"},
    {"replay", set_replay, "on or off"},
    {"keep-room", set_keep_room, "a share from 0.1% to 100%"},
    {"rounding", set_rounding, "a power of two up to 256"},
    {"page", set_page, "a power of two from 4KiB"},
    {"repeat", set_repeat, "a number from 1 to 1000"},
    {"snapshot", set_snapshot, "the beginning of a file's name"},
};
enum { SETTABLE = sizeof settable / sizeof *settable, SMALLEST, JSON };

static bool take(struct replay_settings *settings, int found)
{
    settings->smallest |= found == SMALLEST;
    settings->json |= found == JSON;
    settings->help |= found == 'h';
    if (found >= SETTABLE || settable[found].set(settings, optarg))
        return found != '?';
    fprintf(stderr, "replay: --%s is '%.60s': expected %s\n", settable[found].name, optarg,
            settable[found].expected);
    return false;
}

static bool check(const struct replay_settings *settings)
{
    const bool is_sized = settings->smallest || settings->capacity_bytes != REBATCH_UNLIMITED;
    if (settings->is_cuda && is_sized)
        fputs("replay: a GPU's memory is fixed: expected no --smallest and no --capacity with "
              "--device cuda\n",
              stderr);
    else if (settings->path_count == 0 && !settings->help)
        fputs("usage: replay [OPTION...] TRACE...; see replay --help\n", stderr);
    else
        return true;
    return false;
}

bool replay_settings_read(struct replay_settings *settings, int count, char **arguments)
{
    struct option known[SETTABLE + 4] = {{"smallest", no_argument, NULL, SMALLEST},
                                         {"json", no_argument, NULL, JSON},
                                         {"help", no_argument, NULL, 'h'}};
    for (int i = 0; i < SETTABLE; i++)
        known[3 + i] = (struct option){settable[i].name, required_argument, NULL, i};
    *settings = (struct replay_settings){
        .capacity_bytes = REBATCH_UNLIMITED,
        .page_bytes = PAGE_BYTES,
        .pool = REBATCH_POOL_OPTIONS_INIT,
        .repeat = REPEAT_DEFAULT,
    };
    for (int found; (found = getopt_long(count, arguments, "h", known, NULL)) != -1;)
        if (!take(settings, found))
            return false;
    settings->path_count = (size_t)(count - optind);
    settings->paths = arguments + optind;
    return check(settings);
}
