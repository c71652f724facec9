/* Owns which request fails: the N-th, or each with a probability.
 * Must not know what a request is. */
#include "launch/launch.h"

/* splitmix64 (Steele, Lea and Flood, 2014): the n-th number of a seed. */
static uint64_t random_at(uint64_t seed, uint64_t n)
{
    uint64_t x = seed + n * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

bool rbi_run_fails(const struct rbi_run_settings *settings, uint64_t request)
{
    if (settings->oom)
        return request == settings->oom;
    return (double)(random_at(settings->seed, request) >> 11) * 0x1p-53 < settings->chance;
}
