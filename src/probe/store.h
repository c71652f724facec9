/* A file of what probes have found: one line an entry, each with a checksum of its own.
 * Must not know sessions, or how a size was found. */
#ifndef RBI_STORE_H
#define RBI_STORE_H

#include "base/base.h"

/* What a result is a function of. An entry counts only where all of it is the same. */
struct rbi_store_key {
    const char *model; /* the user's name for it */
    const char *device;
    uint64_t total_bytes; /* the device's */
    const char *driver;
    const char *library;
    const char *settings;
};

struct rbi_store_result {
    size_t size; /* the micro-batch; at least 1 */
    uint64_t peak_bytes;
    /* The smallest size that was run and did not fit, and what there was to be had when that probe
     * began: with no more of it, it does not fit now. 0, 0: not known. */
    size_t too_large;
    uint64_t room_bytes;
};

/* Looks a result up.
 *  @param[out] out  zeroed when there is none
 *  @return REBATCH_OK, also when there is none, or no file; REBATCH_E_IO when the file cannot be
 *          read; REBATCH_E_PARSE when it is no such file, of a newer version, or has damaged lines,
 *          which count as not there: `out` is from an undamaged one; REBATCH_E_HOST_OOM */
rebatch_status rbi_store_find(struct rbi_store_result *out, const char *path,
                              const struct rbi_store_key *key);

/* Adds a result, or replaces the one of that key. Entries of other keys stay, except the oldest
 * when there are more than RBI_STORE_ENTRIES. A file with damaged lines is kept as PATH.damaged.
 *  @return REBATCH_OK; REBATCH_E_IO; REBATCH_E_PARSE for a file that is not such a file or of a
 *          newer version, which is left alone; REBATCH_E_HOST_OOM: the file is as it was */
rebatch_status rbi_store_put(const char *path, const struct rbi_store_key *key,
                             const struct rbi_store_result *result);

#define RBI_STORE_ENTRIES 256
#define RBI_STORE_BYTES_MOST ((size_t)1 << 20)
#define RBI_STORE_HEADER "rebatch probe results, version 1\n"
#define RBI_STORE_DAMAGED ".damaged"

#endif
