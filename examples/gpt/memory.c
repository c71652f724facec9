/* Owns the formula for a training step's memory.
 * Must not know how that memory is found. */
#include "gpt/update.h"

static uint64_t rounded(uint64_t bytes)
{
    const uint64_t unit = REBATCH_POOL_UNIT_BYTES;
    return (bytes + unit - 1) / unit * unit;
}

/* One value a parameter. */
static uint64_t set_bytes(const struct gpt_config *config, size_t blocks, size_t value_bytes)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < blocks; i++)
        sum += rounded((uint64_t)gpt_block_elements(config, i) * value_bytes);
    return sum;
}

struct gpt_memory gpt_train_memory(const struct gpt_train_options *options, unsigned lighten)
{
    const struct gpt_config *config = &options->config;
    const size_t blocks = gpt_block_count(config);
    const uint64_t tokens = (uint64_t)options->batch * (config->length + 1) * sizeof(int32_t);
    uint64_t bytes = set_bytes(config, blocks, sizeof(float)); /* parameters */
    bytes += set_bytes(config, blocks + 1, sizeof(float));     /* gradients, with the head's */
    bytes += rounded(sizeof(struct gpt_scalars)) + 2 * rounded(tokens);
    if (config->dtype != GPT_FP32)
        bytes += set_bytes(config, blocks, gpt_dtype_bytes(config->dtype));
    if (lighten < GPT_LIGHTEN_MOST)
        bytes += 2 * set_bytes(config, blocks, sizeof(float)); /* moments */
    return (struct gpt_memory){bytes, gpt_sample_bytes(config, gpt_lighten_of(lighten))};
}
