/* Probing for the largest micro-batch of a trainer. Must not know how a probe searches. */
#ifndef GPT_PROBE_H
#define GPT_PROBE_H

#include "gpt/train.h"
#include "rebatch/probe.h"

#define GPT_KEY_BYTES 160

/* Names what a sample's memory depends on, for a file of results. */
void gpt_trainer_key(char key[GPT_KEY_BYTES], const struct gpt_trainer *trainer);

/* What the first update will make and keep; 0 when it has. */
size_t gpt_trainer_reserve_bytes(const struct gpt_trainer *trainer);

/* rebatch_probe() of a trainer's effective batch.
 *  @param options  reserve_bytes is filled in, and a key where there is a file without one; must
 *                  not be NULL
 *  @param report   may be NULL
 *  @return as rebatch_probe() */
rebatch_status gpt_trainer_probe(struct gpt_trainer *trainer, const rebatch_probe_options *options,
                                 rebatch_probe_report *report);

#endif
