/* Owns the arithmetic of the trainings, and the training without the library.
 * Must not know the library. */
#include "storm.h"

uint64_t storm_hash(uint64_t a, uint64_t b)
{
    uint64_t x = a * UINT64_C(0x9e3779b97f4a7c15) + b * UINT64_C(0xd1b54a32d192ed03) + 1;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

uint64_t storm_next(uint64_t *dice)
{
    *dice += UINT64_C(0x9e3779b97f4a7c15);
    return storm_hash(*dice, 17);
}

size_t storm_below(uint64_t *dice, size_t n)
{
    return (size_t)(storm_next(dice) % n);
}

bool storm_one_in(uint64_t *dice, size_t n)
{
    return storm_below(dice, n) == 0;
}

size_t storm_between(uint64_t *dice, size_t low, size_t high)
{
    return low + storm_below(dice, high - low + 1);
}

uint64_t storm_rng_next(uint64_t rng)
{
    return rng * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
}

double storm_unit(uint64_t bits)
{
    return (double)(storm_hash(bits, 3) >> 11) * 0x1p-53;
}

double storm_entry(size_t cache, size_t index)
{
    return storm_unit(storm_hash(cache + 100, index));
}

/* Most are short, some are long. */
size_t storm_length(uint64_t key, size_t sample)
{
    const uint64_t bits = storm_hash(key, sample);
    const size_t most = bits % 32 == 0 ? STORM_LENGTH_MOST : bits % 8 == 0 ? 12 : 4;
    return 1 + (size_t)(bits >> 32) % most;
}

double storm_running(double running, const struct storm_sample *sample)
{
    return running * 0.875 + sample->draw * (double)sample->length;
}

void storm_accumulate(double *gradients, const double *parameters,
                      const struct storm_sample *sample, size_t batch)
{
    const double weight = 1.0 / (double)batch;
    for (size_t i = 0; i < STORM_PARAMETERS; i++)
        gradients[i] += weight * (sample->draw * (double)(i + 1) + sample->entry * parameters[i]);
}

void storm_update(double *parameter, double *moment, double gradient, double draw, double entry)
{
    *moment = 0.75 * *moment + gradient;
    *parameter -= 0.0625 * (*moment + draw * entry);
}

size_t storm_update_index(uint64_t step)
{
    return (size_t)(3 * step % 40);
}

void storm_reference_step(struct storm_numbers *n, uint64_t step, size_t batch, uint64_t lengths)
{
    n->rng = storm_rng_next(n->rng);
    for (size_t i = 0; i < STORM_PARAMETERS; i++)
        n->gradients[i] = 0;
    for (size_t k = 0; k < batch; k++) {
        n->rng = storm_rng_next(n->rng);
        const size_t length = storm_length(lengths, k);
        const struct storm_sample sample = {storm_unit(n->rng), storm_entry(1, length - 1), length};
        n->running = storm_running(n->running, &sample);
        storm_accumulate(n->gradients, n->parameters, &sample, batch);
    }
    n->rng = storm_rng_next(n->rng);
    const double entry = storm_entry(2, storm_update_index(step));
    for (size_t i = 0; i < STORM_PARAMETERS; i++)
        storm_update(&n->parameters[i], &n->moments[i], n->gradients[i], storm_unit(n->rng), entry);
}
