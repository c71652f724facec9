/* Owns the clock.
 * Must not know what is timed. */
#include <inttypes.h>
#include <time.h>

#include "base/base.h"

uint64_t rbi_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void rbi_sleep_ms(uint32_t ms)
{
    const struct timespec nap = {ms / 1000, (long)(ms % 1000) * 1000000};
    (void)nanosleep(&nap, NULL);
}

int64_t rbi_clock_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The date of a day since 1970-01-01, by eras of 400 years that begin on 1 March, so that a leap
 * day is the last of its year (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms"). */
static void add_date(struct rbi_text *t, int64_t day)
{
    const int64_t since = day + 719468; /* from 0000-03-01 */
    const int64_t era = (since >= 0 ? since : since - 146096) / 146097;
    const int64_t of_era = since - era * 146097;
    const int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    const int64_t of_year = of_era - (365 * year + year / 4 - year / 100);
    const int64_t month = (5 * of_year + 2) / 153; /* from March */
    const int64_t of_month = of_year - (153 * month + 2) / 5 + 1;
    rbi_text_add(t, "%04" PRId64 "-%02" PRId64 "-%02" PRId64, year + era * 400 + (month >= 10),
                 month < 10 ? month + 3 : month - 9, of_month);
}

void rbi_text_add_time(struct rbi_text *t, int64_t clock_ms)
{
    const int64_t day_ms = 86400000;
    const int64_t of_day = (clock_ms % day_ms + day_ms) % day_ms;
    add_date(t, (clock_ms - of_day) / day_ms);
    rbi_text_add(t, "T%02" PRId64 ":%02" PRId64 ":%02" PRId64 ".%03" PRId64 "Z", of_day / 3600000,
                 of_day / 60000 % 60, of_day / 1000 % 60, of_day % 1000);
}
