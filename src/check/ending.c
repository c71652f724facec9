/* Owns what is said when a program ends while it is checked: which request failed on purpose, and
 * whether it used memory that was taken back.
 * Must not know what is compared. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check/check.h"
#include "pool/view.h"

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
#define SIGNALS (sizeof signals / sizeof *signals)

/* Host memory that a request has lost may be used as late as that. */
#define EARLIER_RUNS 2

/* The check that runs, in the process that began it. */
static const struct rbi_check *watched;
static pid_t process;
static struct sigaction before[SIGNALS];

static bool is_watched(void)
{
    return __atomic_load_n(&watched, __ATOMIC_ACQUIRE) && process == getpid();
}

/* ---- the sentence ---- */

/* The heap reads a header in front of what it is to free. */
static void add_pools(struct rbi_text *t, const char *address)
{
    const char *const given = address + 2 * sizeof(size_t);
    const struct rbi_stale_block *const block = rbi_stale_at(&watched->stale.live, given);
    if (!rbi_view_has(watched->pool, given))
        return;
    rbi_text_add(t, "; address %p is the pool's, in or in front of ", (const void *)address);
    if (block)
        rbi_place_add(t, &block->place, block->bytes);
    else
        rbi_text_add(t, "one of its blocks");
    rbi_text_add(t,
                 ": give blocks back by rebatch_pool_free(), not by C's free, and leave memory of "
                 "a GPU to kernels");
}

static void add_block(struct rbi_text *t, const void *address)
{
    const struct rbi_stale_block *const block = rbi_stale_at(&watched->stale.lost, address);
    if (!block) {
        add_pools(t, address);
        return;
    }
    rbi_text_add(t, "; address %p is in the memory of ", address);
    rbi_place_add(t, &block->place, block->bytes);
    rbi_text_add(t, ", which was taken back: its pointer is kept across attempts; assign it again "
                    "in each attempt, or guard it");
}

/* `address` is that of a fault; NULL: it was none. */
static void say(const char *how, const void *address)
{
    const struct rbi_injection *const injection = &watched->injection;
    char text[1024];
    struct rbi_text t = {text, sizeof text - 1, 0};
    rbi_text_add(&t, "rebatch: the program ended %s in ", how);
    if (injection->is_running) {
        rbi_text_add(&t, "%s", rbi_callback_name(injection->place.which));
        rbi_samples_add(&t, &injection->place);
    } else {
        rbi_text_add(&t, "the check");
    }
    const bool was_done = injection->runs_since && injection->runs_since <= EARLIER_RUNS;
    if (injection->is_done || was_done) {
        rbi_text_add(&t, ", after ");
        rbi_place_add(&t, &injection->injected, injection->injected_bytes);
        rbi_text_add(&t, " had failed on purpose%s",
                     injection->is_done ? "" : " in an earlier run");
    }
    if (address)
        add_block(&t, address);
    const size_t length = rbi_min(t.length, sizeof text - 2);
    text[length] = '\n';
    ssize_t written = write(STDERR_FILENO, text, length + 1);
    (void)written;
}

/* ---- signals ---- */

static void put_back(void)
{
    for (size_t i = 0; i < SIGNALS; i++)
        (void)sigaction(signals[i], &before[i], NULL);
}

/* The signal comes again when this returns, and whoever had it has it. */
static void on_signal(int number, siginfo_t *info, void *context)
{
    char how[96];
    struct rbi_text t = {how, sizeof how, 0};
    (void)context;
    put_back();
    if (is_watched()) {
        rbi_text_add(&t, "by signal %d (%s)", number, strsignal(number));
        say(how, number == SIGSEGV || number == SIGBUS ? info->si_addr : NULL);
        __atomic_store_n(&watched, NULL, __ATOMIC_RELEASE);
    }
    (void)raise(number);
}

/* ---- calls of exit ---- */

static void on_exit_of_program(void)
{
    if (is_watched())
        say("by a call of exit", NULL);
}

static void watch_exits(void)
{
    (void)atexit(on_exit_of_program);
}

/* ---- beginning and end ---- */

void rbi_ending_watch(const struct rbi_check *c)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const struct rbi_check *nobody = NULL;
    struct sigaction own = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    if (!__atomic_compare_exchange_n(&watched, &nobody, c, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return;
    process = getpid();
    (void)pthread_once(&once, watch_exits);
    (void)sigemptyset(&own.sa_mask);
    for (size_t i = 0; i < SIGNALS; i++)
        (void)sigaction(signals[i], &own, &before[i]);
}

void rbi_ending_leave(const struct rbi_check *c)
{
    if (__atomic_load_n(&watched, __ATOMIC_ACQUIRE) != c)
        return;
    put_back();
    __atomic_store_n(&watched, NULL, __ATOMIC_RELEASE);
}
