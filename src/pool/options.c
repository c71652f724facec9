/* Owns which sizes among a pool's options can never work on its device.
 * Must not know how memory is found. */
#include "pool/pool.h"

static rebatch_status check_limit(size_t limit_bytes, size_t page_bytes)
{
    if (limit_bytes == 0 || limit_bytes >= page_bytes)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID,
                     "rebatch_pool_options.limit_bytes is %zu: expected 0 or at least one page "
                     "of %zu bytes",
                     limit_bytes, page_bytes);
}

rebatch_status rbi_pool_check_sizes(const rebatch_pool_options *options, rebatch_device *device)
{
    rebatch_status status = check_limit(options->limit_bytes, rbi_device_page_bytes(device));
    if (status || options->headroom_bytes == 0)
        return status;
    rebatch_memory_info info;
    status = rebatch_device_memory(device, &info);
    if (status)
        return status;
    if (options->headroom_bytes > info.total_bytes)
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.headroom_bytes is %zu: expected at most the %zu "
                         "bytes of device %s",
                         options->headroom_bytes, info.total_bytes, device->name);
    return REBATCH_OK;
}
