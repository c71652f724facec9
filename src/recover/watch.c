/* Owns the list of what a program has named for a check: rebatch_watch().
 * Must not know what is done with it. */
#include <string.h>

#include "recover/recover.h"

size_t rbi_watched_get(const struct rbi_watched **out, const rebatch *rb)
{
    *out = rb->watched;
    return rb->watched_count;
}

void rbi_watched_release(rebatch *rb)
{
    for (size_t i = 0; i < rb->watched_count; i++)
        rbi_heap_free(rb->watched[i].name);
    rbi_heap_free(rb->watched);
    rb->watched = NULL;
    rb->watched_count = 0;
}

static const size_t number_bytes[] = {[REBATCH_BYTES] = 1,
                                      [REBATCH_F32] = 4,
                                      [REBATCH_F64] = 8,
                                      [REBATCH_F16] = 2,
                                      [REBATCH_BF16] = 2};

static rebatch_status check_arguments(const rebatch *rb, const char *name,
                                      const struct rbi_watched *given)
{
    const bool is_there = given->pointer || given->where;
    if (!rb || !name || !is_there)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL",
                         !rb     ? "rb"
                         : !name ? "name"
                                 : "the pointer to what is watched");
    if (given->kind != REBATCH_GUARD_HOST && given->kind != REBATCH_GUARD_DEVICE)
        return rbi_error(REBATCH_E_INVALID,
                         "kind is %d: expected REBATCH_GUARD_HOST or REBATCH_GUARD_DEVICE",
                         (int)given->kind);
    if (given->number > REBATCH_BF16)
        return rbi_error(REBATCH_E_INVALID,
                         "number is %d: expected REBATCH_BYTES, _F32, _F64, _F16 or _BF16",
                         (int)given->number);
    const size_t unit = number_bytes[given->number];
    if (given->bytes == 0 || given->bytes % unit)
        return rbi_error(REBATCH_E_INVALID,
                         "bytes is %zu: expected a multiple of %zu, at least %zu", given->bytes,
                         unit, unit);
    return rbi_session_check_idle(rb, "rebatch_watch");
}

static struct rbi_watched *find(const rebatch *rb, const char *name)
{
    for (size_t i = 0; i < rb->watched_count; i++)
        if (strcmp(rb->watched[i].name, name) == 0)
            return &rb->watched[i];
    return NULL;
}

static rebatch_status add(struct rbi_watched **out, rebatch *rb, const char *name)
{
    if (rb->watched_count == RBI_WATCHED_MOST)
        return rbi_error(REBATCH_E_UNSUPPORTED, "%d names are watched already: the most there is",
                         RBI_WATCHED_MOST);
    if (!rb->watched)
        rb->watched = rbi_heap_calloc(RBI_WATCHED_MOST, sizeof *rb->watched);
    const size_t size = strlen(name) + 1;
    char *const copy = rb->watched ? rbi_heap_calloc(1, size) : NULL;
    if (!copy)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to watch %s", name);
    memcpy(copy, name, size);
    rbi_assert(rb->watched_count < RBI_WATCHED_MOST);
    *out = &rb->watched[rb->watched_count++];
    (*out)->name = copy;
    return REBATCH_OK;
}

static rebatch_status watch(rebatch *rb, const char *name, const struct rbi_watched *given)
{
    rebatch_status status = check_arguments(rb, name, given);
    if (status)
        return status;
    struct rbi_watched *watched = find(rb, name);
    if (!watched)
        status = add(&watched, rb, name);
    if (status)
        return status;
    char *const copy = watched->name;
    *watched = *given;
    watched->name = copy;
    return REBATCH_OK;
}

rebatch_status rebatch_watch(rebatch *rb, const char *name, void *pointer, size_t bytes,
                             rebatch_guard_kind kind, rebatch_number number)
{
    return watch(
        rb, name,
        &(struct rbi_watched){.pointer = pointer, .bytes = bytes, .kind = kind, .number = number});
}

rebatch_status rebatch_watch_at(rebatch *rb, const char *name, const void *where, size_t bytes,
                                rebatch_number number)
{
    return watch(
        rb, name,
        &(struct rbi_watched){
            .where = where, .bytes = bytes, .kind = REBATCH_GUARD_DEVICE, .number = number});
}
