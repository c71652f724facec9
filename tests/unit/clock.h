/* The library's clock as a test sets it, so that no test depends on how fast the machine is.
 * Nothing calls it unless a test does: the clock then is the machine's. */
#ifndef TEST_CLOCK_H
#define TEST_CLOCK_H

#include <stdint.h>

#define SECOND_NS UINT64_C(1000000000)

/* From here on it stands, and no time of a socket runs out; in children of fork() too. */
void clock_stop(void);
/* Of one that stands. Any thread may call it. */
void clock_advance(uint64_t ns);

#endif
