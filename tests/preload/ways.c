/* Owns the ways in which programs find the driver's functions.
 * Must not know what is asked of them. */
#define _GNU_SOURCE
#include "ways.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static int refuse(const char *what)
{
    printf("no %s\n", what);
    return 0;
}

static int find_by_symbol(struct api *api, void *handle)
{
    void *found;
#define FIND(member, name, symbol, arguments)                                                      \
    found = dlsym(handle, symbol);                                                                 \
    if (!found)                                                                                    \
        return refuse(symbol);                                                                     \
    memcpy(&api->member, &found, sizeof found);
    API(FIND)
#undef FIND
    return 1;
}

static int find_by_asking(struct api *api, void *driver, int per_thread)
{
    get_address *ask;
    int status = -1;
    void *found = dlsym(driver, "cuGetProcAddress_v2");
    memcpy(&ask, &found, sizeof found);
    /* The runtime asks the first one for itself. */
    if (!found || ask("cuGetProcAddress", &found, 12000, 0, &status) || status)
        return refuse("cuGetProcAddress_v2");
    memcpy(&ask, &found, sizeof found);
#define FIND(member, name, symbol, arguments)                                                      \
    status = -1;                                                                                   \
    if (ask(name, &found, 13000, per_thread ? 2 : 0, &status) || status)                           \
        return refuse(name);                                                                       \
    memcpy(&api->member, &found, sizeof found);
    API(FIND)
#undef FIND
    return 1;
}

static int find_by_asking_first(struct api *api, void *driver)
{
    int (*ask)(const char *name, void **out, int version, unsigned long long flags);
    void *found = dlsym(driver, "cuGetProcAddress");
    memcpy(&ask, &found, sizeof found);
#define FIND(member, name, symbol, arguments)                                                      \
    if (ask(name, &found, 11030, 0))                                                               \
        return refuse(name);                                                                       \
    memcpy(&api->member, &found, sizeof found);
    API(FIND)
#undef FIND
    return 1;
}

int find_api(struct api *api, const char *way)
{
    const int is_global = strcmp(way, "global") == 0;
    void *const driver = dlopen("libcuda.so.1", RTLD_NOW | (is_global ? RTLD_GLOBAL : RTLD_LOCAL));
    if (!driver)
        return refuse("libcuda.so.1");
    if (strcmp(way, "asked") == 0 || strcmp(way, "asked-thread") == 0)
        return find_by_asking(api, driver, strcmp(way, "asked-thread") == 0);
    if (strcmp(way, "asked-old") == 0)
        return find_by_asking_first(api, driver);
    if (is_global)
        return find_by_symbol(api, RTLD_DEFAULT);
    return strcmp(way, "symbol") == 0 ? find_by_symbol(api, driver) : refuse(way);
}
