/** @file config.h
 *  Settings from a file and from environment variables.
 *
 *  A session that is opened without options reads them by itself (rebatch_open()).
 *
 *  The file has libconfig's format, with the groups batch, memory, recovery, growth, probe, device
 *  and log; docs/config.md lists every key. A value is taken from the environment variable if it is
 *  set, otherwise from the file, otherwise it is the default. If any value is wrong, nothing is
 *  loaded. */
#ifndef REBATCH_CONFIG_H
#define REBATCH_CONFIG_H

#include "rebatch/device.h"
#include "rebatch/probe.h"
#include "rebatch/status.h"
#include "rebatch/step.h"

/** Settings. Immutable, so any number of threads may use them. */
typedef struct rebatch_config rebatch_config;

#ifdef __cplusplus
extern "C" {
#endif

/** Read settings from a file and from the environment.
 *  @param[out] out  owned by the caller, release with rebatch_config_free(); NULL on failure
 *  @param path      the file; NULL: the one that the environment variable REBATCH_CONFIG names, and
 *                   none where that is not set
 *  @return REBATCH_OK; REBATCH_E_IO when the file cannot be read; REBATCH_E_PARSE for a mistake in
 *          the file or in a variable: rebatch_last_error() has file, line and what was expected;
 *          REBATCH_E_UNSUPPORTED for a file where the library was built without libconfig, as that
 *          in the Python package is; REBATCH_E_INVALID, REBATCH_E_HOST_OOM */
REBATCH_API rebatch_status rebatch_config_load(rebatch_config **out, const char *path);

/** Release settings.
 *  @param config  NULL is allowed */
REBATCH_API void rebatch_config_free(rebatch_config *config);

/** Open the device of the settings (groups device and memory). Thread-safe.
 *  @param[out] out  owned by the caller, close with rebatch_device_close(); NULL on failure
 *  @param config    the settings
 *  @return as rebatch_device_open_host() or rebatch_device_open_cuda(); REBATCH_E_UNSUPPORTED when
 *          device.capacity is a share and the machine does not report its memory */
REBATCH_API rebatch_status rebatch_config_open_device(rebatch_device **out,
                                                      const rebatch_config *config);

/** Fill in the options of a session. The stream, the event callback and `environment` are kept.
 *  Thread-safe.
 *  @param[in,out] options  struct_size set by the caller. log_file belongs to `config` afterwards,
 *                          which must not be released before rebatch_open()
 *  @param config           the settings
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_config_options(rebatch_options *options,
                                                  const rebatch_config *config);

/** Fill in the options of a probe (group probe). reserve_bytes is kept, and so is the key when the
 *  settings have none. Thread-safe.
 *  @param[in,out] options  struct_size set by the caller. Its strings belong to `config`
 *                          afterwards, which must outlive it
 *  @param config           the settings
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_config_probe_options(rebatch_probe_options *options,
                                                        const rebatch_config *config);

/** Read a size as written in a file: "22GiB", "1.5 MB", "1048576" for bytes, or a share such as
 *  "90%". Fractions of a byte are dropped. Thread-safe.
 *  @param[out] bytes     0 for a share, and on failure
 *  @param[out] permille  the share, 1 to 1000; 0 when the text is not a share, and on failure;
 *                        NULL: shares are refused
 *  @param text           the text
 *  @return REBATCH_OK; REBATCH_E_PARSE for text that is not a size or is more than 2^63 - 1 bytes:
 *          rebatch_last_error() has the reason; REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_config_parse_size(size_t *bytes, uint32_t *permille,
                                                     const char *text);

/** The limit that the environment variable REBATCH_MEMORY_LIMIT sets, for a program that makes a
 *  pool without a session. Sessions have it by themselves (rebatch_open()).
 *  @param[out] bytes     0 for a share, for no limit, and on failure
 *  @param[out] permille  the share of the device's memory, 1 to 1000; 0 for bytes, for no limit,
 *                        and on failure
 *  @return REBATCH_OK; REBATCH_E_PARSE: rebatch_last_error() names the variable and its value;
 *          REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_config_run_limit(size_t *bytes, uint32_t *permille);

#ifdef __cplusplus
}
#endif
#endif
