/* Owns the pool's lock: cheap for the one thread that most pools ever see, fair enough for more.
 * Must not know what it protects. */
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pool/pool.h"

#define SPINS 256

_Thread_local uint64_t rbi_lock_thread;

/* Threads are told apart by numbers that are used once: an address could come back. */
static uint64_t number_thread(void)
{
    static _Atomic uint64_t last = 0;
    if (rbi_lock_thread == 0)
        rbi_lock_thread = atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
    return rbi_lock_thread;
}

static bool order_all_threads(void)
{
    return syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0;
}

void rbi_lock_init(struct rbi_lock *lock)
{
    /* Where the kernel has no such barrier nobody may be the owner. */
    const bool can_own =
        syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0 &&
        order_all_threads();
    atomic_init(&lock->owner, can_own ? RBI_LOCK_NOBODY : RBI_LOCK_SHARED);
    atomic_init(&lock->busy, 0);
    atomic_init(&lock->word, 0);
    lock->biased = false;
    lock->waits = 0;
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* False when it was held, and had to be waited for. */
static bool take_word(_Atomic uint32_t *word)
{
    uint32_t seen;
    for (int i = 0; i < SPINS; i++) {
        /* Looking leaves the word with the holder; only taking it moves it. */
        seen = atomic_load_explicit(word, memory_order_relaxed);
        if (seen == 0 && atomic_compare_exchange_weak_explicit(word, &seen, 1, memory_order_acquire,
                                                               memory_order_relaxed))
            return i == 0;
        pause_briefly();
    }
    while (atomic_exchange_explicit(word, 2, memory_order_acquire) != 0)
        (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
    return false;
}

/* The holder may have lost its processor: then it needs one more than we do. */
void rbi_spin_take_slowly(_Atomic uint32_t *word)
{
    do {
        for (int i = 0; i < SPINS && atomic_load_explicit(word, memory_order_relaxed) != 0; i++)
            pause_briefly();
        if (atomic_load_explicit(word, memory_order_relaxed) != 0)
            (void)sched_yield();
    } while (atomic_exchange_explicit(word, 1, memory_order_acquire) != 0);
}

void rbi_lock_give_slowly(struct rbi_lock *lock)
{
    if (atomic_exchange_explicit(&lock->word, 0, memory_order_release) == 2)
        (void)syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* The word is held: ends the ownership of another thread. That thread either saw `owner` change,
 * and then leaves `busy` alone, or had said `busy` before the barrier, and is waited for. */
static void share(struct rbi_lock *lock)
{
    atomic_store_explicit(&lock->owner, RBI_LOCK_SHARED, memory_order_relaxed);
    (void)order_all_threads();
    while (atomic_load_explicit(&lock->busy, memory_order_acquire) != 0)
        (void)sched_yield();
}

void rbi_lock_take_slowly(struct rbi_lock *lock)
{
    const uint64_t self = number_thread();
    uint64_t owner = RBI_LOCK_NOBODY;
    if (atomic_compare_exchange_strong_explicit(&lock->owner, &owner, self, memory_order_relaxed,
                                                memory_order_relaxed)) {
        rbi_lock_take(lock); /* as its owner, unless somebody was as quick */
        return;
    }
    const bool was_free = take_word(&lock->word);
    lock->waits += !was_free;
    if (atomic_load_explicit(&lock->owner, memory_order_relaxed) != RBI_LOCK_SHARED)
        share(lock);
    lock->biased = false;
}
