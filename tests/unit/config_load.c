/* Owns the tests of loading: every key from file and environment, who wins, options, device.
 * Must not know how values are read. Nothing here is random. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "config/settings.h"
#include "rebatch/rebatch.h"
#include "unit/config_files.h"

TestSuite(config_load, .init = config_enter, .fini = config_leave);

/* Every key with a value that is not its default, as it stands in a file and in a variable. */
static const struct value {
    const char *key;
    const char *file, *variable, *initial;
} values[] = {
    {"batch.start", "96", "96", "0"},
    {"batch.learn", "true", "true", "false"},
    {"batch.smallest", "2", "2", "1"},
    {"batch.largest", "128", "128", "0"},
    {"batch.multiple_of", "32", "32", "1"},
    {"batch.allowed", "[32, 64, 96, 128]", "32, 64,96,128", "\"any\""},
    {"memory.limit", "\"22GiB\"", "22GiB", "\"none\""},
    {"memory.headroom", "268435456", "268435456", "0"},
    {"memory.floor", "\"4GiB\"", "4GiB", "0"},
    {"memory.caching", "false", "false", "true"},
    {"memory.replay", "false", "false", "true"},
    {"memory.overflow", "false", "false", "true"},
    {"memory.overflow_limit", "\"4GiB\"", "4GiB", "0"},
    {"memory.keep_room", "\"40%\"", "40%", "\"2%\""},
    {"memory.rounding", "16", "16", "0"},
    {"memory.events", "1000", "1000", "0"},
    {"memory.yield", "\"/run/train.sock\"", "/run/train.sock", "\"none\""},
    {"recovery.on_oom", "\"stop\"", "stop", "\"auto\""},
    {"recovery.admission", "false", "false", "true"},
    {"recovery.lighten", "false", "false", "true"},
    {"recovery.max_attempts", "5", "5", "64"},
    {"recovery.max_ooms_in_row", "3", "3", "0"},
    {"recovery.oom_wait_ms", "250", "250", "10000"},
    {"growth.enabled", "false", "false", "true"},
    {"growth.after", "3", "3", "16"},
    {"growth.wait_max", "100", "100", "1024"},
    {"probe.max_trials", "7", "7", "0"},
    {"probe.max_seconds", "90", "90", "0"},
    {"probe.choose", "\"fastest\"", "fastest", "\"largest\""},
    {"probe.file", "\"sizes/found.txt\"", "sizes/found.txt", "\"none\""},
    {"probe.key", "\"gpt2-124M, T=1024 \xc3\xa9\"", "gpt2-124M, T=1024 \xc3\xa9", "\"none\""},
    {"device.kind", "\"cuda\"", "cuda", "\"host\""},
    {"device.ordinal", "3", "3", "0"},
    {"device.capacity", "\"64GiB\"", "64GiB", "\"none\""},
    {"log.level", "\"debug\"", "debug", "\"auto\""},
    {"log.file", "\"events.json\"", "events.json", "\"none\""},
    {"log.format", "\"json\"", "json", "\"text\""},
};
enum { VALUES = sizeof values / sizeof *values };

static rebatch_config *load(const char *path)
{
    rebatch_config *config;
    const rebatch_status status = rebatch_config_load(&config, path);
    cr_assert(status == REBATCH_OK, "%s", rebatch_last_error());
    return config;
}

static void expect_value(const rebatch_config *config, const char *key, const char *value,
                         const char *origin)
{
    const char *got_origin;
    const char *got = config_value(config, key, &got_origin);
    cr_assert(got != NULL, "%s: %s", key, rebatch_last_error());
    cr_expect(strcmp(got, value) == 0, "%s is %s instead of %s", key, got, value);
    cr_expect(strcmp(got_origin, origin) == 0, "%s comes from %s instead of %s", key, got_origin,
              origin);
}

/* 'group = {\n name = value;\n};\n': the value is in line 2. */
static void write_value(const char *file, const struct value *value)
{
    char text[256];
    const char *name = strchr(value->key, '.') + 1;
    (void)snprintf(text, sizeof text, "%.*s = {\n %s = %s;\n};\n", (int)(name - value->key - 1),
                   value->key, name, value->file);
    config_write(file, text);
}

Test(config_load, keys_are_all_here_and_in_order)
{
    cr_assert((int)VALUES == (int)RBI_SETTING_COUNT);
    for (size_t i = 0; i < VALUES; i++)
        cr_expect(strcmp(rbi_settings[i].key, values[i].key) == 0, "%s", values[i].key);
}

Test(config_load, defaults)
{
    rebatch_config *config = load(NULL);
    for (size_t i = 0; i < VALUES; i++)
        expect_value(config, values[i].key, values[i].initial, "default");
    rebatch_config_free(config);
    cr_expect(rbi_heap_live() == 0);
}

Test(config_load, every_key_from_a_file)
{
    for (size_t i = 0; i < VALUES; i++) {
        write_value("t.cfg", &values[i]);
        rebatch_config *config = load("t.cfg");
        for (size_t k = 0; k < VALUES; k++)
            expect_value(config, values[k].key, k == i ? values[k].file : values[k].initial,
                         k == i ? "t.cfg:2" : "default");
        rebatch_config_free(config);
    }
}

Test(config_load, every_key_from_the_environment)
{
    for (size_t i = 0; i < VALUES; i++) {
        const struct rbi_variable variable = rbi_setting_variable(&rbi_settings[i]);
        cr_assert(setenv(variable.name, values[i].variable, 1) == 0);
        rebatch_config *config = load(NULL);
        for (size_t k = 0; k < VALUES; k++)
            expect_value(config, values[k].key, k == i ? values[k].file : values[k].initial,
                         k == i ? variable.name : "default");
        rebatch_config_free(config);
        unsetenv(variable.name);
    }
}

Test(config_load, names_of_variables)
{
    cr_expect(strcmp(rbi_setting_variable(rbi_setting_find("memory.limit")).name,
                     "REBATCH_MEMORY_LIMIT") == 0);
    cr_expect(strcmp(rbi_setting_variable(rbi_setting_find("recovery.max_attempts")).name,
                     "REBATCH_RECOVERY_MAX_ATTEMPTS") == 0);
}

Test(config_load, environment_wins_over_file_over_default)
{
    config_write("t.cfg", "batch = { start = 64;\n smallest = 4; };");
    setenv("REBATCH_BATCH_START", "32", 1);
    rebatch_config *config = load("t.cfg");
    expect_value(config, "batch.start", "32", "REBATCH_BATCH_START");
    expect_value(config, "batch.smallest", "4", "t.cfg:2");
    expect_value(config, "batch.largest", "0", "default");
    rebatch_config_free(config);
    cr_expect(rbi_heap_live() == 0);
}

Test(config_load, variables_of_others_are_left_alone)
{
    static const char *const names[] = {
        "REBATCH_COMMAND",         "REBATCH_SOURCE_DIR",   "REBATCH_",
        "REBATCH_MEMORYLESS",      "REBATCH_LOGS",         "REBATCH_FOO_LEVEL",
        "REBATCH_RUN_BATCH_START", "XREBATCH_MEMORY_LIMIT"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        setenv(names[i], "22", 1);
    rebatch_config_free(load(NULL));
}

Test(config_load, ways_to_write_a_value)
{
    config_write("t.cfg", "batch : { start = 0x40, smallest = 010 }\n"
                          "memory = { limit = 99999999999; headroom = 4294967296L;\n"
                          "           caching = FALSE; };\n"
                          "device = { capacity = \"5.5 \" \"GiB\" }");
    rebatch_config *config = load("t.cfg");
    expect_value(config, "batch.start", "64", "t.cfg:1");
    expect_value(config, "batch.smallest", "10", "t.cfg:1");
    expect_value(config, "memory.limit", "99999999999", "t.cfg:2");
    expect_value(config, "memory.headroom", "4294967296", "t.cfg:2");
    expect_value(config, "memory.caching", "false", "t.cfg:3");
    expect_value(config, "device.capacity", "\"5.5 GiB\"", "t.cfg:4");
    rebatch_config_free(config);
}

/* What looks like something else in text is text. */
Test(config_load, ways_to_write_text)
{
    static const struct {
        const char *written, *text;
    } rows[] = {{"a /* b */ # c // d", "a /* b */ # c // d"},
                {"@include 0x10 007", "@include 0x10 007"},
                {"\\x41b", "Ab"},
                {"99999999999", "99999999999"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[128], value[64];
        (void)snprintf(text, sizeof text, "log = { file = \"%s\"; }; # \"\nbatch = { start = 8; };",
                       rows[i].written);
        (void)snprintf(value, sizeof value, "\"%s\"", rows[i].text);
        config_write("t.cfg", text);
        rebatch_config *config = load("t.cfg");
        expect_value(config, "log.file", value, "t.cfg:1");
        expect_value(config, "batch.start", "8", "t.cfg:2");
        rebatch_config_free(config);
    }
}

Test(config_load, included_files_and_their_lines)
{
    config_write("more.cfg", "\n\nmemory = { limit = \"90%\"; };\n");
    config_write("t.cfg", "batch = { start = 8; };\n@include \"more.cfg\"\n\nlog = { level = "
                          "\"warn\"; };\n");
    rebatch_config *config = load("t.cfg");
    expect_value(config, "batch.start", "8", "t.cfg:1");
    expect_value(config, "memory.limit", "\"90%\"", "more.cfg:3");
    expect_value(config, "log.level", "\"warn\"", "t.cfg:4");
    rebatch_config_free(config);
}

/* A path starts where the including file is; what follows it is still of that file's lines. */
Test(config_load, included_files_of_a_folder_and_of_a_group)
{
    cr_assert(mkdir("sub", 0700) == 0);
    config_write("sub/b.cfg", "start = 8;\n  @include \"c.cfg\"\nlargest = 64;");
    config_write("sub/c.cfg", "\nsmallest = 2;");
    config_write("t.cfg", "batch = {\n@include \"sub/b.cfg\"\n}; log = { level = \"warn\"; };");
    rebatch_config *config = load("t.cfg");
    expect_value(config, "batch.start", "8", "sub/b.cfg:1");
    expect_value(config, "batch.smallest", "2", "sub/c.cfg:2");
    expect_value(config, "batch.largest", "64", "sub/b.cfg:3");
    expect_value(config, "log.level", "\"warn\"", "t.cfg:3");
    rebatch_config_free(config);
    cr_assert(unlink("sub/b.cfg") == 0 && unlink("sub/c.cfg") == 0 && rmdir("sub") == 0);
}

/* Comments go, wherever they stand; what looks like one in a text stays, and so do lines. */
Test(config_load, comments_marks_and_line_ends)
{
    config_write("t.cfg", "\xef\xbb\xbf# a mark of UTF-8 came first\r\n"
                          "batch/**/=/**/{ start = 0xFFFFFFFF; }; // @include \"not-there\"\r\n"
                          "/* 3\n4 */ log = { file = \"a # b // c /* d @e\"; }; # the end");
    rebatch_config *config = load("t.cfg");
    expect_value(config, "batch.start", "4294967295", "t.cfg:2");
    expect_value(config, "log.file", "\"a # b // c /* d @e\"", "t.cfg:4");
    rebatch_config_free(config);
}

/* 0.cfg includes 1.cfg and so on: ten includes deep is allowed, eleven is not. */
Test(config_load, included_files_to_the_deepest)
{
    for (int i = 0; i < 11; i++) {
        char name[16];
        char text[32];
        (void)snprintf(name, sizeof name, "%d.cfg", i);
        (void)snprintf(text, sizeof text, "@include \"%d.cfg\"\n", i + 1);
        config_write(name, text);
    }
    config_write("10.cfg", "batch = { start = 7; };");
    rebatch_config *config = load("0.cfg");
    expect_value(config, "batch.start", "7", "10.cfg:1");
    rebatch_config_free(config);
    config_write("10.cfg", "@include \"11.cfg\"");
    config_write("11.cfg", "batch = { start = 7; };");
    cr_expect(rebatch_config_load(&config, "0.cfg") == REBATCH_E_PARSE);
    cr_expect(strcmp(rebatch_last_error(),
                     "10.cfg:1: @include \"11.cfg\" is nested deeper than 10: "
                     "does a file include itself?") == 0,
              "%s", rebatch_last_error());
}

/* A pipe is read like a file, so that a shell can make one up. */
Test(config_load, a_pipe_is_a_file)
{
    int ends[2];
    static const char text[] = "batch = { start = 7; };";
    cr_assert(pipe(ends) == 0);
    cr_assert(write(ends[1], text, sizeof text - 1) == (ssize_t)(sizeof text - 1));
    close(ends[1]);
    char path[32];
    (void)snprintf(path, sizeof path, "/dev/fd/%d", ends[0]);
    rebatch_config *config = load(path);
    cr_expect(strcmp(config_value(config, "batch.start", NULL), "7") == 0);
    rebatch_config_free(config);
    close(ends[0]);
}

/* In its own time, of which each step is long for a reader that does not wait. */
static void *write_slowly(void *unused)
{
    static const char *const parts[] = {"batch = {", " start = 7;", " };"};
    struct timespec pause = {0, 30000000};
    (void)nanosleep(&pause, NULL);
    const int pipe = open("pipe", O_WRONLY);
    for (size_t i = 0; i < 3; i++) {
        (void)nanosleep(&pause, NULL);
        (void)!write(pipe, parts[i], strlen(parts[i]));
    }
    (void)close(pipe);
    return unused;
}

Test(config_load, a_pipe_is_read_however_late_it_is_written)
{
    pthread_t writer;
    cr_assert(mkfifo("pipe", 0600) == 0);
    cr_assert(pthread_create(&writer, NULL, write_slowly, NULL) == 0);
    rebatch_config *config = load("pipe");
    cr_expect(strcmp(config_value(config, "batch.start", NULL), "7") == 0);
    rebatch_config_free(config);
    cr_assert(pthread_join(writer, NULL) == 0);
}

Test(config_load, null_arguments)
{
    rebatch_config *config = load(NULL);
    rebatch_device *device;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    cr_expect(rebatch_config_load(NULL, NULL) == REBATCH_E_INVALID);
    cr_expect(strcmp(rebatch_last_error(), "out is NULL") == 0);
    cr_expect(rebatch_config_open_device(NULL, config) == REBATCH_E_INVALID);
    cr_expect(rebatch_config_open_device(&device, NULL) == REBATCH_E_INVALID && !device);
    cr_expect(rebatch_config_options(NULL, config) == REBATCH_E_INVALID);
    cr_expect(strcmp(rebatch_last_error(), "options is NULL") == 0);
    cr_expect(rebatch_config_options(&options, NULL) == REBATCH_E_INVALID);
    rebatch_config_free(NULL);
    rebatch_config_free(config);
}

/* ---- options ---- */

static void expect_options(const rebatch_options *o, const rebatch_options *e)
{
    cr_expect(o->struct_size == sizeof *o);
    cr_expect(o->pool.struct_size == sizeof o->pool);
    cr_expect(o->pool.limit_bytes == e->pool.limit_bytes, "limit %zu", o->pool.limit_bytes);
    cr_expect(o->pool.limit_permille == e->pool.limit_permille);
    cr_expect(o->pool.headroom_bytes == e->pool.headroom_bytes);
    cr_expect(o->pool.caching == e->pool.caching);
    cr_expect(o->pool.overflow == e->pool.overflow);
    cr_expect(o->pool.overflow_bytes == e->pool.overflow_bytes);
    cr_expect(o->pool.keep_room_permille == e->pool.keep_room_permille);
    cr_expect(o->pool.rounding_divisions == e->pool.rounding_divisions);
    cr_expect(o->pool.events == e->pool.events);
    cr_expect(o->pool.replay == e->pool.replay);
    cr_expect(o->micro_start == e->micro_start);
    cr_expect(o->micro_smallest == e->micro_smallest);
    cr_expect(o->micro_largest == e->micro_largest);
    cr_expect(o->micro_multiple_of == e->micro_multiple_of);
    cr_expect(memcmp(o->micro_allowed, e->micro_allowed, sizeof e->micro_allowed) == 0);
    cr_expect(o->max_ooms_in_row == e->max_ooms_in_row);
    cr_expect(o->oom_wait_ms == e->oom_wait_ms);
    cr_expect(o->on_oom == e->on_oom);
    cr_expect(o->admission == e->admission);
    cr_expect(o->lighten == e->lighten);
    cr_expect(o->max_attempts == e->max_attempts);
    cr_expect(o->growth == e->growth);
    cr_expect(o->grow_after == e->grow_after);
    cr_expect(o->grow_wait_max == e->grow_wait_max);
    cr_expect(o->log_level == e->log_level);
    cr_expect(o->log_format == e->log_format);
    cr_expect(!o->log_file == !e->log_file);
    if (o->log_file && e->log_file)
        cr_expect(strcmp(o->log_file, e->log_file) == 0);
    cr_expect(o->learn == e->learn);
}

static void on_event(const rebatch_event *event, void *user)
{
    (void)event;
    (void)user;
}

Test(config_load, options_at_the_defaults)
{
    const rebatch_options expected = {
        .pool = {.caching = REBATCH_ON,
                 .keep_room_permille = 20,
                 .replay = REBATCH_ON,
                 .overflow = REBATCH_ON},
        .micro_smallest = 1,
        .micro_multiple_of = 1,
        .on_oom = REBATCH_ON_OOM_DEFAULT,
        .admission = REBATCH_ON,
        .lighten = REBATCH_ON,
        .max_attempts = 64,
        .oom_wait_ms = 10000,
        .growth = REBATCH_ON,
        .grow_after = 16,
        .grow_wait_max = 1024,
        .log_level = REBATCH_LOG_DEFAULT,
        .learn = REBATCH_OFF,
    };
    rebatch_config *config = load(NULL);
    rebatch_options options = REBATCH_OPTIONS_INIT;
    cr_assert(rebatch_config_options(&options, config) == REBATCH_OK);
    expect_options(&options, &expected);
    rebatch_config_free(config);
}

Test(config_load, options_of_every_setting)
{
    const rebatch_options expected = {
        .pool = {.limit_bytes = 23622320128,
                 .headroom_bytes = 268435456,
                 .caching = REBATCH_OFF,
                 .keep_room_permille = 400,
                 .rounding_divisions = 16,
                 .events = 1000,
                 .replay = REBATCH_OFF,
                 .overflow = REBATCH_OFF,
                 .overflow_bytes = 4294967296},
        .micro_start = 96,
        .micro_smallest = 2,
        .micro_largest = 128,
        .micro_multiple_of = 32,
        .micro_allowed = {32, 64, 96, 128},
        .max_ooms_in_row = 3,
        .oom_wait_ms = 250,
        .on_oom = REBATCH_ON_OOM_STOP,
        .admission = REBATCH_OFF,
        .lighten = REBATCH_OFF,
        .max_attempts = 5,
        .growth = REBATCH_OFF,
        .grow_after = 3,
        .grow_wait_max = 100,
        .log_level = REBATCH_LOG_DEBUG,
        .log_format = REBATCH_LOG_JSON,
        .log_file = "events.json",
        .learn = REBATCH_OFF,
    };
    for (size_t i = 0; i < VALUES; i++)
        setenv(rbi_setting_variable(&rbi_settings[i]).name, values[i].variable, 1);
    unsetenv("REBATCH_BATCH_LEARN"); /* it does not go with a size to start with */
    rebatch_config *config = load(NULL);
    int user = 0;
    rebatch_stream stream = (rebatch_stream)(void *)&user; /* never used: only kept */
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.stream = stream;
    options.on_event = on_event;
    options.on_event_user = &user;
    options.pool.limit_permille = 500; /* of before: the settings decide */
    cr_assert(rebatch_config_options(&options, config) == REBATCH_OK, "%s", rebatch_last_error());
    expect_options(&options, &expected);
    cr_expect(options.stream == stream);
    cr_expect(options.on_event == on_event && options.on_event_user == &user);
    rebatch_config_free(config);
}

Test(config_load, options_of_a_probe)
{
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    options.key = "the program's";
    options.reserve_bytes = 77;
    rebatch_config *config = load(NULL);
    cr_assert(rebatch_config_probe_options(&options, config) == REBATCH_OK);
    cr_expect(options.file == NULL);
    cr_expect(strcmp(options.key, "the program's") == 0);
    rebatch_config_free(config);
    setenv("REBATCH_PROBE_FILE", "sizes", 1);
    setenv("REBATCH_PROBE_KEY", "mine", 1);
    config = load(NULL);
    cr_assert(rebatch_config_probe_options(&options, config) == REBATCH_OK);
    cr_expect(strcmp(options.file, "sizes") == 0);
    cr_expect(strcmp(options.key, "mine") == 0);
    cr_expect(options.reserve_bytes == 77);
    cr_expect(rebatch_config_probe_options(NULL, config) == REBATCH_E_INVALID);
    cr_expect(rebatch_config_probe_options(&options, NULL) == REBATCH_E_INVALID);
    options.struct_size -= sizeof(char *);
    cr_expect(rebatch_config_probe_options(&options, config) == REBATCH_E_INVALID);
    rebatch_config_free(config);
}

/* Each setting alone changes its own option and no other. */
Test(config_load, options_of_one_setting_at_a_time)
{
#define MEMBER(key, member)                                                                        \
    {                                                                                              \
        key, offsetof(rebatch_options, member), sizeof((rebatch_options *)0)->member               \
    }
    static const struct {
        const char *key;
        size_t at, size;
    } members[] = {
        MEMBER("batch.start", micro_start),
        MEMBER("batch.learn", learn),
        MEMBER("batch.smallest", micro_smallest),
        MEMBER("batch.largest", micro_largest),
        MEMBER("batch.multiple_of", micro_multiple_of),
        MEMBER("batch.allowed", micro_allowed),
        MEMBER("recovery.max_ooms_in_row", max_ooms_in_row),
        MEMBER("recovery.oom_wait_ms", oom_wait_ms),
        MEMBER("memory.limit", pool.limit_bytes),
        MEMBER("memory.headroom", pool.headroom_bytes),
        MEMBER("memory.floor", floor_bytes),
        MEMBER("memory.caching", pool.caching),
        MEMBER("memory.replay", pool.replay),
        MEMBER("memory.overflow", pool.overflow),
        MEMBER("memory.overflow_limit", pool.overflow_bytes),
        MEMBER("memory.keep_room", pool.keep_room_permille),
        MEMBER("memory.rounding", pool.rounding_divisions),
        MEMBER("memory.events", pool.events),
        MEMBER("recovery.on_oom", on_oom),
        MEMBER("recovery.admission", admission),
        MEMBER("recovery.lighten", lighten),
        MEMBER("recovery.max_attempts", max_attempts),
        MEMBER("growth.enabled", growth),
        MEMBER("growth.after", grow_after),
        MEMBER("growth.wait_max", grow_wait_max),
        MEMBER("log.level", log_level),
        MEMBER("log.format", log_format),
    };
    rebatch_config *defaults = load(NULL);
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        const struct value *value = values;
        while (strcmp(value->key, members[i].key) != 0)
            value++;
        const struct rbi_variable variable = rbi_setting_variable(rbi_setting_find(value->key));
        setenv(variable.name, value->variable, 1);
        rebatch_config *config = load(NULL);
        unsetenv(variable.name);
        rebatch_options a = REBATCH_OPTIONS_INIT;
        rebatch_options b = REBATCH_OPTIONS_INIT;
        cr_assert(rebatch_config_options(&a, defaults) == REBATCH_OK);
        cr_assert(rebatch_config_options(&b, config) == REBATCH_OK);
        char *changed = (char *)&b + members[i].at;
        const char *before = (const char *)&a + members[i].at;
        cr_expect(memcmp(changed, before, members[i].size) != 0, "%s changes nothing", value->key);
        memcpy(changed, before, members[i].size);
        cr_expect(memcmp(&a, &b, sizeof a) == 0, "%s changes something else", value->key);
        /* What it overrides is the same option, and no other. */
        cr_assert(rebatch_config_options(&b, config) == REBATCH_OK);
        memset(&a, 0x5a, sizeof a);
        rebatch_options overridden = a;
        rbi_config_override(&overridden, config);
        memcpy((char *)&a + members[i].at, changed, members[i].size);
        if (strcmp(value->key, "memory.limit") == 0) /* which is two */
            a.pool.limit_permille = b.pool.limit_permille;
        cr_expect(memcmp(&a, &overridden, sizeof a) == 0, "%s overrides something else",
                  value->key);
        rebatch_config_free(config);
    }
    rebatch_config_free(defaults);
}

/* A program's options may have no pool's, or an older and shorter struct of them. */
Test(config_load, the_struct_of_a_pool_is_that_of_the_program)
{
    static const struct {
        size_t given, overridden, filled;
    } rows[] = {
        {0, sizeof(rebatch_pool_options), sizeof(rebatch_pool_options)},
        {24, 24, sizeof(rebatch_pool_options)},
        {sizeof(rebatch_pool_options), sizeof(rebatch_pool_options), sizeof(rebatch_pool_options)}};
    setenv("REBATCH_MEMORY_LIMIT", "22GiB", 1);
    rebatch_config *config = load(NULL);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        rebatch_options overridden = REBATCH_OPTIONS_INIT;
        overridden.pool.struct_size = rows[i].given;
        rebatch_options filled = overridden;
        rbi_config_override(&overridden, config);
        cr_expect_eq(overridden.pool.struct_size, rows[i].overridden, "row %zu", i);
        cr_expect_eq(overridden.pool.limit_bytes, (size_t)22 << 30, "row %zu", i);
        cr_assert_eq(rebatch_config_options(&filled, config), REBATCH_OK);
        cr_expect_eq(filled.pool.struct_size, rows[i].filled, "row %zu", i);
    }
    rebatch_config_free(config);
}

Test(config_load, on_oom_says_each_of_its_choices)
{
    static const struct {
        const char *text;
        rebatch_on_oom on_oom;
    } list[] = {{"auto", REBATCH_ON_OOM_DEFAULT},
                {"halve", REBATCH_ON_OOM_HALVE},
                {"fit", REBATCH_ON_OOM_FIT},
                {"stop", REBATCH_ON_OOM_STOP}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        setenv("REBATCH_RECOVERY_ON_OOM", list[i].text, 1);
        rebatch_config *config = load(NULL);
        rebatch_options options = REBATCH_OPTIONS_INIT;
        cr_assert(rebatch_config_options(&options, config) == REBATCH_OK);
        cr_expect(options.on_oom == list[i].on_oom, "%s", list[i].text);
        rebatch_config_free(config);
    }
}

Test(config_load, ways_to_write_a_list)
{
    static const struct {
        const char *file, *variable, *value;
    } list[] = {
        {"[16, 8, 16, 4]", "16,8,16,4", "[4, 8, 16]"},
        {"(8, 0x10)", "8, 0x10", "[8, 16]"},
        {"[9]", "[9]", "[9]"},
        {"9", "9", "[9]"},
        {"\"8, 16\"", " 8 , 16 ", "[8, 16]"},
        {"\"any\"", "any", "\"any\""},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        char text[64];
        (void)snprintf(text, sizeof text, "batch = { allowed = %s; };", list[i].file);
        config_write("t.cfg", text);
        rebatch_config *config = load("t.cfg");
        expect_value(config, "batch.allowed", list[i].value, "t.cfg:1");
        rebatch_config_free(config);
        setenv("REBATCH_BATCH_ALLOWED", list[i].variable, 1);
        config = load(NULL);
        expect_value(config, "batch.allowed", list[i].value, "REBATCH_BATCH_ALLOWED");
        rebatch_config_free(config);
        unsetenv("REBATCH_BATCH_ALLOWED");
    }
}

/* 32 numbers of 19 digits are shown whole, and what is shown can be loaded. */
Test(config_load, the_longest_list)
{
    char text[1024] = "batch = { allowed = [";
    for (int i = 0; i < 32; i++)
        (void)snprintf(text + strlen(text), sizeof text - strlen(text), "%s92233720368547757%02dL",
                       i ? ", " : "", i);
    strcat(text, "]; };");
    config_write("t.cfg", text);
    rebatch_config *config = load("t.cfg");
    rebatch_options options = REBATCH_OPTIONS_INIT;
    cr_assert(rebatch_config_options(&options, config) == REBATCH_OK);
    for (size_t i = 0; i < 32; i++)
        cr_expect(options.micro_allowed[i] == 9223372036854775700u + i);
    const char *shown = config_value(config, "batch.allowed", NULL);
    cr_expect(strlen(shown) == 32 * 19 + 31 * 2 + 2, "%s", shown);
    rebatch_config_free(config);
}

Test(config_load, options_of_a_share_and_every_level)
{
    static const char *const levels[] = {"auto", "quiet", "error", "warn", "info", "debug"};
    setenv("REBATCH_MEMORY_LIMIT", "12.5%", 1);
    for (int i = 0; i < 6; i++) {
        setenv("REBATCH_LOG_LEVEL", levels[i], 1);
        rebatch_config *config = load(NULL);
        rebatch_options options = REBATCH_OPTIONS_INIT;
        cr_assert(rebatch_config_options(&options, config) == REBATCH_OK);
        cr_expect(options.log_level == (rebatch_log_level)(REBATCH_LOG_DEFAULT + i), "%s",
                  levels[i]);
        cr_expect(options.pool.limit_permille == 125 && options.pool.limit_bytes == 0);
        rebatch_config_free(config);
    }
}

Test(config_load, options_of_a_wrong_size_stay_as_they_are)
{
    rebatch_config *config = load(NULL);
    struct {
        rebatch_options options;
        char tail[16];
    } given;
    const size_t sizes[] = {0,
                            1,
                            sizeof(size_t),
                            offsetof(rebatch_options, log_level) / 2,
                            offsetof(rebatch_options, log_level),
                            sizeof given};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        memset(&given, 0xa5, sizeof given);
        given.options.struct_size = sizes[i];
        unsigned char before[sizeof given];
        memcpy(before, &given, sizeof given);
        cr_expect(rebatch_config_options(&given.options, config) == REBATCH_E_INVALID, "%zu",
                  sizes[i]);
        cr_expect(memcmp(before, &given, sizeof given) == 0, "%zu changed something", sizes[i]);
    }
    /* A newer header's options, none of the new ones in use, are as good as ours. */
    memset(&given, 0, sizeof given);
    given.options.struct_size = sizeof given;
    cr_expect(rebatch_config_options(&given.options, config) == REBATCH_OK);
    cr_expect(given.options.struct_size == sizeof given && given.options.max_attempts == 64);
    rebatch_config_free(config);
}

/* ---- device ---- */

static size_t total_of(rebatch_device *device)
{
    rebatch_memory_info info;
    cr_assert(rebatch_device_memory(device, &info) == REBATCH_OK);
    return info.total_bytes;
}

static size_t capacity_for(const char *text)
{
    if (text)
        setenv("REBATCH_DEVICE_CAPACITY", text, 1);
    rebatch_config *config = load(NULL);
    rebatch_device *device;
    cr_assert(rebatch_config_open_device(&device, config) == REBATCH_OK, "%s",
              rebatch_last_error());
    cr_expect(strcmp(rebatch_device_name(device), "host") == 0);
    const size_t total = total_of(device);
    rebatch_device_close(device);
    rebatch_config_free(config);
    return total;
}

Test(config_load, device)
{
    rebatch_device *unlimited;
    cr_assert(rebatch_device_open_host(&unlimited, REBATCH_UNLIMITED, NULL) == REBATCH_OK);
    const size_t machine = total_of(unlimited);
    rebatch_device_close(unlimited);
    cr_expect(capacity_for(NULL) == machine);
    cr_expect(capacity_for("none") == machine);
    cr_expect(capacity_for("64MiB") == 67108864);
    cr_expect(capacity_for("65536") == 65536);
    cr_expect(capacity_for("12.5%") == machine / 1000 * 125);
    cr_expect(rbi_heap_live() == 0);
}

/* ---- memory ---- */

Test(config_load, every_failing_heap_call)
{
    config_write("more.cfg", "memory = { limit = \"90%\"; };\n# a comment\n");
    config_write("t.cfg", "batch = { start = 8; };\n@include \"more.cfg\"\n");
    setenv("REBATCH_LOG_LEVEL", "warn", 1);
    static const uint64_t times[] = {1, UINT64_MAX};
    for (size_t t = 0; t < 2; t++) {
        uint64_t n = 0;
        rebatch_status status;
        do {
            rebatch_config *config;
            rebatch_clear_error();
            rbi_heap_fail(++n, times[t]);
            status = rebatch_config_load(&config, "t.cfg");
            rbi_heap_fail(0, 0);
            cr_assert((config != NULL) == (status == REBATCH_OK));
            if (status) {
                cr_assert(status == REBATCH_E_HOST_OOM, "call %" PRIu64 ": %s", n,
                          rebatch_status_name(status));
                cr_assert(strstr(rebatch_last_error(), "no host memory") != NULL);
            }
            rebatch_config_free(config);
            cr_assert(rbi_heap_live() == 0, "call %" PRIu64 " leaves something", n);
        } while (status);
        cr_expect(n > 8, "only %" PRIu64 " heap calls were seen", n);
    }
}

Test(config_load, every_failing_heap_call_of_a_device)
{
    setenv("REBATCH_DEVICE_CAPACITY", "50%", 1);
    rebatch_config *config = load(NULL);
    const int64_t live = rbi_heap_live();
    rebatch_status status;
    uint64_t n = 0;
    do {
        rebatch_device *device;
        rbi_heap_fail(++n, 1);
        status = rebatch_config_open_device(&device, config);
        rbi_heap_fail(0, 0);
        cr_assert((device != NULL) == (status == REBATCH_OK));
        cr_assert(!status || status == REBATCH_E_HOST_OOM);
        rebatch_device_close(device);
        cr_assert(rbi_heap_live() == live);
    } while (status);
    cr_expect(n > 1);
    rebatch_config_free(config);
}

/* ---- the probe ---- */

Test(config_load, the_options_of_a_probe_are_filled_in)
{
    rebatch_config *config;
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    config_write("t.cfg", "probe = { max_trials = 7; max_seconds = 90; choose = \"fastest\"; };");
    config = load("t.cfg");
    options.reserve_bytes = 12;
    cr_assert_eq(rebatch_config_probe_options(&options, config), REBATCH_OK);
    cr_expect_eq(options.max_trials, 7);
    cr_expect_eq(options.max_seconds, 90);
    cr_expect_eq(options.choose, REBATCH_PROBE_FASTEST);
    cr_expect_eq(options.reserve_bytes, 12);
    options.struct_size = 8;
    cr_expect_eq(rebatch_config_probe_options(&options, config), REBATCH_E_INVALID);
    cr_expect_eq(rebatch_config_probe_options(NULL, config), REBATCH_E_INVALID);
    cr_expect_eq(rebatch_config_probe_options(&options, NULL), REBATCH_E_INVALID);
    rebatch_config_free(config);
}
