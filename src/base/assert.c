/* Owns the end of a process in which something does not hold that must.
 * Must not know what. */
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

#ifdef RBI_ASSERTS
void rbi_assert_failed(const char *condition, const char *file, int line)
{
    (void)fprintf(stderr, "rebatch: %s:%d: does not hold: %s\n", file, line, condition);
    abort();
}
#endif
