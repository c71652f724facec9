/* Owns the tests that documents, example and headers say what the table of settings says.
 * Must not know how they are made. Nothing here is random. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/settings.h"
#include "unit/config_files.h"

TestSuite(config_documents, .init = config_enter, .fini = config_leave);

static char *formatted(size_t (*format)(char *text, size_t size))
{
    const size_t length = format(NULL, 0);
    char *text = malloc(length + 1);
    cr_assert(text != NULL);
    cr_assert(format(text, length + 1) == length);
    cr_assert(strlen(text) == length);
    return text;
}

Test(config_documents, texts_are_cut_as_snprintf_does)
{
    size_t (*const formats[])(char *, size_t) = {rebatch_config_format_example,
                                                 rebatch_config_format_reference};
    for (size_t i = 0; i < 2; i++) {
        char *whole = formatted(formats[i]);
        char cut[101];
        memset(cut, 'x', sizeof cut);
        cr_expect(formats[i](cut, 100) == strlen(whole));
        cr_expect(strlen(cut) == 99 && memcmp(cut, whole, 99) == 0 && cut[100] == 'x');
        cut[0] = 'x';
        cr_expect(formats[i](cut, 1) == strlen(whole) && cut[0] == '\0');
        free(whole);
    }
}

Test(config_documents, example_file_is_the_text)
{
    char *text = formatted(rebatch_config_format_example);
    char *file = config_read_source("examples/rebatch.cfg");
    cr_expect(strcmp(text, file) == 0, "examples/rebatch.cfg is not what the table says: "
                                       "run rebatch config example > examples/rebatch.cfg");
    free(text);
    free(file);
}

Test(config_documents, reference_is_in_the_document)
{
    static const char begin[] = "<!-- reference: made by `rebatch config reference` -->\n";
    static const char end[] = "<!-- end of reference -->\n";
    char *text = formatted(rebatch_config_format_reference);
    char *file = config_read_source("docs/config.md");
    const char *from = strstr(file, begin);
    const char *to = strstr(file, end);
    cr_assert(from && to && from < to, "docs/config.md has no place for the reference");
    from += strlen(begin);
    cr_expect(strlen(text) == (size_t)(to - from) && memcmp(text, from, strlen(text)) == 0,
              "docs/config.md is not what the table says: "
              "put what rebatch config reference prints between the two comments");
    free(text);
    free(file);
}

Test(config_documents, reference_has_every_key_and_all_that_it_may_be)
{
    char *text = formatted(rebatch_config_format_reference);
    char *at = text;
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_setting *setting = &rbi_settings[i];
        char values[256];
        struct rbi_text t = {values, sizeof values, 0};
        rbi_setting_describe(&t, setting);
        cr_assert(t.length < sizeof values);
        at = strstr(at, setting->key);
        cr_assert(at != NULL, "%s is missing or not in order", setting->key);
        const char *line_end = strchr(at, '\n');
        const char *const wanted[] = {values, rbi_setting_variable(setting).name, setting->help,
                                      setting->initial};
        for (size_t w = 0; w < sizeof wanted / sizeof *wanted; w++) {
            const char *found = strstr(at, wanted[w]);
            cr_expect(found && found < line_end, "%s: '%s' is missing", setting->key, wanted[w]);
        }
    }
    free(text);
}

Test(config_documents, example_loads_to_all_defaults)
{
    char *text = formatted(rebatch_config_format_example);
    config_write("example.cfg", text);
    free(text);
    rebatch_config *example;
    rebatch_config *defaults;
    cr_assert(rebatch_config_load(&example, "example.cfg") == REBATCH_OK, "%s",
              rebatch_last_error());
    cr_assert(rebatch_config_load(&defaults, NULL) == REBATCH_OK);
    const char *key;
    for (size_t i = 0; (key = rebatch_config_key(i)) != NULL; i++) {
        const char *origin;
        cr_expect(strcmp(rebatch_config_get(example, key, &origin),
                         rebatch_config_get(defaults, key, NULL)) == 0,
                  "%s", key);
        cr_expect(strncmp(origin, "example.cfg:", 12) == 0, "%s comes from %s", key, origin);
    }
    rebatch_options a = REBATCH_OPTIONS_INIT;
    rebatch_options b = REBATCH_OPTIONS_INIT;
    cr_assert(rebatch_config_options(&a, example) == REBATCH_OK);
    cr_assert(rebatch_config_options(&b, defaults) == REBATCH_OK);
    cr_expect(memcmp(&a, &b, sizeof a) == 0);
    rebatch_config_free(example);
    rebatch_config_free(defaults);
}

Test(config_documents, table_is_sound)
{
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_setting *setting = &rbi_settings[i];
        size_t groups = 0;
        for (size_t g = 0; g < RBI_GROUP_COUNT; g++)
            groups += rbi_setting_is_in(setting, rbi_groups[g].name);
        cr_expect(groups == 1, "%s is in %zu groups", setting->key, groups);
        struct rbi_entry entry = {0};
        const struct rbi_place place = {NULL, 0, "table"};
        cr_expect(rbi_entry_set_bare(&entry, setting, setting->initial, &place) == REBATCH_OK,
                  "the default: %s", rebatch_last_error());
        const struct rbi_variable variable = rbi_setting_variable(setting);
        cr_expect(strlen(variable.name) == strlen(setting->key) + strlen(RBI_VARIABLE_PREFIX));
        for (size_t k = 0; k < i; k++)
            cr_expect(strcmp(rbi_settings[k].key, setting->key) != 0, "%s twice", setting->key);
    }
}

/* What a header says of a member, with one blank where comments break; release it with free(). */
static char *comment_of(const char *name, const char *member)
{
    char path[64];
    (void)snprintf(path, sizeof path, "include/rebatch/%s", name);
    char *header = config_read_source(path);
    char *to = header;
    for (const char *from = header; *from; from++) {
        const char c = *from == '\n' ? ' ' : *from;
        if (c != ' ' || to == header || to[-1] != ' ')
            *to++ = c;
    }
    *to = '\0';
    char *at = strstr(header, member);
    cr_assert(at != NULL, "%s is not in %s", member, name);
    char *end = strstr(at, "*/");
    cr_assert(end != NULL);
    *end = '\0';
    memmove(header, at, (size_t)(end - at) + 1);
    return header;
}

/* The public headers say what zero means; the table says it again as a default. */
Test(config_documents, defaults_are_those_of_the_headers)
{
    static const struct {
        const char *key, *header, *member, *says, *initial;
    } list[] = {
        {"batch.start", "step.h", "size_t micro_start;", "0: the effective batch", "0"},
        {"batch.learn", "step.h", "rebatch_toggle learn;", "default off", "false"},
        {"batch.smallest", "step.h", "size_t micro_smallest;", "0: 1", "1"},
        {"batch.largest", "step.h", "size_t micro_largest;", "0: the effective batch", "0"},
        {"batch.multiple_of", "step.h", "size_t micro_multiple_of;", "0: 1", "1"},
        {"batch.allowed", "step.h", "size_t micro_allowed[REBATCH_ALLOWED_SIZES];",
         "none: any size", "any"},
        {"recovery.max_ooms_in_row", "step.h", "uint32_t max_ooms_in_row;",
         "0: only max_attempts applies", "0"},
        {"memory.limit", "pool.h", "size_t limit_bytes;", "0: no limit", "none"},
        {"memory.headroom", "pool.h", "size_t headroom_bytes;", "0: none", "0"},
        {"memory.caching", "pool.h", "rebatch_toggle caching;", "default on", "true"},
        {"memory.replay", "pool.h", "rebatch_toggle replay;", "default on", "true"},
        {"memory.keep_room", "pool.h", "uint32_t keep_room_permille;", "0: 20", "2%"},
        {"memory.rounding", "pool.h", "uint32_t rounding_divisions;",
         "0: rounding to REBATCH_POOL_UNIT_BYTES only", "0"},
        {"memory.events", "pool.h", "uint32_t events;", "0: none", "0"},
        {"recovery.on_oom", "step.h", "rebatch_on_oom on_oom;", "default: fit where", "auto"},
        {"recovery.admission", "step.h", "rebatch_toggle admission;", "default on", "true"},
        {"recovery.lighten", "step.h", "rebatch_toggle lighten;", "default on", "true"},
        {"recovery.max_attempts", "step.h", "uint32_t max_attempts;", "0: 64", "64"},
        {"growth.enabled", "step.h", "rebatch_toggle growth;", "default on", "true"},
        {"growth.after", "step.h", "uint32_t grow_after;", "0: 16", "16"},
        {"growth.wait_max", "step.h", "uint32_t grow_wait_max;", "0: 1024", "1024"},
        {"probe.max_trials", "probe.h", "uint32_t max_trials;",
         "0: 5, and 8 more to measure which size is fastest", "0"},
        {"probe.max_seconds", "probe.h", "No trial starts later than this many seconds",
         "0: no bound", "0"},
        {"device.capacity", "device.h", "capacity_bytes the cap,", "REBATCH_UNLIMITED: none",
         "none"},
        {"log.level", "step.h", "rebatch_log_level log_level;", "default: WARN on standard error",
         "auto"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        char *comment = comment_of(list[i].header, list[i].member);
        cr_expect(strstr(comment, list[i].says) != NULL, "%s does not say '%s'", list[i].member,
                  list[i].says);
        cr_expect(strcmp(rbi_setting_find(list[i].key)->initial, list[i].initial) == 0, "%s",
                  list[i].key);
        free(comment);
    }
}
