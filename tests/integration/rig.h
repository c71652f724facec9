/* What most tests share: how a call is looked at, options in one expression, what closes itself.
 * Must not know the library's inside. */
#ifndef RIG_H
#define RIG_H

#include <string.h>

#include <criterion/criterion.h>

#include "rebatch/rebatch.h"

#define KIB(n) ((size_t)(n) << 10)
#define MIB(n) ((size_t)(n) << 20)

/* The call succeeds. */
#define OK(call) cr_assert_eq(call, REBATCH_OK, "%s: %s", #call, rebatch_last_error())
/* A text has these words in it, or the last error has. */
#define HAS(text, words) cr_assert(strstr(text, words), "\"%s\" is missing in: %s", words, text)
#define SAYS(words) HAS(rebatch_last_error(), words)
/* The call fails with this status, and with these words in its sentence, or with this sentence. */
#define FAILS(call, status, words)                                                                 \
    do {                                                                                           \
        cr_assert_eq(call, status, "%s: %s", #call, rebatch_last_error());                         \
        SAYS(words);                                                                               \
    } while (0)
#define FAILS_WITH(call, status, sentence)                                                         \
    do {                                                                                           \
        cr_assert_eq(call, status, "%s: %s", #call, rebatch_last_error());                         \
        cr_assert_str_eq(rebatch_last_error(), sentence);                                          \
    } while (0)

/* Options of a session with some members set: &OPTIONS(.micro_start = 8). */
#define OPTIONS(...)                                                                               \
    ((rebatch_options){.struct_size = sizeof(rebatch_options),                                     \
                       .pool.struct_size = sizeof(rebatch_pool_options),                           \
                       __VA_ARGS__})

/* A step's callbacks, and other members: rebatch_step_ops ops = OPS(zero, forward, update,
 * .flags = 0). */
#define OPS(zero, forward, update, ...)                                                            \
    {                                                                                              \
        .struct_size = sizeof(rebatch_step_ops), .zero_grad = zero, .forward_backward = forward,   \
        .optimizer_step = update, __VA_ARGS__                                                      \
    }

/* A struct that is closed by tag_close() at the end of its block. */
#define AUTO_CLOSE(tag, name) __attribute__((cleanup(tag##_close))) struct tag name
/* Makes that of a struct with a session and its device. */
#define CLOSE_BOTH(tag)                                                                            \
    static void tag##_close(struct tag *it)                                                        \
    {                                                                                              \
        rebatch_close(it->rb);                                                                     \
        rebatch_device_close(it->device);                                                          \
    }
/* One that open(&name, ...) opens, or tag_open(&name, ...). */
#define OPEN_WITH(open, tag, name, ...)                                                            \
    AUTO_CLOSE(tag, name);                                                                         \
    open(&name, __VA_ARGS__)
#define OPEN(tag, name, ...) OPEN_WITH(tag##_open, tag, name, __VA_ARGS__)

/* A session on a host device of so many bytes. */
void open_on_host(rebatch_device **device, rebatch **rb, size_t capacity_bytes,
                  const rebatch_options *options);
rebatch_pool_stats pool_stats_of(rebatch_pool *pool);
/* Bytes that live in the session's pool. */
uint64_t live_bytes_of(const rebatch *rb);
/* Bytes that are taken from the device. */
uint64_t used_bytes_of(rebatch_device *device);
/* What a program writes to a file in a process of its own, of which it ends with 0 unless it says
 * else. Gives its status, as waitpid() does. */
int output_of(void (*program)(void *user), void *user, int file, char *text, size_t size);
/* A callback that has nothing to do. */
rebatch_status nothing_to_do(void *user);

#endif
