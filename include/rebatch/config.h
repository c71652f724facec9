/** @file config.h
 *  Limits and behaviour from a file and from REBATCH_… environment variables.
 *
 *  The file is libconfig's: groups batch, memory, recovery, growth, probe, device, log.
 *  docs/config.md lists every key. A value comes from the environment if it is set there, else from
 *  the file, else it is the default. Loading is all or nothing. */
#ifndef REBATCH_CONFIG_H
#define REBATCH_CONFIG_H

#include "rebatch/device.h"
#include "rebatch/probe.h"
#include "rebatch/status.h"
#include "rebatch/step.h"

/** Settings read from somewhere. Immutable: any thread. */
typedef struct rebatch_config rebatch_config;

#ifdef __cplusplus
extern "C" {
#endif

/** Read a file and the environment.
 *  @param[out] out  owned by the caller, release with rebatch_config_free(); NULL on failure
 *  @param path      NULL: no file, environment and defaults only
 *  @return REBATCH_OK; REBATCH_E_IO when the file cannot be read; REBATCH_E_PARSE for a mistake in
 *          it or in a variable: rebatch_last_error() has file, line and what was expected;
 *          REBATCH_E_HOST_OOM. */
REBATCH_API rebatch_status rebatch_config_load(rebatch_config **out, const char *path);

/** NULL is allowed. */
REBATCH_API void rebatch_config_free(rebatch_config *config);

/** Open the device that the settings ask for: groups device and memory.
 *  @param[out] out  owned by the caller, close with rebatch_device_close(); NULL on failure
 *  @return as rebatch_device_open_host(); REBATCH_E_NO_DEVICE, REBATCH_E_UNSUPPORTED. */
REBATCH_API rebatch_status rebatch_config_open_device(rebatch_device **out,
                                                      const rebatch_config *config);

/** Fill in a session's options. Stream and event callback stay as they are.
 *  @param[in,out] options  struct_size set by the caller
 *  @return REBATCH_OK, REBATCH_E_INVALID. */
REBATCH_API rebatch_status rebatch_config_options(rebatch_options *options,
                                                  const rebatch_config *config);

/** Fill in a probe's options: group probe. reserve_bytes stays as it is, and so does a key that the
 *  settings do not give.
 *  @param[in,out] options  struct_size set by the caller; its texts are then those of `config`,
 *                          which must outlive it
 *  @return REBATCH_OK, REBATCH_E_INVALID. */
REBATCH_API rebatch_status rebatch_config_probe_options(rebatch_probe_options *options,
                                                        const rebatch_config *config);

/** One value as it would stand in a file, "64" or "\"22GiB\"", by its full name, "memory.limit".
 *  @param[out] origin  where it came from: "default", "FILE:LINE" or the variable's name; may be
 *                      NULL
 *  @return a string owned by `config`; NULL when there is no such key. */
REBATCH_API const char *rebatch_config_get(const rebatch_config *config, const char *key,
                                           const char **origin);

/** Read a size as it may stand in a file: "22GiB", "1.5 MB", "1048576" for bytes, or a share such
 *  as "90%" where shares make sense. What is left of a byte is dropped.
 *  @param[out] bytes     0 for a share, and on failure
 *  @param[out] permille  of a share, 1 to 1000; 0 when it is none, and on failure. NULL: shares are
 *                        refused
 *  @return REBATCH_OK; REBATCH_E_PARSE for text that is no size, or more than 2^63 - 1 bytes:
 *          rebatch_last_error() says what is wrong; REBATCH_E_INVALID. Any thread. */
REBATCH_API rebatch_status rebatch_config_parse_size(size_t *bytes, uint32_t *permille,
                                                     const char *text);

/** Look for mistakes in the variables that are for one run of a program (docs/run.md), which
 *  rebatch_open() reads: REBATCH_PROBE_ONLY, REBATCH_MEMORY_LIMIT, REBATCH_RUN_OOM and others.
 *  @return REBATCH_OK; REBATCH_E_PARSE: rebatch_last_error() names the variable. */
REBATCH_API rebatch_status rebatch_config_check_run(void);

/** The full name of the n-th key, in the order of docs/config.md.
 *  @return a string that is never freed; NULL past the last. Any thread. */
REBATCH_API const char *rebatch_config_key(size_t n);

/** Write a commented example file with every key at its default.
 *  @return the length of the whole text without its zero byte, as snprintf does. Any thread. */
REBATCH_API size_t rebatch_config_format_example(char *text, size_t size);

/** Write docs/config.md's table of keys in Markdown.
 *  @return the length of the whole text without its zero byte, as snprintf does. Any thread. */
REBATCH_API size_t rebatch_config_format_reference(char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
