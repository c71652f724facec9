/* Owns the clock that the tests' program has in place of the library's (tests.mk: --wrap).
 * Must not know what is timed. */
#include "unit/clock.h"

#include <stdatomic.h>
#include <sys/socket.h>

uint64_t __real_rbi_now_ns(void);
uint64_t __wrap_rbi_now_ns(void);
int __real_setsockopt(int fd, int level, int name, const void *value, socklen_t bytes);
int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t bytes);

static atomic_uint_fast64_t stopped_ns; /* 0: it runs */

uint64_t __wrap_rbi_now_ns(void)
{
    const uint64_t now = atomic_load(&stopped_ns);
    return now ? now : __real_rbi_now_ns();
}

int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t bytes)
{
    if (atomic_load(&stopped_ns) && (name == SO_RCVTIMEO || name == SO_SNDTIMEO))
        return 0;
    return __real_setsockopt(fd, level, name, value, bytes);
}

/* At a time that is long after the machine's start. */
void clock_stop(void)
{
    atomic_store(&stopped_ns, __real_rbi_now_ns() + 3600 * SECOND_NS);
}

void clock_advance(uint64_t ns)
{
    (void)atomic_fetch_add(&stopped_ns, ns);
}
