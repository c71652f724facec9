/* The pool's lock (lock.c), cheap for the one thread that most pools ever see, and that of caches.
 * Must not know what it protects. */
#ifndef RBI_POOL_LOCK_H
#define RBI_POOL_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A lock of one word that belongs to a thread as long as no other takes it: the owner needs no
 * atomic read-modify-write, it says `busy` and looks whether it still is the owner. Another thread
 * ends that: it takes the word, names nobody the owner, has every processor pass a memory barrier
 * (membarrier(2)) and waits until the old owner is not busy. From then on all take the word, until
 * one thread has taken it RBI_LOCK_ALONE times in a row and is the owner from there on, if threads
 * are not in each other's way: as many takes cost more than what it costs to end it.
 *
 * A thread that lost the lock between its two looks at `owner` says busy, and not busy, when others
 * have long had it. So each that ever was the owner has a `busy` of its own: the one that its
 * number falls on, and where another has that one, it never becomes the owner.
 *   word: 0 free, 1 held, 2 held and waited for */
#define RBI_LOCK_OWNERS 8
struct rbi_lock {
    _Atomic uint64_t owner; /* a thread's number, from 1, or one of the two below */
    _Atomic uint32_t busy[RBI_LOCK_OWNERS];
    _Atomic uint32_t word;
    bool can_be_owned; /* the kernel has such a barrier */
    bool biased;       /* how the holder has it */
    /* Of who has the word: */
    uint32_t in_row; /* takes of it by `last` since another thread's */
    uint64_t last, takes;
    uint64_t owners[RBI_LOCK_OWNERS]; /* whose each `busy` is, for good; 0: nobody's yet */
    /* How often it was held when it was asked for; halved every RBI_LOCK_CALM takes of the word.
     * The holder's to write. */
    _Atomic uint64_t waits;
};
#define RBI_LOCK_ALONE 1024
#define RBI_LOCK_CALM 65536
#define RBI_LOCK_CONTENDED 64 /* waits */
#define RBI_LOCK_NOBODY (UINT64_MAX - 1)
#define RBI_LOCK_SHARED UINT64_MAX
void rbi_lock_init(struct rbi_lock *lock);
void rbi_lock_take_slowly(struct rbi_lock *lock);
void rbi_lock_give_slowly(struct rbi_lock *lock);
/* This thread's number; 0 before its first call of rbi_lock_take_slowly(). */
extern _Thread_local uint64_t rbi_lock_thread __attribute__((tls_model("initial-exec")));

static inline _Atomic uint32_t *rbi_lock_busy(struct rbi_lock *lock, uint64_t thread)
{
    return &lock->busy[thread % RBI_LOCK_OWNERS];
}

/* For a caller that has another way where this thread is not the owner. */
static inline bool rbi_lock_take_as_owner(struct rbi_lock *lock)
{
    const uint64_t self = rbi_lock_thread;
    if (__builtin_expect(atomic_load_explicit(&lock->owner, memory_order_relaxed) != self, 0))
        return false;
    _Atomic uint32_t *const busy = rbi_lock_busy(lock, self);
    atomic_store_explicit(busy, 1, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst); /* the other side's membarrier does the rest */
    if (__builtin_expect(atomic_load_explicit(&lock->owner, memory_order_relaxed) == self, 1))
        return true;
    atomic_store_explicit(busy, 0, memory_order_release);
    return false;
}

static inline void rbi_lock_give_as_owner(struct rbi_lock *lock)
{
    atomic_store_explicit(rbi_lock_busy(lock, rbi_lock_thread), 0, memory_order_release);
}

static inline void rbi_lock_take(struct rbi_lock *lock)
{
    if (__builtin_expect(rbi_lock_take_as_owner(lock), 1))
        lock->biased = true;
    else
        rbi_lock_take_slowly(lock);
}

static inline void rbi_lock_give(struct rbi_lock *lock)
{
    if (__builtin_expect(lock->biased, 1))
        rbi_lock_give_as_owner(lock);
    else
        rbi_lock_give_slowly(lock);
}
/* Do threads wait for each other, of late? Anybody may ask. */
static inline bool rbi_lock_is_contended(const struct rbi_lock *lock)
{
    return atomic_load_explicit(&lock->waits, memory_order_relaxed) >= RBI_LOCK_CONTENDED;
}

#endif
