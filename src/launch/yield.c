/* Owns what a process does about requests for its memory: status, give, sleep, wake.
 * Must not know who asks, nor where memory lies. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/yield.h"
#include "rebatch/sharing.h"

#define STEP_NS UINT64_C(5000000000) /* in which a step must come */

#define NONE UINT64_MAX

static void run_in_turn(void *user);

/* What the training tells, in its thread. */
struct told {
    atomic_uint_fast64_t turned_ns; /* when a step or map began or ended last; 0: none has */
    atomic_uint_fast64_t needs;     /* 0: not known */
    atomic_uint_fast64_t steps, samples, micro, short_permille;
    atomic_uint_fast64_t period_ns; /* of a step, on average */
    uint64_t ended_ns;              /* the last one */
};

static struct {
    _Atomic(rebatch_pool *) pool; /* NULL: there is no socket */
    const rebatch_pool *lifted;   /* which calls lift_outside() */
    struct rbi_socket socket;
    char command[128];

    /* What one client asks of the training: the task waits for its thread, and then what is in use
     * beyond the bound for being freed. */
    pthread_mutex_t lock;
    struct rbi_pool_task task;
    bool is_posted;            /* and has neither run nor been withdrawn */
    bool sleeps;               /* that is asked for, else a give */
    bool falls_asleep;         /* now, in the thread of the training */
    bool has_slept;            /* on request; anybody may have woken it since */
    char complaint[256];       /* why it does not sleep; "": it is not in a step */
    struct rbi_client *asking; /* NULL: none waits for an answer */
    uint64_t asked_ns, ran_ns, held_before, target;
    uint64_t waiting; /* the least target of those answered that wait for a step; NONE: no one */
    uint64_t bound;   /* set on request; 0: none. It holds as long as it is the pool's */

    /* A wake copies, so it has a thread of its own. */
    pthread_t waker;
    bool has_waker;           /* which is to be joined */
    atomic_bool wakes;        /* it has not answered yet */
    struct rbi_client wanted; /* by whom */

    _Atomic(rebatch *) rb; /* whose step or map runs, NULL: none */
    struct told told;
} yield = {.socket = {.fd = -1},
           .lock = PTHREAD_MUTEX_INITIALIZER,
           .task = {run_in_turn, NULL},
           .waiting = NONE};

/* ---- in the thread of the training ---- */

/* Of steps: what the next one needs, and how fast they are. */
static void note_step(const rebatch *rb)
{
    const rebatch_step_report *const report = rbi_session_report(rb);
    const uint64_t now = rbi_now_ns(), took = now - yield.told.ended_ns,
                   before = yield.told.period_ns;
    if (report->micro == 0)
        return;
    if (yield.told.ended_ns)
        yield.told.period_ns = before ? (7 * before + took) / 8 : took;
    yield.told.ended_ns = now;
    yield.told.needs = rbi_session_needs(rb);
    yield.told.samples = rbi_session_batch(rb);
    yield.told.micro = report->micro;
    yield.told.short_permille = (uint64_t)(rebatch_short_of_memory(rb) * 1000 + .5);
    yield.told.steps++;
}

/* Whether the pool has the bound that was asked for: a wake by the program ends it too. */
static bool holds_bound(void)
{
    return yield.bound && rbi_pool_look(yield.pool).given_bytes == yield.bound;
}

/* The lock is held. */
static void set_bound(uint64_t bytes)
{
    yield.bound = bytes;
    (void)rebatch_pool_give(yield.pool, (size_t)bytes, NULL);
}

/* Never less than what a step needs, so that what is asked ends no training; and never more than
 * before. */
static void set_bound_in_turn(void)
{
    if (yield.rb)
        yield.told.needs = rbi_max(rbi_session_needs(yield.rb), yield.told.needs);
    const uint64_t target = yield.asking && !yield.sleeps ? yield.target : NONE;
    const uint64_t before = rbi_pool_look(yield.pool).given_bytes;
    const uint64_t most = rbi_max(yield.told.needs, rbi_min(target, yield.waiting));
    if (most < before)
        set_bound(most);
}

/* After a sleep the pool lets the thread wait for the wake. Who asks meanwhile is answered. Where
 * the client has gone meanwhile, or a wake has come, the sleep is over. */
static void fall_asleep_in_turn(void)
{
    rebatch_pool *const pool = yield.pool;
    yield.falls_asleep = true;
    (void)pthread_mutex_unlock(&yield.lock);
    const bool sleeps = rebatch_pool_sleep(pool, NULL, NULL) == REBATCH_OK;
    (void)pthread_mutex_lock(&yield.lock);
    yield.has_slept = sleeps;
    if (!sleeps)
        (void)snprintf(yield.complaint, sizeof yield.complaint, "%s", rebatch_last_error());
    const bool is_over = sleeps && !yield.asking;
    (void)pthread_mutex_unlock(&yield.lock);
    if (is_over)
        (void)!rebatch_pool_wake(pool);
    (void)pthread_mutex_lock(&yield.lock);
    yield.falls_asleep = false;
}

static void run_in_turn(void *user)
{
    (void)user;
    (void)pthread_mutex_lock(&yield.lock);
    if (yield.is_posted)
        set_bound_in_turn();
    if (yield.is_posted && yield.sleeps)
        fall_asleep_in_turn();
    yield.is_posted = false;
    yield.waiting = NONE;
    yield.ran_ns = rbi_now_ns();
    (void)pthread_mutex_unlock(&yield.lock);
    rbi_clients_ring();
}

static void on_turn(rebatch *rb, enum rbi_turn turn)
{
    if (rebatch_get_pool(rb) != yield.pool)
        return;
    if (turn == RBI_TURN_CLOSES) {
        if (!rbi_session_borrows_pool(rb))
            (void)rebatch_yield_to(NULL, NULL);
        return;
    }
    yield.rb = turn == RBI_TURN_BEGINS ? rb : NULL;
    yield.told.turned_ns = rbi_now_ns();
    if (turn == RBI_TURN_ENDS)
        note_step(rb);
}

/* What was given comes back before a training ends for want of it. */
static bool lift(rebatch *rb, uint64_t missing_bytes)
{
    (void)pthread_mutex_lock(&yield.lock);
    const bool may = rebatch_get_pool(rb) == yield.pool && holds_bound();
    if (may)
        set_bound(yield.bound + rbi_max(missing_bytes, yield.bound / 32));
    (void)pthread_mutex_unlock(&yield.lock);
    return may;
}

/* And before an allocation outside of steps fails for want of it, which no micro-batch could make
 * smaller. A pressure callback of the pool. */
static size_t lift_outside(size_t wanted_bytes, void *pool)
{
    (void)pthread_mutex_lock(&yield.lock);
    const bool may = pool == yield.pool && !yield.rb && holds_bound();
    if (may)
        set_bound(yield.bound + wanted_bytes + rbi_pool_look(pool).page_bytes);
    (void)pthread_mutex_unlock(&yield.lock);
    return may ? wanted_bytes : 0;
}

/* ---- answers ---- */

/* "; holds 8.00 GiB, a step needs at least 5.20 GiB" */
static void end_with_held(struct rbi_client *client, struct rbi_text *t)
{
    rbi_text_add(t, "; holds ");
    rbi_text_add_bytes(t, rbi_pool_look(yield.pool).reserved_bytes);
    rbi_text_add(t, yield.told.needs ? ", a step needs at least "
                                     : ", what a step needs is not known");
    if (yield.told.needs)
        rbi_text_add_bytes(t, yield.told.needs);
    rbi_client_end(client, t);
}

/* No step runs, and none has for a while. */
static bool has_stopped(uint64_t since_ns, uint64_t now)
{
    return !yield.rb && now - rbi_max(yield.told.turned_ns, since_ns) > STEP_NS;
}

/* A number of JSON with three places, whatever the locale. */
static void add_thousandths(struct rbi_text *t, const char *name, uint64_t value)
{
    rbi_text_add(t, ", \"%s\": %" PRIu64 ".%03" PRIu64, name, value / 1000, value % 1000);
}

/* 0: null. */
static void add_known(struct rbi_text *t, const char *name, uint64_t value)
{
    rbi_text_add(t, ", \"%s\": ", name);
    rbi_text_add(t, value ? "%" PRIu64 : "null", value);
}

static void say_status(struct rbi_client *client)
{
    char text[RBI_ANSWER_BYTES];
    struct rbi_text t = {text, sizeof text, 0};
    const struct rbi_pool_look pool = rbi_pool_look(yield.pool);
    const bool sleeps = rbi_pool_sleeps(yield.pool);
    const bool trains = !sleeps && !has_stopped(0, rbi_now_ns());
    const char *const state = sleeps ? "asleep" : trains ? "training" : "not in a step";
    const uint64_t period = yield.told.period_ns;
    const uint64_t per_second = trains && period ? UINT64_C(1000000000000) / period : 0;
    rbi_text_add(&t, "{\"pid\": %d, \"command\": ", (int)getpid());
    rbi_text_add_json(&t, yield.command);
    rbi_text_add(&t, ", \"state\": \"%s\", \"held_bytes\": %" PRIu64 ", \"live_bytes\": %" PRIu64,
                 state, pool.reserved_bytes, pool.live_bytes);
    add_known(&t, "needs_bytes", yield.told.needs);
    add_known(&t, "bound_bytes", pool.given_bytes == SIZE_MAX ? 0 : pool.given_bytes);
    rbi_text_add(&t, ", \"steps\": %" PRIu64 ", \"micro\": %" PRIu64, (uint64_t)yield.told.steps,
                 (uint64_t)yield.told.micro);
    add_thousandths(&t, "steps_per_second", per_second);
    add_thousandths(&t, "samples_per_second", per_second * yield.told.samples);
    add_thousandths(&t, "short_of_memory", yield.told.short_permille);
    rbi_text_add(&t, "}");
    rbi_client_end(client, &t);
}

/* ---- give ---- */

/* Where the give of the client that asks has come to its end. */
static void say_given(void)
{
    char text[RBI_ANSWER_BYTES];
    struct rbi_text t = {text, sizeof text, 0};
    struct rbi_client *const client = yield.asking;
    const uint64_t now = rbi_now_ns(), held = rbi_pool_look(yield.pool).reserved_bytes;
    const bool is_late = yield.is_posted ? has_stopped(yield.asked_ns, now)
                                         : now - rbi_max(yield.ran_ns, yield.asked_ns) > STEP_NS;
    const uint64_t bound = holds_bound() ? yield.bound : 0;
    const bool is_done = !yield.is_posted && held <= rbi_max(bound, yield.target);
    if (!is_done && !is_late && yield.told.turned_ns)
        return;
    rbi_text_add(&t, "%s: gave ", held <= yield.target ? "ok" : "partly");
    rbi_text_add_bytes(&t, yield.held_before - rbi_min(yield.held_before, held));
    rbi_text_add(&t, " after %" PRIu64 " ms", (now - yield.asked_ns) / 1000000);
    if (yield.is_posted || !yield.told.turned_ns)
        rbi_text_add(&t, ", not in a step%s", yield.is_posted ? ": the next one is bounded" : "");
    if (yield.is_posted)
        yield.waiting = rbi_min(yield.waiting, yield.target);
    yield.asking = NULL;
    end_with_held(client, &t);
}

/* The lock is held. */
static void ask_training(struct rbi_client *client, bool sleeps)
{
    yield.asking = client;
    yield.asked_ns = rbi_now_ns();
    yield.sleeps = sleeps;
    yield.has_slept = false;
    yield.complaint[0] = '\0';
    if (yield.told.turned_ns && !yield.is_posted)
        yield.is_posted = rbi_pool_post_task(yield.pool, &yield.task);
}

/* Between steps what is cached goes back at once; in one, whose micro-batch would miss it, before
 * the next. A process that has trained may train on, and is bounded before it takes memory again.
 * Nothing bounds one that has not: there is no step that could become smaller. */
static void give(struct rbi_client *client, const char *size)
{
    size_t bytes;
    const bool is_target = strncmp(size, "to ", 3) == 0;
    if (rebatch_config_parse_size(&bytes, NULL, is_target ? size + 3 : size)) {
        rbi_client_refuse(client, rebatch_last_error());
        return;
    }
    const struct rbi_pool_look pool = rbi_pool_look(yield.pool);
    const uint64_t held = pool.reserved_bytes, cached = held - pool.live_bytes;
    yield.held_before = held;
    yield.target = is_target ? bytes : held - rbi_min(held, bytes);
    const uint64_t excess = held - rbi_min(held, yield.target);
    ask_training(client, false);
    if (excess && !yield.rb && rbi_pool_may_wait(yield.pool))
        (void)rebatch_pool_trim(yield.pool, (size_t)(cached - rbi_min(cached, excess)), NULL);
    say_given();
}

/* ---- sleep and wake ---- */

/* The client that asks has asked for nothing. The lock is held. */
static void let_go(void)
{
    yield.asking = NULL;
    yield.sleeps = false;
    if (yield.waiting != NONE)
        return;
    (void)rbi_pool_withdraw_task(yield.pool, &yield.task);
    yield.is_posted = false;
}

/* What the training has not done, it does not do. */
static void withdraw(void)
{
    yield.waiting = NONE;
    let_go();
}

/* Where the training of the client that asks sleeps, or does not. */
static void say_asleep(void)
{
    char text[RBI_ANSWER_BYTES];
    struct rbi_text t = {text, sizeof text, 0};
    struct rbi_client *const client = yield.asking;
    const uint64_t now = rbi_now_ns();
    if (yield.is_posted && !has_stopped(yield.asked_ns, now))
        return;
    let_go();
    if (!yield.has_slept) {
        rbi_client_refuse(client, yield.complaint[0]
                                      ? yield.complaint
                                      : "not in a step, and it sleeps between two micro-batches");
        return;
    }
    rbi_text_add(&t, "ok: asleep after %" PRIu64 " ms", (now - yield.asked_ns) / 1000000);
    end_with_held(client, &t);
}

static void *wake_now(void *unused)
{
    char text[RBI_ANSWER_BYTES];
    struct rbi_text t = {text, sizeof text, 0};
    (void)unused;
    if (rebatch_pool_wake(yield.pool)) {
        rbi_client_refuse(&yield.wanted, rebatch_last_error());
    } else {
        rbi_text_add(&t, "ok: it may take memory again");
        end_with_held(&yield.wanted, &t);
    }
    yield.wakes = false;
    return NULL;
}

static void join_waker(void)
{
    if (yield.has_waker)
        (void)pthread_join(yield.waker, NULL);
    yield.has_waker = false;
}

/* One at a time: the next is asked for again in each turn. */
static void wake(struct rbi_client *client)
{
    struct rbi_client *const asking = yield.asking;
    if (yield.wakes)
        return;
    withdraw();
    if (asking)
        rbi_client_refuse(asking, "a wake has come before it");
    join_waker();
    yield.wanted = *client;
    client->fd = -1; /* the thread's now */
    yield.wakes = true;
    yield.has_waker = rbi_pool_sleeps(yield.pool) && rbi_thread_start(&yield.waker, wake_now) == 0;
    if (!yield.has_waker)
        (void)wake_now(NULL);
}

/* ---- requests ---- */

/* Of gives and sleeps there is one at a time; who comes later waits for the answer to that. */
static void take_request(struct rbi_client *client)
{
    const char *const line = client->line;
    const bool is_give = strncmp(line, "give ", 5) == 0, is_sleep = strcmp(line, "sleep") == 0;
    char text[256];
    struct rbi_text t = {text, sizeof text, 0};
    if (client == yield.asking)
        (yield.sleeps ? say_asleep : say_given)();
    else if (strcmp(line, "status") == 0)
        say_status(client);
    else if (strcmp(line, "wake") == 0)
        wake(client);
    else if (!is_give && !is_sleep) {
        rbi_text_add(&t, "\"");
        rbi_text_add_shown(&t, line, client->length, 64);
        rbi_text_add(&t, "\" is no request: expected status, give 4GiB, give to 12GiB, sleep or "
                         "wake");
        rbi_client_refuse(client, text);
    } else if (yield.falls_asleep || rbi_pool_sleeps(yield.pool))
        rbi_client_refuse(client, "it sleeps: expected wake");
    else if (!yield.asking && is_give)
        give(client, line + 5);
    else if (!yield.asking) {
        ask_training(client, true);
        say_asleep();
    }
}

static void answer(struct rbi_client *client)
{
    (void)pthread_mutex_lock(&yield.lock);
    take_request(client);
    (void)pthread_mutex_unlock(&yield.lock);
}

static void gone(struct rbi_client *client)
{
    (void)pthread_mutex_lock(&yield.lock);
    if (client == yield.asking) {
        let_go();
        if (yield.has_slept)
            wake(&(struct rbi_client){.fd = -1});
    }
    (void)pthread_mutex_unlock(&yield.lock);
}

/* ---- its beginning and end ---- */

/* The thread is the parent's, and so is the file. */
static void forget_in_child(void)
{
    rbi_asker_set(NULL);
    rbi_clients_forget();
    if (yield.socket.fd >= 0)
        (void)close(yield.socket.fd);
    if (yield.pool)
        withdraw();
    if (yield.wakes)
        (void)close(yield.wanted.fd);
    yield.wakes = yield.has_waker = yield.falls_asleep = false;
    yield.socket.fd = -1;
    yield.pool = NULL;
    (void)pthread_mutex_init(&yield.lock, NULL);
}

static void stop(void)
{
    rbi_asker_set(NULL);
    rbi_clients_end();
    join_waker();
    rbi_socket_end(&yield.socket);
    (void)pthread_mutex_lock(&yield.lock); /* the training may be at its turn */
    if (yield.pool)
        withdraw();
    yield.pool = NULL;
    (void)pthread_mutex_unlock(&yield.lock);
}

static void register_once(void)
{
    (void)pthread_atfork(NULL, NULL, forget_in_child);
    (void)atexit(stop);
}

/* As people know it: "python3 train.py". */
static void read_command(void)
{
    char *text;
    size_t length;
    struct rbi_text t = {yield.command, sizeof yield.command, 0};
    yield.command[0] = '\0';
    if (rbi_file_read(&text, &length, "/proc/self/cmdline", 1 << 20))
        return;
    for (size_t at = 0; at < length; at += strlen(text + at) + 1)
        rbi_text_add(&t, "%s%s", at ? " " : "", text + at);
    for (char *at = yield.command; *at; at++)
        if ((unsigned char)*at < ' ')
            *at = '?'; /* which JSON would need six bytes for */
    rbi_heap_free(text);
}

rebatch_status rebatch_yield_to(rebatch_pool *pool, const char *path)
{
    static const struct rbi_asker asker = {.on_turn = on_turn, .lift = lift};
    static const struct rbi_answerer answerer = {.answer = answer, .gone = gone};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (yield.pool && (holds_bound() || (yield.has_slept && rbi_pool_sleeps(yield.pool))))
        (void)!rebatch_pool_wake(yield.pool); /* nobody could ask for it any more */
    stop();
    const bool is_lifted = yield.lifted == pool;
    yield.lifted = pool; /* NULL: another may come to lie where it was */
    if (!pool)
        return REBATCH_OK;
    (void)pthread_once(&once, register_once);
    rebatch_status status = rbi_socket_listen(&yield.socket, path);
    if (status)
        return status;
    read_command();
    yield.pool = pool;
    yield.rb = NULL;
    yield.has_slept = false;
    yield.bound = 0;
    yield.told = (struct told){0};
    status = rbi_clients_begin(&yield.socket, &answerer);
    if (!is_lifted)
        (void)rebatch_pool_add_pressure(pool, lift_outside, pool);
    if (status)
        stop();
    else
        rbi_asker_set(&asker);
    return status;
}

rebatch_status rbi_yield_open(const rebatch *rb, const rebatch_config *config)
{
    const char *path = config ? config->entries[RBI_MEMORY_YIELD].words
                              : getenv(rbi_setting_variable(&rbi_settings[RBI_MEMORY_YIELD]).name);
    if (!path || !path[0] || strcmp(path, "0") == 0 || strcasecmp(path, "none") == 0 ||
        strcasecmp(path, "false") == 0 || yield.pool ||
        rbi_session_check_records(rb, "rebatch_yield_to"))
        return REBATCH_OK;
    const bool is_on = strcmp(path, "1") == 0 || strcasecmp(path, "true") == 0;
    const rebatch_status status = rebatch_yield_to(rebatch_get_pool(rb), is_on ? NULL : path);
    if (!status)
        return REBATCH_OK;
    char why[512];
    (void)snprintf(why, sizeof why, "%s", rebatch_last_error());
    return rbi_error(status, "memory.yield: %s", why);
}
