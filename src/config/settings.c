/* Owns the table of settings, and what can be said of it without a value.
 * Must not know where values come from. */
#include "config/settings.h"

#include <inttypes.h>
#include <string.h>

#define SETTING_(id, ...) [RBI_##id] = {__VA_ARGS__},
const struct rbi_setting rbi_settings[RBI_SETTING_COUNT] = {RBI_SETTINGS(SETTING_)};
#undef SETTING_

#define GROUP_(name, text) [RBI_GROUP_##name] = {#name, text},
const struct rbi_group rbi_groups[RBI_GROUP_COUNT] = {RBI_GROUPS(GROUP_)};
#undef GROUP_

bool rbi_setting_is_in(const struct rbi_setting *setting, const char *group)
{
    const size_t length = strlen(group);
    return strncmp(setting->key, group, length) == 0 && setting->key[length] == '.';
}

const char *rbi_setting_name(const struct rbi_setting *setting)
{
    rbi_assert(strchr(setting->key, '.'));
    return strchr(setting->key, '.') + 1;
}

const struct rbi_setting *rbi_setting_find(const char *key)
{
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++)
        if (strcmp(rbi_settings[i].key, key) == 0)
            return &rbi_settings[i];
    return NULL;
}

const struct rbi_group *rbi_group_find(const char *name)
{
    for (size_t i = 0; i < RBI_GROUP_COUNT; i++)
        if (strcmp(rbi_groups[i].name, name) == 0)
            return &rbi_groups[i];
    return NULL;
}

struct rbi_variable rbi_setting_variable(const struct rbi_setting *setting)
{
    struct rbi_variable variable = {RBI_VARIABLE_PREFIX};
    rbi_assert(sizeof RBI_VARIABLE_PREFIX + strlen(setting->key) <= sizeof variable.name);
    if (setting->variable) {
        memcpy(variable.name, setting->variable, strlen(setting->variable) + 1);
        return variable;
    }
    char *to = variable.name + strlen(variable.name);
    for (const char *c = setting->key; *c && to < variable.name + sizeof variable.name - 1; c++)
        *to++ = *c == '.' ? '_' : *c >= 'a' && *c <= 'z' ? (char)(*c - 'a' + 'A') : *c;
    return variable;
}

/* ---- what may stand there ---- */

/* Between the items of "a, b or c". */
static const char *separator(size_t i, size_t count)
{
    return i == 0 ? "" : i + 1 < count ? ", " : " or ";
}

static void describe_size(struct rbi_text *t, const struct rbi_setting *setting)
{
    rbi_text_add(t, "bytes such as 1048576 or \"22GiB\"");
    if (setting->share_of)
        rbi_text_add(t, ", a share such as \"90%%\" of %s", setting->share_of);
    if (setting->may_be_none)
        rbi_text_add(t, ", or \"none\"");
    if (setting->least > 1)
        rbi_text_add(t, "; at least %" PRIu64 " bytes", setting->least);
}

static void describe_choice(struct rbi_text *t, const struct rbi_setting *setting)
{
    size_t count = 0;
    while (setting->choices[count])
        count++;
    for (size_t i = 0; i < count; i++)
        rbi_text_add(t, "%s\"%s\"", separator(i, count), setting->choices[i]);
}

void rbi_setting_describe(struct rbi_text *t, const struct rbi_setting *setting)
{
    switch (setting->kind) {
    case RBI_COUNT:
        if (setting->is_power_of_two)
            rbi_text_add(t, "0 or a power of two up to %" PRIu64, setting->most);
        else if (setting->most == RBI_NUMBER_MOST)
            rbi_text_add(t, "a whole number, %" PRIu64 " or more", setting->least);
        else
            rbi_text_add(t, "a whole number from %" PRIu64 " to %" PRIu64, setting->least,
                         setting->most);
        break;
    case RBI_SIZE:
        describe_size(t, setting);
        break;
    case RBI_SHARE:
        rbi_text_add(t, "a share such as \"90%%\" of %s%s", setting->share_of,
                     setting->may_be_none ? ", or \"none\"" : "");
        break;
    case RBI_SWITCH:
        rbi_text_add(t, "true or false");
        break;
    case RBI_CHOICE:
        describe_choice(t, setting);
        break;
    case RBI_TEXT:
        rbi_text_add(t, "1 to %" PRIu64 " bytes%s", setting->most,
                     setting->may_be_none ? ", or \"none\"" : "");
        break;
    case RBI_LIST:
        rbi_text_add(t, "up to %d whole numbers such as [8, 16, 32], or \"any\"", RBI_LIST_MOST);
        break;
    }
}

void rbi_setting_list(struct rbi_text *t, const char *group)
{
    if (!group) {
        for (size_t i = 0; i < RBI_GROUP_COUNT; i++)
            rbi_text_add(t, "%s%s", separator(i, RBI_GROUP_COUNT), rbi_groups[i].name);
        return;
    }
    size_t count = 0;
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++)
        count += rbi_setting_is_in(&rbi_settings[i], group);
    size_t n = 0;
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        if (!rbi_setting_is_in(&rbi_settings[i], group))
            continue;
        rbi_text_add(t, "%s%s", separator(n, count), rbi_setting_name(&rbi_settings[i]));
        n++;
    }
}
