/* Owns the ways to open a session: puts it together from what the layers below and beside have.
 * Must not know what the parts do. */
#include <pthread.h>

#include "launch/launch.h"
#include "launch/yield.h"
#include "probe/tuner.h"
#include "rebatch/current.h"

/* `config` is where its settings are from; NULL: they are the program's. */
static rebatch_status open_session(rebatch **out, rebatch_device *device,
                                   const rebatch_options *options, const rebatch_config *config)
{
    static const struct rbi_session_parts parts = {
        .create_tuner = rbi_tuner_create,
        .open_launch = rbi_launch_open,
    };
    rebatch_status status = rbi_session_open(out, device, options, &parts);
    if (!status)
        status = rbi_yield_open(*out, config);
    if (!status || !out)
        return status;
    rebatch_close(*out);
    *out = NULL;
    return status;
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
    status = rbi_config_check_device(config, device);
    if (!status)
        status = open_session(out, device, &options, config);
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
        return open_session(out, device, options, NULL);
    if (out)
        *out = NULL;
    if (!out || !device)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", out ? "device" : "out");
    return open_with_environment(out, device, options);
}

/* ---- a session and its device ---- */

static rebatch_status open_on(rebatch **out, rebatch_device *device, const rebatch_config *config)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_status status = rbi_config_check_device(config, device);
    if (!status)
        status = rebatch_config_options(&options, config);
    if (!status)
        status = open_session(out, device, &options, config);
    if (status)
        rebatch_device_close(device);
    else
        rbi_session_own_device(*out);
    return status;
}

/* On the GPU of `gpu`, or for NULL on the device of the settings. */
static rebatch_status open_with_device(rebatch **out, const rebatch_cuda_options *gpu,
                                       const char *settings)
{
    rebatch_config *config;
    rebatch_device *device;
    *out = NULL;
    rebatch_status status = rbi_config_load(&config, NULL, settings ? settings : "");
    if (status)
        return status;
    status =
        gpu ? rebatch_device_open_cuda(&device, gpu) : rebatch_config_open_device(&device, config);
    if (!status)
        status = open_on(out, device, config);
    rebatch_config_free(config);
    return status;
}

rebatch_status rebatch_open_default(rebatch **out, const char *settings)
{
    return out ? open_with_device(out, NULL, settings)
               : rbi_error(REBATCH_E_INVALID, "out is NULL");
}

/* Whoever comes second finds the session of the first. */
rebatch_status rebatch_open_current(rebatch **out, const rebatch_cuda_options *gpu,
                                    const char *settings)
{
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    rebatch_status status = REBATCH_OK;
    (void)pthread_mutex_lock(&opening);
    *out = rebatch_get_current();
    if (*out && settings) {
        *out = NULL;
        status = rbi_error(REBATCH_E_STATE, "the process has a session already: expected to open "
                                            "one before the first allocation");
    } else if (!*out && (settings || !rbi_current_was_set())) {
        status = open_with_device(out, gpu, settings);
        if (!status)
            status = rebatch_set_current(*out);
        if (status) {
            rebatch_close(*out);
            *out = NULL;
        }
    }
    (void)pthread_mutex_unlock(&opening);
    return status;
}
