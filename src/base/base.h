/* What every other part stands on: error text, the heap seam, options, arithmetic, time.
 * Must not know devices, pools or training. */
#ifndef RBI_BASE_H
#define RBI_BASE_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rebatch/status.h"

/* ---- what must hold whatever a caller does (assert.c) ---- */

/* Looked at in sanitizer and check builds (make SAN=..., CHECK=1), where it ends the process with
 * file and line. */
#ifdef RBI_ASSERTS
#define rbi_assert(condition)                                                                      \
    ((condition) ? (void)0 : rbi_assert_failed(#condition, __FILE__, __LINE__))
_Noreturn void rbi_assert_failed(const char *condition, const char *file, int line);
#else
#define rbi_assert(condition) ((void)sizeof((condition) ? 1 : 0))
#endif

/* ---- error text (error.c) ---- */

/* Sets this thread's error sentence and gives `status` back, so that a fault is said once, where it
 * is found: `return rbi_error(REBATCH_E_INVALID, "batch is 0: expected at least 1 sample");` Uses
 * no heap. */
rebatch_status rbi_error(rebatch_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* How often this thread's sentence was set or cleared. */
uint64_t rbi_error_changes(void);

/* ---- failures on order, for tests (fault_counter.c) ---- */

/* `left` calls until the failure, 0: none; then `times` in a row, UINT64_MAX: for ever. */
struct rbi_countdown {
    atomic_uint_fast64_t left, times;
};
void rbi_countdown_set(struct rbi_countdown *countdown, uint64_t nth, uint64_t times);
/* Counts a call; true when it is to fail. */
bool rbi_countdown_strikes(struct rbi_countdown *countdown);

/* ---- the one heap seam (heap.c) ---- */

/* Zeroed memory for count * size bytes; NULL when there is none, or when the product overflows.
 * Nothing else in the library may call malloc and its kin. */
void *rbi_heap_calloc(size_t count, size_t size);
/* The same, from the beginning of a line of the cache on: for what is _Alignas(RBI_LINE_BYTES). */
#define RBI_LINE_BYTES 64
void *rbi_heap_calloc_lines(size_t count, size_t size);
/* Grows or makes an array; the old one stays valid on NULL. New bytes are not zeroed. */
void *rbi_heap_resize(void *old, size_t count, size_t size);
void rbi_heap_free(void *memory);

/* Tests: the n-th call from now (1 = the next) fails, and `times` in a row; 0 disarms.
 * Process-wide. */
void rbi_heap_fail(uint64_t nth, uint64_t times);
/* Heap calls that gave memory, and blocks not freed yet, since the process began. */
uint64_t rbi_heap_calls(void);
int64_t rbi_heap_live(void);

/* ---- files (file.c) ---- */

/* Reads a whole file.
 *  @param[out] bytes  zero-terminated, from the heap; NULL on failure
 *  @return REBATCH_OK; REBATCH_E_IO when it cannot be read or is larger than `most`;
 *          REBATCH_E_HOST_OOM */
rebatch_status rbi_file_read(char **bytes, size_t *length, const char *path, size_t most);

/** Write all of a text.
 *  @return false when that fails: errno says why, and the rest is not written */
bool rbi_write_all(int fd, const char *text, size_t length);

/* ---- the machine (machine.c) ---- */

/* Memory that the machine could give without swapping, and the control groups of the process, such
 * as a container's; 0: not known. Uses no heap. */
size_t rbi_host_free_bytes(void);
/* What the control groups leave that the file `self` (/proc/self/cgroup) names, below `root`
 * (/sys/fs/cgroup); UINT64_MAX: no bound. */
uint64_t rbi_cgroup_free_bytes(const char *root, const char *self);

/* ---- options (options.c) ---- */

/* How large a struct is that ends with `last`. */
#define RBI_SIZE_TO(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))

/* Copies a caller's options struct over ours, which holds defaults: at most `ours_size` bytes, so
 * an older and shorter struct leaves our tail alone; a newer and longer one is refused unless its
 * tail is zero. One that is shorter than `least`, its length in the first version of this soname,
 * is none.
 * `given` may be NULL: nothing is copied. `name` is for the error text. */
rebatch_status rbi_options_copy(void *ours, size_t ours_size, size_t least, const void *given,
                                const char *name);

/* True unless `toggle` is off: for switches whose default is on. */
static inline bool rbi_is_on(rebatch_toggle toggle)
{
    return toggle != REBATCH_OFF;
}

/* REBATCH_OK for a toggle that is one, else an error that names it. */
rebatch_status rbi_check_toggle(rebatch_toggle toggle, const char *name);

/* ---- checked arithmetic ---- */

/* False, and *out untouched, when the result does not fit. */
static inline bool rbi_add(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}
static inline bool rbi_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool rbi_is_power_of_two(size_t n)
{
    return n != 0 && (n & (n - 1)) == 0;
}
/* Rounds up to a multiple of `unit`, a power of two; false when that does not fit. */
static inline bool rbi_round_up(size_t n, size_t unit, size_t *out)
{
    size_t sum;
    if (!rbi_add(n, unit - 1, &sum))
        return false;
    *out = sum & ~(unit - 1);
    return true;
}
/* The whole part; 0 for what is less, and the largest number for what is more. */
static inline uint64_t rbi_saturate(double value)
{
    return value >= 0x1p64 ? UINT64_MAX : value > 0 ? (uint64_t)value : 0;
}
static inline size_t rbi_min(size_t a, size_t b)
{
    return a < b ? a : b;
}
static inline size_t rbi_max(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* ---- text (text.c) ---- */

/* Appends to a text of limited size, counting what the whole would need, as snprintf does:
 * `struct rbi_text t = {text, size, 0};` then rbi_text_add(&t, ...), then t.length. */
struct rbi_text {
    char *text;    /* may be NULL when size is 0 */
    size_t size;   /* room, the zero byte included */
    size_t length; /* of the whole text so far, however much of it fitted */
};
void rbi_text_add(struct rbi_text *t, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void rbi_text_add_v(struct rbi_text *t, const char *format, va_list arguments)
    __attribute__((format(printf, 2, 0)));
/* Text from outside, fit for a sentence: control characters and what is no UTF-8 as "\xNN", and at
 * most `most` bytes, then "...". */
void rbi_text_add_shown(struct rbi_text *t, const char *text, size_t length, size_t most);
/* The same of a path, of which the end is shown if it is long. */
void rbi_text_add_path(struct rbi_text *t, const char *path);
/* "1.50 GiB", "512 B": three significant digits; for people. */
void rbi_text_add_bytes(struct rbi_text *t, uint64_t bytes);
/* A string of JSON, in quotes; what is no UTF-8 becomes U+FFFD. */
void rbi_text_add_json(struct rbi_text *t, const char *text);

/* ---- time (time.c) ---- */

/* Monotonic nanoseconds. */
uint64_t rbi_now_ns(void);
/* Sleeps, at most so long: a signal ends it. */
void rbi_sleep_ms(uint32_t ms);
/* Milliseconds since 1970 by the machine's clock. */
int64_t rbi_clock_ms(void);
/* "2026-11-23T06:31:14.123Z", for 0000 to 9999. Neither uses the heap nor looks at the locale. */
void rbi_text_add_time(struct rbi_text *t, int64_t clock_ms);

#endif
