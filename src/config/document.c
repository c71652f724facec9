/* Owns the texts that are made of the table: the commented example file and the reference.
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

size_t rebatch_config_format_example(char *text, size_t size)
{
    struct rbi_text t = {text, size, 0};
    add_comment(&t, "", "Settings of rebatch, all at their defaults. Keep only what you change.");
    add_comment(&t, "", "rebatch config check FILE   looks for mistakes");
    add_comment(&t, "", "rebatch config show FILE    prints every value, and where it comes from");
    rbi_text_add(&t, "#\n");
    add_comment(&t, "",
                "Units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of "
                "1024). A variable wins over the file: REBATCH_MEMORY_LIMIT=20GiB.");
    for (size_t g = 0; g < RBI_GROUP_COUNT; g++) {
        rbi_text_add(&t, "\n");
        add_comment(&t, "", rbi_groups[g].help);
        rbi_text_add(&t, "%s = {\n", rbi_groups[g].name);
        const char *between = "";
        for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
            if (!rbi_setting_is_in(&rbi_settings[i], rbi_groups[g].name))
                continue;
            rbi_text_add(&t, "%s", between);
            add_example_setting(&t, &rbi_settings[i]);
            between = "\n";
        }
        rbi_text_add(&t, "};\n");
    }
    return t.length;
}

/* ---- reference ---- */

enum { COLUMNS = 4 };

/* A row of the table: key, default, values and variable, padded so that the text is readable as
 * it is; the meaning comes last. */
struct row {
    char cells[COLUMNS][160];
};

static struct row row_of(const struct rbi_setting *setting)
{
    struct row row;
    const struct rbi_variable variable = rbi_setting_variable(setting);
    const struct rbi_entry initial = default_of(setting);
    const char *const cells[COLUMNS] = {setting->key, initial.text, NULL, variable.name};
    for (size_t i = 0; i < COLUMNS; i++) {
        struct rbi_text t = {row.cells[i], sizeof row.cells[i], 0};
        if (cells[i])
            rbi_text_add(&t, "`%s`", cells[i]);
        else
            rbi_setting_describe(&t, setting);
        rbi_assert(t.length < sizeof row.cells[i]);
    }
    return row;
}

static void add_row(struct rbi_text *t, const struct row *row, const size_t *widths,
                    const char *last)
{
    for (size_t i = 0; i < COLUMNS; i++)
        rbi_text_add(t, "| %-*s ", (int)widths[i], row->cells[i]);
    rbi_text_add(t, "| %s |\n", last);
}

/* The line under the heading. */
static void add_rule(struct rbi_text *t, const size_t *widths)
{
    for (size_t i = 0; i < COLUMNS; i++) {
        rbi_text_add(t, "| ");
        for (size_t n = 0; n < widths[i]; n++)
            rbi_text_add(t, "-");
        rbi_text_add(t, " ");
    }
    rbi_text_add(t, "| ------- |\n");
}

size_t rebatch_config_format_reference(char *text, size_t size)
{
    static const struct row heading = {{"Key", "Default", "Values", "Variable"}};
    size_t widths[COLUMNS] = {0};
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct row row = row_of(&rbi_settings[i]);
        for (size_t c = 0; c < COLUMNS; c++)
            widths[c] = rbi_max(widths[c], strlen(row.cells[c]));
    }
    struct rbi_text t = {text, size, 0};
    add_row(&t, &heading, widths, "Meaning");
    add_rule(&t, widths);
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct row row = row_of(&rbi_settings[i]);
        add_row(&t, &row, widths, rbi_settings[i].help);
    }
    return t.length;
}
