/* A program that the command runs, and what the library within it says.
 * Must not know what it was started for. */
#ifndef RBI_CLI_CHILD_H
#define RBI_CLI_CHILD_H

#include <stdbool.h>
#include <stddef.h>

/* What the library says: a word, and what comes behind it. */
struct rbi_child_listener {
    void (*on_message)(void *user, const char *kind, const char *text); /* both end in a zero */
    void *user;
};

struct rbi_child_end {
    int exec_error;   /* errno of a program that could not be run; 0: it ran */
    int status;       /* as waitpid() gives it */
    bool has_stepped; /* a library within it said something: of a step, or of CUDA's memory */
    bool has_answer;  /* to a probe or a check, which is printed; the program may have been ended */
    int answer;       /* what to exit with then */
};

/* Runs arguments[0], found as a shell does, and waits for its end.
 *  @param quiet     what it prints goes to stderr
 *  @param listener  of messages that are no answer; may be NULL
 *  @return false when it could not even be tried, which is said on stderr */
bool rbi_child_run(struct rbi_child_end *end, char **arguments, bool quiet,
                   const struct rbi_child_listener *listener);

/* The exit status of a program that could not be run, as shells have it; says why. */
int rbi_child_refuse(const char *program, int exec_error);

/* "ended with status 1", "was ended by signal 11 (Segmentation fault)". */
struct rbi_child_text {
    char text[96];
};
struct rbi_child_text rbi_child_describe(int status);

/* ---- the library that the program is started with (preload.c) ---- */

/* Has the program load librebatch_wrap.so, after what LD_PRELOAD names already. False when the
 * library is not found. */
bool rbi_child_preload(void);

/* ---- options that `probe` and `run` share ---- */

/* Where the program and its arguments begin, behind "--"; NULL, with a sentence on stderr, when it
 * is not there. `arguments[at]` is the first that is no option of `count`. */
char **rbi_child_find(const char *command, int at, int count, char **arguments);
/* Sets a variable for the program. */
bool rbi_child_set(const char *variable, const char *value);
/* The same, for an option: "--limit". It is borrowed. */
bool rbi_child_set_option(const char *option, const char *variable, const char *value);
/* Looks at all variables of a run; false, with a sentence on stderr, when one is wrong. It names
 * the option that set it, where one did. */
bool rbi_child_check(void);

#endif
