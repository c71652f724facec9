/* Owns a second session on the pool of the program under test: small steps with buffers of its own,
 * which nothing that the program does may touch. Must not know the program. */
#include <string.h>

#include "storm.h"

static rebatch_status resize(size_t samples, void *user)
{
    struct storm *const s = user;
    return storm_buffers_make(s, &s->neighbour.buffers, samples) ? REBATCH_OK : REBATCH_OOM;
}

static rebatch_status zero_grad(void *user)
{
    struct storm *const s = user;
    storm_buffers_check(s, &s->neighbour.buffers, 0, "zero_grad beside");
    s->neighbour.next = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct storm *const s = user;
    struct storm_neighbour *const n = &s->neighbour;
    storm_buffers_check(s, &n->buffers, mb->count, "forward_backward beside");
    if (mb->first != n->next)
        storm_fail(s, "beside, a micro-batch begins with sample %zu: expected %zu", mb->first,
                   n->next);
    void *const block = storm_alloc(s, mb->count * s->plan.unit_bytes);
    if (!block || storm_one_in(&n->dice, 8))
        return REBATCH_OOM;
    if (storm_one_in(&n->dice, 20))
        return STORM_STATUS;
    rebatch_mutating(n->rb);
    n->next += mb->count;
    storm_free(s, block);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    struct storm *const s = user;
    storm_buffers_check(s, &s->neighbour.buffers, 0, "optimizer_step beside");
    if (s->neighbour.next != s->neighbour.batch)
        storm_fail(s, "beside, the update runs after sample %zu of %zu", s->neighbour.next,
                   s->neighbour.batch);
    rebatch_mutating(s->neighbour.rb);
    return REBATCH_OK;
}

void storm_neighbour_open(struct storm *s)
{
    struct storm_neighbour *const n = &s->neighbour;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    if (!s->plan.has_neighbour)
        return;
    n->dice = storm_hash(s->seed, 7000);
    n->buffers.salt = storm_hash(s->seed, 7001);
    n->buffers.manner = storm_frees_draw(s, &n->dice);
    n->buffers.is_backwards = storm_one_in(&n->dice, 2);
    options.existing_pool = s->pool;
    options.log_level = REBATCH_LOG_QUIET;
    options.grow_after = 1;
    options.learn = storm_one_in(&n->dice, 3) ? REBATCH_ON : REBATCH_DEFAULT;
    if (rebatch_open(&n->rb, s->device, &options) != REBATCH_OK)
        storm_fail(s, "no session beside: %s", rebatch_last_error());
}

void storm_neighbour_step(struct storm *s)
{
    struct storm_neighbour *const n = &s->neighbour;
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION,
                                  .resize = resize};
    if (!n->rb || s->has_failed || storm_one_in(&n->dice, 3))
        return;
    n->batch = storm_between(&n->dice, 1, 12);
    const rebatch_status status = rebatch_step(n->rb, &ops, n->batch, s, NULL);
    storm_say(s, "  beside: step of %zu: %s", n->batch, rebatch_status_name(status));
    if (status != REBATCH_OK && status != REBATCH_E_EXHAUSTED && status != STORM_STATUS)
        storm_fail(s, "the step beside answered %s: %s", rebatch_status_name(status),
                   rebatch_last_error());
    storm_buffers_find(s, &n->buffers);
    if (status == REBATCH_OK)
        storm_buffers_check(s, &n->buffers, 0, "after a step beside");
    storm_check_memory(s, "after a step beside");
    s->counts->beside++;
}

void storm_neighbour_close(struct storm *s)
{
    rebatch_close(s->neighbour.rb);
    s->neighbour.rb = NULL;
    s->neighbour.buffers.are_there = false;
}
