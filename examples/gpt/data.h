/* Text to train on: bytes of files, and which of them a sample is. Must not know the model. */
#ifndef GPT_DATA_H
#define GPT_DATA_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpt/hash.h"
#include "rebatch/status.h"

/* Read once, then immutable: any thread. */
struct gpt_data;

enum gpt_split {
    GPT_TRAINING, /* the first nine tenths */
    GPT_HELD_OUT  /* the rest, for evaluation; a text whose tenth is no sample is all in both */
};

/* Where a text was read from. */
struct gpt_source {
    bool is_default;     /* gpt_data_open_default() read it, under the folder `path` */
    char path[PATH_MAX]; /* absolute; "": made up, or of no place that has a name */
};

/* Reads a whole file.
 *  @param[out] out  owned by the caller, release with gpt_data_close(); NULL on failure
 *  @param length    T: the text must hold at least one sample of T + 1 bytes
 *  @return REBATCH_OK; REBATCH_E_IO when it cannot be read; REBATCH_E_INVALID when it is too short;
 *          REBATCH_E_HOST_OOM */
rebatch_status gpt_data_open(struct gpt_data **out, const char *path, size_t length);

/* Reads text that a machine has anyway, in a fixed order: the documents, licence and public headers
 * under `root`, which is the repository, and the files of /usr/share/common-licenses. What is not
 * there is left out.
 *  @return as gpt_data_open() */
rebatch_status gpt_data_open_default(struct gpt_data **out, const char *root, size_t length);

/* NULL is allowed. */
void gpt_data_close(struct gpt_data *data);

size_t gpt_data_bytes(const struct gpt_data *data);
/* Lives as long as `data`. */
const struct gpt_source *gpt_data_source(const struct gpt_data *data);
/* SHA-256 of the text. */
void gpt_data_hash(const struct gpt_data *data, char text[GPT_HASH_TEXT_BYTES]);

/* Writes the length + 1 tokens of one sample. Which bytes they are is a function of the text, the
 * split and (seed, step, index) alone. `length` is at most that of the open. */
void gpt_data_sample(int32_t *out, const struct gpt_data *data, enum gpt_split split, uint64_t seed,
                     uint64_t step, size_t index, size_t length);

#endif
