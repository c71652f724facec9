/* Owns what is checked of every call: its pool, who calls, the size and the stream.
 * Must not know what the call is for. */
#include "pool/pool.h"

_Thread_local const rebatch_pool *rbi_pool_pressing;
_Thread_local unsigned rbi_pool_callbacks;

unsigned rbi_pool_callback_depth(void)
{
    return rbi_pool_callbacks;
}

rebatch_status rbi_pool_check(const rebatch_pool *pool)
{
    if (pool)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID, "pool is NULL: expected one from rebatch_pool_create()");
}

/* Steps an octave: a size is rounded up to a multiple of its highest bit's step. */
bool rbi_pool_round_size(size_t *rounded, const rebatch_pool *pool, size_t bytes)
{
    if (!rbi_round_up(bytes, REBATCH_POOL_UNIT_BYTES, rounded))
        return false;
    if (__builtin_expect(pool->rounding_divisions == 0, 1) || *rounded == 0)
        return true;
    const size_t octave = (size_t)1 << (63 - __builtin_clzll(*rounded));
    const size_t step = octave / pool->rounding_divisions;
    return step <= REBATCH_POOL_UNIT_BYTES || rbi_round_up(*rounded, step, rounded);
}

rebatch_status rbi_pool_check_size(size_t *rounded, const rebatch_pool *pool, size_t bytes)
{
    size_t whole;
    if (rbi_pool_round_size(rounded, pool, bytes) &&
        rbi_round_up(*rounded, pool->page_bytes, &whole))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID,
                     "bytes is %zu: expected a size that can be rounded up to %zu bytes", bytes,
                     pool->page_bytes);
}

rebatch_status rbi_pool_check_stream(const rebatch_pool *pool, rebatch_stream stream)
{
    if (!stream || rbi_device_stream_is_valid(pool->device, stream))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID, "stream is %p: expected a stream of device \"%s\"",
                     (void *)stream, rebatch_device_name(pool->device));
}

rebatch_status rbi_pool_check_caller(const rebatch_pool *pool, const char *function)
{
    if (!rbi_pool_is_pressing(pool))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_STATE,
                     "%s called from within a pressure callback: expected only frees there",
                     function);
}
