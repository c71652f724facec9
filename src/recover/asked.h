/* What a session tells whoever is asked for its memory (asked.c).
 * Must not know who asks. */
#ifndef RBI_ASKED_H
#define RBI_ASKED_H

#include "recover/interface.h"

extern _Atomic(const struct rbi_asker *) rbi_asker_now;

/* Without an asker one load. */
static inline void rbi_asked_turn(rebatch *rb, enum rbi_turn turn)
{
    const struct rbi_asker *const asker =
        atomic_load_explicit(&rbi_asker_now, memory_order_acquire);
    if (asker)
        asker->on_turn(rb, turn);
}
/* The last resort after an OOM: whether the session has back some of what it was asked for. */
bool rbi_asked_lift(rebatch *rb);

#endif
