/* Owns the noticing of memory that is never freed: each step leaves more allocated than it found.
 * Must not know what a step does. */
#include <inttypes.h>

#include "pool/view.h"
#include "recover/recover.h"

/* The first steps allocate what an optimizer and caches keep. */
#define ROW_TO_SAY 3
/* Less than this part of what is allocated may be batches of other lengths, some in a row. What a
 * program allocates once between two steps is no growth of each of them: the least one counts. */
#define LITTLE_PARTS 256
#define ROW_OF_LITTLE 16

void rbi_leak_update_begins(rebatch *rb)
{
    if (rb->leak.row)
        rb->leak.update_from = rbi_pool_allocations(rb->pool);
}

/* Runs with the pool's lock held. */
static void add_block(void *user, const struct rbi_view_piece *block)
{
    struct rbi_leak *leak = user;
    leak->blocks++;
    leak->in_update += block->allocation >= leak->update_from;
    if (block->requested_bytes <= leak->largest_bytes)
        return;
    leak->largest_bytes = block->requested_bytes;
    leak->tag = block->tag;
}

static void find_blocks(rebatch *rb, uint64_t first_sequence)
{
    struct rbi_leak *leak = &rb->leak;
    leak->blocks = leak->in_update = 0;
    leak->largest_bytes = 0;
    rbi_view_open(rb->pool);
    rbi_view_each_live(rb->pool, &(struct rbi_extent){first_sequence, true}, add_block, leak);
    leak->tag_name = rbi_view_tag_name(rb->pool, leak->tag);
    rbi_view_close(rb->pool);
}

void rbi_leak_add(struct rbi_text *t, const rebatch *rb)
{
    const struct rbi_leak *leak = &rb->leak;
    rbi_text_add(t, "each of the last %" PRIu32 " steps left more memory allocated, ", leak->row);
    rbi_text_add_bytes(t, leak->grown_bytes);
    rbi_text_add(t, " in all");
    if (!leak->blocks)
        return;
    rbi_text_add(t, "; the last one left %zu block%s", leak->blocks, leak->blocks == 1 ? "" : "s");
    rbi_text_add(t, " of up to ");
    rbi_text_add_bytes(t, leak->largest_bytes);
    rbi_text_add(t, " (%s)", leak->tag_name);
    if (leak->in_update == leak->blocks)
        rbi_text_add(t, ", of optimizer_step");
    else if (leak->in_update == 0)
        rbi_text_add(t, ", of zero_grad or forward_backward");
}

bool rbi_leak_is_likely(const rebatch *rb)
{
    return rb->leak.row >= ROW_TO_SAY - 1;
}

static bool is_worth_saying(const struct rbi_leak *leak)
{
    const bool is_little = leak->row * leak->least_bytes < leak->live_bytes / LITTLE_PARTS;
    return leak->row >= (is_little ? ROW_OF_LITTLE : ROW_TO_SAY) &&
           (leak->row == ROW_TO_SAY || rbi_is_power_of_two(leak->row));
}

static void say(rebatch *rb)
{
    char text[320];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_leak_add(&t, rb);
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_LEAK);
    rbi_event_end(&event, rb);
    event.text = text;
    rbi_event_emit(rb, &event);
}

void rbi_leak_step_done(rebatch *rb, uint64_t first_sequence, bool is_same_size)
{
    struct rbi_leak *leak = &rb->leak;
    struct rbi_memory memory;
    rbi_memory_get(&memory, rb);
    const uint64_t expected = leak->live_bytes + leak->kept_bytes;
    const bool grows = leak->has_stepped && is_same_size && memory.live_bytes > expected;
    const uint64_t more = grows ? memory.live_bytes - expected : 0;
    leak->grown_bytes = grows ? leak->grown_bytes + more : 0;
    leak->least_bytes = leak->row ? rbi_min(leak->least_bytes, more) : more;
    leak->kept_bytes = 0;
    leak->row = grows ? leak->row + (leak->row < UINT32_MAX) : 0;
    leak->live_bytes = memory.live_bytes;
    leak->has_stepped = true;
    if (leak->row < ROW_TO_SAY - 1)
        return;
    find_blocks(rb, first_sequence);
    if (is_worth_saying(leak))
        say(rb);
}
