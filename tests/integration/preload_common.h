/* Running the programs of tests/preload with a stand-in for CUDA's driver. */
#ifndef PRELOAD_COMMON_H
#define PRELOAD_COMMON_H

#include "cli_common.h"

/* As cli_enter(); skips the test in builds that have nothing to preload. */
void preload_enter(void);

/* Runs a program of tests/preload with `variables` set, where $WRAP is the library and $TESTS the
 * folder of those programs. The driver's calls are in the file `log` afterwards. */
struct run preload_run_plain(const char *variables, const char *program, const char *arguments);
/* Runs it by `rebatch run` with `options`. */
struct run preload_run(const char *options, const char *program, const char *arguments);
/* The same of a line of a shell. */
struct run preload_run_shell(const char *options, const char *line);
/* The same of any program, with variables. */
struct run preload_run_with(const char *variables, const char *options, const char *program,
                            const char *arguments);

#endif
