/* A program that looks functions up, and prints in which library each was found.
 * Must not know what stands between it and the driver. It has libouter.so and libinner.so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "ways.h"

const char *cuda_outer(void);
const char *cudnnCreate(void);
const void *outer_next(const char *symbol);

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

/* The driver's own questions about itself. */
static void look_up_within(void *driver)
{
    const void *(*find)(const char *symbol);
    void *const found = dlsym(driver, "driver_find");
    memcpy(&find, &found, sizeof find);
    say("driver itself cuMemAlloc_v2", find("cuMemAlloc_v2"));
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

/* A process may use streams of threads and of the process at once. */
static void use_both_streams(void *driver)
{
    get_address *ask_driver;
    int (*alloc)(pointer * out, size_t bytes, const void *stream);
    pointer memory;
    void *found = dlsym(driver, "cuGetProcAddress_v2");
    memcpy(&ask_driver, &found, sizeof found);
    for (unsigned long long flags = 0; flags <= 2; flags++) {
        (void)ask_driver("cuMemAllocAsync", &found, 13000, flags, NULL);
        memcpy(&alloc, &found, sizeof found);
        (void)alloc(&memory, 512 << flags, NULL);
    }
}

/* The first form of the functions has 32-bit pointers and sizes. */
static void use_first_form(void *driver)
{
    get_address *ask_driver;
    int (*alloc)(unsigned *out, unsigned bytes);
    int (*release)(unsigned memory);
    int (*info)(unsigned *free_bytes, unsigned *total_bytes);
    unsigned memory[2] = {7, 7}, more[2] = {7, 7}, room[3] = {7, 7, 7};
    void *found = dlsym(driver, "cuGetProcAddress_v2");
    memcpy(&ask_driver, &found, sizeof found);
    (void)ask_driver("cuMemAlloc", &found, 2000, 0, NULL);
    memcpy(&alloc, &found, sizeof found);
    (void)ask_driver("cuMemFree", &found, 2000, 0, NULL);
    memcpy(&release, &found, sizeof found);
    (void)ask_driver("cuMemGetInfo", &found, 2000, 0, NULL);
    memcpy(&info, &found, sizeof found);
    int code = alloc(memory, 1000);
    printf("first form: %d, %#x %u\n", code, memory[0], memory[1]);
    code = alloc(more, 2000000);
    printf("first form: %d, %u %u\n", code, more[0], more[1]);
    code = info(&room[0], &room[1]);
    printf("first form: %d, %u of %u %u\n", code, room[0], room[1], room[2]);
    code = release(memory[0]);
    printf("first form: %d", code);
    (void)info(&room[0], &room[1]);
    printf(", %u of %u\n", room[0], room[1]);
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
    say("next of outer cuMemAlloc_v2", outer_next("cuMemAlloc_v2"));
    say("next of outer cudnnCreate", outer_next("cudnnCreate"));
    look_up_within(driver);
    printf("cudnnCreate calls %s\n", cudnnCreate());
    printf("cuda_outer calls %s\n", cuda_outer());
    ask_all(driver);
    use_first_form(driver);
    use_both_streams(driver);
    return 0;
}
