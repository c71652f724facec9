/* Owns the search for a function by its name, and the texts of errors.
 * Must not know what a function does. */
#include <dlfcn.h>
#include <stdio.h>

#include <initializer_list>

#include "standin.h"

namespace standin
{
namespace
{

const struct {
    int error;
    const char *name, *text;
} errors[] = {
    {OK, "cudaSuccess", "no error"},
    {INVALID, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {BAD_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
};

CUresult answer_not_supported(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

} // namespace

const char *name_of(int error)
{
    for (const auto &e : errors)
        if (e.error == error)
            return e.name;
    return "cudaErrorUnknown";
}

const char *text_of(int error)
{
    for (const auto &e : errors)
        if (e.error == error)
            return e.text;
    return "unknown error";
}

void *find_function(const char *name)
{
    /* The stand-in has the newest version of a function alone. */
    for (const char *version : {"", "_v2", "_v3"}) {
        char full[256];
        snprintf(full, sizeof full, "%s%s", name, version);
        void *found = dlsym(RTLD_DEFAULT, full);
        if (found)
            return found;
    }
    return nullptr;
}

void *unsupported_function(void)
{
    return (void *)answer_not_supported;
}

} // namespace standin
