/* Owns failures on order: the n-th call of a kind, and `times` in a row.
 * Must not know what is called. */
#include "base/base.h"

void rbi_countdown_set(struct rbi_countdown *countdown, uint64_t nth, uint64_t times)
{
    atomic_store(&countdown->times, times);
    atomic_store(&countdown->left, nth);
}

bool rbi_countdown_strikes(struct rbi_countdown *countdown)
{
    const uint64_t left = atomic_load(&countdown->left);
    if (left == 0)
        return false;
    if (left > 1) {
        atomic_store(&countdown->left, left - 1);
        return false;
    }
    const uint64_t times = atomic_load(&countdown->times);
    if (times == 0) {
        atomic_store(&countdown->left, 0);
        return false;
    }
    if (times != UINT64_MAX)
        atomic_store(&countdown->times, times - 1);
    return true;
}
