/* Owns what the ranks vote on when a step begins and before its update, and what they tell each
 * other of a failure. Must not know how words get from rank to rank. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "rebatch/version.h"
#include "recover/recover.h"

/* ---- whether all ranks have the same key ---- */

void rbi_agreement_set(struct rbi_agreement *words, uint64_t key)
{
    for (unsigned i = 0; i < RBI_KEY_PIECES; i++) {
        const uint64_t piece = key >> (16 * i) & 0xffff;
        words->sum[i] = piece;
        words->sum_of_squares[i] = piece * piece;
    }
}

/* For numbers h_i of n ranks, n * sum(h_i^2) - sum(h_i)^2 = sum over pairs of (h_i - h_j)^2
 * (Lagrange's identity): 0 exactly when all are equal. For 16 bits it is less than n^2 / 4 * 2^32,
 * so up to RBI_RANKS_MOST = 2^17 ranks it is 0 exactly when it is 0 modulo 2^64. */
bool rbi_agreement_holds(const struct rbi_agreement *words, uint32_t ranks)
{
    bool holds = true;
    for (unsigned i = 0; i < RBI_KEY_PIECES; i++)
        holds &= ranks * words->sum_of_squares[i] == words->sum[i] * words->sum[i];
    return holds;
}

/* What must be the same on all ranks. */
enum { STEP, FLAGS, VERSION, SIZE, LOCKSTEP, BATCH, SMALLEST, MULTIPLE, ALLOWED, VALUES };
_Static_assert(2 * VALUES <= REBATCH_GROUP_WORDS, "all of them are compared in one all-reduce");

static void get_values(uint64_t values[VALUES], const rebatch *rb)
{
    memset(values, 0, VALUES * sizeof *values);
    values[STEP] = rb->step;
    values[FLAGS] = rb->run.ops ? rb->run.ops->flags : 0;
    values[VERSION] = (uint64_t)REBATCH_VERSION_MAJOR << 32 |
                      (uint64_t)REBATCH_VERSION_MINOR << 16 | REBATCH_VERSION_PATCH;
    values[SIZE] = rb->group.table.size;
    values[LOCKSTEP] = rbi_group_is_in_lockstep(rb);
    if (!values[LOCKSTEP])
        return;
    values[BATCH] = rb->run.batch; /* with these, equal sizes are cut equally */
    values[SMALLEST] = rb->options.micro_smallest;
    values[MULTIPLE] = rb->options.micro_multiple_of;
    values[ALLOWED] = rbi_limits_digest(&rb->options);
}

/* splitmix64 (Steele, Lea, Flood 2014) over the values. */
static uint64_t key_of(const uint64_t values[VALUES])
{
    uint64_t key = 0;
    for (unsigned i = 0; i < VALUES; i++) {
        key += values[i] + UINT64_C(0x9e3779b97f4a7c15);
        key = (key ^ key >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        key = (key ^ key >> 27) * UINT64_C(0x94d049bb133111eb);
        key ^= key >> 31;
    }
    return key;
}

static rebatch_status say_values(const char *what, uint64_t lowest, uint64_t highest, uint64_t own)
{
    return rbi_error(REBATCH_E_PEER,
                     "the ranks disagree on %s: %" PRIu64 " on one rank, %" PRIu64
                     " on another, and %" PRIu64 " here: expected the same on all",
                     what, lowest, highest, own);
}

/* Who has which value is found only now that it is needed: the smallest of each, and of its
 * complement, which is the complement of the largest. */
static rebatch_status say_disagreement(rebatch *rb)
{
    static const char *const names[VALUES] = {
        [STEP] = "the number of the step (rebatch_set_step() sets it)",
        [FLAGS] = "ops.flags",
        [VERSION] = "the version of rebatch (major * 2^32 + minor * 2^16 + patch)",
        [SIZE] = "group->size",
        [LOCKSTEP] = "whether lockstep is on",
        [BATCH] = "the number of samples of a rank, which are in lockstep",
        [SMALLEST] = "micro_smallest, and are in lockstep",
        [MULTIPLE] = "micro_multiple_of, and are in lockstep",
        [ALLOWED] = "micro_allowed (a digest of the list), and are in lockstep"};
    uint64_t values[VALUES], words[2 * VALUES];
    get_values(values, rb);
    for (unsigned i = 0; i < VALUES; i++) {
        words[i] = values[i];
        words[VALUES + i] = ~values[i];
    }
    const rebatch_status status = rbi_group_all_reduce(rb, words, 2 * VALUES, REBATCH_MIN);
    if (status)
        return status;
    unsigned i = 0;
    while (i < VALUES - 1 && words[i] == ~words[VALUES + i])
        i++;
    return say_values(names[i], words[i], ~words[VALUES + i], values[i]);
}

/* ---- why a rank has failed ---- */

/* At most RBI_WHY_BYTES bytes of whole characters in UTF-8. */
static void copy_why(char out[RBI_WHY_BYTES + 1], const char *why)
{
    size_t length = strnlen(why, RBI_WHY_BYTES + 1);
    if (length > RBI_WHY_BYTES)
        for (length = RBI_WHY_BYTES; length > 0 && ((unsigned char)why[length] & 0xc0) == 0x80;)
            length--;
    memset(out, 0, RBI_WHY_BYTES + 1);
    memcpy(out, why, length);
}

void rebatch_explain(rebatch *rb, const char *why)
{
    if (!rb || !why)
        (void)rbi_error(REBATCH_E_INVALID, "%s is NULL", rb ? "why" : "rb");
    else if (!rb->callback.is_running)
        (void)rbi_error(REBATCH_E_STATE, "rebatch_explain() was called outside a callback");
    else
        copy_why(rb->group.explained, why);
}

/* Without "step 12: ", which the other ranks say themselves. */
static const char *without_step(const rebatch *rb, const char *text)
{
    char prefix[32];
    const int length = snprintf(prefix, sizeof prefix, "step %" PRIu64 ": ", rb->step);
    return strncmp(text, prefix, (size_t)length) == 0 ? text + length : text;
}

struct rbi_said rbi_said_take(rebatch *rb, rebatch_status status)
{
    struct rbi_said said = {.status = rebatch_last_status()};
    if (!status)
        return said;
    (void)snprintf(said.text, sizeof said.text, "%s", rebatch_last_error());
    const char *const text = without_step(rb, said.text);
    copy_why(said.why, rb->group.explained[0] ? rb->group.explained
                       : text[0]              ? text
                                              : rebatch_status_text(status));
    rb->group.explained[0] = '\0';
    return said;
}

rebatch_status rbi_said_again(const struct rbi_said *said, rebatch_status status)
{
    if (said->text[0] == '\0')
        rebatch_clear_error();
    else
        (void)rbi_error(said->status, "%s", said->text);
    return status;
}

/* ---- the rounds after a vote in which a rank has failed ---- */

enum { WHY_WORDS = RBI_WHY_BYTES / 8 };
_Static_assert(WHY_WORDS * 8 == RBI_WHY_BYTES && WHY_WORDS <= REBATCH_GROUP_WORDS,
               "a sentence is whole words of one all-reduce");
/* A failure in reduce is often the consequence of another rank's failure, so others go first. */
#define IN_REDUCE (UINT64_C(1) << 32)

/* The lowest rank that has failed says why. The status of this rank: `own` where it has failed. */
rebatch_status rbi_vote_hear(rebatch *rb, rebatch_status own, const struct rbi_said *said)
{
    rbi_assert(!own || said->why[0]);
    const uint64_t mine = rb->group.table.rank | (rb->group.has_failed_in_reduce ? IN_REDUCE : 0);
    uint64_t first = own ? mine : UINT64_MAX;
    rebatch_status status = rbi_group_all_reduce(rb, &first, 1, REBATCH_MIN);
    uint64_t words[WHY_WORDS] = {0};
    if (!status && own && first == mine)
        memcpy(words, said->why, RBI_WHY_BYTES);
    if (!status)
        status = rbi_group_all_reduce(rb, words, WHY_WORDS, REBATCH_SUM);
    if (own)
        return own;
    if (status)
        return status;
    char why[RBI_WHY_BYTES + 1] = "";
    memcpy(why, words, RBI_WHY_BYTES);
    return rbi_error(REBATCH_E_PEER, "rank %" PRIu32 " ended step %" PRIu64 ": %s", (uint32_t)first,
                     rb->step, why);
}

/* ---- the votes ---- */

/* Of the first vote. */
struct begin_words {
    uint64_t samples, failed;
    struct rbi_agreement agreement;
};
enum { BEGIN_WORDS = sizeof(struct begin_words) / sizeof(uint64_t) };

static rebatch_status vote_to_begin(rebatch *rb, rebatch_status own, const struct rbi_said *said)
{
    union {
        struct begin_words of;
        uint64_t words[BEGIN_WORDS];
    } sum = {.of = {.samples = own ? 0 : rb->run.batch, .failed = own != REBATCH_OK}};
    uint64_t values[VALUES];
    get_values(values, rb);
    rbi_agreement_set(&sum.of.agreement, key_of(values));
    const rebatch_status status = rbi_group_all_reduce(rb, sum.words, BEGIN_WORDS, REBATCH_SUM);
    if (status)
        return own ? own : status;
    rb->group.owes = false;
    if (sum.of.failed)
        return rbi_vote_hear(rb, own, said);
    if (!rbi_agreement_holds(&sum.of.agreement, rb->group.table.size))
        return say_disagreement(rb);
    rb->run.total = sum.of.samples;
    return REBATCH_OK;
}

/* What the ranks do not know yet: an update that failed here, and not on them. */
static rebatch_status say_owed(const rebatch *rb)
{
    return rbi_error(REBATCH_E_STATE,
                     "the update of step %" PRIu64 " failed on rank %" PRIu32
                     " after other ranks had updated: restore a checkpoint on all ranks",
                     rb->group.owed_step, rb->group.table.rank);
}

rebatch_status rbi_vote_begin(rebatch *rb, rebatch_status own)
{
    if (!rbi_group_is_set(rb))
        return own;
    if (rb->group.owes) {
        own = say_owed(rb);
        rb->group.explained[0] = '\0';
    }
    rb->group.has_failed_in_reduce = false;
    const struct rbi_said said = rbi_said_take(rb, own);
    const rebatch_status status = vote_to_begin(rb, own, &said);
    return own ? rbi_said_again(&said, own) : status;
}

rebatch_status rbi_vote_end(rebatch *rb, rebatch_status own, const struct rbi_said *said)
{
    uint64_t failed = own != REBATCH_OK;
    rebatch_status status = rbi_group_all_reduce(rb, &failed, 1, REBATCH_SUM);
    if (!status && failed)
        status = rbi_vote_hear(rb, own, said);
    if (own == REBATCH_E_PEER && rb->group.has_ended)
        return status; /* who is missing says more than that somebody was, in reduce */
    return own ? rbi_said_again(said, own) : status;
}

rebatch_status rbi_vote_owe(rebatch *rb, rebatch_status status)
{
    rbi_assert(status != REBATCH_OK);
    if (rb->group.table.size <= 1)
        return status;
    const struct rbi_said said = rbi_said_take(rb, status);
    rb->group.owes = true;
    rb->group.owed_step = rb->step;
    (void)rbi_error(status, "%.380s; other ranks have updated: restore a checkpoint on all",
                    said.text[0] ? said.text : said.why);
    return status;
}

rebatch_status rebatch_abandon_step(rebatch *rb, const char *why)
{
    if (!rb || !why)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", rb ? "why" : "rb");
    const rebatch_status status = rbi_session_check_idle(rb, "rebatch_abandon_step");
    if (status || !rbi_group_is_set(rb))
        return status;
    copy_why(rb->group.explained, why[0] ? why : "rebatch_abandon_step() was called");
    (void)rbi_vote_begin(rb, REBATCH_E_STATE);
    return rb->group.has_ended ? rbi_error(REBATCH_E_PEER, "%s", rb->group.ended) : REBATCH_OK;
}
