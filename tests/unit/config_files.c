/* Owns the folder that a test of settings works in.
 * Must not know what is tested. */
#include "unit/config_files.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/settings.h"

static char folder[] = "/tmp/rebatch-config-XXXXXX";
static char source_folder[PATH_MAX];

void config_enter(void)
{
    const char *source = getenv("REBATCH_SOURCE_DIR");
    cr_assert(realpath(source ? source : ".", source_folder) != NULL);
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++)
        unsetenv(rbi_setting_variable(&rbi_settings[i]).name);
    cr_assert(mkdtemp(folder) != NULL);
    cr_assert(chdir(folder) == 0);
}

void config_leave(void)
{
    DIR *entries = opendir(folder);
    for (struct dirent *e; entries && (e = readdir(entries)) != NULL;)
        (void)unlinkat(dirfd(entries), e->d_name, 0);
    if (entries)
        closedir(entries);
    cr_assert(chdir("/") == 0);
    (void)rmdir(folder);
}

void config_write_bytes(const char *name, const char *bytes, size_t length)
{
    FILE *file = fopen(name, "w");
    cr_assert(file != NULL, "%s cannot be written", name);
    cr_assert(fwrite(bytes, 1, length, file) == length);
    cr_assert(fclose(file) == 0);
}

void config_write(const char *name, const char *text)
{
    config_write_bytes(name, text, strlen(text));
}

const char *config_value(const rebatch_config *config, const char *key, const char **origin)
{
    const struct rbi_setting *setting = rbi_setting_find(key);
    if (!setting)
        return NULL;
    const struct rbi_entry *entry = &config->entries[setting - rbi_settings];
    if (origin)
        *origin = entry->origin ? entry->origin : "default";
    return entry->text;
}

char *config_read(const char *name)
{
    FILE *file = fopen(name, "r");
    cr_assert(file != NULL, "%s cannot be read", name);
    cr_assert(fseek(file, 0, SEEK_END) == 0);
    const long length = ftell(file);
    rewind(file);
    char *text = calloc((size_t)length + 1, 1);
    cr_assert(text != NULL);
    cr_assert(fread(text, 1, (size_t)length, file) == (size_t)length);
    fclose(file);
    return text;
}

char *config_read_source(const char *path)
{
    char whole[2 * PATH_MAX];
    (void)snprintf(whole, sizeof whole, "%s/%s", source_folder, path);
    return config_read(whole);
}
