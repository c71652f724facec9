/* Owns rebatch_step_plain(): a step of three functions that return nothing.
 * Must not know how a step runs. */
#include "recover/recover.h"

/* A function that does not say where it begins to change things is taken to do so at once, whatever
 * one before it did. */
static struct rbi_plain *begin(void *user)
{
    struct rbi_plain *plain = user;
    if (!plain->declares)
        rebatch_mutating(plain->rb);
    return plain;
}

static rebatch_status zero_grad(void *user)
{
    const struct rbi_plain *plain = begin(user);
    plain->zero_grad(plain->user);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    const struct rbi_plain *plain = begin(user);
    plain->train(mb->first, mb->count, plain->user);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    const struct rbi_plain *plain = begin(user);
    plain->update(plain->user);
    return REBATCH_OK;
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    const struct rbi_plain *plain = user;
    plain->resize(micro_batch, plain->user);
    return REBATCH_OK;
}

/* Buffers are known by resize and user, which are a frame's here: a step with the same ones has the
 * frame of the last step with buffers, and one with others has the other frame. */
static struct rbi_plain *keep(const struct rbi_plain *plain)
{
    rebatch *rb = plain->rb;
    const struct rbi_plain *last = &rb->plain[rb->plain_at];
    if (last->resize != plain->resize || last->user != plain->user)
        rb->plain_at = !rb->plain_at;
    rb->plain[rb->plain_at] = *plain;
    return &rb->plain[rb->plain_at];
}

static rebatch_status step(size_t batch, struct rbi_plain *plain, uint32_t flags,
                           rebatch_step_report *report)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = plain->zero_grad ? zero_grad : NULL,
                                  .forward_backward = plain->train ? forward_backward : NULL,
                                  .optimizer_step = plain->update ? optimizer_step : NULL,
                                  .resize = plain->resize ? resize : NULL,
                                  .flags = flags | REBATCH_DECLARES_MUTATION | REBATCH_OWN_WEIGHTS};
    plain->declares = (flags & REBATCH_DECLARES_MUTATION) != 0;
    /* A step that is going to be refused must leave the frame of the one that runs. */
    const bool keeps =
        plain->resize && plain->rb && !rbi_session_check_idle(plain->rb, "rebatch_step_plain");
    return rebatch_step(plain->rb, &ops, batch, keeps ? keep(plain) : plain, report);
}

rebatch_status rebatch_step_plain(rebatch *rb, size_t batch, void (*zero)(void *user),
                                  void (*train)(size_t first, size_t count, void *user),
                                  void (*update)(void *user), void *user, uint32_t flags,
                                  rebatch_step_report *report)
{
    return rebatch_step_plain_resize(rb, batch, zero, train, update, NULL, user, flags, report);
}

rebatch_status rebatch_step_plain_resize(rebatch *rb, size_t batch, void (*zero)(void *user),
                                         void (*train)(size_t first, size_t count, void *user),
                                         void (*update)(void *user),
                                         void (*make)(size_t micro_batch, void *user), void *user,
                                         uint32_t flags, rebatch_step_report *report)
{
    struct rbi_plain plain = {.rb = rb,
                              .zero_grad = zero,
                              .train = train,
                              .update = update,
                              .resize = make,
                              .user = user};
    return step(batch, &plain, flags, report);
}
