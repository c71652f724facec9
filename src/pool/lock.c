/* Owns what a thread does that finds the pool's lock held, and the numbers of threads.
 * Must not know what the lock protects. */
#include "pool/lock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pool/tuning.h"

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

_Thread_local uint64_t rbi_thread;

void rbi_lock_wait(struct rbi_lock *lock)
{
    for (int i = 0; i < RBI_LOCK_SPINS; i++) {
        /* Looking leaves the word with the holder; only taking it moves it. */
        uint32_t seen = atomic_load_explicit(&lock->word, memory_order_relaxed);
        if (seen == 0 && atomic_compare_exchange_weak_explicit(
                             &lock->word, &seen, 1, memory_order_acquire, memory_order_relaxed))
            return;
        pause_briefly();
    }
    while (atomic_exchange_explicit(&lock->word, 2, memory_order_acquire) != 0)
        (void)syscall(SYS_futex, &lock->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

void rbi_lock_wake(struct rbi_lock *lock)
{
    (void)syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

uint64_t rbi_thread_take_number(void)
{
    static _Atomic uint64_t last = 0;
    return rbi_thread = atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
}
