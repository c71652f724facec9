/* Dynamic loss scaling, for gradients that fp16 would round to zero: the rules of PyTorch's
 * GradScaler with its defaults. Must not know where gradients are. */
#ifndef GPT_SCALER_H
#define GPT_SCALER_H

#include <stdbool.h>
#include <stdint.h>

#define GPT_SCALER_FIRST 65536.0f
#define GPT_SCALER_INTERVAL 2000

struct gpt_scaler {
    float scale;   /* what the loss is multiplied with */
    uint32_t good; /* updates in a row with finite gradients, below GPT_SCALER_INTERVAL */
};

/* What gradients are multiplied with to be those of the loss itself. */
float gpt_scaler_inverse(const struct gpt_scaler *scaler);

/* After each effective batch. Gradients that are not finite halve the scale, and their update is to
 * be skipped; GPT_SCALER_INTERVAL good ones in a row double it, unless it would become infinite.
 * There is no least scale. */
void gpt_scaler_update(struct gpt_scaler *scaler, bool is_finite);

#endif
