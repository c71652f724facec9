/* Owns rebatch_step_plain(): a step of three functions that return nothing.
 * Must not know how a step runs. */
#include "recover/recover.h"

/* What the callbacks of such a step get as their user. */
struct plain {
    rebatch *rb;
    void (*zero_grad)(void *user);
    void (*train)(size_t first, size_t count, void *user);
    void (*update)(void *user);
    void *user;
    bool declares;
};

/* A function that does not say where it begins to change things is taken to do so at once, whatever
 * one before it did. */
static struct plain *begin(void *user)
{
    struct plain *plain = user;
    if (!plain->declares)
        rebatch_mutating(plain->rb);
    return plain;
}

static rebatch_status zero_grad(void *user)
{
    const struct plain *plain = begin(user);
    plain->zero_grad(plain->user);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    const struct plain *plain = begin(user);
    plain->train(mb->first, mb->count, plain->user);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    const struct plain *plain = begin(user);
    plain->update(plain->user);
    return REBATCH_OK;
}

rebatch_status rebatch_step_plain(rebatch *rb, size_t batch, void (*zero)(void *user),
                                  void (*train)(size_t first, size_t count, void *user),
                                  void (*update)(void *user), void *user, uint32_t flags,
                                  rebatch_step_report *report)
{
    if (flags & REBATCH_STEP_CAPTURED)
        return rbi_error(REBATCH_E_UNSUPPORTED, "flags has REBATCH_STEP_CAPTURED: expected "
                                                "rebatch_step() with callbacks for it");
    struct plain plain = {rb, zero, train, update, user, (flags & REBATCH_DECLARES_MUTATION) != 0};
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero ? zero_grad : NULL,
                                  .forward_backward = train ? forward_backward : NULL,
                                  .optimizer_step = update ? optimizer_step : NULL,
                                  .flags = flags | REBATCH_DECLARES_MUTATION | REBATCH_OWN_WEIGHTS};
    return rebatch_step(rb, &ops, batch, &plain, report);
}
