/* The last events of a pool, and where they are kept. Must not know what is made of them. */
#ifndef RBI_POOL_EVENT_LOG_H
#define RBI_POOL_EVENT_LOG_H

#include "base/base.h"
#include "rebatch/pool.h"

/* X(kind, its name). A block that other streams use is freed in two events. */
#define RBI_POOL_EVENTS(X)                                                                         \
    X(ALLOC, "alloc")                                                                              \
    X(FREE, "free")                                                                                \
    X(FREE_REQUESTED, "free_requested")                                                            \
    X(FREE_COMPLETED, "free_completed")                                                            \
    X(MAP, "map")                                                                                  \
    X(UNMAP, "unmap")                                                                              \
    X(OOM, "oom")                                                                                  \
    X(ROLLBACK, "rollback")
enum rbi_pool_event_kind {
#define RBI_POOL_EVENT_(name, text) RBI_POOL_EVENT_##name,
    RBI_POOL_EVENTS(RBI_POOL_EVENT_)
#undef RBI_POOL_EVENT_
};

/* ROLLBACK: bytes are the blocks taken back. OOM: address is NULL. */
struct rbi_pool_event {
    uint64_t number; /* from 0; gaps are none */
    const char *address;
    size_t bytes;
    rebatch_stream stream;
    rebatch_tag tag;
    uint8_t kind;        /* enum rbi_pool_event_kind */
    uint64_t time_ns;    /* of rbi_now_ns() */
    uint64_t free_bytes; /* OOM: what the device had left */
};

/* A ring buffer. */
struct rbi_event_log {
    struct rbi_pool_event *events; /* NULL: nothing is recorded */
    size_t capacity;
    uint64_t count; /* recorded since create */
};
/* A capacity of 0 records nothing.
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
rebatch_status rbi_event_log_open(struct rbi_event_log *log, size_t capacity);
void rbi_event_log_close(struct rbi_event_log *log);
/* The number of the oldest that is kept. */
static inline uint64_t rbi_event_log_first(const struct rbi_event_log *log)
{
    return log->count < log->capacity ? 0 : log->count - log->capacity;
}
static inline const struct rbi_pool_event *rbi_event_log_at(const struct rbi_event_log *log,
                                                            uint64_t number)
{
    return &log->events[number % log->capacity];
}
void rbi_event_log_add(struct rbi_event_log *log, enum rbi_pool_event_kind kind,
                       const char *address, size_t bytes, rebatch_stream stream, rebatch_tag tag);
/* Also where nothing is recorded. */
void rbi_event_log_add_oom(struct rbi_event_log *log, size_t asked_bytes, uint64_t free_bytes,
                           rebatch_stream stream, rebatch_tag tag);

#endif
