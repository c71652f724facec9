/* A library for LD_PRELOAD that takes dlsym() too, and says at the end how often it was called.
 * Must not know who calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void *find(void *handle, const char *symbol);

static int calls;

void *dlsym(void *handle, const char *symbol);
void *dlsym(void *handle, const char *symbol)
{
    find *real;
    void *const found = dlvsym(RTLD_NEXT, "dlsym", VERSION);
    memcpy(&real, &found, sizeof real);
    calls++;
    return real(handle, symbol);
}

__attribute__((destructor)) static void end(void)
{
    (void)fprintf(stderr, "hook: %s\n", calls ? "called" : "not called");
}
