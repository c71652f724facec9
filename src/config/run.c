/* Owns the variables that the person who starts a program sets for that run: a probe, a cap,
 * failures to inject. Must not know what is done about them. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "config/settings.h"

static rebatch_status refuse(enum rbi_run_variable id, const char *text, const char *expected)
{
    return rbi_error(REBATCH_E_PARSE, "%s is \"%s\": expected %s", rbi_run_variables[id],
                     rbi_shown_text(text, strlen(text)).text, expected);
}

/* ---- one value ---- */

/* A whole number of at least `least`. */
static bool read_count(uint64_t *out, const char *text, size_t length, int64_t least)
{
    int64_t number;
    if (rbi_integer_parse(text, length, &number) != RBI_INTEGER_FITS || number < least)
        return false;
    *out = (uint64_t)number;
    return true;
}

/* "0.05" or "5%", above 0 and at most 1, whatever the locale. */
static bool read_chance(double *out, const char *text)
{
    const size_t length = strlen(text);
    const bool is_share = length > 0 && text[length - 1] == '%';
    double value = 0, unit = 1;
    bool has_digit = false, has_point = false;
    for (size_t i = 0; i < length - is_share; i++) {
        const bool is_digit = text[i] >= '0' && text[i] <= '9';
        if (!is_digit && (text[i] != '.' || has_point))
            return false;
        has_digit |= is_digit;
        has_point |= !is_digit;
        if (is_digit)
            value = 10 * value + (text[i] - '0');
        if (is_digit && has_point)
            unit *= 10;
    }
    value /= is_share ? 100 * unit : unit;
    *out = value;
    return has_digit && value > 0 && value <= 1;
}

static rebatch_status read_probe(struct rbi_run_settings *run, const char *text)
{
    if (strcmp(text, "0") == 0)
        return REBATCH_OK;
    if (strcmp(text, "1") != 0 && strcmp(text, "json") != 0)
        return refuse(RBI_RUN_PROBE_ONLY, text, "1, json, or 0 for no probe");
    run->probe = text[0] == '1' ? RBI_PROBE_TABLE : RBI_PROBE_JSON;
    return REBATCH_OK;
}

static rebatch_status read_check(struct rbi_run_settings *run, const char *text)
{
    if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0)
        return refuse(RBI_RUN_CHECK, text, "1, or 0 for no check");
    run->check = text[0] == '1';
    return REBATCH_OK;
}

/* Settings that hold in every session; an entry stays as it is where its variable is not set. */
static rebatch_status read_setting(struct rbi_entry *entry, enum rbi_setting_id id)
{
    const struct rbi_variable variable = rbi_setting_variable(&rbi_settings[id]);
    const char *text = getenv(variable.name);
    const struct rbi_place place = {NULL, 0, variable.name};
    return text ? rbi_entry_set_bare(entry, &rbi_settings[id], text, &place) : REBATCH_OK;
}

static rebatch_status read_settings(struct rbi_run_settings *run)
{
    static const struct rbi_entry none;
    struct rbi_entry limit = none, level = none;
    rebatch_status status = read_setting(&limit, RBI_MEMORY_LIMIT);
    if (!status)
        status = read_setting(&level, RBI_LOG_LEVEL);
    run->limit_bytes = limit.number;
    run->limit_permille = limit.permille;
    run->log_level = rbi_entry_log_level(&level);
    return status;
}

/* "50%@step:20" */
static bool read_shrink(struct rbi_shrink *out, const char *text, size_t length)
{
    static const char at_step[] = "@step:";
    char share[16];
    size_t size = 0;
    while (size < length && text[size] != '@')
        size++;
    const size_t digits = size + sizeof at_step - 1;
    if (size >= sizeof share || length <= digits ||
        strncmp(text + size, at_step, sizeof at_step - 1) != 0)
        return false;
    rbi_assert(size < length && size < sizeof share);
    memcpy(share, text, size);
    share[size] = '\0';
    const struct rbi_size parsed = rbi_size_parse(share, true);
    out->permille = parsed.permille;
    return !parsed.wrong[0] && parsed.permille > 0 &&
           read_count(&out->step, text + digits, length - digits, 0);
}

static rebatch_status read_shrinks(struct rbi_run_settings *run, const char *text)
{
    for (const char *at = text;; at++) {
        const size_t length = strcspn(at, ",");
        if (run->shrink_count == RBI_SHRINKS_MOST)
            return rbi_error(REBATCH_E_PARSE, "%s has more than %d shares: expected no more",
                             rbi_run_variables[RBI_RUN_SHRINK], RBI_SHRINKS_MOST);
        struct rbi_shrink *const shrink = &run->shrinks[run->shrink_count];
        if (!read_shrink(shrink, at, length))
            return refuse(RBI_RUN_SHRINK, text,
                          "a share of the memory and a step, for example 50%@step:20");
        if (run->shrink_count > 0 && shrink->step <= shrink[-1].step)
            return refuse(RBI_RUN_SHRINK, text, "steps in ascending order");
        run->shrink_count++;
        at += length;
        if (*at == '\0')
            return REBATCH_OK;
    }
}

static rebatch_status read_record(struct rbi_run_settings *run, const char *text)
{
    if (text[0] == '\0')
        return refuse(RBI_RUN_RECORD, text, "the path of a file");
    run->record = text;
    return REBATCH_OK;
}

/* "FD:INODE": a program may have closed it, and have another file of that number since. */
static rebatch_status read_report(struct rbi_run_settings *run, const char *text)
{
    uint64_t fd, inode;
    struct stat file;
    const size_t length = strcspn(text, ":");
    if (text[length] != ':' || !read_count(&fd, text, length, 0) || fd > INT32_MAX ||
        !read_count(&inode, text + length + 1, strlen(text + length + 1), 0))
        return refuse(RBI_RUN_REPORT, text, "a descriptor and its inode, as `rebatch` sets it");
    if (fstat((int)fd, &file) == 0 && S_ISSOCK(file.st_mode) && file.st_ino == inode)
        run->report = (int)fd;
    return REBATCH_OK;
}

/* ---- all of them ---- */

static rebatch_status read_failures(struct rbi_run_settings *run)
{
    const char *nth = getenv(rbi_run_variables[RBI_RUN_OOM]);
    const char *chance = getenv(rbi_run_variables[RBI_RUN_OOM_CHANCE]);
    const char *seed = getenv(rbi_run_variables[RBI_RUN_SEED]);
    if (nth && !read_count(&run->oom, nth, strlen(nth), 1))
        return refuse(RBI_RUN_OOM, nth, "a whole number, 1 or more");
    if (chance && !read_chance(&run->chance, chance))
        return refuse(RBI_RUN_OOM_CHANCE, chance, "a chance above 0 and at most 1, 0.05 or 5%");
    if (nth && chance)
        return rbi_error(REBATCH_E_PARSE, "%s and %s are both set: expected one of them",
                         rbi_run_variables[RBI_RUN_OOM], rbi_run_variables[RBI_RUN_OOM_CHANCE]);
    if (seed && !read_count(&run->seed, seed, strlen(seed), 0))
        return refuse(RBI_RUN_SEED, seed, "a whole number, 0 or more");
    return REBATCH_OK;
}

rebatch_status rbi_run_settings_read(struct rbi_run_settings *run)
{
    static rebatch_status (*const readers[])(struct rbi_run_settings *, const char *) = {
        [RBI_RUN_PROBE_ONLY] = read_probe, [RBI_RUN_CHECK] = read_check,
        [RBI_RUN_SHRINK] = read_shrinks,   [RBI_RUN_RECORD] = read_record,
        [RBI_RUN_REPORT] = read_report,
    };
    *run = (struct rbi_run_settings){.seed = 1, .report = -1};
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof readers / sizeof *readers && !status; i++) {
        const char *text = readers[i] ? getenv(rbi_run_variables[i]) : NULL;
        if (text)
            status = readers[i](run, text);
    }
    if (!status)
        status = read_settings(run);
    return status ? status : read_failures(run);
}

rebatch_status rbi_run_settings_check(void)
{
    struct rbi_run_settings run;
    const rebatch_status status = rbi_run_settings_read(&run);
    return status ? status : rbi_config_check_names(NULL);
}

rebatch_status rebatch_config_run_limit(size_t *bytes, uint32_t *permille)
{
    struct rbi_entry limit = {0};
    if (bytes)
        *bytes = 0;
    if (permille)
        *permille = 0;
    if (!bytes || !permille)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", bytes ? "permille" : "bytes");
    const rebatch_status status = read_setting(&limit, RBI_MEMORY_LIMIT);
    if (status)
        return status;
    *bytes = (size_t)limit.number;
    *permille = limit.permille;
    return REBATCH_OK;
}
