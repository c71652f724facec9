/* Owns the tests of bad input: for each kind the whole sentence that is said.
 * Must not know how it is found. Nothing here is random. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/settings.h"
#include "unit/config_files.h"

TestSuite(config_errors, .init = config_enter, .fini = config_leave);

#define LIMIT                                                                                      \
    "expected bytes such as 1048576 or \"22GiB\", a share such as \"90%\" of the device's "        \
    "memory, "                                                                                     \
    "or \"none\""
#define MEMORY_KEYS                                                                                \
    "limit, headroom, floor, caching, replay, overflow, overflow_limit, keep_room, rounding, "     \
    "events or yield"
#define KEEP_ROOM                                                                                  \
    "expected text, a share such as \"90%\" of the memory that the pool holds or can get"
#define ROUNDING "expected 0 or a power of two up to 256"
#define HEADROOM "expected bytes such as 1048576 or \"22GiB\""
#define CAPACITY                                                                                   \
    "expected bytes such as 1048576 or \"22GiB\", a share such as \"90%\" of the machine's "       \
    "memory, or \"none\"; at least 65536 bytes"
#define UINT32_RANGE "expected a whole number from 1 to 4294967295"
#define ATTEMPTS "expected a whole number from 1 to 65536"
#define SYNTAX "expected GROUP = { KEY = VALUE; }; with quotes around text such as \"22GiB\""

static void expect_failure(const char *path, rebatch_status expected, const char *sentence)
{
    rebatch_config *config = NULL;
    rebatch_clear_error();
    const rebatch_status status = rebatch_config_load(&config, path);
    cr_expect(status == expected, "%s instead of %s for: %s", rebatch_status_name(status),
              rebatch_status_name(expected), sentence);
    cr_expect(config == NULL);
    cr_expect(strcmp(rebatch_last_error(), sentence) == 0, "\n  %s\ninstead of\n  %s",
              rebatch_last_error(), sentence);
    rebatch_config_free(config);
    cr_expect(rbi_heap_live() == 0, "something is left after: %s", sentence);
}

struct mistake {
    const char *text;
    const char *sentence;
};

static void expect_mistakes(const struct mistake *mistakes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        config_write("t.cfg", mistakes[i].text);
        expect_failure("t.cfg", REBATCH_E_PARSE, mistakes[i].sentence);
    }
}
#define EXPECT_MISTAKES(list) expect_mistakes(list, sizeof list / sizeof *list)

Test(config_errors, nothing_in_the_file)
{
#define EMPTY "t.cfg has no settings: expected at least one, such as memory = { limit = \"90%\"; };"
    static const struct mistake list[] = {
        {"", EMPTY},
        {" \t\r\n\n", EMPTY},
        {"# only\n// comments\n/* here */", EMPTY},
        {"memory = {};", EMPTY},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, wrong_types)
{
    static const struct mistake list[] = {
        {"batch = {\n start = \"64\"; };",
         "t.cfg:2: batch.start is \"64\", text: expected a whole number, 0 or more"},
        {"batch = { start = true; };",
         "t.cfg:1: batch.start is true, a boolean: expected a whole number, 0 or more"},
        {"batch = { start = 8; learn = true; };",
         "batch.learn is true (t.cfg:1) and batch.start is 8 (t.cfg:1): expected batch.start to be "
         "0 with it"},
        {"batch = { start = 1.5; };", "t.cfg:1: batch.start is 1.5, a number with a fraction: "
                                      "expected a whole number, 0 or more"},
        {"memory = { caching = 1; };",
         "t.cfg:1: memory.caching is 1, a whole number: expected a boolean, true or false"},
        {"memory = { caching = 99999999999; };",
         "t.cfg:1: memory.caching is 99999999999, a whole number: expected a boolean, true or "
         "false"},
        {"memory = { caching = \"yes\"; };",
         "t.cfg:1: memory.caching is \"yes\", text: expected a boolean, true or false"},
        {"memory = { replay = 0; };",
         "t.cfg:1: memory.replay is 0, a whole number: expected a boolean, true or false"},
        {"memory = { replay = \"off\"; };",
         "t.cfg:1: memory.replay is \"off\", text: expected a boolean, true or false"},
        {"memory = { limit = false; };", "t.cfg:1: memory.limit is false, a boolean: " LIMIT},
        {"memory = { limit = 1.5; };",
         "t.cfg:1: memory.limit is 1.5, a number with a fraction: " LIMIT},
        {"memory = { limit = [ 1, 2 ]; };", "t.cfg:1: memory.limit is an array: " LIMIT},
        {"memory = { limit = ( 1, \"x\" ); };", "t.cfg:1: memory.limit is a list: " LIMIT},
        {"memory = { limit = { bytes = 1; }; };", "t.cfg:1: memory.limit is a group: " LIMIT},
        {"recovery = { on_oom = 0; };", "t.cfg:1: recovery.on_oom is 0, a whole number: expected "
                                        "text, \"auto\", \"halve\", \"fit\" or \"stop\""},
        {"log = { level = true; };", "t.cfg:1: log.level is true, a boolean: expected text, "
                                     "\"auto\", \"quiet\", \"error\", \"warn\", "
                                     "\"info\" or \"debug\""},
        {"memory = 5;",
         "t.cfg:1: memory is 5, a whole number: expected a group, memory = { KEY = VALUE; };"},
        {"memory = \"22GiB\";",
         "t.cfg:1: memory is \"22GiB\", text: expected a group, memory = { KEY = VALUE; };"},
        {"memory = ( 5 );",
         "t.cfg:1: memory is a list: expected a group, memory = { KEY = VALUE; };"},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, wrong_values)
{
    static const struct mistake list[] = {
        {"batch = { start = -4; };",
         "t.cfg:1: batch.start is -4, a negative number: expected a whole number, 0 or more"},
        {"batch = { smallest = 0; };",
         "t.cfg:1: batch.smallest is 0, too small: expected a whole number, 1 or more"},
        {"probe = { max_seconds = -1; };",
         "t.cfg:1: probe.max_seconds is -1, a negative number: expected a whole number from 0 to "
         "4294967295"},
        {"probe = { choose = \"best\"; };",
         "t.cfg:1: probe.choose is \"best\": expected text, \"largest\" or \"fastest\""},
        {"growth = { after = 0; };", "t.cfg:1: growth.after is 0, too small: " UINT32_RANGE},
        {"recovery = { max_attempts = 4294967296; };",
         "t.cfg:1: recovery.max_attempts is 4294967296, too large: " ATTEMPTS},
        {"device = { kind = \"gpu\"; };",
         "t.cfg:1: device.kind is \"gpu\": expected text, \"host\", \"cuda\" or \"auto\""},
        {"memory = { keep_room = \"22GiB\"; };",
         "t.cfg:1: memory.keep_room is \"22GiB\", not a share: " KEEP_ROOM},
        {"memory = { keep_room = \"80\"; };",
         "t.cfg:1: memory.keep_room is \"80\", a number without a unit: " KEEP_ROOM},
        {"memory = { keep_room = 80; };",
         "t.cfg:1: memory.keep_room is 80, a whole number: " KEEP_ROOM},
        {"memory = { rounding = 12; };",
         "t.cfg:1: memory.rounding is 12, not a power of two: " ROUNDING},
        {"memory = { rounding = 512; };", "t.cfg:1: memory.rounding is 512, too large: " ROUNDING},
        {"recovery = { on_oom = \"halv\"; };", "t.cfg:1: recovery.on_oom is \"halv\": expected "
                                               "text, \"auto\", \"halve\", \"fit\" or \"stop\""},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, wrong_sizes)
{
    static const struct mistake list[] = {
        {"memory = { limit = 0; };", "t.cfg:1: memory.limit is 0, a size of zero: " LIMIT},
        {"memory = { limit = \"0GiB\"; };",
         "t.cfg:1: memory.limit is \"0GiB\", a size of zero: " LIMIT},
        {"memory = { limit = \"0%\"; };",
         "t.cfg:1: memory.limit is \"0%\", a size of zero: " LIMIT},
        {"memory = { limit = -1; };", "t.cfg:1: memory.limit is -1, a negative size: " LIMIT},
        {"memory = { limit = \"-22GiB\"; };",
         "t.cfg:1: memory.limit is \"-22GiB\", a negative size: " LIMIT},
        {"memory = { limit = \"22G\"; };",
         "t.cfg:1: memory.limit is \"22G\", which may mean 22GiB or 22GB: " LIMIT},
        {"memory = { limit = \"NaN\"; };", "t.cfg:1: memory.limit is \"NaN\", not a size: " LIMIT},
        {"memory = { limit = \"\"; };", "t.cfg:1: memory.limit is \"\", empty: " LIMIT},
        {"memory = { limit = \"22\"; };",
         "t.cfg:1: memory.limit is \"22\", a number without a unit: " LIMIT},
        {"memory = { limit = \"22GiB or so\"; };",
         "t.cfg:1: memory.limit is \"22GiB or so\", not a size: " LIMIT},
        {"memory = { limit = \"8388608TiB\"; };",
         "t.cfg:1: memory.limit is \"8388608TiB\", more than 9223372036854775807 bytes: " LIMIT},
        {"memory = { limit = \"101%\"; };",
         "t.cfg:1: memory.limit is \"101%\", more than 100%: " LIMIT},
        {"memory = { limit = \"None\"; };",
         "t.cfg:1: memory.limit is \"None\", not a size: " LIMIT},
        {"memory = { limit = \"000000000000000000000000000000000000000000000000000000000001GiB\"; "
         "};",
         "t.cfg:1: memory.limit is \"000000000000000000000000000000000000000000000000000000000001"
         "...\", too long a text: " LIMIT},
        {"memory = { limit = \"a\\nb\\x07\"; };",
         "t.cfg:1: memory.limit is \"a\\x0ab\\x07\", not a size: " LIMIT},
        {"memory = { headroom = \"90%\"; };",
         "t.cfg:1: memory.headroom is \"90%\", a share: " HEADROOM},
        {"memory = { headroom = \"none\"; };",
         "t.cfg:1: memory.headroom is \"none\", not a size: " HEADROOM},
        {"device = { capacity = 65535; };",
         "t.cfg:1: device.capacity is 65535, too small: " CAPACITY},
        {"device = { capacity = 0; };", "t.cfg:1: device.capacity is 0, a size of zero: " CAPACITY},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, unknown_names)
{
    static const struct mistake list[] = {
        {"memory = {\n\n  limt = \"22GiB\";\n};",
         "t.cfg:3: memory.limt is not a setting; did you mean memory.limit?"},
        {"recovery = { max_attepmts = 3; };",
         "t.cfg:1: recovery.max_attepmts is not a setting; did you mean recovery.max_attempts?"},
        {"memory = { start = 3; };",
         "t.cfg:1: memory.start is not a setting; did you mean batch.start?"},
        {"memory = { colour = 3; };",
         "t.cfg:1: memory.colour is not a setting: expected " MEMORY_KEYS},
        {"log = { x = 3; };", "t.cfg:1: log.x is not a setting: expected level, file or format"},
        {"memroy = { limit = 3; };", "t.cfg:1: memroy is not a group; did you mean memory?"},
        {"max_attempts = 3;", "t.cfg:1: max_attempts is not a group; did you mean "
                              "recovery.max_attempts, inside recovery = { };"},
        {"colour = 3;", "t.cfg:1: colour is not a group: expected batch, memory, recovery, growth, "
                        "probe, device or log"},
        {"a_very_long_name_that_somebody_made_up_and_that_goes_on_and_on_and_on = 3;",
         "t.cfg:1: a_very_long_name_that_somebody_made_up_and_that_goes_on_and_... is not a group: "
         "expected batch, memory, recovery, growth, probe, device or log"},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, syntax)
{
    static const struct mistake list[] = {
        {"memory = {\n limit = 22GiB; };",
         "t.cfg:2: syntax error at \"limit = 22GiB; };\": " SYNTAX},
        {"memory = { limit = 90%; };",
         "t.cfg:1: syntax error at \"memory = { limit = 90%; };\": " SYNTAX},
        {"memory = { limit = none; };",
         "t.cfg:1: syntax error at \"memory = { limit = none; };\": " SYNTAX},
        {"memory = { caching = yes; };",
         "t.cfg:1: syntax error at \"memory = { caching = yes; };\": " SYNTAX},
        {"memory = { limit = -; };",
         "t.cfg:1: syntax error at \"memory = { limit = -; };\": " SYNTAX},
        {"5G = 5", "t.cfg:1: syntax error at \"5G = 5\": " SYNTAX},
        {"memory = { limit = 5;\n", "t.cfg:1: syntax error at \"memory = { limit = 5;\": " SYNTAX},
        {"memory = {\n limit = [ 5;\n}", "t.cfg:2: syntax error at \"limit = [ 5;\": " SYNTAX},
        {"memory = { limit = 5; };\n}", "t.cfg:2: syntax error at \"}\": " SYNTAX},
        {"memory = { limit = \"5; };\n\n",
         "t.cfg:1: syntax error at \"memory = { limit = \"5; };\": " SYNTAX},
        {"memory.limit = 5;", "t.cfg:1: syntax error at \"memory.limit = 5;\": " SYNTAX},
        {"\n memory { limit = 5; }; # x\n",
         "t.cfg:2: syntax error at \"memory { limit = 5; };\": " SYNTAX},
        {"memory = { limit = ; };",
         "t.cfg:1: syntax error at \"memory = { limit = ; };\": " SYNTAX},
        {"memory = { limit = 22 GiB; };",
         "t.cfg:1: syntax error at \"memory = { limit = 22 GiB; };\": " SYNTAX},
        {"memory = { \"limit\" = 5; };",
         "t.cfg:1: syntax error at \"memory = { \"limit\" = 5; };\": " SYNTAX},
        {"memory =\n\n\n", "t.cfg:1: syntax error at \"memory =\": " SYNTAX},
        {"memory = { limit = $HOME; };",
         "t.cfg:1: syntax error at \"memory = { limit = $HOME; };\": " SYNTAX},
        {"\x7f"
         "ELF\x02\x01",
         "t.cfg:1: syntax error at \"\\x7fELF\\x02\\x01\": " SYNTAX},
        {"memory = {\n limit = 5;\n limit = 6;\n};",
         "t.cfg:3: duplicate setting name at \"limit = 6;\": expected every name once"},
        {"log = { level = \"info\"; };\nlog = { level = \"info\"; };",
         "t.cfg:2: duplicate setting name at \"log = { level = \"info\"; };\": expected every name "
         "once"},
        {"batch = { allowed = [8, \"x\"]; };",
         "t.cfg:1: mismatched element type in array at \"batch = { allowed = [8, \"x\"]; };\": "
         "expected values of one kind, such as [8, 16, 32]"},
        {"\n/* memory = { limit = 5; };",
         "t.cfg:2: the comment that begins here never ends: expected */"},
        {"memory = { limit = 9223372036854775808; };",
         "t.cfg:1: 9223372036854775808: expected a number from -9223372036854775808 to "
         "9223372036854775807"},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, values_in_the_wrong_order)
{
    static const struct mistake list[] = {
        {"batch = { smallest = 8;\n largest = 4; };",
         "batch.smallest is 8 (t.cfg:1) and batch.largest is 4 (t.cfg:2): expected batch.smallest "
         "<= batch.largest"},
        {"batch = { smallest = 8;\n start = 4; };",
         "batch.smallest is 8 (t.cfg:1) and batch.start is 4 (t.cfg:2): expected batch.smallest <= "
         "batch.start"},
        {"batch = { start = 8;\n largest = 4; };",
         "batch.start is 8 (t.cfg:1) and batch.largest is 4 (t.cfg:2): expected batch.start <= "
         "batch.largest"},
        {"growth = { after = 2000; };",
         "growth.after is 2000 (t.cfg:1) and growth.wait_max is 1024 (default): expected "
         "growth.after <= growth.wait_max"},
        {"memory = { headroom = \"2GiB\"; };\ndevice = { capacity = \"1GiB\"; };",
         "memory.headroom is \"2GiB\" (t.cfg:1) and device.capacity is \"1GiB\" (t.cfg:2): "
         "expected memory.headroom <= device.capacity"},
        {"memory = { headroom = \"2GiB\";\n limit = \"1GiB\"; };",
         "memory.headroom is \"2GiB\" (t.cfg:1) and memory.limit is \"1GiB\" (t.cfg:2): expected "
         "memory.headroom <= memory.limit"},
        {"memory = { floor = \"2GiB\";\n limit = \"1GiB\"; };",
         "memory.floor is \"2GiB\" (t.cfg:1) and memory.limit is \"1GiB\" (t.cfg:2): expected "
         "memory.floor <= memory.limit"},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, sizes_that_do_not_go_together)
{
    static const struct mistake list[] = {
        {"batch = { multiple_of = 8;\n largest = 7; };",
         "batch.multiple_of is 8 (t.cfg:1) and batch.largest is 7 (t.cfg:2): expected "
         "batch.multiple_of <= batch.largest"},
        {"batch = { multiple_of = 8;\n smallest = 9;\n largest = 15; };",
         "batch.multiple_of is 8 (t.cfg:1) and batch.smallest is 9 (t.cfg:2): expected a multiple "
         "between batch.smallest and batch.largest"},
        {"batch = { multiple_of = 8;\n start = 12; };",
         "batch.start is 12 (t.cfg:2) and batch.multiple_of is 8 (t.cfg:1): expected batch.start "
         "to be a multiple of it"},
        {"batch = { allowed = [8, 16];\n start = 12; };",
         "batch.start is 12 (t.cfg:2) and batch.allowed is [8, 16] (t.cfg:1): expected batch.start "
         "to be in the list"},
        {"batch = { allowed = [8, 16];\n largest = 7; };",
         "batch.allowed is [8, 16] (t.cfg:1) and batch.largest is 7 (t.cfg:2): expected a size in "
         "the list of at most batch.largest"},
        {"batch = { allowed = [8, 16];\n smallest = 17; };",
         "batch.allowed is [8, 16] (t.cfg:1) and batch.smallest is 17 (t.cfg:2): expected a size "
         "in "
         "the list between batch.smallest and batch.largest"},
        {"batch = { allowed = [8, 16];\n smallest = 9; largest = 15; };",
         "batch.allowed is [8, 16] (t.cfg:1) and batch.smallest is 9 (t.cfg:2): expected a size in "
         "the list between batch.smallest and batch.largest"},
        {"batch = { allowed = [8, 16];\n multiple_of = 3; };",
         "batch.allowed is [8, 16] (t.cfg:1) and batch.multiple_of is 3 (t.cfg:2): expected a "
         "multiple of it in the list, between batch.smallest and batch.largest"},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, values_of_a_file_and_a_variable_that_do_not_go_together)
{
    config_write("t.cfg", "batch = { smallest = 8; };");
    setenv("REBATCH_BATCH_LARGEST", "7", 1);
    expect_failure("t.cfg", REBATCH_E_PARSE,
                   "batch.smallest is 8 (t.cfg:1) and batch.largest is 7 (REBATCH_BATCH_LARGEST): "
                   "expected batch.smallest <= batch.largest");
    setenv("REBATCH_BATCH_LARGEST", "8", 1);
    setenv("REBATCH_BATCH_START", "8", 1);
    rebatch_config *config;
    cr_expect(rebatch_config_load(&config, "t.cfg") == REBATCH_OK, "equal is in order");
    rebatch_config_free(config);
}

/* A limit that is a share, or none, is known only with a device. */
Test(config_errors, values_that_may_go_together)
{
    static const char *const fine[] = {"memory = { limit = \"50%\"; headroom = \"2GiB\"; };",
                                       "memory = { limit = \"2GiB\"; headroom = \"2048MiB\"; };"};
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++) {
        rebatch_config *config;
        config_write("t.cfg", fine[i]);
        cr_expect(rebatch_config_load(&config, "t.cfg") == REBATCH_OK, "%s", rebatch_last_error());
        rebatch_config_free(config);
    }
}

Test(config_errors, lists_that_are_none)
{
#define LIST "expected up to 32 whole numbers such as [8, 16, 32], or \"any\""
    static const struct mistake list[] = {
        {"batch = { allowed = []; };", "t.cfg:1: batch.allowed is an empty list: " LIST},
        {"batch = { allowed = [0, 8]; };",
         "t.cfg:1: batch.allowed is a list with 0, too small: " LIST},
        {"batch = { allowed = [8, -8]; };",
         "t.cfg:1: batch.allowed is a list with -8, a negative number: " LIST},
        {"batch = { allowed = [1.5]; };",
         "t.cfg:1: batch.allowed is a list with 1.5, a number with a fraction: " LIST},
        {"batch = { allowed = (8, [9]); };",
         "t.cfg:1: batch.allowed is a list with an array: " LIST},
        {"batch = { allowed = true; };", "t.cfg:1: batch.allowed is true, a boolean: " LIST},
        {"batch = { allowed = -1; };",
         "t.cfg:1: batch.allowed is a list with -1, a negative number: " LIST},
        {"batch = { allowed = \"\"; };", "t.cfg:1: batch.allowed is \"\": " LIST},
        {"batch = { allowed = \"none\"; };", "t.cfg:1: batch.allowed is \"none\": " LIST},
        {"batch = { allowed = \"8,,9\"; };", "t.cfg:1: batch.allowed is \"8,,9\": " LIST},
        {"batch = { allowed = \"8 9\"; };", "t.cfg:1: batch.allowed is \"8 9\": " LIST},
        {"batch = { allowed = \"8,\"; };", "t.cfg:1: batch.allowed is \"8,\": " LIST},
        {"batch = { allowed = \"[8\"; };", "t.cfg:1: batch.allowed is \"[8\": " LIST},
        {"batch = { allowed = \"[]\"; };", "t.cfg:1: batch.allowed is \"[]\": " LIST},
        {"batch = { allowed = \"99999999999999999999\"; };",
         "t.cfg:1: batch.allowed is \"99999999999999999999\": " LIST},
        {"batch = { allowed = [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1];"
         "};",
         "t.cfg:1: batch.allowed is a longer list: " LIST},
        {"batch = { start = [8]; };",
         "t.cfg:1: batch.start is an array: expected a whole number, 0 or more"},
    };
    EXPECT_MISTAKES(list);
    setenv("REBATCH_BATCH_ALLOWED",
           "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
           "1,1",
           1);
    expect_failure(NULL, REBATCH_E_PARSE,
                   "REBATCH_BATCH_ALLOWED: batch.allowed is a longer list: " LIST);
}

#define PROBE_FILE "expected text, 1 to 600 bytes, or \"none\""

Test(config_errors, texts_that_are_none)
{
    static const struct mistake list[] = {
        {"probe = { file = \"\"; };", "t.cfg:1: probe.file is \"\", nothing: " PROBE_FILE},
        {"probe = { file = 7; };", "t.cfg:1: probe.file is 7, a whole number: " PROBE_FILE},
        {"probe = { file = true; };", "t.cfg:1: probe.file is true, a boolean: " PROBE_FILE},
        {"probe = { file = \"a\\\"b\"; };", "t.cfg:1: probe.file is \"a\"b\", with a quote, a "
                                            "backslash or a control character: " PROBE_FILE},
        {"probe = { file = \"a\\nb\"; };", "t.cfg:1: probe.file is \"a\\x0ab\", with a quote, a "
                                           "backslash or a control character: " PROBE_FILE},
    };
    EXPECT_MISTAKES(list);
    char text[1024];
    (void)snprintf(text, sizeof text, "probe = { key = \"%0*d\"; };", 255, 0);
    config_write("t.cfg", text);
    rebatch_config *config;
    cr_assert(rebatch_config_load(&config, "t.cfg") == REBATCH_OK, "%s", rebatch_last_error());
    rebatch_config_free(config);
    (void)snprintf(text, sizeof text, "probe = { key = \"%0*d\"; };", 256, 0);
    config_write("t.cfg", text);
    cr_assert(rebatch_config_load(&config, "t.cfg") == REBATCH_E_PARSE);
    cr_expect(strstr(rebatch_last_error(), "too long a text: expected text, 1 to 255 bytes"), "%s",
              rebatch_last_error());
}

#define QUOTED                                                                                     \
    ", with a quote, a backslash or a control character: expected text, 1 to 600 bytes, or "       \
    "\"none\""

Test(config_errors, text_ends_with_its_quote)
{
    static const struct mistake list[] = {
        {"log = { file = \"a\\\"b # c\"; };", "t.cfg:1: log.file is \"a\"b # c\"" QUOTED},
        {"log = { file = \"a\\\\\"; };\n# \"", "t.cfg:1: log.file is \"a\\\"" QUOTED},
        {"\nlog = { file = \"a\\nb\"; };", "t.cfg:2: log.file is \"a\\x0ab\"" QUOTED},
    };
    EXPECT_MISTAKES(list);
}

Test(config_errors, files_that_cannot_be_read)
{
    expect_failure("not-there.cfg", REBATCH_E_IO,
                   "not-there.cfg cannot be read: No such file or directory");
    expect_failure("/", REBATCH_E_IO, "/ cannot be read: Is a directory");
    expect_failure("t.cfg/t.cfg", REBATCH_E_IO,
                   "t.cfg/t.cfg cannot be read: No such file or directory");
    expect_failure("/dev/zero", REBATCH_E_IO, "/dev/zero is larger than 1048576 bytes");
    if (geteuid() != 0) { /* root may read everything */
        config_write("closed.cfg", "batch = { start = 1; };");
        cr_assert(chmod("closed.cfg", 0) == 0);
        expect_failure("closed.cfg", REBATCH_E_IO, "closed.cfg cannot be read: Permission denied");
    }
}

/* Nobody has opened it to write, somebody has and wrote nothing, and one that a file includes. */
Test(config_errors, a_pipe_with_nothing_in_it_is_not_waited_for)
{
    int ends[2];
    char path[32], said[96];
    cr_assert(mkfifo("pipe", 0600) == 0 && pipe(ends) == 0 && close(ends[1]) == 0);
    (void)snprintf(path, sizeof path, "/dev/fd/%d", ends[0]);
    (void)snprintf(said, sizeof said, "%s cannot be read: nobody writes to this pipe", path);
    expect_failure("pipe", REBATCH_E_IO, "pipe cannot be read: nobody writes to this pipe");
    expect_failure(path, REBATCH_E_IO, said);
    config_write("t.cfg", "@include \"pipe\"\n");
    expect_failure("t.cfg", REBATCH_E_IO,
                   "t.cfg:1: pipe cannot be read: nobody writes to this pipe");
    cr_assert(setenv("REBATCH_CONFIG", "pipe", 1) == 0);
    expect_failure(NULL, REBATCH_E_IO, "pipe cannot be read: nobody writes to this pipe");
    close(ends[0]);
}

Test(config_errors, a_long_path_shows_its_end)
{
    char path[400];
    memset(path, 'd', sizeof path);
    memcpy(path + sizeof path - sizeof "/end.cfg", "/end.cfg", sizeof "/end.cfg");
    rebatch_config *config;
    cr_expect(rebatch_config_load(&config, path) == REBATCH_E_IO);
    cr_expect(strncmp(rebatch_last_error(), "...ddd", 6) == 0);
    cr_expect(strstr(rebatch_last_error(), "d/end.cfg cannot be read: ") != NULL, "%s",
              rebatch_last_error());
}

Test(config_errors, bytes_that_are_no_text)
{
    static const char text[] = "memory = {\n lim\0it = 1; };";
    config_write_bytes("t.cfg", text, sizeof text - 1);
    expect_failure("t.cfg", REBATCH_E_PARSE, "t.cfg has a zero byte: expected text");
}

Test(config_errors, includes)
{
    static const struct mistake list[] = {
        {"\n@include\n", "t.cfg:2: @ without a file: expected @include \"FILE\""},
        {"@include more.cfg", "t.cfg:1: @ without a file: expected @include \"FILE\""},
        {"@include \"\"", "t.cfg:1: @ without a file: expected @include \"FILE\""},
        {"@include \"more.cfg\n\"", "t.cfg:1: @ without a file: expected @include \"FILE\""},
        {"@inclyde \"x\"", "t.cfg:1: @ without a file: expected @include \"FILE\""},
        {"@include \"t.cfg\"",
         "t.cfg:1: @include \"t.cfg\" is nested deeper than 10: does a file include itself?"},
        {"\n@include \"more.cfg\"",
         "more.cfg:3: memory.limt is not a setting; did you mean memory.limit?"},
        {"@include \"open.cfg\"\n}", "t.cfg:2: syntax error at \"}\": " SYNTAX},
    };
    config_write("more.cfg", "\n\nmemory = { limt = 1; };");
    config_write("open.cfg", "\nmemory = { limit = 1; log = {");
    EXPECT_MISTAKES(list);
    config_write("t.cfg", "\n\n@include \"not-there.cfg\"");
    expect_failure("t.cfg", REBATCH_E_IO,
                   "t.cfg:3: not-there.cfg cannot be read: No such file or directory");
    config_write("t.cfg", "@include \"/\"");
    expect_failure("t.cfg", REBATCH_E_IO, "t.cfg:1: / cannot be read: Is a directory");
}

Test(config_errors, a_file_that_is_too_large)
{
    enum { LINE = 64, LINES = (1 << 20) / LINE };
    char *text = malloc(LINE * LINES + 1);
    cr_assert(text != NULL);
    memset(text, ' ', LINE * LINES + 1);
    for (size_t i = 0; i < LINES; i++)
        text[i * LINE] = '\n';
    config_write_bytes("t.cfg", text, LINE * LINES + 1);
    expect_failure("t.cfg", REBATCH_E_IO, "t.cfg is larger than 1048576 bytes");
    free(text);
    /* A small file that includes itself twice at each of ten levels would be large as well. */
    char pad[1200];
    memset(pad, '\n', sizeof pad);
    memcpy(pad, "@include \"b.cfg\"\n@include \"b.cfg\"\n", 34);
    static const char *const names[] = {"t.cfg", "b.cfg", "c.cfg", "d.cfg", "e.cfg",
                                        "f.cfg", "g.cfg", "h.cfg", "i.cfg", "j.cfg"};
    for (size_t i = 0; i < 10; i++) {
        pad[10] = pad[27] = (char)('b' + i);
        config_write_bytes(names[i], pad, sizeof pad);
    }
    config_write("k.cfg", "\n");
    expect_failure("t.cfg", REBATCH_E_IO,
                   "t.cfg is larger than 1048576 bytes, with what it "
                   "includes: expected a file of settings");
}

Test(config_errors, variables)
{
    static const struct {
        const char *name, *text, *sentence;
    } list[] = {
        {"REBATCH_BATCH_START", "many",
         "REBATCH_BATCH_START: batch.start is \"many\": expected a whole number, 0 or more"},
        {"REBATCH_BATCH_START", "-4",
         "REBATCH_BATCH_START: batch.start is -4, a negative number: expected a whole number, 0 or "
         "more"},
        {"REBATCH_BATCH_START", "-99999999999999999999",
         "REBATCH_BATCH_START: batch.start is \"-99999999999999999999\", a negative number: "
         "expected a whole number, 0 or more"},
        {"REBATCH_BATCH_START", "",
         "REBATCH_BATCH_START: batch.start is \"\": expected a whole number, 0 or more"},
        {"REBATCH_MEMORY_LIMIT", "22G",
         "REBATCH_MEMORY_LIMIT: memory.limit is \"22G\", which may mean 22GiB or 22GB: " LIMIT},
        {"REBATCH_MEMORY_LIMIT", "", "REBATCH_MEMORY_LIMIT: memory.limit is \"\", empty: " LIMIT},
        {"REBATCH_MEMORY_LIMIT", "\"1GiB\"",
         "REBATCH_MEMORY_LIMIT: memory.limit is \"\"1GiB\"\", in quotes, which a variable goes "
         "without: " LIMIT},
        {"REBATCH_RECOVERY_ON_OOM", "'fit'",
         "REBATCH_RECOVERY_ON_OOM: recovery.on_oom is \"'fit'\", in quotes, which a variable goes "
         "without: expected text, \"auto\", \"halve\", \"fit\" or \"stop\""},
        {"REBATCH_MEMORY_LIMIT", "\xff\xc3\x28\x1b[1m \xc3\xa4",
         "REBATCH_MEMORY_LIMIT: memory.limit is \"\\xff\\xc3(\\x1b[1m \xc3\xa4\", not a "
         "size: " LIMIT},
        {"REBATCH_MEMORY_LIMIT", "0",
         "REBATCH_MEMORY_LIMIT: memory.limit is 0, a size of zero: " LIMIT},
        {"REBATCH_MEMORY_LIMIT", "99999999999999999999",
         "REBATCH_MEMORY_LIMIT: memory.limit is \"99999999999999999999\", too large a "
         "number: " LIMIT},
        {"REBATCH_MEMORY_CACHING", "1",
         "REBATCH_MEMORY_CACHING: memory.caching is \"1\": expected a boolean, true or false"},
        {"REBATCH_MEMORY_REPLAY", "off",
         "REBATCH_MEMORY_REPLAY: memory.replay is \"off\": expected a boolean, true or false"},
        {"REBATCH_RECOVERY_ON_OOM", "retry",
         "REBATCH_RECOVERY_ON_OOM: recovery.on_oom is \"retry\": expected text, \"auto\", "
         "\"halve\", "
         "\"fit\" or \"stop\""},
        {"REBATCH_MEMORY_LIMT", "5",
         "REBATCH_MEMORY_LIMT is not a setting's variable; did you mean REBATCH_MEMORY_LIMIT?"},
        {"REBATCH_MEMROY_LIMIT", "5",
         "REBATCH_MEMROY_LIMIT is not a setting's variable; did you mean REBATCH_MEMORY_LIMIT?"},
        {"REBATCH_MEMORY_PURPLE", "5",
         "REBATCH_MEMORY_PURPLE is not a setting's variable: expected " MEMORY_KEYS " "
         "in "
         "group memory"},
        {"REBATCH_GROWTH", "off",
         "REBATCH_GROWTH is not a setting's variable: expected enabled, after or wait_max in group "
         "growth"},
        {"REBATCH_LOG", "debug",
         "REBATCH_LOG is not a setting's variable: expected level, file or format in group log"},
        {"REBATCH_LOG_", "5",
         "REBATCH_LOG_ is not a setting's variable: expected level, file or format in group log"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        setenv(list[i].name, list[i].text, 1);
        expect_failure(NULL, REBATCH_E_PARSE, list[i].sentence);
        unsetenv(list[i].name);
    }
}

/* The first mistake counts, file before environment, and a value that is overridden is checked
 * too. */
Test(config_errors, the_file_is_checked_even_where_it_is_overridden)
{
    config_write("t.cfg", "batch = { start = -1; };");
    setenv("REBATCH_BATCH_START", "8", 1);
    setenv("REBATCH_MEMORY_LIMIT", "x", 1);
    expect_failure("t.cfg", REBATCH_E_PARSE,
                   "t.cfg:1: batch.start is -1, a negative number: "
                   "expected a whole number, 0 or more");
}
