/* Owns the pool's lock: cheap for the one thread that most pools ever see, fair enough for more.
 * Must not know what it protects. */
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
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
    *lock = (struct rbi_lock){.biased = false};
    lock->can_be_owned =
        syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0 &&
        order_all_threads();
    atomic_init(&lock->owner, lock->can_be_owned ? RBI_LOCK_NOBODY : RBI_LOCK_SHARED);
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

/* The word is held: makes the holder the owner if it alone has taken it for long. That it has it by
 * the word this time is known to rbi_lock_give_slowly(). */
static void own_if_alone(struct rbi_lock *lock)
{
    if (lock->in_row < RBI_LOCK_ALONE || !lock->can_be_owned || rbi_lock_is_contended(lock))
        return;
    uint64_t *const had = &lock->owners[lock->last % RBI_LOCK_OWNERS];
    if (*had != 0 && *had != lock->last)
        return;
    *had = lock->last;
    lock->in_row = 0;
    lock->biased = true;
    atomic_store_explicit(&lock->owner, lock->last, memory_order_relaxed);
}

void rbi_lock_give_slowly(struct rbi_lock *lock)
{
    own_if_alone(lock);
    if (atomic_exchange_explicit(&lock->word, 0, memory_order_release) == 2)
        (void)syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* The word is held: ends the ownership of another thread. That thread either saw `owner` change,
 * and then is not busy for long, or had said `busy` before the barrier, and is waited for: it may
 * be within a call of the device, or wait for the device's work. */
static void share(struct rbi_lock *lock, uint64_t owner)
{
    const struct timespec nap = {.tv_nsec = 50 * 1000};
    _Atomic uint32_t *const busy = rbi_lock_busy(lock, owner);
    lock->owners[owner % RBI_LOCK_OWNERS] = owner;
    atomic_store_explicit(&lock->owner, RBI_LOCK_SHARED, memory_order_relaxed);
    (void)order_all_threads();
    for (int i = 0; atomic_load_explicit(busy, memory_order_acquire) != 0; i++)
        (void)(i < SPINS ? sched_yield() : nanosleep(&nap, NULL));
}

/* Makes this thread the owner where nobody has been one. */
static bool become_owner(struct rbi_lock *lock)
{
    const uint64_t self = number_thread();
    uint64_t owner = atomic_load_explicit(&lock->owner, memory_order_relaxed);
    return owner == RBI_LOCK_NOBODY &&
           atomic_compare_exchange_strong_explicit(&lock->owner, &owner, self, memory_order_relaxed,
                                                   memory_order_relaxed);
}

static void count_take(struct rbi_lock *lock, bool was_free)
{
    lock->in_row = lock->last == rbi_lock_thread ? lock->in_row + 1 : 1;
    lock->last = rbi_lock_thread;
    const bool is_calm = ++lock->takes % RBI_LOCK_CALM == 0;
    if (was_free && !is_calm)
        return;
    const uint64_t waits = atomic_load_explicit(&lock->waits, memory_order_relaxed) + !was_free;
    atomic_store_explicit(&lock->waits, is_calm ? waits / 2 : waits, memory_order_relaxed);
}

void rbi_lock_take_slowly(struct rbi_lock *lock)
{
    if (become_owner(lock)) {
        rbi_lock_take(lock); /* as its owner, unless somebody was as quick */
        return;
    }
    count_take(lock, take_word(&lock->word));
    const uint64_t owner = atomic_load_explicit(&lock->owner, memory_order_relaxed);
    if (owner != RBI_LOCK_SHARED)
        share(lock, owner);
    lock->biased = false;
}
