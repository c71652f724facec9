/* A library that hands its calls on as cuDNN 9 does, to functions of the same names.
 * Must not know who calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

typedef const char *function(void);

const char *cudnnCreate(void);
const char *cudnnCreate(void)
{
    function *inner = NULL;
    void *const library = dlopen("libinner.so", RTLD_NOW | RTLD_LOCAL);
    void *const found = library ? dlsym(library, "cudnnCreate") : NULL;
    memcpy(&inner, &found, sizeof inner);
    return inner ? inner() : "nothing";
}

/* What follows this library's own. The call must come back here, or it would be the caller's. */
const void *outer_next(const char *symbol);
const void *outer_next(const char *symbol)
{
    const void *volatile found = dlsym(RTLD_NEXT, symbol);
    return found;
}

int cuMemAlloc_v2(unsigned long long *out, unsigned long bytes);
int cuMemAlloc_v2(unsigned long long *out, unsigned long bytes)
{
    *out = bytes;
    return 1;
}

const char *cuda_outer(void);
const char *cuda_outer(void)
{
    function *next = NULL;
    void *const found = dlsym(RTLD_NEXT, "cuda_outer");
    memcpy(&next, &found, sizeof next);
    return next ? next() : "nothing";
}
