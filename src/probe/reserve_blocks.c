/* Owns `reserve_bytes`: the blocks in which the first update will allocate it.
 * Must not know which sizes run meanwhile. */
#include "pool/view.h"
#include "probe/probe.h"

#define RESERVE_BLOCKS_MOST 4096
/* Blocks for each parameter: optimizers keep one, two or three values. */
#define TURNS_MOST 4

__extension__ typedef unsigned __int128 wide;

/* Runs with the pool's lock held. */
static void add_live(void *user, const struct rbi_view_piece *block)
{
    struct rbi_setting *setting = user;
    if (setting->reserve_count < RESERVE_BLOCKS_MOST)
        setting->reserve[setting->reserve_count++].bytes = block->requested_bytes;
}

/* The size of each of `turns` pieces that are together `times` as large as the block. */
static wide part_of(const struct rbi_reserve_block *block, uint64_t times, uint64_t turns)
{
    rbi_assert(turns > 0);
    return ((wide)block->bytes * times + turns - 1) / turns;
}

static bool is_sum(const struct rbi_setting *setting, uint64_t times, uint64_t turns, size_t bytes)
{
    const size_t unit = REBATCH_POOL_UNIT_BYTES;
    wide units = 0;
    for (size_t i = 0; i < setting->reserve_count; i++)
        units += turns * ((part_of(&setting->reserve[i], times, turns) + unit - 1) / unit);
    return units * unit == bytes;
}

/* How many pieces there are for each block: as many as the reserve is times as large as the live
 * blocks, or fewer and larger ones if their sizes, rounded up as the pool does, add up to it. */
static uint64_t choose_turns(const struct rbi_setting *setting, uint64_t times, size_t bytes)
{
    for (uint64_t turns = times; turns > 0; turns--)
        if (is_sum(setting, times, turns, bytes))
            return turns;
    return times;
}

/* An optimizer allocates blocks like the parameters: the pieces have the sizes of the live blocks,
 * each once or several times, and add up to `bytes`, rounded up or not. */
static void shape(struct rbi_setting *setting, size_t bytes)
{
    rbi_view_open(setting->pool);
    rbi_view_each_live(setting->pool, &(struct rbi_extent){0, false}, add_live, setting);
    rbi_view_close(setting->pool);
    const size_t blocks = setting->reserve_count;
    struct rbi_reserve_block *reserve = setting->reserve;
    uint64_t live = 0;
    for (size_t i = 0; i < blocks; i++)
        live += reserve[i].bytes;
    const uint64_t times = live ? rbi_min((bytes + live / 2) / live, TURNS_MOST) : 0;
    const uint64_t turns = times ? choose_turns(setting, times, bytes) : 1;
    if (live == 0 || turns * blocks > RESERVE_BLOCKS_MOST) {
        setting->reserve_count = 1;
        reserve[0].bytes = bytes;
        return;
    }
    const bool is_exact = times && is_sum(setting, times, turns, bytes);
    const wide all = (wide)live * turns;
    size_t left = bytes;
    setting->reserve_count = turns * blocks;
    for (size_t i = setting->reserve_count;
         i-- > 0;) { /* the live sizes come first: they go last */
        const struct rbi_reserve_block *block = &reserve[i / turns];
        const wide share =
            is_exact ? part_of(block, times, turns) : ((wide)block->bytes * bytes + all - 1) / all;
        reserve[i].bytes = rbi_min((size_t)share, left);
        rbi_assert(reserve[i].bytes <= left);
        left -= reserve[i].bytes;
    }
}

uint64_t rbi_reserve_missing(const struct rbi_setting *setting)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < setting->reserve_count; i++) {
        size_t rounded = 0;
        if (!setting->reserve[i].address && setting->reserve[i].bytes)
            (void)rbi_pool_check_size(&rounded, setting->pool, setting->reserve[i].bytes);
        sum += rounded;
    }
    return sum;
}

rebatch_status rbi_reserve_plan(struct rbi_setting *setting, size_t bytes)
{
    if (bytes == 0)
        return REBATCH_OK;
    rbi_assert(!setting->reserve);
    setting->reserve = rbi_heap_calloc(RESERVE_BLOCKS_MOST, sizeof *setting->reserve);
    if (!setting->reserve)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to hold reserve_bytes");
    shape(setting, bytes);
    size_t available;
    const rebatch_status status = rebatch_pool_available(&available, setting->pool);
    if (status || bytes <= available)
        return status;
    rbi_reserve_release(setting);
    return REBATCH_OOM;
}

static void give(struct rbi_setting *setting)
{
    for (size_t i = 0; i < setting->reserve_count; i++) {
        (void)rebatch_pool_free(setting->pool, setting->reserve[i].address);
        setting->reserve[i].address = NULL;
    }
}

static rebatch_status take(struct rbi_setting *setting)
{
    rebatch_tag tag = 0; /* where there are no tags left */
    (void)rebatch_pool_tag(&tag, setting->pool, "reserve_bytes");
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < setting->reserve_count && !status; i++)
        status = rebatch_pool_alloc(&setting->reserve[i].address, setting->pool,
                                    setting->reserve[i].bytes, setting->stream, tag);
    if (status)
        give(setting);
    return status;
}

/* After an OOM once more without the cache, as a step does. */
rebatch_status rbi_reserve_hold(struct rbi_setting *setting)
{
    if (setting->reserve_count == 0)
        return REBATCH_OK;
    rebatch_status status = take(setting);
    if (status == REBATCH_OOM && !(status = rebatch_pool_trim(setting->pool, 0, NULL)))
        status = take(setting);
    return status;
}

void rbi_reserve_release(struct rbi_setting *setting)
{
    give(setting);
    rbi_heap_free(setting->reserve);
    setting->reserve = NULL;
    setting->reserve_count = 0;
}
