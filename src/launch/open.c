/* Owns rebatch_open(): puts a session together from what the layers below and beside have.
 * Must not know what the parts do. */
#include "launch/launch.h"
#include "probe/tuner.h"

static rebatch_status open_session(rebatch **out, rebatch_device *device,
                                   const rebatch_options *options)
{
    static const struct rbi_session_parts parts = {
        .create_tuner = rbi_tuner_create,
        .open_launch = rbi_launch_open,
    };
    return rbi_session_open(out, device, options, &parts);
}

/* What the environment sets overrides `given`, which may be NULL. The settings are there until the
 * session is open, because strings among the options are theirs. */
static rebatch_status open_with_environment(rebatch **out, rebatch_device *device,
                                            const rebatch_options *given)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_status status = rbi_options_copy(
        &options, sizeof options, RBI_SIZE_TO(rebatch_options, learn), given, "rebatch_options");
    if (status)
        return status;
    rebatch_config *config;
    status = rebatch_config_load(&config, NULL);
    if (status)
        return status;
    rbi_config_override(&options, config);
    status = open_session(out, device, &options);
    rebatch_config_free(config);
    return status;
}

/* Whether the environment is to be read: `options` may be an older and shorter struct. */
static bool asks_for_environment(const rebatch_options *options)
{
    return !options || (options->struct_size >= RBI_SIZE_TO(rebatch_options, environment) &&
                        options->environment == REBATCH_ON);
}

rebatch_status rebatch_open(rebatch **out, rebatch_device *device, const rebatch_options *options)
{
    if (!asks_for_environment(options))
        return open_session(out, device, options);
    if (out)
        *out = NULL;
    if (!out || !device)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", out ? "device" : "out");
    return open_with_environment(out, device, options);
}
