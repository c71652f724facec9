/* Owns `rebatch config`: looking for mistakes in settings, and showing them.
 * Must not know how settings are read. */
#include "config/settings.h"

#include <stdio.h>
#include <string.h>

#include "cli/command.h"

static const char config_help[] =
    "usage: rebatch config check FILE | show [FILE] | example\n"
    "\n"
    "A setting has the value of its REBATCH_GROUP_KEY variable if it is set, else that of the\n"
    "file, else its default. `check` and `show` include the variables; `show` without FILE shows\n"
    "the file that REBATCH_CONFIG names. The output of `show` and of `example` is a settings\n"
    "file:\n"
    "\n"
    "  rebatch config example > rebatch.cfg\n"
    "  rebatch config check rebatch.cfg\n"
    "  REBATCH_MEMORY_LIMIT=20GiB rebatch config show rebatch.cfg\n";

static int load(rebatch_config **config, const char *path)
{
    if (rebatch_config_load(config, path) == REBATCH_OK)
        return RBI_EXIT_OK;
    fprintf(stderr, "%s\n", rebatch_last_error());
    return RBI_EXIT_FAILED;
}

static void print_mistake(const char *sentence, void *user)
{
    (void)user;
    fprintf(stderr, "%s\n", sentence);
}

static int config_check(int count, char **paths)
{
    if (count != 1)
        return rbi_command_refuse("config check FILE");
    rebatch_config *config;
    if (rbi_config_check(paths[0], print_mistake, NULL) == REBATCH_E_PARSE)
        return RBI_EXIT_FAILED;
    const int code = load(&config, paths[0]);
    if (code)
        return code;
    unsigned in_file = 0;
    unsigned in_variables = 0;
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const char *origin = config->entries[i].origin;
        const bool is_line = origin && strchr(origin, ':'); /* no variable's name has a colon */
        in_file += is_line;
        in_variables += origin && !is_line;
    }
    printf("%s: ok, %u of %d settings from the file", paths[0], in_file, RBI_SETTING_COUNT);
    if (in_variables > 0)
        printf(", %u from the environment", in_variables);
    fputs("\n", stdout);
    rebatch_config_free(config);
    return RBI_EXIT_OK;
}

/* The widest name and value, so that they stand in columns. */
struct widths {
    int name, value;
};

static struct widths measure(const rebatch_config *config)
{
    struct widths widths = {0, 0};
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const int name = (int)strlen(rbi_setting_name(&rbi_settings[i]));
        const int value = (int)strlen(config->entries[i].text);
        widths.name = name > widths.name ? name : widths.name;
        widths.value = value > widths.value ? value : widths.value;
    }
    return widths;
}

/* Prints a file that would set what holds, with the origin of each value in a comment. */
static int config_show(int count, char **paths)
{
    if (count > 1)
        return rbi_command_refuse("config show [FILE]");
    rebatch_config *config;
    const int code = load(&config, count == 1 ? paths[0] : NULL);
    if (code)
        return code;
    const struct widths widths = measure(config);
    const char *before = ""; /* the key before, so that groups are seen to end */
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const char *key = rbi_settings[i].key, *name = rbi_setting_name(&rbi_settings[i]);
        const int group = (int)(name - key);
        if (strncmp(before, key, (size_t)group) != 0)
            printf("%s%.*s = {\n", i > 0 ? "};\n\n" : "", group - 1, key);
        const struct rbi_entry *entry = &config->entries[i];
        printf("    %-*s = %s;%*s  # %s\n", widths.name, name, entry->text,
               widths.value - (int)strlen(entry->text), "",
               entry->origin ? entry->origin : "default");
        before = key;
    }
    fputs("};\n", stdout);
    rebatch_config_free(config);
    return RBI_EXIT_OK;
}

static int config_example(int count, char **arguments)
{
    (void)arguments;
    if (count != 0)
        return rbi_command_refuse("config example");
    static char text[65536];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_config_add_example(&t);
    rbi_assert(t.length < sizeof text);
    fputs(text, stdout);
    return RBI_EXIT_OK;
}

RBI_COMMAND_HELP(config, config_help)

/* Takes "--" out of what follows a command; false when help is asked for, or an option that there
 * is not. Then *code is what to exit with. */
static bool read_options(int *count, char **arguments, int *code)
{
    int left = 0;
    bool are_paths = false; /* after "--" */
    for (int i = 0; i < *count; i++) {
        const bool is_option = !are_paths && arguments[i][0] == '-' && arguments[i][1];
        if (is_option && rbi_command_is_help(arguments[i])) {
            *code = rbi_config_help(0, NULL);
            return false;
        }
        if (is_option && strcmp(arguments[i], "--") != 0) {
            fprintf(stderr, "rebatch: there is no option '%.60s'; see 'rebatch help config'\n",
                    arguments[i]);
            *code = RBI_EXIT_USAGE;
            return false;
        }
        are_paths |= is_option;
        if (!is_option)
            arguments[left++] = arguments[i];
    }
    *count = left;
    return true;
}

int rbi_config_main(int count, char **arguments)
{
    static const struct rbi_command commands[] = {
        {"check", config_check},
        {"show", config_show},
        {"example", config_example},
    };
    if (count == 0)
        return rbi_command_refuse("config check FILE | show [FILE] | example");
    if (rbi_command_is_help(arguments[0]))
        return rbi_config_help(0, NULL);
    int code;
    int rest = count - 1;
    if (!read_options(&rest, arguments + 1, &code))
        return code;
    return rbi_command_run("config command", commands, sizeof commands / sizeof *commands, rest + 1,
                           arguments);
}
