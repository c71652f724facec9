/* What a probe has to do with the file of results: the key that a session stands for, and what is
 * said when the file cannot be used. Must not know the file's format. */
#ifndef RBI_SAVED_H
#define RBI_SAVED_H

#include "probe/store.h"
#include "rebatch/probe.h"
#include "recover/session.h"

struct rbi_saved {
    const char *path; /* NULL: no file was given */
    rebatch *rb;
    struct rbi_store_key key;
    char device[64], settings[768];
    rebatch_saved_size state;
    size_t size;      /* 0: none */
    size_t too_large; /* known not to fit in what there is; 0: none is */
    struct rbi_store_result found;
    uint64_t room_bytes; /* to be had now */
};

/* Looks for a size that is within [least, most]. A file that cannot be used is an event and no
 * failure.
 *  @param saved    must stay where it is until rbi_saved_close()
 *  @return REBATCH_OK; REBATCH_E_INVALID for a key that is none; what the device says */
rebatch_status rbi_saved_open(struct rbi_saved *saved, rebatch *rb,
                              const rebatch_probe_options *options, size_t least, size_t most,
                              size_t batch);
/* Keeps what was found, when it is not what the file has.
 *  @param too_large  the smallest size that was run and did not fit; SIZE_MAX: none */
void rbi_saved_close(struct rbi_saved *saved, const rebatch_probe_report *report, size_t too_large);

#endif
