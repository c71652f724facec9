/* What a probe has to do with the file of results: the key that a session stands for, what the
 * file has under it, and what is said when it cannot be used.
 * Must not know how a size is found. */
#ifndef RBI_SAVED_H
#define RBI_SAVED_H

#include "rebatch/probe.h"
#include "recover/interface.h"

/* ---- the file (store.c) ---- */

struct rbi_store_result {
    uint64_t size; /* the micro-batch; 0: there is no result */
    /* The smallest size that was run and did not fit, and what there was to be had when that probe
     * began: with no more of it, it does not fit now. 0, 0: not known. */
    uint64_t too_large, room_bytes;
};

/* Looks up what is kept under `key`.
 *  @param[out] out  zeroed when there is none
 *  @return REBATCH_OK, also when there is none, or no file; REBATCH_E_IO; REBATCH_E_PARSE when it
 *          is no such file, or has damaged entries, which are not believed; REBATCH_E_HOST_OOM */
rebatch_status rbi_store_find(struct rbi_store_result *out, const char *path, const char *key);
/* Puts a result under `key`. Other entries stay, but for damaged ones, and for the oldest when
 * there are more than RBI_STORE_ENTRIES. On failure the file is as it was. */
rebatch_status rbi_store_put(const char *path, const char *key,
                             const struct rbi_store_result *result);
#define RBI_STORE_ENTRIES 256

/* ---- a probe's part of it (saved.c) ---- */

struct rbi_saved {
    const char *path; /* NULL: no file was given */
    rebatch *rb;
    char key[1536];
    rebatch_saved_size state;
    size_t size;         /* 0: none */
    size_t too_large;    /* known not to fit in what there is; 0: none is */
    uint64_t room_bytes; /* to be had now */
};

/* Looks for a size that is within [least, most]. A file that cannot be used is an event and no
 * failure.
 *  @return REBATCH_OK; REBATCH_E_INVALID for a key that is none; what the device says */
rebatch_status rbi_saved_open(struct rbi_saved *saved, rebatch *rb,
                              const rebatch_probe_options *options, size_t least, size_t most,
                              size_t batch);
/* Keeps what was found, when it is not what the file has.
 *  @param too_large  the smallest size that was run and did not fit; SIZE_MAX: none */
void rbi_saved_close(struct rbi_saved *saved, const rebatch_probe_report *report, size_t too_large);

#endif
