/* Owns the runs of optimizer_step, each in a copy of the process, from the same state: with an OOM
 * at each of its allocations, it and the step that follows must come out the same.
 * Must not know what runs before. */
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check/check.h"
#include "device/device.h"

/* A copy has one thread, and hangs if it waits for another. It may take as long as all runs so far,
 * and this. */
#define MOST_SECONDS 10

/* What a copy of the process gives. */
struct given {
    rebatch_check_report report;
    rebatch_status status;
    char error[512];
    uint64_t requests; /* of optimizer_step */
    bool has_failed;   /* the one that was to */
    bool was_swallowed;
    struct rbi_place place;
    uint64_t bytes;
    bool has_ended;
};

struct update {
    struct rbi_check *c;
    struct given *given; /* in shared memory; the values follow */
    size_t given_bytes;
    struct rbi_old_blocks blocks; /* all, which copies of the process change */
    char **saved;                 /* their contents */
};

static char *values_of(const struct update *u)
{
    return (char *)(u->given + 1);
}

/* ---- in a copy of the process ---- */

/* Something that no guard restores: "\"w\"", "block 3 (64 B)". */
static bool find_changed(struct rbi_text *t, struct update *u)
{
    struct rbi_check *const c = u->c;
    if (rbi_values_read(&c->other, &c->items))
        return false;
    for (size_t i = 0; i < c->items.count; i++) {
        const struct rbi_item *const item = &c->items.list[i];
        if (memcmp(c->other.copies[i], c->now.copies[i], item->bytes) == 0 ||
            (item->pointer && rbi_guards_hold(c->rb, item->pointer)))
            continue;
        rbi_item_add(t, item);
        return true;
    }
    return rbi_older_find_changed(t, &u->blocks);
}

/* optimizer_step has run, which promises to say before it changes things that it does. */
static void find_undeclared(struct update *u)
{
    char what[128] = "nothing that was looked at,";
    struct rbi_text t = {what, sizeof what, 0};
    if (u->c->report->updates > 1 || !rbi_callback_breaks_promise(u->c->rb, RBI_OPTIMIZER))
        return;
    const bool is_seen = find_changed(&t, u);
    rbi_finding_add(u->c->report, is_seen ? REBATCH_FINDING_EARLY : REBATCH_FINDING_UNWATCHED, "",
                    "optimizer_step changes %s and never calls rebatch_mutating(), which "
                    "REBATCH_DECLARES_MUTATION promises: call it before the first change",
                    what);
}

static rebatch_status run_steps(struct update *u, struct given *given, uint64_t nth)
{
    size_t ran;
    struct rbi_check *const c = u->c;
    struct rbi_injection *const injection = &c->injection;
    rebatch_status status = rbi_check_run(c, c->base, 0, &ran);
    const uint64_t before = injection->requests;
    rbi_assert(!injection->is_done);
    if (nth)
        injection->fails_at = before + nth;
    if (!status)
        status = rbi_older_note(&u->blocks);
    if (!status)
        status = rbi_dry_step_update(c->rb);
    if (!status)
        find_undeclared(u);
    given->requests = injection->requests - before;
    given->has_failed = injection->is_done;
    given->was_swallowed = injection->was_swallowed;
    given->place = injection->injected;
    given->bytes = injection->injected_bytes;
    rbi_check_find_stale(c);
    return status ? status : rbi_check_run(c, c->base, 0, &ran);
}

static void run_copy(struct update *u, uint64_t nth)
{
    struct rbi_check *const c = u->c;
    struct given *const given = u->given;
    char *to = values_of(u);
    rbi_ending_leave(c);
    rbi_ending_watch(c); /* of this process */
    given->status = run_steps(u, given, nth);
    struct rbi_text t = {given->error, sizeof given->error, 0};
    if (given->status)
        rbi_text_add(&t, "%s", rebatch_last_error());
    for (size_t i = 0; i < c->items.count; to += c->items.list[i++].bytes)
        memcpy(to, c->now.copies[i], c->items.list[i].bytes);
    rbi_assert(to == (char *)u->given + u->given_bytes);
    given->report = *c->report;
    given->has_ended = true;
    (void)raise(SIGKILL); /* no atexit function of the program runs */
}

/* ---- copies of the process ---- */

static bool wait_for(const struct update *u, pid_t child, int *how)
{
    const uint64_t begins = rbi_now_ns();
    const uint64_t until = 2 * begins - u->c->began_ns + MOST_SECONDS * UINT64_C(1000000000);
    const struct timespec nap = {0, 200000};
    for (;;) {
        const pid_t ended = waitpid(child, how, WNOHANG);
        if (ended)
            return ended == child || u->given->has_ended; /* else another has waited for it */
        if (rbi_now_ns() > until) {
            (void)kill(child, SIGKILL);
            (void)waitpid(child, how, 0);
            return false;
        }
        (void)nanosleep(&nap, NULL);
    }
}

/* Memory of the device is shared with copies of the process. */
static rebatch_status write_back(const struct update *u)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < u->blocks.count && !status; i++)
        status = rbi_check_copy(u->c->rb, REBATCH_GUARD_DEVICE,
                                (void *)(uintptr_t)u->blocks.list[i].address, u->saved[i],
                                u->blocks.list[i].bytes);
    return status;
}

static void add_when(struct rbi_text *t, const struct given *given, uint64_t nth)
{
    if (given->has_failed) {
        rbi_text_add(t, "after ");
        rbi_place_add(t, &given->place, given->bytes);
        rbi_text_add(t, " failed");
    } else if (nth) {
        rbi_text_add(t, "when allocation %" PRIu64 " of optimizer_step failed", nth);
    } else {
        rbi_text_add(t, "when optimizer_step ran, and nothing was made to fail");
    }
}

static void say_end(const struct update *u, uint64_t nth, int how)
{
    char text[256];
    struct rbi_text t = {text, sizeof text, 0};
    add_when(&t, u->given, nth);
    rbi_finding_add(u->c->report, REBATCH_FINDING_FAILED, "", "the program ended by %s %d %s",
                    WIFSIGNALED(how) ? "signal" : "exit with status",
                    WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how), text);
}

/* Runs a copy; *is_there is whether its values are in c->now. */
static rebatch_status run(struct update *u, uint64_t nth, bool *is_there)
{
    struct rbi_check *const c = u->c;
    struct given *const given = u->given;
    int how = 0;
    memset(given, 0, sizeof *given);
    given->report = *c->report;
    c->report->updates++;
    c->stale.gone.count = 0; /* the copy before may have written there */
    const pid_t child = fork();
    *is_there = false;
    if (child < 0)
        return rbi_error(REBATCH_E_HOST_OOM, "the process could not be copied for a check");
    if (child == 0)
        run_copy(u, nth);
    const bool is_known = wait_for(u, child, &how);
    const rebatch_status written = write_back(u);
    if (written)
        return written;
    if (!is_known)
        c->report->not_looked_at = "optimizer_step, because a copy of the process, in which it "
                                   "was to run, did not end in time";
    else if (!given->has_ended)
        say_end(u, nth, how);
    if (!given->has_ended)
        return REBATCH_OK;
    given->report.updates = c->report->updates;
    given->report.runs = c->report->runs;
    *c->report = given->report;
    if (given->status == REBATCH_E_TORN)
        return REBATCH_OK; /* the step's own answer where memory runs out too late */
    char text[256];
    struct rbi_text t = {text, sizeof text, 0};
    add_when(&t, given, nth);
    if (given->status)
        return rbi_check_fail(c, text, rbi_error(given->status, "%s", given->error));
    const char *from = values_of(u);
    for (size_t i = 0; i < c->items.count; from += c->items.list[i++].bytes)
        memcpy(c->now.copies[i], from, c->items.list[i].bytes);
    *is_there = true;
    return REBATCH_OK;
}

/* ---- what is run ---- */

/* The results repeat to the bit, so any difference is caused by the failed attempt. */
static rebatch_status compare(const struct update *u, uint64_t nth)
{
    char when[256];
    struct rbi_text t = {when, sizeof when, 0};
    struct rbi_comparison what = {REBATCH_FINDING_AFTER_OOM,
                                  when,
                                  "optimizer_step has changed what is not guarded before "
                                  "rebatch_mutating(), or keeps a pointer to memory that was taken "
                                  "back",
                                  &u->c->other,
                                  &u->c->now,
                                  .is_exact = true};
    if (nth == 0) {
        what.kind = REBATCH_FINDING_UNINITIALIZED;
        what.advice = "memory is read that was allocated and not written";
        rbi_text_add(&t, "where new memory is not 0 in optimizer_step");
    } else {
        add_when(&t, u->given, nth);
        rbi_text_add(&t, ", in that step or the next");
    }
    if (u->given->was_swallowed) {
        what.kind = REBATCH_FINDING_SWALLOWED;
        what.advice = "return the status of the allocation";
        what.is_exact = false;
    }
    return rbi_compare(u->c, &what);
}

/* Without an OOM, twice: the results that all others are compared with. */
static rebatch_status run_without(struct update *u, bool *is_there)
{
    struct rbi_check *const c = u->c;
    rbi_fill_set(c, 0, 0);
    rebatch_status status = run(u, 0, is_there);
    for (size_t i = 0; i < c->items.count && *is_there; i++)
        memcpy(c->other.copies[i], c->now.copies[i], c->items.list[i].bytes);
    if (!status && *is_there)
        status = run(u, 0, is_there);
    for (size_t i = 0; i < c->items.count && *is_there; i++)
        if (memcmp(c->other.copies[i], c->now.copies[i], c->items.list[i].bytes) != 0) {
            c->report->not_looked_at = "optimizer_step, because it and the step that follows give "
                                       "something else when they run again from the same state";
            *is_there = false;
        }
    rbi_fill_set(c, RBI_NO_NUMBER, RBI_NO_NUMBER);
    if (!status && *is_there)
        status = run(u, 0, is_there);
    if (!status && *is_there)
        status = compare(u, 0);
    return status;
}

static rebatch_status run_all(struct update *u)
{
    struct rbi_check *const c = u->c;
    bool is_there = false;
    rebatch_status status = run_without(u, &is_there);
    const uint64_t all = u->given->requests;
    const uint64_t most = rbi_min(all, c->options.most_ooms);
    c->report->update_allocations = is_there ? all : 0;
    for (uint64_t i = 0; i < most && !status && is_there; i++) {
        if (c->report->mistakes || c->report->not_looked_at || !rbi_check_has_time(c))
            break;
        const uint64_t nth = 1 + (most > 1 ? i * (all - 1) / (most - 1) : 0);
        rbi_assert(nth <= all);
        bool has_values;
        status = run(u, nth, &has_values);
        c->report->update_ooms += u->given->has_failed;
        if (!status && has_values && !c->report->mistakes)
            status = compare(u, nth);
    }
    rbi_fill_set(c, 0, 0);
    return status;
}

/* ---- beginning and end ---- */

static rebatch_status open_all(struct update *u)
{
    const struct rbi_items none = {.rb = u->c->rb};
    u->blocks.rb = u->c->rb;
    rebatch_status status = rbi_older_open(&u->blocks, &none);
    if (!status)
        status = rbi_older_save(&u->saved, &u->blocks);
    u->given_bytes = sizeof *u->given;
    for (size_t i = 0; i < u->c->items.count; i++)
        u->given_bytes += u->c->items.list[i].bytes;
    void *const shared =
        mmap(NULL, u->given_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!status && shared == MAP_FAILED)
        status = rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    u->given = shared == MAP_FAILED ? NULL : shared;
    return status;
}

static void close_all(struct update *u)
{
    for (size_t i = 0; i < u->blocks.count && u->saved; i++)
        rbi_heap_free(u->saved[i]);
    rbi_heap_free(u->saved);
    rbi_older_close(&u->blocks);
    if (u->given)
        (void)munmap(u->given, u->given_bytes);
}

rebatch_status rbi_update_check(struct rbi_check *c)
{
    struct update u = {.c = c};
    if (c->report->mistakes)
        c->report->not_looked_at = "optimizer_step, because of the mistakes above";
    else if (!rbi_device_is_in_process(rbi_session_device(c->rb)))
        c->report->not_looked_at =
            "optimizer_step, which runs in copies of the process, and neither "
            "a GPU nor streams are copied with it";
    if (c->report->not_looked_at || !rbi_check_has_time(c))
        return REBATCH_OK;
    rebatch_status status = open_all(&u);
    if (!status)
        status = run_all(&u);
    close_all(&u);
    return status;
}
