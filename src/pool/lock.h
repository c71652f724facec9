/* The pool's lock: one word, which costs two atomic operations when nobody else wants it.
 * Must not know what it protects. */
#ifndef RBI_POOL_LOCK_H
#define RBI_POOL_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/base.h"

/* word: 0 free, 1 held, 2 held and waited for (Drepper, "Futexes Are Tricky", 2011) */
struct rbi_lock {
    _Atomic uint32_t word;
};
void rbi_lock_wait(struct rbi_lock *lock);
void rbi_lock_wake(struct rbi_lock *lock);

/* By anyone: for asserts of who relies on it. */
static inline bool rbi_lock_is_held(const struct rbi_lock *lock)
{
    return atomic_load_explicit(&lock->word, memory_order_relaxed) != 0;
}

static inline bool rbi_lock_try(struct rbi_lock *lock)
{
    uint32_t seen = 0;
    return atomic_compare_exchange_strong_explicit(&lock->word, &seen, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

static inline void rbi_lock_take(struct rbi_lock *lock)
{
    if (__builtin_expect(!rbi_lock_try(lock), 0))
        rbi_lock_wait(lock);
}

static inline void rbi_lock_give(struct rbi_lock *lock)
{
    rbi_assert(rbi_lock_is_held(lock));
    if (__builtin_expect(atomic_exchange_explicit(&lock->word, 0, memory_order_release) == 2, 0))
        rbi_lock_wake(lock);
}

/* The number of this thread, from 1; 0: it has none yet. A number is used once, where an address
 * could come back. */
extern _Thread_local uint64_t rbi_thread __attribute__((tls_model("initial-exec")));
uint64_t rbi_thread_take_number(void);
static inline uint64_t rbi_thread_number(void)
{
    return rbi_thread ? rbi_thread : rbi_thread_take_number();
}

#endif
