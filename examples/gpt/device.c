/* Owns which operations are a device's.
 * Must not know what they do. */
#include <string.h>

#include "gpt/error.h"
#include "gpt/ops.h"

/* A device's name is its kind, or begins with it and a colon. */
rebatch_status gpt_ops_for_device(const struct gpt_ops **out, const rebatch_device *device)
{
    const struct gpt_ops *const tables[] = {&gpt_host_ops, gpt_cuda_ops_get()};
    const char *name = rebatch_device_name(device);
    const size_t kind_bytes = strcspn(name, ":");
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (tables[i] && strlen(tables[i]->name) == kind_bytes &&
            strncmp(name, tables[i]->name, kind_bytes) == 0) {
            *out = tables[i];
            return REBATCH_OK;
        }
    *out = NULL;
    return gpt_error(REBATCH_E_UNSUPPORTED,
                     "this program was built without operations for the device \"%s\"", name);
}
