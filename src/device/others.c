/* Owns the limits that other programs set for a GPU in the environment: MPS, and HAMi.
 * Must not know who keeps to them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "rebatch/cuda.h"

#define OF_MPS "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
#define OF_HAMI "CUDA_DEVICE_MEMORY_LIMIT"

/* "2G", "512MB", "3000m": their units are powers of 1024, and a plain number is bytes. Returns what
 * follows it; NULL: it is no size. */
static const char *read_size(size_t *bytes, const char *text)
{
    static const char units[] = "kmgt";
    char *end = NULL;
    if (*text < '0' || *text > '9')
        return NULL;
    const unsigned long long number = strtoull(text, &end, 10);
    const char *const unit = *end ? strchr(units, *end | 0x20) : NULL;
    const unsigned shift = unit ? 10 * (unsigned)(unit - units + 1) : 0;
    end += unit ? 1 : 0;
    end += (*end | 0x20) == 'b' ? 1 : 0;
    if (number > SIZE_MAX >> shift)
        return NULL;
    *bytes = (size_t)number << shift;
    return end;
}

static rebatch_status refuse(const char *variable, const char *text, const char *example)
{
    char shown[96] = "";
    struct rbi_text t = {shown, sizeof shown, 0};
    rbi_text_add_shown(&t, text, strlen(text), 64);
    return rbi_error(REBATCH_E_PARSE,
                     "%s is \"%s\": expected a size such as %s, so it is no limit here", variable,
                     shown, example);
}

/* The smallest holds; 0 is none. */
static void lower(struct rbi_others_limit *out, size_t bytes, const char *variable)
{
    if (bytes == 0 || bytes >= out->bytes)
        return;
    out->bytes = bytes;
    (void)snprintf(out->variable, sizeof out->variable, "%s", variable);
}

/* "0=2G,1=512M": the GPUs as the process counts them. */
static rebatch_status read_mps(struct rbi_others_limit *out, int ordinal)
{
    const char *const text = getenv(OF_MPS);
    for (const char *at = text; at && *at;) {
        char *equals = NULL;
        size_t bytes = 0;
        const long gpu = strtol(at, &equals, 10);
        const char *const end =
            equals != at && *equals == '=' ? read_size(&bytes, equals + 1) : NULL;
        if (!end || (*end && *end != ','))
            return refuse(OF_MPS, text, "0=2G,1=512M");
        if (gpu == ordinal)
            lower(out, bytes, OF_MPS);
        at = *end ? end + 1 : end;
    }
    return REBATCH_OK;
}

/* The variable of a GPU takes the place of the one for all. */
static rebatch_status read_hami(struct rbi_others_limit *out, int ordinal)
{
    char own[sizeof out->variable];
    size_t bytes = 0;
    (void)snprintf(own, sizeof own, OF_HAMI "_%d", ordinal);
    const char *const variable = getenv(own) ? own : OF_HAMI;
    const char *const text = getenv(variable);
    if (!text || !*text)
        return REBATCH_OK;
    const char *const end = read_size(&bytes, text);
    if (!end || *end)
        return refuse(variable, text, "4g");
    lower(out, bytes, variable);
    return REBATCH_OK;
}

rebatch_status rbi_others_limit_read(struct rbi_others_limit *out, int ordinal)
{
    *out = (struct rbi_others_limit){.bytes = SIZE_MAX};
    const rebatch_status of_mps = read_mps(out, ordinal), of_hami = read_hami(out, ordinal);
    return of_mps ? of_mps : of_hami;
}

rebatch_status rebatch_cuda_limit(size_t *bytes, char *variable, size_t size, int ordinal)
{
    struct rbi_others_limit limit;
    if (bytes)
        *bytes = 0;
    if (size > 0 && variable)
        variable[0] = '\0';
    if (!bytes || (size > 0 && !variable))
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", bytes ? "variable" : "bytes");
    const rebatch_status status = rbi_others_limit_read(&limit, ordinal);
    *bytes = limit.bytes == SIZE_MAX ? 0 : limit.bytes;
    if (size > 0)
        (void)snprintf(variable, size, "%s", limit.variable);
    return status;
}
