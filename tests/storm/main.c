/* Owns the command line, the processes that share the seeds, and what is said at the end.
 * Must not know what a training is. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "storm.h"

#define JOBS_MOST 64
/* A training takes some milliseconds: one that takes that long does not end. */
#define SECONDS_MOST 300
/* So many failures of a process are enough to see what is wrong. */
#define FAILURES_MOST 50

/* What a process and the one that started it share. */
struct job {
    uint64_t seed; /* that runs, or is next */
    uint64_t passed, failed;
    struct storm_counts counts;
};

struct command {
    pid_t pids[JOBS_MOST];
    uint64_t first, seeds;
    uint32_t jobs;
    bool is_verbose, is_one;
    const char *program;
};

static void say_failure(const struct command *c, uint64_t seed, const char *what)
{
    char text[1024];
    const int length =
        snprintf(text, sizeof text, "seed %" PRIu64 ": %s; %s --seed %" PRIu64 " --verbose\n", seed,
                 what, c->program, seed);
    if (write(STDOUT_FILENO, text, (size_t)length) < 0)
        _exit(2);
}

static void work(const struct command *c, struct job *job)
{
    char failure[512];
    for (; job->seed < c->first + c->seeds && job->failed < FAILURES_MOST; job->seed += c->jobs) {
        (void)alarm(SECONDS_MOST);
        if (storm_run(job->seed, c->is_verbose, &job->counts, failure)) {
            job->passed++;
        } else {
            job->failed++;
            say_failure(c, job->seed, failure);
        }
    }
    (void)alarm(0);
}

static void start(struct command *c, struct job *job, uint32_t number)
{
    (void)fflush(stdout);
    const pid_t pid = fork();
    c->pids[number] = pid;
    if (pid == 0) {
        work(c, job);
        _exit(0);
    }
    if (pid < 0) {
        perror("fork");
        exit(2);
    }
}

/* A process that died did so of the seed that it ran: another one goes on after that. */
static void note_death(struct command *c, struct job *job, uint32_t number, int status)
{
    char what[64];
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        (void)snprintf(what, sizeof what, "it did not end within %d seconds", SECONDS_MOST);
    else if (WIFSIGNALED(status))
        (void)snprintf(what, sizeof what, "died of signal %d", WTERMSIG(status));
    else
        (void)snprintf(what, sizeof what, "ended with %d", WEXITSTATUS(status));
    say_failure(c, job->seed, what);
    job->failed++;
    job->seed += c->jobs;
    if (job->failed < FAILURES_MOST)
        start(c, job, number);
}

static void wait_for_all(struct command *c, struct job *jobs)
{
    int status;
    for (pid_t pid; (pid = wait(&status)) > 0;)
        for (uint32_t i = 0; i < c->jobs; i++)
            if (c->pids[i] == pid && status != 0)
                note_death(c, &jobs[i], i, status);
}

static int say_summary(const struct command *c, const struct job *jobs)
{
    uint64_t passed = 0, failed = 0;
    struct storm_counts sum = {0};
    for (uint32_t i = 0; i < c->jobs; i++) {
        passed += jobs[i].passed;
        failed += jobs[i].failed;
#define ADD(name) sum.name += jobs[i].counts.name;
        STORM_COUNTS(ADD)
#undef ADD
    }
#define SAY(name) printf("%s %" PRIu64 ", ", #name, sum.name);
    printf("storm: ");
    STORM_COUNTS(SAY)
#undef SAY
    printf("seeds %" PRIu64 " to %" PRIu64 "\n", c->first, c->first + c->seeds - 1);
    if (passed + failed < c->seeds)
        printf("storm: ended early\n");
    printf("%" PRIu64 " passed, %" PRIu64 " failed\n", passed, failed);
    return failed ? 1 : 0;
}

static int usage(const char *program)
{
    fprintf(stderr, "usage: %s [--seeds N] [--from SEED] [--jobs N] | --seed SEED [--verbose]\n",
            program);
    return 2;
}

static bool read_number(uint64_t *out, const char *text)
{
    char *end;
    *out = text ? strtoull(text, &end, 10) : 0;
    return text && *text && *end == '\0';
}

static bool read_command(struct command *c, char **arguments)
{
    uint64_t number;
    for (; *arguments; arguments++) {
        if (strcmp(*arguments, "--verbose") == 0) {
            c->is_verbose = true;
            continue;
        }
        const char *const name = *arguments++;
        if (!read_number(&number, *arguments))
            return false;
        if (strcmp(name, "--seed") == 0) {
            c->first = number;
            c->seeds = 1;
            c->is_one = true;
        } else if (strcmp(name, "--seeds") == 0) {
            c->seeds = number;
        } else if (strcmp(name, "--from") == 0) {
            c->first = number;
        } else if (strcmp(name, "--jobs") == 0 && number >= 1 && number <= JOBS_MOST) {
            c->jobs = (uint32_t)number;
        } else {
            return false;
        }
    }
    return true;
}

/* Memory of all processes, with none before and behind it, so that what a broken library has a
 * training overwrite is not this. */
static struct job *share_jobs(void)
{
    const size_t fence = (size_t)1 << 20, bytes = (size_t)1 << 16;
    _Static_assert(JOBS_MOST * sizeof(struct job) <= 1 << 16, "the jobs have room");
    char *const all =
        mmap(NULL, fence + bytes + fence, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all + fence, bytes, PROT_READ | PROT_WRITE) != 0) {
        perror("mmap");
        exit(2);
    }
    return (struct job *)(void *)(all + fence);
}

int main(int count, char **arguments)
{
    struct command c = {.first = 1, .seeds = 100000, .jobs = 2, .program = arguments[0]};
    if (!read_command(&c, arguments + (count > 0)))
        return usage(c.program);
    struct job *const jobs = share_jobs();
    if (c.is_one) {
        c.jobs = 1;
        jobs[0].seed = c.first;
        work(&c, &jobs[0]);
        return say_summary(&c, jobs);
    }
    for (uint32_t i = 0; i < c.jobs; i++) {
        jobs[i].seed = c.first + i;
        start(&c, &jobs[i], i);
    }
    wait_for_all(&c, jobs);
    return say_summary(&c, jobs);
}
