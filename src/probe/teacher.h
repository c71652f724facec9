/* Who chooses the sizes of a session that learns. Must not know when a micro-batch runs. */
#ifndef RBI_TEACHER_H
#define RBI_TEACHER_H

#include "recover/session.h"

/* The session's table of operations for it (struct rbi_teacher).
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
rebatch_status rbi_teacher_create(struct rbi_teacher *out, rebatch *rb);

#endif
