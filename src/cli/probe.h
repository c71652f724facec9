/* The parts of `rebatch probe`: what was asked, the probe of the reference model, and what is
 * printed of it. Must not know the library's inside: public headers, and the model's. */
#ifndef RBI_CLI_PROBE_H
#define RBI_CLI_PROBE_H

#include <stdbool.h>

#include "gpt/train.h"
#include "rebatch/probe.h"

/* ---- the command (probe.c) ---- */

/* Both take what follows the command's name and give the exit status. */
int rbi_probe_main(int count, char **arguments);
int rbi_probe_help(int count, char **arguments);

/* ---- what was found ---- */

/* One size: a row of the table. */
struct rbi_probe_row {
    rebatch_prediction prediction; /* size alone is set when has_prediction is not */
    bool has_prediction;
    bool ran, failed;        /* in a trial; failed: out of memory */
    uint64_t measured_bytes; /* of one that ran: most live */
    const char *remark;      /* "largest" and the like; "" */
};

#define RBI_PROBE_ROWS 96

struct rbi_probe_result {
    struct gpt_train_options train;
    const char *device;
    uint64_t device_bytes; /* UINT64_MAX: no cap */
    uint64_t limit_bytes;  /* what the pool can hold; UINT64_MAX: no limit */
    rebatch_status status;
    char error[512]; /* why, unless status is REBATCH_OK */
    double seconds;
    rebatch_probe_report report;
    struct rbi_probe_row rows[RBI_PROBE_ROWS]; /* by size */
    size_t row_count;
};

/* ---- printing (probe_print.c) ---- */

void rbi_probe_print(const struct rbi_probe_result *result);
/* The same as one object. */
void rbi_probe_print_json(const struct rbi_probe_result *result);

#endif
