/* Takes the place of settings_file.c in a build without libconfig, such as the Python package.
 * Must not know settings. */
#include "config/settings.h"

rebatch_status rbi_config_read_file(struct rebatch_config *config, const char *path)
{
    (void)config;
    return rbi_error(REBATCH_E_UNSUPPORTED,
                     "%s: settings files need libconfig, which this build was made without: use "
                     "options or REBATCH_* variables",
                     rbi_shown_path(path).text);
}
