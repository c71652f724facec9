/* Owns when the loss scale grows and shrinks.
 * Must not know where gradients are. */
#include "gpt/scaler.h"

#include <math.h>

float gpt_scaler_inverse(const struct gpt_scaler *scaler)
{
    return (float)(1.0 / (double)scaler->scale);
}

void gpt_scaler_update(struct gpt_scaler *scaler, bool is_finite)
{
    if (!is_finite) {
        scaler->scale *= 0.5f;
        scaler->good = 0;
        return;
    }
    if (++scaler->good < GPT_SCALER_INTERVAL)
        return;
    scaler->good = 0;
    if (isfinite(scaler->scale * 2.0f))
        scaler->scale *= 2.0f;
}
