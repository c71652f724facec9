/* A program that looks functions up, and prints in which library each was found.
 * Must not know what stands between it and the driver. It has libouter.so and libinner.so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "ways.h"

const char *cuda_outer(void);
const char *cudnnCreate(void);

static void say(const char *what, const void *found)
{
    Dl_info info;
    const char *file = "nowhere";
    if (found && dladdr(found, &info) && info.dli_fname)
        file = strrchr(info.dli_fname, '/') ? strrchr(info.dli_fname, '/') + 1 : info.dli_fname;
    printf("%s: %s\n", what, file);
}

static void look_up(void *handle, const char *symbol, const char *what)
{
    char text[128];
    (void)dlerror();
    void *const found = dlsym(handle, symbol);
    const char *const error = dlerror();
    (void)snprintf(text, sizeof text, "%s %s%s", what, symbol, error ? " has an error" : "");
    say(text, found);
}

static void ask(get_address *function, const char *name, int version, unsigned long long flags)
{
    char text[128];
    void *found = NULL;
    int status = -1;
    const int code = function(name, &found, version, flags, &status);
    (void)snprintf(text, sizeof text, "%s %d %llu = %d, %d", name, version, flags, code, status);
    say(text, found);
}

static void ask_all(void *driver)
{
    get_address *function;
    void *const found = dlsym(driver, "cuGetProcAddress_v2");
    memcpy(&function, &found, sizeof function);
    ask(function, "cuMemAlloc", 13000, 0);
    ask(function, "cuMemAlloc", 3020, 1);
    ask(function, "cuMemAlloc", 2000, 0);
    ask(function, "cuMemAllocAsync", 13000, 2);
    ask(function, "cuMemAllocAsync", 11010, 0);
    ask(function, "cuMemGetInfo", 13999, 0);
    ask(function, "cuMemGetInfo", 14000, 0);
    ask(function, "cuDriverGetVersion", 13000, 0);
    ask(function, "cuGetProcAddress", 12000, 0);
    ask(function, "cuNone", 13000, 0);
}

int main(void)
{
    void *const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    void *const inner = dlopen("libinner.so", RTLD_NOW);
    if (!driver || !inner)
        return 9;
    look_up(driver, "cuMemAlloc_v2", "driver");
    look_up(driver, "cuMemAllocManaged", "driver");
    look_up(driver, "cuNone", "driver");
    look_up(inner, "cuMemAlloc_v2", "inner");
    look_up(inner, "cudnnCreate", "inner");
    look_up(RTLD_DEFAULT, "cuMemAlloc_v2", "default");
    look_up(RTLD_DEFAULT, "cudnnCreate", "default");
    look_up(RTLD_NEXT, "cudnnCreate", "next");
    look_up(RTLD_NEXT, "dlsym", "next");
    printf("cudnnCreate calls %s\n", cudnnCreate());
    printf("cuda_outer calls %s\n", cuda_outer());
    ask_all(driver);
    return 0;
}
