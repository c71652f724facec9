/* Owns the text that is made of the table: the commented example file.
 * Must not know values other than defaults. */
#include <string.h>

#include "config/settings.h"

#define LINE_MOST 80

/* A default as it stands in a file: "\"none\"", "64", "true". */
static struct rbi_entry default_of(const struct rbi_setting *setting)
{
    struct rbi_entry entry = {0};
    const struct rbi_place place = {NULL, 0, "default"};
    (void)rbi_entry_set_bare(&entry, setting, setting->initial, &place);
    return entry;
}

/* Adds words as comment lines of at most LINE_MOST characters. */
static void add_comment(struct rbi_text *t, const char *indent, const char *text)
{
    const size_t most = LINE_MOST - strlen(indent) - strlen("# ");
    while (*text) {
        size_t length = strlen(text);
        if (length > most) {
            length = most;
            while (length > 0 && text[length] != ' ')
                length--;
        }
        rbi_text_add(t, "%s# %.*s\n", indent, (int)length, text);
        text += length + strspn(text + length, " ");
    }
}

static void add_example_setting(struct rbi_text *t, const struct rbi_setting *setting)
{
    char values[256];
    struct rbi_text v = {values, sizeof values, 0};
    rbi_text_add(&v, "Values: ");
    rbi_setting_describe(&v, setting);
    rbi_assert(v.length < sizeof values);
    add_comment(t, "    ", setting->help);
    add_comment(t, "    ", values);
    rbi_text_add(t, "    %s = %s;\n", rbi_setting_name(setting), default_of(setting).text);
}

void rbi_config_add_example(struct rbi_text *t)
{
    add_comment(t, "", "Settings of rebatch, all at their defaults. Keep only what you change.");
    add_comment(t, "", "rebatch config check FILE   looks for mistakes");
    add_comment(t, "", "rebatch config show FILE    prints every value, and where it comes from");
    rbi_text_add(t, "#\n");
    add_comment(t, "",
                "Units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of "
                "1024). A variable wins over the file: REBATCH_MEMORY_LIMIT=20GiB.");
    for (size_t g = 0; g < RBI_GROUP_COUNT; g++) {
        rbi_text_add(t, "\n");
        add_comment(t, "", rbi_groups[g].help);
        rbi_text_add(t, "%s = {\n", rbi_groups[g].name);
        const char *between = "";
        for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
            if (!rbi_setting_is_in(&rbi_settings[i], rbi_groups[g].name))
                continue;
            rbi_text_add(t, "%s", between);
            add_example_setting(t, &rbi_settings[i]);
            between = "\n";
        }
        rbi_text_add(t, "};\n");
    }
}
