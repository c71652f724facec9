/* Owns the last events. Must not know what is made of them. */
#include "pool/event_log.h"

rebatch_status rbi_event_log_open(struct rbi_event_log *log, size_t capacity)
{
    if (capacity == 0)
        return REBATCH_OK;
    log->events = rbi_heap_calloc(capacity, sizeof *log->events);
    log->capacity = capacity;
    return log->events ? REBATCH_OK
                       : rbi_error(REBATCH_E_HOST_OOM, "no host memory for %zu events", capacity);
}

void rbi_event_log_close(struct rbi_event_log *log)
{
    rbi_heap_free(log->events);
}

void rbi_event_log_add(struct rbi_event_log *log, enum rbi_pool_event_kind kind,
                       const char *address, size_t bytes, rebatch_stream stream, rebatch_tag tag)
{
    rbi_assert(log->events && log->capacity > 0);
    const uint64_t number = log->count++;
    log->events[number % log->capacity] = (struct rbi_pool_event){
        number, address, bytes, stream, tag, (uint8_t)kind, rbi_now_ns(), 0};
}

void rbi_event_log_add_oom(struct rbi_event_log *log, size_t asked_bytes, uint64_t free_bytes,
                           rebatch_stream stream, rebatch_tag tag)
{
    if (!log->events)
        return;
    rbi_event_log_add(log, RBI_POOL_EVENT_OOM, NULL, asked_bytes, stream, tag);
    log->events[(log->count - 1) % log->capacity].free_bytes = free_bytes;
}
