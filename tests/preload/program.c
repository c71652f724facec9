/* A program that allocates, frees and asks as its arguments say, and prints each answer.
 * Must not know what stands between it and the driver.
 *
 * program WAY ACTION...: WAY is one of ways.h, or "deep" for a library that is loaded with
 * RTLD_DEEPBIND and finds them as CUDA's runtime does. An action is a letter and a number:
 *   aN pN sN tN mN cN  allocates N bytes: plain, pitched, on stream 80, from a pool, on stream 99
 *                      that is captured, physical
 *   zN                 allocates N bytes on the default stream
 *   fN gN hN nN rN     frees the N-th allocation, from 1: plain, on stream 80, on stream 81, on
 *                      stream 99, physical
 *   i0 x0 k0           asks what there is; ends without exit(); is killed
 *   dN                 makes device N current
 *   yN                 allocates N bytes in a child process, which ends by itself
 *   w0                 four threads allocate and free at once
 * With a session (SESSION) also:
 *   AN FN              the same as aN and fN by rebatch_alloc() and rebatch_free()
 *   oN                 runs a step of 4 samples, each of which allocates N bytes, plain */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ways.h"

#define UNTOUCHED 0x1234u

#ifdef LINKED
int cuMemAlloc_v2(pointer *out, size_t bytes);
int cuMemAllocPitch_v2(pointer *out, size_t *pitch, size_t width, size_t height, unsigned element);
int cuMemAllocAsync(pointer *out, size_t bytes, const void *stream);
int cuMemAllocFromPoolAsync(pointer *out, size_t bytes, const void *pool, const void *stream);
int cuMemCreate(pointer *out, size_t bytes, const void *kind, unsigned long long flags);
int cuMemRelease(pointer handle);
int cuMemFree_v2(pointer memory);
int cuMemFreeAsync(pointer memory, const void *stream);
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes);

static int find(struct api *api, const char *way)
{
    (void)way;
    *api = (struct api){
        cuMemAlloc_v2, cuMemAllocPitch_v2, cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemCreate,
        cuMemRelease,  cuMemFree_v2,       cuMemFreeAsync,  cuMemGetInfo_v2};
    return 1;
}
#else
static int find(struct api *api, const char *way)
{
    int (*find_there)(struct api *, const char *);
    if (strcmp(way, "deep") != 0)
        return find_api(api, way);
    void *const library = dlopen("libdeep.so", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    void *const found = library ? dlsym(library, "find_api") : NULL;
    memcpy(&find_there, &found, sizeof found);
    return found ? find_there(api, "asked") : 0;
}
#endif

static struct {
    struct api api;
    pointer held[4096];
    size_t count;
    int device;
} program;

static void allocate(char action, size_t bytes)
{
    static const struct {
        int type, handle_types, location, id;
        void *rest[2];
    } kinds[] = {{.type = 1, .location = 1}, {.type = 1, .location = 1, .id = 1}};
    const struct api *const api = &program.api;
    const void *const kind = &kinds[program.device];
    pointer out = UNTOUCHED;
    size_t pitch = UNTOUCHED;
    const int code = action == 'a'   ? api->alloc(&out, bytes)
                     : action == 'p' ? api->pitch(&out, &pitch, 100, bytes / 512, 4)
                     : action == 's' ? api->alloc_on(&out, bytes, (void *)80)
                     : action == 'm' ? api->alloc_on(&out, bytes, (void *)99)
                     : action == 'z' ? api->alloc_on(&out, bytes, NULL)
                     : action == 't' ? api->alloc_from(&out, bytes, kind, (void *)80)
                                     : api->create(&out, bytes, kind, 0);
    program.held[program.count++] = code ? 0 : out;
    printf("%c%zu = %d", action, bytes, code);
    if (code)
        printf(out == UNTOUCHED && pitch == UNTOUCHED ? " untouched\n" : " changed\n");
    else
        printf(" %#llx\n", out);
}

static void release(char action, size_t which)
{
    const struct api *const api = &program.api;
    const pointer memory = program.held[which - 1];
    const int code = action == 'f'   ? api->free(memory)
                     : action == 'g' ? api->free_on(memory, (void *)80)
                     : action == 'h' ? api->free_on(memory, (void *)81)
                     : action == 'n' ? api->free_on(memory, (void *)99)
                                     : api->release(memory);
    printf("%c%zu = %d\n", action, which, code);
}

static void set_device(int device)
{
    int (*set)(int);
    void *const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *const found = dlsym(driver, "driver_set_device");
    memcpy(&set, &found, sizeof set);
    (void)set(device);
    program.device = device;
}

static void allocate_in_child(size_t bytes)
{
    (void)fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        allocate('a', bytes);
        exit(0);
    }
    (void)waitpid(child, NULL, 0);
}

/* ---- threads ---- */

static void *run_thread(void *user)
{
    const struct api *const api = &program.api;
    pointer held[8] = {0};
    size_t free_bytes, total_bytes;
    for (unsigned i = 0; i < 400; i++) {
        pointer *const slot = &held[i * 7 % 8];
        const int code = !*slot ? api->alloc(slot, 512 + 64 * i) : 0;
        if (*slot && i % 3 == 0 && api->free(*slot))
            *(int *)user = 1;
        if (i % 3 == 0)
            *slot = 0;
        if ((code && code != 2) || api->info(&free_bytes, &total_bytes) || free_bytes > total_bytes)
            *(int *)user = 1;
    }
    for (unsigned i = 0; i < 8; i++)
        if (held[i] && api->free(held[i]))
            *(int *)user = 1;
    return NULL;
}

static void run_threads(void)
{
    pthread_t threads[4];
    int wrong[4] = {0};
    for (int i = 0; i < 4; i++)
        (void)pthread_create(&threads[i], NULL, run_thread, &wrong[i]);
    for (int i = 0; i < 4; i++)
        (void)pthread_join(threads[i], NULL);
    printf("threads: %d wrong\n", wrong[0] + wrong[1] + wrong[2] + wrong[3]);
}

/* ---- a session ---- */

#ifdef SESSION
#include "rebatch/rebatch.h"

static rebatch *rb;

static int open_session(void)
{
    rebatch_device *device;
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    if (rebatch_device_open_cuda(&device, &options) || rebatch_open(&rb, device, NULL) ||
        rebatch_set_current(rb)) {
        printf("no session: %s\n", rebatch_last_error());
        return 0;
    }
    return 1;
}

static size_t sample_bytes;

static rebatch_status zero_grad(void *user)
{
    (void)user;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    (void)user;
    for (size_t i = 0; i < mb->count; i++) {
        pointer memory;
        if (program.api.alloc(&memory, sample_bytes))
            return REBATCH_OOM;
    }
    rebatch_mutating(rb);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    (void)user;
    rebatch_mutating(rb);
    return REBATCH_OK;
}

static void run_step(size_t bytes)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION};
    rebatch_step_report report;
    sample_bytes = bytes;
    const rebatch_status status = rebatch_step(rb, &ops, 4, NULL, &report);
    printf("o%zu = %d, micro-batch %zu, %u out of memory\n", bytes, (int)status, report.micro_after,
           (unsigned)report.ooms);
}

static int act_in_session(char action, size_t number)
{
    void *memory = NULL;
    if (action == 'A') {
        const rebatch_status status = rebatch_alloc(&memory, rb, number);
        program.held[program.count++] = (uintptr_t)memory;
        printf("A%zu = %d\n", number, (int)status);
    } else if (action == 'F') {
        printf("F%zu = %d\n", number,
               (int)rebatch_free(rb, (void *)(uintptr_t)program.held[number - 1]));
    } else if (action == 'o') {
        run_step(number);
    } else {
        return 0;
    }
    return 1;
}
#else
static int open_session(void)
{
    return 1;
}

static int act_in_session(char action, size_t number)
{
    (void)action;
    (void)number;
    return 0;
}
#endif

static void act(const char *action)
{
    const size_t number = strtoull(action + 1, NULL, 10);
    size_t free_bytes = 0, total_bytes = 0;
    if (act_in_session(action[0], number)) {
        return;
    } else if (strchr("apstmcz", action[0])) {
        allocate(action[0], number);
    } else if (strchr("fghnr", action[0])) {
        release(action[0], number);
    } else if (action[0] == 'd') {
        set_device((int)number);
    } else if (action[0] == 'y') {
        allocate_in_child(number);
    } else if (action[0] == 'w') {
        run_threads();
    } else if (action[0] == 'i') {
        const int code = program.api.info(&free_bytes, &total_bytes);
        printf("info = %d, %zu of %zu\n", code, free_bytes, total_bytes);
    } else {
        (void)fflush(stdout);
        if (action[0] == 'k')
            (void)raise(SIGKILL);
        _exit(0);
    }
}

int main(int count, char **arguments)
{
    if (count < 2 || !open_session() || !find(&program.api, arguments[1]))
        return 9;
    for (int i = 2; i < count; i++)
        act(arguments[i]);
    return 0;
}
