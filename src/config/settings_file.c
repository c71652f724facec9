/* Owns the reading of a settings file: from libconfig's tree into entries.
 * Must not know what a setting does. */
#include <libconfig.h>
#include <stdio.h>
#include <string.h>

#include "config/settings.h"

struct file {
    const struct rbi_source *source;
    struct rebatch_config *config;
    size_t count; /* settings seen */
};

static struct rbi_place place_of(const struct file *f, const config_setting_t *element)
{
    return rbi_source_place(f->source, config_setting_source_line(element));
}

/* What kind of thing stands there; NULL for a single value that is not a group, array or list. */
static const char *aggregate_text(const config_setting_t *element)
{
    switch (config_setting_type(element)) {
    case CONFIG_TYPE_GROUP:
        return "a group";
    case CONFIG_TYPE_ARRAY:
        return "an array";
    case CONFIG_TYPE_LIST:
        return "a list";
    default:
        return NULL;
    }
}

/* 'a list', '5, a whole number' */
static struct rbi_shown shown_value(const config_setting_t *element)
{
    struct rbi_shown shown = {""};
    struct rbi_text t = {shown.text, sizeof shown.text, 0};
    const char *text = aggregate_text(element);
    switch (config_setting_type(element)) {
    case CONFIG_TYPE_INT:
        rbi_text_add(&t, "%d, a whole number", config_setting_get_int(element));
        break;
    case CONFIG_TYPE_INT64:
        rbi_text_add(&t, "%lld, a whole number", config_setting_get_int64(element));
        break;
    case CONFIG_TYPE_FLOAT:
        rbi_text_add(&t, "%g, a number with a fraction", config_setting_get_float(element));
        break;
    case CONFIG_TYPE_BOOL:
        rbi_text_add(&t, "%s, a boolean", config_setting_get_bool(element) ? "true" : "false");
        break;
    case CONFIG_TYPE_STRING:
        text = config_setting_get_string(element);
        rbi_text_add(&t, "\"%s\", text", rbi_shown_text(text, strlen(text)).text);
        break;
    default:
        rbi_text_add(&t, "%s", text ? text : "nothing");
        break;
    }
    return shown;
}

static rebatch_status refuse_group(const config_setting_t *element, const struct rbi_place *place)
{
    const char *name = config_setting_name(element);
    const size_t length = strlen(name);
    const struct rbi_shown at = rbi_shown_place(place);
    const struct rbi_shown shown = rbi_shown_text(name, length);
    struct rbi_nearest nearest = rbi_nearest_to(name, length);
    for (size_t i = 0; i < RBI_GROUP_COUNT; i++)
        rbi_nearest_offer(&nearest, rbi_groups[i].name, &rbi_groups[i]);
    const struct rbi_group *group = nearest.found;
    if (group)
        return rbi_error(REBATCH_E_PARSE, "%s: %s is not a group; did you mean %s?", at.text,
                         shown.text, group->name);
    const struct rbi_setting *setting = rbi_nearest_setting(NULL, name, length);
    if (setting)
        return rbi_error(REBATCH_E_PARSE,
                         "%s: %s is not a group; did you mean %s, inside %.*s = { };", at.text,
                         shown.text, setting->key,
                         (int)(rbi_setting_name(setting) - setting->key - 1), setting->key);
    char list[256];
    struct rbi_text t = {list, sizeof list, 0};
    rbi_setting_list(&t, NULL);
    return rbi_error(REBATCH_E_PARSE, "%s: %s is not a group: expected %s", at.text, shown.text,
                     list);
}

static rebatch_status refuse_key(const char *group, const config_setting_t *element,
                                 const struct rbi_place *place)
{
    const char *name = config_setting_name(element);
    const size_t length = strlen(name);
    const struct rbi_setting *nearest = rbi_nearest_setting(group, name, length);
    const struct rbi_shown at = rbi_shown_place(place);
    const struct rbi_shown shown = rbi_shown_text(name, length);
    if (nearest)
        return rbi_error(REBATCH_E_PARSE, "%s: %s.%s is not a setting; did you mean %s?", at.text,
                         group, shown.text, nearest->key);
    char list[256];
    struct rbi_text t = {list, sizeof list, 0};
    rbi_setting_list(&t, group);
    return rbi_error(REBATCH_E_PARSE, "%s: %s.%s is not a setting: expected %s", at.text, group,
                     shown.text, list);
}

/* An array or a list for a setting that is one. */
static rebatch_status read_list(struct rbi_entry *entry, const struct rbi_setting *setting,
                                const config_setting_t *element, const struct rbi_place *place)
{
    int64_t numbers[RBI_LIST_MOST + 1];
    const int length = config_setting_length(element);
    const size_t count = rbi_min((size_t)length, RBI_LIST_MOST + 1);
    for (size_t i = 0; i < count; i++) {
        const config_setting_t *item = config_setting_get_elem(element, (unsigned)i);
        const int type = config_setting_type(item);
        if (type != CONFIG_TYPE_INT && type != CONFIG_TYPE_INT64) {
            char shown[sizeof(struct rbi_shown) + 16];
            struct rbi_text t = {shown, sizeof shown, 0};
            rbi_text_add(&t, "a list with %s", shown_value(item).text);
            return rbi_entry_refuse(setting, place, shown);
        }
        numbers[i] =
            type == CONFIG_TYPE_INT ? config_setting_get_int(item) : config_setting_get_int64(item);
    }
    return rbi_entry_set_list(entry, setting, numbers, count, place);
}

static rebatch_status read_value(struct rbi_entry *entry, const struct rbi_setting *setting,
                                 const config_setting_t *element, const struct rbi_place *place)
{
    switch (config_setting_type(element)) {
    case CONFIG_TYPE_INT:
        return rbi_entry_set_integer(entry, setting, config_setting_get_int(element), place);
    case CONFIG_TYPE_INT64:
        return rbi_entry_set_integer(entry, setting, config_setting_get_int64(element), place);
    case CONFIG_TYPE_BOOL:
        return rbi_entry_set_boolean(entry, setting, config_setting_get_bool(element), place);
    case CONFIG_TYPE_STRING:
        return rbi_entry_set_quoted(entry, setting, config_setting_get_string(element), place);
    case CONFIG_TYPE_ARRAY:
    case CONFIG_TYPE_LIST:
        if (setting->kind == RBI_LIST)
            return read_list(entry, setting, element, place);
        break;
    }
    return rbi_entry_refuse(setting, place, shown_value(element).text);
}

static rebatch_status read_setting(struct file *f, const char *group,
                                   const config_setting_t *element)
{
    const struct rbi_place place = place_of(f, element);
    char key[64];
    struct rbi_text t = {key, sizeof key, 0};
    rbi_text_add(&t, "%s.%s", group, config_setting_name(element));
    const struct rbi_setting *setting = rbi_setting_find(key);
    if (!setting)
        return refuse_key(group, element, &place);
    struct rbi_entry *entry = &f->config->entries[setting - rbi_settings];
    const rebatch_status status = read_value(entry, setting, element, &place);
    if (status)
        return status;
    f->count++;
    return rbi_entry_set_origin(entry, &place);
}

static rebatch_status read_group(struct file *f, const config_setting_t *element)
{
    const struct rbi_place place = place_of(f, element);
    const struct rbi_group *group = rbi_group_find(config_setting_name(element));
    if (!group)
        return refuse_group(element, &place);
    if (!config_setting_is_group(element))
        return rbi_error(REBATCH_E_PARSE, "%s: %s is %s: expected a group, %s = { KEY = VALUE; };",
                         rbi_shown_place(&place).text, group->name, shown_value(element).text,
                         group->name);
    rebatch_status status = REBATCH_OK;
    const int count = config_setting_length(element);
    for (int i = 0; i < count && !status; i++)
        status = rbi_config_note(
            f->config, read_setting(f, group->name, config_setting_get_elem(element, (unsigned)i)));
    return status;
}

static rebatch_status read_tree(struct file *f, const config_t *tree, const char *path)
{
    const config_setting_t *root = config_root_setting(tree);
    const int count = config_setting_length(root);
    for (int i = 0; i < count; i++) {
        const rebatch_status status =
            rbi_config_note(f->config, read_group(f, config_setting_get_elem(root, (unsigned)i)));
        if (status)
            return status;
    }
    if (f->count > 0 || f->config->has_mistake)
        return REBATCH_OK;
    return rbi_error(
        REBATCH_E_PARSE,
        "%s has no settings: expected at least one, such as memory = { limit = \"90%%\"; };",
        rbi_shown_path(path).text);
}

/* The last line with something in it, up to line `line`: what libconfig stumbled over stands
 * there. */
static unsigned find_line(const struct rbi_source *source, unsigned line, const char **begin,
                          size_t *length)
{
    unsigned found = 1;
    unsigned number = 1;
    *begin = source->text;
    *length = 0;
    for (const char *at = source->text; *at && number <= line; number++) {
        const size_t whole = strcspn(at, "\n");
        const size_t blank = strspn(at, " \t\r\f");
        if (blank < whole) {
            found = number;
            *begin = at + blank;
            *length = whole - blank;
        }
        at += whole + (at[whole] == '\n');
    }
    while (*length > 0 && strchr(" \t\r\f", (*begin)[*length - 1]))
        --*length;
    return found;
}

/* Says what libconfig had to say, with what stands in that line. */
static rebatch_status refuse_syntax(const struct rbi_source *source, const config_t *tree)
{
    const char *why = config_error_text(tree);
    const int line = config_error_line(tree);
    const char *begin;
    size_t length;
    const unsigned found = find_line(source, line > 0 ? (unsigned)line : 1, &begin, &length);
    const struct rbi_place place = rbi_source_place(source, found);
    const char *const expected = why && strstr(why, "duplicate") ? "every name once"
                                 : why && strstr(why, "element")
                                     ? "values of one kind, such as [8, 16, 32]"
                                     : "GROUP = { KEY = VALUE; }; with quotes around text such "
                                       "as \"22GiB\"";
    return rbi_error(REBATCH_E_PARSE, "%s: %s at \"%s\": expected %s", rbi_shown_place(&place).text,
                     why ? why : "syntax error", rbi_shown_text(begin, length).text, expected);
}

rebatch_status rbi_config_read_file(struct rebatch_config *config, const char *path)
{
    struct rbi_source source;
    rebatch_status status = rbi_source_read(&source, path);
    if (!status) {
        struct file f = {.source = &source, .config = config};
        config_t tree;
        config_init(&tree);
        status = config_read_string(&tree, source.text) ? read_tree(&f, &tree, path)
                                                        : refuse_syntax(&source, &tree);
        config_destroy(&tree);
    }
    rbi_source_free(&source);
    return status;
}
