/* What the tests of settings share: a folder of their own, and files in it. */
#ifndef CONFIG_FILES_H
#define CONFIG_FILES_H

#include "rebatch/config.h"

/* Criterion's .init: enters a new folder, and clears REBATCH_… settings from the environment. */
void config_enter(void);
/* Criterion's .fini: removes the folder with the files in it. */
void config_leave(void);

void config_write(const char *name, const char *text);
void config_write_bytes(const char *name, const char *bytes, size_t length);
/* A value as it would be written in a file; NULL: there is no such key.
 *  @param[out] origin  "default", "FILE:LINE", or the name of the variable; may be NULL */
const char *config_value(const rebatch_config *config, const char *key, const char **origin);
/* A whole file, zero-terminated; the caller frees it. */
char *config_read(const char *name);
/* The same for a file of the repository. */
char *config_read_source(const char *path);

#endif
