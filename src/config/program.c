/* Owns the reading of settings that a program gives as text: "batch.largest = 64; ...".
 * Must not know files or the environment. */
#include <string.h>

#include "config/settings.h"

static const char origin[] = "settings";
static const struct rbi_place place = {NULL, 0, origin};

struct words {
    const char *at;
    size_t length;
};

static struct words trimmed(const char *at, size_t length)
{
    const char blank[] = " \t\r\n";
    while (length > 0 && strchr(blank, *at)) {
        at++;
        length--;
    }
    while (length > 0 && strchr(blank, at[length - 1]))
        length--;
    return (struct words){at, length};
}

static struct words without_quotes(struct words w)
{
    const bool is_quoted = w.length >= 2 && w.at[0] == '"' && w.at[w.length - 1] == '"';
    return is_quoted ? (struct words){w.at + 1, w.length - 2} : w;
}

/* The setting of a key; NULL: it is said why there is none. */
static const struct rbi_setting *find(struct words key)
{
    char name[64] = "";
    if (key.length < sizeof name)
        memcpy(name, key.at, key.length);
    const struct rbi_setting *setting = rbi_setting_find(name);
    if (setting)
        return setting;
    const struct rbi_setting *nearest = rbi_nearest_setting(NULL, key.at, key.length);
    rbi_error(REBATCH_E_PARSE, "%s: %s is not a setting%s%s%s", origin,
              rbi_shown_text(key.at, key.length).text, nearest ? "; did you mean " : "",
              nearest ? nearest->key : "", nearest ? "?" : "");
    return NULL;
}

/* One "KEY = VALUE". */
static rebatch_status read_one(struct rebatch_config *config, struct words line)
{
    char text[RBI_VALUE_BYTES];
    const char *equals = memchr(line.at, '=', line.length);
    if (!equals)
        return rbi_error(REBATCH_E_PARSE,
                         "%s: \"%s\" has no \"=\": expected KEY = VALUE, such as "
                         "batch.largest = 64",
                         origin, rbi_shown_text(line.at, line.length).text);
    const struct rbi_setting *setting = find(trimmed(line.at, (size_t)(equals - line.at)));
    if (!setting)
        return REBATCH_E_PARSE;
    const struct words value =
        without_quotes(trimmed(equals + 1, line.length - (size_t)(equals + 1 - line.at)));
    struct rbi_entry *entry = &config->entries[setting - rbi_settings];
    if (entry->origin && strcmp(entry->origin, origin) == 0)
        return rbi_error(REBATCH_E_PARSE, "%s: %s is set twice: expected every name once", origin,
                         setting->key);
    if (value.length >= sizeof text)
        return rbi_entry_refuse(setting, &place, "too long a text");
    memcpy(text, value.at, value.length);
    text[value.length] = '\0';
    const rebatch_status status = rbi_entry_set_bare(entry, setting, text, &place);
    return status ? status : rbi_entry_set_origin(entry, &place);
}

rebatch_status rbi_config_read_program(struct rebatch_config *config, const char *text)
{
    rebatch_status status = rbi_entry_set_bare(&config->entries[RBI_DEVICE_KIND],
                                               &rbi_settings[RBI_DEVICE_KIND], "auto", &place);
    while (*text && !status) {
        const size_t length = strcspn(text, ";\n");
        const struct words line = trimmed(text, length);
        if (line.length > 0)
            status = read_one(config, line);
        text += length + (text[length] != '\0');
    }
    return status;
}
