/* Which micro-batch sizes the limits allow: for whoever chooses one, and for the settings.
 * Must not know sessions. */
#ifndef RBI_LIMITS_H
#define RBI_LIMITS_H

#include "base/base.h"
#include "rebatch/step.h"

/* Of these options' zeros are defaults already, and the list is in order. */

/* The largest size of at most `size` that smallest, largest, multiple and list allow; 0: none. */
size_t rbi_round_size(const rebatch_options *limits, size_t size);
/* The smallest of at least `size`; 0: none. */
size_t rbi_round_size_up(const rebatch_options *limits, size_t size);

/* Whether `left` samples in micro-batches of `size` end with one that is not allowed; and the size
 * of the first one of a cut that avoids it: `size` where there is none. */
bool rbi_ends_short(const rebatch_options *limits, size_t size, size_t left);
size_t rbi_even_size(const rebatch_options *limits, size_t size, size_t left);
/* The first part of the last samples, cut where they have no allowed size and each part can have
 * one; else all of them. */
size_t rbi_rest_size(const rebatch_options *limits, size_t left);

/* REBATCH_E_INVALID, with the two that cannot hold together. */
rebatch_status rbi_limits_check(const rebatch_options *limits);
rebatch_status rbi_limits_check_batch(const rebatch_options *limits, size_t batch);
/* A number that tells one list of sizes from another; 0: there is none. */
uint64_t rbi_limits_digest(const rebatch_options *limits);
/* Puts the list in order. */
void rbi_limits_sort(rebatch_options *limits);

#endif
