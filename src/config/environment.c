/* Owns the reading of REBATCH_… variables.
 * Must not know files. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/settings.h"

static const char file_variable[] = RBI_FILE_VARIABLE;

const char *const rbi_run_variables[RBI_RUN_VARIABLE_COUNT] = {
#define NAME_(id, name) name,
    RBI_RUN_VARIABLES(NAME_)
#undef NAME_
};

static bool is_known_variable(const char *name, size_t length)
{
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_variable variable = rbi_setting_variable(&rbi_settings[i]);
        if (strlen(variable.name) == length && memcmp(variable.name, name, length) == 0)
            return true;
    }
    if (strlen(file_variable) == length && memcmp(file_variable, name, length) == 0)
        return true;
    for (size_t i = 0; i < RBI_RUN_VARIABLE_COUNT; i++)
        if (strlen(rbi_run_variables[i]) == length &&
            memcmp(rbi_run_variables[i], name, length) == 0)
            return true; /* of one run (run.c), which looks at its value itself */
    return false;
}

/* The group of a name such as REBATCH_MEMORY_LIMT or REBATCH_MEMORY; NULL for one such as
 * REBATCH_COMMAND. */
static const struct rbi_group *group_of(const char *name, size_t length)
{
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_setting *setting = &rbi_settings[i];
        const struct rbi_variable variable = rbi_setting_variable(setting);
        const size_t prefix =
            sizeof RBI_VARIABLE_PREFIX - 1 + (size_t)(rbi_setting_name(setting) - setting->key);
        const bool is_group = length == prefix - 1; /* without the '_' behind it */
        if ((is_group || length >= prefix) &&
            memcmp(variable.name, name, is_group ? length : prefix) == 0)
            for (size_t g = 0; g < RBI_GROUP_COUNT; g++)
                if (rbi_setting_is_in(setting, rbi_groups[g].name))
                    return &rbi_groups[g];
    }
    return NULL;
}

/* A variable that no setting has, though it looks like one, would otherwise do nothing and say
 * nothing. One that is neither in a group nor one slip away from a setting's nor a shorter form of
 * one, such as REBATCH_MEM_LIMIT, is someone else's. */
static rebatch_status check_name(const char *name, size_t length)
{
    if (is_known_variable(name, length))
        return REBATCH_OK;
    struct rbi_nearest nearest = rbi_nearest_to(name, length);
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_setting *const setting = &rbi_settings[i];
        rbi_nearest_offer(&nearest, rbi_setting_variable(setting).name, setting);
    }
    rbi_nearest_offer(&nearest, file_variable, file_variable);
    const struct rbi_group *group = group_of(name, length);
    struct rbi_variable near = {""};
    if (nearest.found == file_variable)
        memcpy(near.name, file_variable, sizeof file_variable);
    else if (nearest.found)
        near = rbi_setting_variable(nearest.found);
    const bool is_shortened = near.name[0] && strlen(near.name) == length + nearest.distance;
    if (!group && nearest.distance > 1 && !is_shortened)
        return REBATCH_OK;
    const struct rbi_shown shown = rbi_shown_text(name, length);
    if (near.name[0])
        return rbi_error(REBATCH_E_PARSE, "%s is not a setting's variable; did you mean %s?",
                         shown.text, near.name);
    rbi_assert(group);
    char list[256];
    struct rbi_text t = {list, sizeof list, 0};
    rbi_setting_list(&t, group->name);
    return rbi_error(REBATCH_E_PARSE, "%s is not a setting's variable: expected %s in group %s",
                     shown.text, list, group->name);
}

rebatch_status rbi_config_check_names(struct rebatch_config *config)
{
    const size_t prefix = sizeof RBI_VARIABLE_PREFIX - 1;
    for (char *const *at = environ; at && *at; at++) {
        if (strncmp(*at, RBI_VARIABLE_PREFIX, prefix) != 0)
            continue;
        const rebatch_status status = rbi_config_note(config, check_name(*at, strcspn(*at, "=")));
        if (status)
            return status;
    }
    return REBATCH_OK;
}

rebatch_status rbi_config_read_environment(struct rebatch_config *config)
{
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_variable variable = rbi_setting_variable(&rbi_settings[i]);
        const char *text = getenv(variable.name);
        if (!text)
            continue;
        const struct rbi_place place = {NULL, 0, variable.name};
        rebatch_status status =
            rbi_entry_set_bare(&config->entries[i], &rbi_settings[i], text, &place);
        if (!status)
            status = rbi_entry_set_origin(&config->entries[i], &place);
        status = rbi_config_note(config, status);
        if (status)
            return status;
    }
    return rbi_config_check_names(config);
}
