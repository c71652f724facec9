/* Owns rebatch_open(): puts a session together from what the layers below and beside have.
 * Must not know what the parts do. */
#include "launch/launch.h"
#include "probe/tuner.h"

rebatch_status rebatch_open(rebatch **out, rebatch_device *device, const rebatch_options *options)
{
    static const struct rbi_session_parts parts = {
        .create_tuner = rbi_tuner_create,
        .open_launch = rbi_launch_open,
    };
    return rbi_session_open(out, device, options, &parts);
}
