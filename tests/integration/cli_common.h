/* Running the `rebatch` command, for the tests of what it prints and how it ends. */
#ifndef CLI_COMMON_H
#define CLI_COMMON_H

#include <limits.h>

/* The program that REBATCH_COMMAND names, as an absolute path; from cli_enter() on. */
extern char cli_command[PATH_MAX];

/* The reference model's, that REBATCH_GPT names. */
extern char cli_gpt[PATH_MAX];

/* The other examples, in the folder that REBATCH_EXAMPLES names. */
extern char cli_demo[PATH_MAX], cli_minimal[PATH_MAX];

/* The replay of traces of bench/replay, that REBATCH_REPLAY names. */
extern char cli_replay[PATH_MAX];

/* Finds them, and goes into a folder of the test's own, which config_leave() removes. */
void cli_enter(void);

/* The same, with a made-up `text` there for the reference model to train on. */
void cli_enter_with_text(void);

/* What a run of the command left behind. */
struct run {
    int code;
    char *out, *error;
};

/* Runs it with `verb` and what a shell makes of `arguments` after `setup`; out and error go to
 * files unless they say else. */
struct run cli_run(const char *setup, const char *verb, const char *arguments);
/* The same of any program, without a verb or setup. */
struct run cli_run_program(const char *program, const char *arguments);
void done(struct run *r);
/* A run that is done with at the end of its block. */
#define AUTO_DONE(name) __attribute__((cleanup(done))) struct run name
/* The command ends with `code` and prints nothing but `words`, as an error. */
void cli_expect_refused(const char *setup, const char *verb, const char *arguments, int code,
                        const char *words);
/* Of a verb that runs a program: one that is not there, one that is none, and those that end with 0
 * and 7 without a step, the latter with `code`. What else is said of these two is in `never` and
 * `before`. */
void cli_expect_programs_refused(const char *setup, const char *verb, int code, const char *never,
                                 const char *before);

#endif
