/* Owns rebatch_remake_buffers(): buffers that depend on more than the micro-batch's size.
 * Must not know how they are made. */
#include "recover/recover.h"

rebatch_status rebatch_remake_buffers(rebatch *rb)
{
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    const rebatch_status status = rbi_session_check_idle(rb, "rebatch_remake_buffers");
    if (status)
        return status;
    const unsigned before = rbi_residents_enter(rb->pool, rb->residents);
    rbi_resize_release(rb);
    (void)rbi_residents_enter(rb->pool, before);
    rbi_sizes_forget(&rb->sizes);
    rbi_maps_forget(rb);
    return REBATCH_OK;
}
