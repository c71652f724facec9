/* Owns where the limits on the size come from: the program's options, a settings file, variables of
 * the environment, or the last over the others. Must not know what the limits mean. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "storm.h"

/* "8, 16", or "any" */
static void write_list(char *text, size_t size, const size_t *allowed)
{
    (void)snprintf(text, size, "any");
    for (size_t i = 0, at = 0; i < REBATCH_ALLOWED_SIZES && allowed[i] && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, "%s%zu", i ? "," : "", allowed[i]);
}

static void set_number(const char *name, size_t value)
{
    char text[32];
    (void)snprintf(text, sizeof text, "%zu", value);
    (void)setenv(name, text, 1);
}

static void set_variables(const rebatch_options *o)
{
    char list[256];
    write_list(list, sizeof list, o->micro_allowed);
    (void)setenv("REBATCH_BATCH_ALLOWED", list, 1);
    set_number("REBATCH_BATCH_SMALLEST", o->micro_smallest ? o->micro_smallest : 1);
    set_number("REBATCH_BATCH_LARGEST", o->micro_largest);
    set_number("REBATCH_BATCH_MULTIPLE_OF", o->micro_multiple_of ? o->micro_multiple_of : 1);
    set_number("REBATCH_BATCH_START", o->micro_start);
    (void)setenv("REBATCH_BATCH_LEARN", o->learn == REBATCH_ON ? "true" : "false", 1);
}

static void write_file(struct storm *s, const rebatch_options *o)
{
    char list[256], text[600];
    (void)snprintf(s->settings, sizeof s->settings, "/tmp/storm-XXXXXX");
    const int file = mkstemp(s->settings);
    write_list(list, sizeof list, o->micro_allowed);
    const bool is_list = o->micro_allowed[0] != 0;
    const int length = snprintf(
        text, sizeof text,
        "batch = { allowed = %s%s%s; smallest = %zu; largest = %zu; multiple_of = %zu; start = "
        "%zu; learn = %s; };\n",
        is_list ? "[" : "\"", list, is_list ? "]" : "\"", o->micro_smallest ? o->micro_smallest : 1,
        o->micro_largest, o->micro_multiple_of ? o->micro_multiple_of : 1, o->micro_start,
        o->learn == REBATCH_ON ? "true" : "false");
    if (file < 0 || write(file, text, (size_t)length) != length)
        storm_fail(s, "cannot write %s", s->settings);
    if (file >= 0)
        (void)close(file);
    (void)setenv("REBATCH_CONFIG", s->settings, 1);
}

/* Other limits, which must not hold. */
static rebatch_options others(const rebatch_options *o)
{
    rebatch_options other = *o;
    memset(other.micro_allowed, 0, sizeof other.micro_allowed);
    other.micro_allowed[0] = 3;
    other.micro_smallest = other.micro_largest = 3;
    other.micro_multiple_of = other.micro_start = 0;
    other.learn = REBATCH_DEFAULT;
    return other;
}

rebatch_options storm_settings_set(struct storm *s)
{
    const rebatch_options *const o = &s->plan.options;
    rebatch_options given = *o;
    if (s->plan.source == STORM_FROM_OPTIONS)
        return given;
    given = others(o);
    given.environment = REBATCH_ON;
    if (s->plan.source != STORM_FROM_VARIABLES)
        write_file(s, s->plan.source == STORM_FROM_FILE ? o : &given);
    if (s->plan.source != STORM_FROM_FILE)
        set_variables(o);
    return given;
}

void storm_settings_clear(struct storm *s)
{
    static const char *const names[] = {
        "REBATCH_CONFIG",        "REBATCH_BATCH_ALLOWED",     "REBATCH_BATCH_SMALLEST",
        "REBATCH_BATCH_LARGEST", "REBATCH_BATCH_MULTIPLE_OF", "REBATCH_BATCH_START",
        "REBATCH_BATCH_LEARN"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        (void)unsetenv(names[i]);
    if (s->settings[0])
        (void)unlink(s->settings);
    s->settings[0] = '\0';
}
