/* Owns the tests that documents, example and headers say what the table of settings says.
 * Must not know how they are made. Nothing here is random. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/settings.h"
#include "unit/config_files.h"

TestSuite(config_documents, .init = config_enter, .fini = config_leave);

/* The example file as the table makes it; the caller frees it. */
static char *example_text(void)
{
    struct rbi_text t = {NULL, 0, 0};
    rbi_config_add_example(&t);
    char *text = malloc(t.length + 1);
    cr_assert(text != NULL);
    t = (struct rbi_text){text, t.length + 1, 0};
    rbi_config_add_example(&t);
    return text;
}

Test(config_documents, example_file_is_the_text)
{
    char *text = example_text();
    char *file = config_read_source("examples/rebatch.cfg");
    cr_expect(strcmp(text, file) == 0, "examples/rebatch.cfg is not what the table says: "
                                       "run rebatch config example > examples/rebatch.cfg");
    free(text);
    free(file);
}

/* docs/config.md has one row for each setting, in order, with all that it may be. */
Test(config_documents, reference_has_every_key_and_all_that_it_may_be)
{
    char *file = config_read_source("docs/config.md");
    char *at = strstr(file, "\n| --- |");
    cr_assert(at != NULL, "docs/config.md has no table of settings");
    at = strchr(at + 1, '\n') + 1;
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_setting *setting = &rbi_settings[i];
        char row[1024];
        struct rbi_text t = {row, sizeof row, 0};
        struct rbi_entry initial = {0};
        const struct rbi_place place = {NULL, 0, "default"};
        cr_assert(rbi_entry_set_bare(&initial, setting, setting->initial, &place) == REBATCH_OK);
        rbi_text_add(&t, "| `%s` | `%s` | ", setting->key, initial.text);
        rbi_setting_describe(&t, setting);
        rbi_text_add(&t, " | `%s` | %s |\n", rbi_setting_variable(setting).name, setting->help);
        cr_assert(t.length < sizeof row);
        cr_assert(strncmp(at, row, t.length) == 0,
                  "docs/config.md: expected this row of the table of settings:\n%s", row);
        at += t.length;
    }
    cr_expect(*at == '\n', "docs/config.md has a row for a setting that there is not: %.60s", at);
    free(file);
}

Test(config_documents, example_loads_to_all_defaults)
{
    char *text = example_text();
    config_write("example.cfg", text);
    free(text);
    rebatch_config *example;
    rebatch_config *defaults;
    cr_assert(rebatch_config_load(&example, "example.cfg") == REBATCH_OK, "%s",
              rebatch_last_error());
    cr_assert(rebatch_config_load(&defaults, NULL) == REBATCH_OK);
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const char *key = rbi_settings[i].key, *origin;
        cr_expect(strcmp(config_value(example, key, &origin), config_value(defaults, key, NULL)) ==
                      0,
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
        cr_expect(setting->variable ||
                  strlen(variable.name) == strlen(setting->key) + strlen(RBI_VARIABLE_PREFIX));
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
        {"recovery.oom_wait_ms", "step.h", "uint32_t oom_wait_ms;", "0: 10,000", "10000"},
        {"memory.limit", "pool.h", "size_t limit_bytes;", "0: no limit", "none"},
        {"memory.headroom", "pool.h", "size_t headroom_bytes;", "0: none", "0"},
        {"memory.floor", "step.h", "size_t floor_bytes;", "0: none", "0"},
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
