/* Owns the table of a group: one all-reduce with its errors, and whether the group has ended.
 * Must not know what the ranks vote on. */
#include <inttypes.h>

#include "recover/recover.h"

#define DEFAULT_TIMEOUT_MS 300000u

rebatch_status rbi_group_check(const rebatch_options *o)
{
    const rebatch_group *group = o->group;
    if (o->lockstep == REBATCH_ON && !group)
        return rbi_error(REBATCH_E_INVALID, "lockstep is on and group is NULL: expected a group");
    if (o->lockstep == REBATCH_ON && o->learn == REBATCH_ON)
        return rbi_error(REBATCH_E_INVALID,
                         "lockstep and learn are both on: expected one, since in lockstep no rank "
                         "chooses the size of a micro-batch alone");
    if (!group)
        return REBATCH_OK;
    if (group->struct_size < sizeof *group)
        return rbi_error(REBATCH_E_INVALID, "group->struct_size is %zu: expected %zu",
                         group->struct_size, sizeof *group);
    if (group->size < 1 || group->size > RBI_RANKS_MOST)
        return rbi_error(REBATCH_E_INVALID, "group->size is %" PRIu32 ": expected 1 to %" PRIu32,
                         group->size, RBI_RANKS_MOST);
    if (group->rank >= group->size)
        return rbi_error(REBATCH_E_INVALID,
                         "group->rank is %" PRIu32 ": expected less than group->size, %" PRIu32,
                         group->rank, group->size);
    if (!group->all_reduce)
        return rbi_error(REBATCH_E_INVALID, "group->all_reduce is NULL: expected a function");
    return REBATCH_OK;
}

rebatch_status rbi_group_check_ops(const rebatch *rb, const rebatch_step_ops *ops)
{
    const bool is_in_lockstep = rbi_group_is_in_lockstep(rb);
    if (rbi_group_is_set(rb) && !ops->reduce && !is_in_lockstep)
        return rbi_error(REBATCH_E_INVALID, "ops.reduce is NULL: expected a callback with "
                                            "rebatch_options.group");
    if (is_in_lockstep && ops->cost)
        return rbi_error(REBATCH_E_INVALID, "ops.cost is set and lockstep is on: expected one, "
                                            "since the cost of the same samples differs by rank");
    if (is_in_lockstep && ops->part)
        return rbi_error(REBATCH_E_INVALID, "ops.part is set and lockstep is on: expected one, "
                                            "since the parts of a batch differ by rank");
    return REBATCH_OK;
}

void rbi_group_open(rebatch *rb, const rebatch_options *o)
{
    if (o->group)
        rb->group.table = *o->group;
    rb->group.timeout_ms = o->group_timeout_ms ? o->group_timeout_ms : DEFAULT_TIMEOUT_MS;
}

/* "step 12: rank 1 did not vote: the connection was closed" */
static rebatch_status end_group(rebatch *rb, bool is_told)
{
    struct rbi_group *const group = &rb->group;
    const rebatch_group *const table = &group->table;
    const uint32_t missing = table->missing ? table->missing(table->user) : table->size;
    struct rbi_text t = {group->ended, sizeof group->ended, 0};
    rbi_text_add(&t, "step %" PRIu64 ": ", rb->step);
    if (missing < table->size)
        rbi_text_add(&t, "rank %" PRIu32 " did not vote", missing);
    else
        rbi_text_add(&t, "another rank did not vote");
    if (is_told)
        rbi_text_add(&t, ": %s", rebatch_last_error());
    else
        rbi_text_add(&t, " within %" PRIu64 " ms, or its connection is lost", group->timeout_ms);
    group->has_ended = true;
    if (table->abort)
        table->abort(table->user);
    return rbi_error(REBATCH_E_PEER, "%s", group->ended);
}

rebatch_status rbi_group_all_reduce(rebatch *rb, uint64_t *words, size_t count,
                                    rebatch_reduction reduction)
{
    struct rbi_group *const group = &rb->group;
    rbi_assert(rbi_group_is_set(rb) && count > 0 && count <= REBATCH_GROUP_WORDS);
    if (group->has_ended)
        return rbi_error(REBATCH_E_PEER, "%s", group->ended);
    const uint64_t changes = rbi_error_changes();
    if (group->table.all_reduce(words, count, reduction, group->timeout_ms, group->table.user) ==
        REBATCH_OK)
        return REBATCH_OK;
    return end_group(rb, rbi_error_changes() != changes && rebatch_last_error()[0] != '\0');
}
