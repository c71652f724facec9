/* Owns what most tests share. Must not know the library's inside. */
#include "rig.h"

#include <sys/wait.h>
#include <unistd.h>

void open_on_host(rebatch_device **device, rebatch **rb, size_t capacity_bytes,
                  const rebatch_options *options)
{
    OK(rebatch_device_open_host(device, capacity_bytes, NULL));
    OK(rebatch_open(rb, *device, options));
}

rebatch_pool_stats pool_stats_of(rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    OK(rebatch_pool_get_stats(&stats, pool));
    return stats;
}

uint64_t live_bytes_of(const rebatch *rb)
{
    return pool_stats_of(rebatch_get_pool(rb)).live_bytes;
}

uint64_t used_bytes_of(rebatch_device *device)
{
    rebatch_memory_info info;
    OK(rebatch_device_memory(device, &info));
    return info.used_bytes;
}

int output_of(void (*program)(void *user), void *user, int file, char *text, size_t size)
{
    int ends[2], status;
    cr_assert_eq(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        (void)dup2(ends[1], file);
        program(user);
        _exit(0);
    }
    (void)close(ends[1]);
    size_t length = 0;
    for (ssize_t got;
         length + 1 < size && (got = read(ends[0], text + length, size - length - 1)) > 0;)
        length += (size_t)got;
    text[length] = '\0';
    (void)close(ends[0]);
    cr_assert_eq(waitpid(child, &status, 0), child);
    return status;
}

rebatch_status nothing_to_do(void *user)
{
    (void)user;
    return REBATCH_OK;
}
