/* A training run on disk: everything that its bits depend on, so that a run that was interrupted
 * goes on as if it had not been, at any micro-batch. Must not know how a step runs. */
#ifndef GPT_SAVE_H
#define GPT_SAVE_H

#include "gpt/train.h"

/* Writes the run's state: weights, moments, losses, numbers of steps and samples, settings, which
 * text it is of, and where that was read from. Between steps only. What was there under that name
 * stays until the new file is whole and on the disk, and is then replaced; PATH.new is what it is
 * written to.
 *  @return REBATCH_OK; REBATCH_E_IO: the old file is as it was; REBATCH_E_HOST_OOM; a device's */
rebatch_status gpt_trainer_save(struct gpt_trainer *trainer, const char *path);

/* Whether a training may be saved under that name: it is free, or that of a regular file. A save
 * would replace a device such as /dev/null by a file.
 *  @return REBATCH_OK, REBATCH_E_IO */
rebatch_status gpt_save_check_path(const char *path);

/* Puts a run in the state that was saved, the number of its session's step included. The trainer
 * must have been created with the settings that gpt_saved_options() gives, on the same text.
 *  @return REBATCH_OK; REBATCH_E_IO when the file cannot be read; REBATCH_E_PARSE when it is
 *          damaged, foreign or of another version; REBATCH_E_INVALID when it is of other settings
 *          or another text; REBATCH_OOM, REBATCH_E_HOST_OOM: after these nothing has changed.
 *          Anything else is a device's that failed while weights were copied to it: load again, or
 *          end */
rebatch_status gpt_trainer_load(struct gpt_trainer *trainer, const char *path);

/* The settings that a run was saved with, and where its text was read from.
 *  @param[out] source  may be NULL; its path is "" in a file of version 1
 *  @return REBATCH_OK, REBATCH_E_IO, REBATCH_E_PARSE, REBATCH_E_HOST_OOM */
rebatch_status gpt_saved_options(struct gpt_train_options *out, struct gpt_source *source,
                                 const char *path);

#endif
