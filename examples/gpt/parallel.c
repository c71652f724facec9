/* Owns the worker threads of the host operations: made when first needed, gone at exit.
 * Must not know what is computed. */
#include "gpt/parallel.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "gpt/error.h"

/* Ranges a thread gets on average: more balance better, fewer cost less. */
#define RANGES_A_THREAD 4

struct job {
    gpt_range_function function;
    const void *user;
    size_t count, range; /* items in all, and in a range */
    atomic_size_t next;  /* first item that nobody has taken */
};

/* `user_lock` is held by the thread whose job runs; `lock` guards the rest. A worker joins job
 * number `generation` once, unless it comes too late: when nothing is left to take, the job is
 * closed and only those who joined are waited for. */
static struct {
    pthread_mutex_t user_lock, lock;
    pthread_cond_t work, done;
    struct job job;
    uint64_t generation;
    bool open;      /* the job may be joined */
    size_t joined;  /* workers that are at it */
    size_t workers; /* that run; the caller's thread comes on top */
    size_t wanted;  /* threads in all; 0: not decided yet */
    bool stopping, prepared;
    pthread_t threads[GPT_THREADS_MOST];
} team = {.user_lock = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static void run_job(struct job *job)
{
    for (;;) {
        const size_t begin =
            atomic_fetch_add_explicit(&job->next, job->range, memory_order_relaxed);
        if (begin >= job->count)
            return;
        const size_t end = job->count - begin < job->range ? job->count : begin + job->range;
        job->function(begin, end, job->user);
    }
}

static void *run_worker(void *argument)
{
    uint64_t seen = (uint64_t)(uintptr_t)argument;
    pthread_mutex_lock(&team.lock);
    for (;;) {
        while (team.generation == seen && !team.stopping)
            pthread_cond_wait(&team.work, &team.lock);
        if (team.stopping)
            break;
        seen = team.generation;
        if (!team.open)
            continue;
        team.joined++;
        pthread_mutex_unlock(&team.lock);
        run_job(&team.job);
        pthread_mutex_lock(&team.lock);
        if (--team.joined == 0)
            pthread_cond_signal(&team.done);
    }
    pthread_mutex_unlock(&team.lock);
    return NULL;
}

/* Ends the workers. The caller holds user_lock, so that none is at work. */
static void stop_workers(void)
{
    pthread_mutex_lock(&team.lock);
    team.stopping = true;
    pthread_cond_broadcast(&team.work);
    pthread_mutex_unlock(&team.lock);
    for (size_t i = 0; i < team.workers; i++)
        pthread_join(team.threads[i], NULL);
    team.workers = 0;
    team.stopping = false;
}

static void stop_at_exit(void)
{
    if (pthread_mutex_trylock(&team.user_lock) != 0)
        return; /* exit was called from within a job */
    stop_workers();
    pthread_mutex_unlock(&team.user_lock);
}

/* A child process has none of its parent's workers, and their locks as the fork found them. */
static void forget_in_child(void)
{
    pthread_mutex_init(&team.user_lock, NULL);
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.work, NULL);
    pthread_cond_init(&team.done, NULL);
    team.workers = 0;
    team.joined = 0;
    team.open = false;
}

static size_t processors(void)
{
    cpu_set_t set;
    const int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return count < GPT_THREADS_DEFAULT_MOST ? (size_t)count : GPT_THREADS_DEFAULT_MOST;
}

/* 0 when GPT_THREADS is set to something that is no number of threads. */
static size_t default_threads(void)
{
    const char *text = getenv("GPT_THREADS");
    if (!text)
        return processors();
    char *end;
    errno = 0;
    const unsigned long threads = strtoul(text, &end, 10);
    const bool is_number = text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0;
    return is_number && threads <= GPT_THREADS_MOST ? threads : 0;
}

/* Makes the workers that are still wanted; fewer than that when the system gives no more. */
static void start_workers(void)
{
    if (!team.prepared) {
        pthread_atfork(NULL, NULL, forget_in_child);
        atexit(stop_at_exit);
        team.prepared = true;
    }
    while (team.workers + 1 < team.wanted) {
        void *generation = (void *)(uintptr_t)team.generation;
        if (pthread_create(&team.threads[team.workers], NULL, run_worker, generation) != 0) {
            team.wanted = team.workers + 1;
            return;
        }
        team.workers++;
    }
}

/* The caller holds user_lock. */
static void decide_threads(void)
{
    if (team.wanted == 0) {
        const size_t threads = default_threads();
        team.wanted = threads ? threads : processors();
    }
}

void gpt_parallel_for(size_t count, size_t grain, gpt_range_function function, const void *user)
{
    if (count == 0)
        return;
    if (count <= grain || pthread_mutex_trylock(&team.user_lock) != 0) {
        function(0, count, user);
        return;
    }
    decide_threads();
    start_workers();
    if (team.workers == 0) {
        pthread_mutex_unlock(&team.user_lock);
        function(0, count, user);
        return;
    }
    const size_t even = count / ((team.workers + 1) * RANGES_A_THREAD) + 1;
    pthread_mutex_lock(&team.lock);
    team.job.function = function;
    team.job.user = user;
    team.job.count = count;
    team.job.range = even > grain ? even : grain;
    atomic_store_explicit(&team.job.next, 0, memory_order_relaxed);
    team.open = true;
    team.generation++;
    pthread_cond_broadcast(&team.work);
    pthread_mutex_unlock(&team.lock);

    run_job(&team.job);
    pthread_mutex_lock(&team.lock);
    team.open = false;
    while (team.joined > 0)
        pthread_cond_wait(&team.done, &team.lock);
    pthread_mutex_unlock(&team.lock);
    pthread_mutex_unlock(&team.user_lock);
}

static rebatch_status refuse_variable(void)
{
    return gpt_error(REBATCH_E_INVALID, "GPT_THREADS is \"%s\": expected a number from 1 to %d",
                     getenv("GPT_THREADS"), GPT_THREADS_MOST);
}

rebatch_status gpt_parallel_prepare(void)
{
    rebatch_status status = REBATCH_OK;
    pthread_mutex_lock(&team.user_lock);
    if (team.wanted == 0 && default_threads() == 0)
        status = refuse_variable();
    else
        decide_threads();
    pthread_mutex_unlock(&team.user_lock);
    return status;
}

size_t gpt_parallel_threads(void)
{
    pthread_mutex_lock(&team.user_lock);
    decide_threads();
    const size_t threads = team.wanted;
    pthread_mutex_unlock(&team.user_lock);
    return threads;
}

rebatch_status gpt_parallel_set_threads(size_t threads)
{
    if (threads > GPT_THREADS_MOST)
        return gpt_error(REBATCH_E_INVALID, "threads is %zu: expected 1 to %d", threads,
                         GPT_THREADS_MOST);
    const size_t wanted = threads ? threads : default_threads();
    if (wanted == 0)
        return refuse_variable();
    pthread_mutex_lock(&team.user_lock);
    stop_workers();
    team.wanted = wanted;
    pthread_mutex_unlock(&team.user_lock);
    return REBATCH_OK;
}
