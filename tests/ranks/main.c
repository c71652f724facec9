/* Owns trainings of many ranks, as threads, from one seed: needs, OOMs, ranks that fail, and ranks
 * that die are drawn at random, and every rank's end of every step is compared with what was drawn.
 * Must not know more of the library than its public headers say. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "integration/rank_threads.h"

#define UNIT_BYTES ((size_t)64 << 10)
#define CAPACITY_BYTES ((size_t)8 << 20)
#define LIVES 8
#define STEPS 40 /* of a life, which the death of a rank ends */
#define SECONDS_MOST 300

/* What happens in a step, apart from OOMs that ranks survive. */
enum trouble { NOTHING, FAILS, FAILS_TWICE, EXHAUSTED, ABANDONS, TEARS, DIES, TROUBLES };

static const char *const names[TROUBLES] = {"nothing",    "a status",  "two statuses",
                                            "exhausted",  "abandoned", "a torn update",
                                            "a rank died"};

struct drawn {
    enum trouble trouble;
    uint32_t rank, other; /* whom it strikes; the lower one is heard */
};

static uint64_t seed = 1;
static uint32_t size = 1024;
static bool is_in_lockstep;

static uint64_t draw(uint64_t life, uint64_t step, uint64_t rank, uint64_t what)
{
    uint64_t z = seed;
    const uint64_t values[] = {life, step, rank, what};
    for (size_t i = 0; i < 4; i++) {
        z += values[i] + UINT64_C(0x9e3779b97f4a7c15);
        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        z ^= z >> 31;
    }
    return z;
}

static struct drawn draw_trouble(uint64_t life, uint64_t step)
{
    const uint64_t a = draw(life, step, size, 0) % size, b = draw(life, step, size, 1) % size;
    struct drawn drawn = {.rank = (uint32_t)(a < b ? a : b), .other = (uint32_t)(a < b ? b : a)};
    const uint64_t number = draw(life, step, size, 2) % 16;
    if (step == STEPS - 1)
        drawn.trouble = DIES;
    else if (number < DIES)
        drawn.trouble = (enum trouble)number;
    return drawn;
}

/* ---- what a rank does ---- */

static rebatch_status fail(struct rank *r, enum rank_place place)
{
    return place == *(const enum rank_place *)r->inside_user ? RANK_STATUS : REBATCH_OK;
}

static rebatch_status tear(struct rank *r, enum rank_place place)
{
    if (place != RANK_UPDATE)
        return REBATCH_OK;
    rebatch_mutating(r->rb);
    return RANK_STATUS;
}

static rebatch_status abandon(struct rank *r)
{
    return rebatch_abandon_step(r->rb, "no data");
}

/* Its connections are closed: whoever meets it from now on is told. */
static rebatch_status die(struct rank *r, enum rank_place place)
{
    if (place != *(const enum rank_place *)r->inside_user)
        return REBATCH_OK;
    meeting_leave(&r->ranks->meeting);
    return RANK_STATUS;
}

static bool is_struck(const struct rank *r, const struct drawn *drawn)
{
    return r->number == drawn->rank || (drawn->trouble == FAILS_TWICE && r->number == drawn->other);
}

/* Memory that comes and goes with every step, and requests that find none for a moment. */
static void set_needs(struct rank *r, uint64_t life, uint64_t step)
{
    const uint64_t units = 3 + draw(life, step, r->number, 3) % 30;
    r->limit_bytes = (size_t)units * UNIT_BYTES;
    (void)rebatch_pool_set_limit(rebatch_get_pool(r->rb), r->limit_bytes);
    const bool fails = draw(life, step, r->number, 4) % 16 == 0;
    r->fail_request = fails ? 1 + draw(life, step, r->number, 5) % 12 : 0;
}

/* A failure in reduce would leave the others to the timeout of their collective. */
static void set_place(struct rank *r, const struct drawn *drawn, uint64_t number)
{
    static enum rank_place places[] = {RANK_ZERO, RANK_FORWARD, RANK_REDUCE};
    static enum rank_place in_lockstep[] = {RANK_ZERO, RANK_FORWARD, RANK_ACCUMULATED};
    if (is_in_lockstep)
        r->inside_user = &in_lockstep[number % 3];
    else
        r->inside_user = &places[number % (drawn->trouble == DIES ? 3 : 2)];
}

static void set_trouble(struct rank *r, const struct drawn *drawn)
{
    r->inside = NULL;
    r->act = NULL;
    r->fails_for_ever = false;
    if (!is_struck(r, drawn))
        return;
    if (drawn->trouble == FAILS || drawn->trouble == FAILS_TWICE)
        r->inside = fail;
    else if (drawn->trouble == TEARS)
        r->inside = tear;
    else if (drawn->trouble == DIES)
        r->inside = die;
    else if (drawn->trouble == ABANDONS)
        r->act = abandon;
    else if (drawn->trouble == EXHAUSTED) {
        r->fails_for_ever = true;
        r->fail_request = 1;
    }
}

/* ---- how it must end ---- */

static pthread_mutex_t faults_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t faults;

static void blame(const struct rank *r, uint64_t life, uint64_t step, enum trouble trouble)
{
    (void)pthread_mutex_lock(&faults_mutex);
    if (faults++ < 10)
        fprintf(stderr, "life %" PRIu64 ", step %" PRIu64 ", %s: rank %u ended with %s: %s\n", life,
                step, names[trouble], r->number, rebatch_status_name(r->status), r->error);
    (void)pthread_mutex_unlock(&faults_mutex);
}

static bool says(const struct rank *r, uint32_t rank, const char *why)
{
    char text[64];
    (void)snprintf(text, sizeof text, "rank %u ended step ", rank);
    return r->status == REBATCH_E_PEER && strstr(r->error, text) && strstr(r->error, why);
}

static bool ends_as_drawn(const struct rank *r, const struct drawn *drawn)
{
    const bool is_own = is_struck(r, drawn);
    switch (drawn->trouble) {
    case NOTHING:
        return r->status == REBATCH_OK;
    case FAILS:
    case FAILS_TWICE:
        return is_own ? r->status == RANK_STATUS : says(r, drawn->rank, "returned 1009");
    case EXHAUSTED:
        return is_own ? r->status == REBATCH_E_EXHAUSTED : says(r, drawn->rank, "out of memory");
    case ABANDONS:
        return is_own ? r->status == REBATCH_OK && r->updates == 0
                      : says(r, drawn->rank, "no data");
    case TEARS:
        return is_own ? r->status == RANK_STATUS && r->report.torn : r->status == REBATCH_OK;
    default:
        return is_own ? r->status == RANK_STATUS : r->status == REBATCH_E_PEER;
    }
}

/* ---- a life ---- */

struct life {
    struct ranks ranks;
    uint64_t number;
};
struct walker {
    struct life *life;
    struct rank *rank;
};

/* The step after a torn update tells all ranks. Then all go back to before it. */
static bool restore(struct rank *r, const struct drawn *drawn, const uint64_t *checkpoint,
                    uint64_t step)
{
    r->inside = NULL;
    r->fail_request = 0;
    rank_step(r);
    memcpy(r->parameters, checkpoint, sizeof r->parameters);
    return rebatch_set_step(r->rb, step) == REBATCH_OK &&
           (is_struck(r, drawn) ? r->status == REBATCH_E_STATE
                                : says(r, drawn->rank, "the update of step"));
}

static void *walk(void *argument)
{
    const struct walker *const w = argument;
    struct rank *const r = w->rank;
    const uint64_t life = w->life->number;
    uint64_t done = 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        const struct drawn drawn = draw_trouble(life, step);
        uint64_t checkpoint[RANK_SUMS];
        memcpy(checkpoint, r->parameters, sizeof checkpoint);
        set_needs(r, life, step);
        /* In lockstep the first of two failures ends the step, so both are at one place. */
        set_place(r, &drawn, draw(life, step, is_in_lockstep ? size : r->number, 6));
        set_trouble(r, &drawn);
        rank_step(r);
        bool is_right = ends_as_drawn(r, &drawn);
        if (drawn.trouble == TEARS)
            is_right = restore(r, &drawn, checkpoint, done) && is_right;
        done += drawn.trouble == NOTHING;
        if (!is_right)
            blame(r, life, step, drawn.trouble);
    }
    r->inside = NULL;
    rank_step(r); /* the group has ended */
    if (r->status != REBATCH_E_PEER)
        blame(r, life, STEPS, DIES);
    return NULL;
}

static uint64_t steps_done(uint64_t life)
{
    uint64_t done = 0;
    for (uint64_t step = 0; step < STEPS; step++)
        done += draw_trouble(life, step).trouble == NOTHING;
    return done;
}

static void walk_all(struct life *life)
{
    struct walker *const walkers = calloc(size, sizeof *walkers);
    pthread_t *const threads = calloc(size, sizeof *threads);
    pthread_attr_t attributes;
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setstacksize(&attributes, (size_t)256 << 10);
    for (uint32_t i = 0; walkers && threads && i < size; i++) {
        walkers[i] = (struct walker){life, &life->ranks.rank[i]};
        if (pthread_create(&threads[i], &attributes, walk, &walkers[i]))
            abort();
    }
    for (uint32_t i = 0; walkers && threads && i < size; i++)
        (void)pthread_join(threads[i], NULL);
    (void)pthread_attr_destroy(&attributes);
    free(threads);
    free(walkers);
}

struct totals {
    uint64_t steps, done, votes, words, programs, ooms;
};

static void live(struct totals *totals, uint64_t number)
{
    struct life life = {.number = number};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.group_timeout_ms = SECONDS_MOST * 1000;
    options.lockstep = is_in_lockstep ? REBATCH_ON : REBATCH_OFF;
    if (!ranks_open(&life.ranks, size, &options, CAPACITY_BYTES)) {
        fprintf(stderr, "test-ranks: %s\n", rebatch_last_error());
        exit(1);
    }
    for (uint32_t i = 0; i < size; i++)
        life.ranks.rank[i].unit_bytes = UNIT_BYTES;
    walk_all(&life);
    const struct meeting *const m = &life.ranks.meeting;
    if (!ranks_have_stepped(&life.ranks, steps_done(number))) {
        fprintf(stderr, "life %" PRIu64 ": %s\n", number,
                m->was_mismatched ? "ranks were in different collectives"
                                  : "a rank has other parameters than one of all samples");
        faults++;
    }
    totals->steps += STEPS;
    totals->done += steps_done(number);
    totals->votes += m->votes;
    totals->words += m->vote_words;
    totals->programs += m->programs;
    for (uint32_t i = 0; i < size; i++)
        totals->ooms += life.ranks.rank[i].ooms;
    ranks_close(&life.ranks);
}

static void hang(int number)
{
    static const char text[] = "test-ranks: ranks wait for each other for ever\n";
    (void)number;
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(1);
}

int main(int count, char **arguments)
{
    if (count > 1)
        seed = strtoull(arguments[1], NULL, 10);
    if (count > 2)
        size = (uint32_t)strtoul(arguments[2], NULL, 10);
    is_in_lockstep = count > 3 && strcmp(arguments[3], "lockstep") == 0;
    if (size < 2 || size > 4096 || (count > 3 && !is_in_lockstep)) {
        fprintf(stderr, "usage: ranks [SEED [RANKS [lockstep]]]: expected 2 to 4096 ranks\n");
        return 2;
    }
    (void)signal(SIGALRM, hang);
    (void)alarm(SECONDS_MOST);
    struct totals totals = {0};
    for (uint64_t life = 0; life < LIVES; life++)
        live(&totals, life);
    unsigned depth = 0;
    while ((UINT64_C(1) << depth) < size)
        depth++;
    printf("test-ranks: seed %" PRIu64 ", %u ranks%s, %" PRIu64 " steps, %" PRIu64
           " of them done, %" PRIu64 " OOMs, %d deaths, %" PRIu64 " faults\n"
           "test-ranks: %.2f votes a step, %.1f words a vote, %.2f collectives a step; a tree of "
           "the ranks is %u deep\n",
           seed, size, is_in_lockstep ? " in lockstep" : "", totals.steps, totals.done, totals.ooms,
           LIVES, faults, (double)totals.votes / (double)totals.steps,
           (double)totals.words / (double)totals.votes,
           (double)totals.programs / (double)totals.steps, depth);
    return faults != 0;
}
