/* Who chooses the sizes of a session that learns. Must not know when a micro-batch runs. */
#ifndef RBI_TUNER_H
#define RBI_TUNER_H

#include "recover/interface.h"

/* The session's table of operations for it (struct rbi_tuner).
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
rebatch_status rbi_tuner_create(struct rbi_tuner *out, rebatch *rb);

#endif
