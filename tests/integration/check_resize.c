/* Owns the tests of checks of a step with buffers that resize makes.
 * Must not know more of the library than its public headers say. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check_common.h"
#include "rig.h"

#define BATCH 24
#define BUFFERS 3

struct trainer {
    struct check_run run;
    rebatch_device *device;
    bool forgets; /* a buffer that an OOM has left out */
    bool has_resized;
    double *buffers[BUFFERS];
    double gradient;
};

static rebatch_status resize(size_t count, void *user)
{
    struct trainer *t = user;
    for (size_t i = 0; i < BUFFERS; i++) {
        const bool is_last = i == BUFFERS - 1;
        if (t->forgets && is_last && t->has_resized && !t->buffers[i])
            continue;
        t->buffers[i] = NULL;
        void *memory;
        const rebatch_status status =
            rebatch_pool_alloc(&memory, rebatch_get_pool(t->run.rb), count << 12, NULL, 0);
        if (status)
            return status;
        t->buffers[i] = memory;
    }
    t->has_resized = true;
    return REBATCH_OK;
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    t->gradient = 0;
    return REBATCH_OK;
}

/* One allocation. */
static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, mb->pool, mb->count << 10, mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(t->run.rb);
    for (size_t i = 0; i < mb->count; i++)
        for (size_t k = 0; k < BUFFERS; k++)
            if (t->buffers[k]) {
                t->buffers[k][i << 9] = (double)check_input(mb->first + i, k);
                t->gradient += t->buffers[k][i << 9] / (double)mb->batch;
            }
    return rebatch_pool_free(mb->pool, memory);
}

static rebatch_status check(rebatch_check_report *report, bool forgets)
{
    static struct trainer t;
    rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    ops.resize = resize;
    t = (struct trainer){.forgets = forgets};
    open_on_host(&t.device, &t.run.rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
    OK(rebatch_watch(t.run.rb, "gradient", &t.gradient, sizeof t.gradient, REBATCH_GUARD_HOST,
                     REBATCH_F64));
    const rebatch_status status = rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, report);
    rebatch_close(t.run.rb);
    rebatch_device_close(t.device);
    return status;
}

Test(check_resize, each_allocation_of_resize_fails_once)
{
    rebatch_check_report report;
    cr_expect_eq(check(&report, false), REBATCH_OK, "%s", check_texts(&report));
    cr_expect_eq(report.allocations, BUFFERS + 1);
    cr_expect_eq(report.ooms, report.allocations, "%s", check_texts(&report));
    cr_expect_eq(check(&report, true), REBATCH_E_STATE, "%s", check_texts(&report));
    const rebatch_finding *const found = check_find(&report, REBATCH_FINDING_AFTER_OOM, "gradient");
    cr_expect(found && strstr(found->text, "after allocation 3 (96.0 KiB) of resize failed"), "%s",
              check_texts(&report));
}

/* ---- host memory that resize changes too ---- */

#define LAYERS 3

/* What resize does with the host memory of its layers: realloc() gives another address, of which
 * the one before is gone. */
enum host {
    STORES_EACH,            /* at once: right */
    ASKS_FIRST,             /* all requests, then host memory: right */
    WORKS_ON_COPIES,        /* as darknet's resize_network */
    WORKS_ON_A_COPY_OF_ALL, /* of the layers, which it stores at its end */
    LAST_LAYER_IS_A_COPY,   /* the others are right */
    COPY_GROWS_AND_STAYS,   /* it moves where it is too small */
    COUNTS_BEFORE_IT_ASKS,  /* how many it has made, which it never sets back */
};

struct layer {
    unsigned host; /* the address, as a number */
    double *device;
};

struct network {
    struct check_run run;
    rebatch_device *device;
    enum host host;
    struct layer layers[LAYERS];
    unsigned valid[LAYERS], addresses;
    size_t room[LAYERS]; /* of the host memory */
    unsigned made;
    bool is_broken; /* an address that is gone was used */
    double gradient;
};

static unsigned move(struct network *n, size_t i, unsigned old, size_t count)
{
    n->is_broken |= old != n->valid[i];
    const bool stays = n->host == COPY_GROWS_AND_STAYS ? count <= n->room[i] : count == n->room[i];
    if (stays)
        return n->valid[i];
    n->room[i] = count;
    return n->valid[i] = ++n->addresses;
}

static rebatch_status make_layer(struct network *n, struct layer *layer, size_t count)
{
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, rebatch_get_pool(n->run.rb), count << 12, NULL, 0);
    if (!status)
        layer->device = memory;
    return status;
}

static rebatch_status resize_layer(struct network *n, size_t i, size_t count, struct layer *layers)
{
    const bool is_copy = n->host == WORKS_ON_COPIES || n->host == COPY_GROWS_AND_STAYS ||
                         (n->host == LAST_LAYER_IS_A_COPY && i == LAYERS - 1);
    struct layer copy = layers[i];
    struct layer *const layer = is_copy ? &copy : &layers[i];
    n->made += n->host == COUNTS_BEFORE_IT_ASKS;
    if (n->host != ASKS_FIRST)
        layer->host = move(n, i, layer->host, count);
    const rebatch_status status = make_layer(n, layer, count);
    if (!status)
        layers[i] = *layer;
    n->made -= n->host == COUNTS_BEFORE_IT_ASKS && !status;
    return status;
}

static rebatch_status resize_network(size_t count, void *user)
{
    struct network *n = user;
    struct layer all[LAYERS];
    struct layer *const layers = n->host == WORKS_ON_A_COPY_OF_ALL ? all : n->layers;
    memcpy(all, n->layers, sizeof all);
    for (size_t i = 0; i < LAYERS; i++) {
        const rebatch_status status = resize_layer(n, i, count, layers);
        if (status)
            return status;
    }
    for (size_t i = 0; i < LAYERS && n->host == ASKS_FIRST; i++)
        n->layers[i].host = move(n, i, n->layers[i].host, count);
    if (layers == all)
        memcpy(n->layers, all, sizeof all);
    return REBATCH_OK;
}

static rebatch_status clear_network(void *user)
{
    struct network *n = user;
    n->gradient = 0;
    return REBATCH_OK;
}

static rebatch_status train_network(const rebatch_microbatch *mb, void *user)
{
    struct network *n = user;
    rebatch_mutating(n->run.rb);
    for (size_t i = 0; i < mb->count; i++)
        n->gradient += (double)(check_input(mb->first + i, 0) + (float)n->made) / (double)mb->batch;
    n->gradient += n->is_broken ? 1 : 0;
    return REBATCH_OK;
}

Test(check_resize, host_memory_that_a_failed_resize_loses_is_found)
{
    for (enum host host = STORES_EACH; host <= COUNTS_BEFORE_IT_ASKS; host++) {
        static struct network n;
        rebatch_check_report report;
        rebatch_step_ops ops = check_step_ops(clear_network, train_network);
        ops.resize = resize_network;
        n = (struct network){.host = host};
        open_on_host(&n.device, &n.run.rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
        OK(rebatch_watch(n.run.rb, "gradient", &n.gradient, sizeof n.gradient, REBATCH_GUARD_HOST,
                         REBATCH_F64));
        const bool is_right = host == STORES_EACH || host == ASKS_FIRST;
        cr_expect_eq(rebatch_check(n.run.rb, &ops, BATCH, &n, NULL, &report),
                     is_right ? REBATCH_OK : REBATCH_E_STATE, "%d: %s", (int)host,
                     check_texts(&report));
        const rebatch_finding *const found =
            check_find(&report, REBATCH_FINDING_AFTER_OOM, "gradient");
        cr_expect_eq(found != NULL, !is_right, "%d: %s", (int)host, check_texts(&report));
        cr_expect_eq(report.mistakes, !is_right, "%d: %s", (int)host, check_texts(&report));
        cr_expect(!found || strstr(found->text, host == LAST_LAYER_IS_A_COPY
                                                    ? "allocation 3 (96.0 KiB) of resize failed"
                                                    : "allocation 1 (96.0 KiB) of resize failed"),
                  "%d: %s", (int)host, check_texts(&report));
        rebatch_close(n.run.rb);
        rebatch_device_close(n.device);
    }
}

/* ---- a resize that ends the program ---- */

/* As glibc does where it finds that an address was freed. */
static rebatch_status resize_or_abort(size_t count, void *user)
{
    const struct network *n = user;
    const rebatch_status status = resize_network(count, user);
    if (n->is_broken)
        abort();
    return status;
}

static void check_and_abort(void *user)
{
    static struct network n = {.host = WORKS_ON_COPIES};
    rebatch_step_ops ops = check_step_ops(clear_network, train_network);
    (void)user;
    (void)signal(SIGABRT, SIG_DFL); /* the test's own handler */
    ops.resize = resize_or_abort;
    open_on_host(&n.device, &n.run.rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
    OK(rebatch_watch(n.run.rb, "gradient", &n.gradient, sizeof n.gradient, REBATCH_GUARD_HOST,
                     REBATCH_F64));
    (void)!rebatch_check(n.run.rb, &ops, BATCH, &n, NULL, NULL);
}

Test(check_resize, where_it_ends_the_program_the_request_is_named)
{
    char text[4096];
    const int status = output_of(check_and_abort, NULL, STDERR_FILENO, text, sizeof text);
    cr_expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "%d: %s", status, text);
    HAS(text, "the program ended by signal 6 (Aborted) in resize, after allocation 1 (96.0 KiB) of "
              "resize had failed on purpose in an earlier run");
}
