/* What a program does about its output: what cannot be written is said on stderr, and the exit
 * status says it too. Must not know what is printed. */
#ifndef EXAMPLES_OUTPUT_H
#define EXAMPLES_OUTPUT_H

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The first thing in main: of a program that begins with stdin, stdout or stderr closed the next
 * file that is opened would take its place, and be written to. This opens one that cannot be. */
static inline void output_begin(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
            (void)open("/dev/null", O_RDONLY); /* which is `fd`: those below are open */
}

/* The last thing: `code`, or 1 when some of what was printed is lost. */
static inline int output_end(const char *program, int code)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    /* The reason is known only when it was the last write that failed. */
    fprintf(stderr, "%s: cannot write the output%s%s\n", program, errno ? ": " : "",
            errno ? strerror(errno) : "");
    return 1;
}

#endif
