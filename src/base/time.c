/* Owns the clock.
 * Must not know what is timed. */
#include <time.h>

#include "base/base.h"

uint64_t rbi_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
