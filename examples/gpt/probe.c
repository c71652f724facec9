/* Owns what a probe has to be told of the model: its name, and the memory of its first update.
 * Must not know how a probe searches. */
#include "gpt/probe.h"

#include <stdio.h>

#include "gpt/error.h"
#include "gpt/update.h"

void gpt_trainer_key(char key[GPT_KEY_BYTES], const struct gpt_trainer *trainer)
{
    const struct gpt_config *config = &trainer->model->config;
    (void)snprintf(key, GPT_KEY_BYTES, "gpt %zu layers x %zu, %zu heads, T=%zu V=%zu %s%s",
                   config->layers, config->channels, config->heads, config->length,
                   config->vocabulary, gpt_dtype_name(config->dtype),
                   config->inexact ? ", inexact" : "");
}

size_t gpt_trainer_reserve_bytes(const struct gpt_trainer *trainer)
{
    const struct gpt_config *config = &trainer->model->config;
    const size_t unit = REBATCH_POOL_UNIT_BYTES;
    size_t bytes = 0;
    if (gpt_moments_of(trainer)[0].count > 0)
        return 0;
    for (size_t i = 0; i < gpt_block_count(config); i++)
        bytes += 2 * ((gpt_block_elements(config, i) * sizeof(float) + unit - 1) / unit * unit);
    return bytes;
}

rebatch_status gpt_trainer_probe(struct gpt_trainer *trainer, const rebatch_probe_options *options,
                                 rebatch_probe_report *report)
{
    char key[GPT_KEY_BYTES];
    rebatch_probe_options filled = *options;
    if (trainer->options.shards)
        return gpt_error(REBATCH_E_UNSUPPORTED, "shards is %zu: expected 0 where there is a probe",
                         trainer->options.shards);
    filled.reserve_bytes = gpt_trainer_reserve_bytes(trainer);
    gpt_trainer_key(key, trainer);
    if (!filled.key)
        filled.key = key;
    return rebatch_probe(trainer->rb, gpt_trainer_ops(), trainer->options.batch, trainer, &filled,
                         report);
}
