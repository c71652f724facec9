/* Takes the place of store.c in a build without libconfig, such as the Python package.
 * Must not know sessions. */
#include "probe/saved.h"

rebatch_status rbi_store_put(const char *path, const char *key,
                             const struct rbi_store_result *result)
{
    (void)key;
    (void)result;
    return rbi_error(REBATCH_E_UNSUPPORTED,
                     "%.200s: a file of results needs libconfig, which this build was made without",
                     path);
}

rebatch_status rbi_store_find(struct rbi_store_result *out, const char *path, const char *key)
{
    *out = (struct rbi_store_result){0};
    return rbi_store_put(path, key, out);
}
