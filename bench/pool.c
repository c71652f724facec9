/* What the pool costs and how tightly it packs, beside glibc's malloc and mimalloc on the same
 * calls. Prints a table and writes build/bench/pool.json. Public headers only: it measures any
 * pool.
 *
 * What is measured: bookkeeping. Nobody touches the blocks, as nobody does on the host when they
 * are a GPU's. The pool runs on a dry device and touches none of them either. The other two keep
 * headers next to the blocks, and by default give large blocks back to the kernel at once, which
 * then has to fetch and clear pages again, thousands of nanoseconds each: the patterns ask for
 * nothing of the kind, so it would not be fair to count it. Hence both are told to keep what they
 * have, glibc's pages are fetched beforehand, each contender runs the same calls once before the
 * clock starts, and the faults that are still left are shown beside the figures. */
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc_patterns.h"
#include "rebatch/cuda.h"
#include "rebatch/pool.h"
#include "rebatch/version.h"

#define RUNS 9
#define CONTENDERS_MOST 4
#define JSON_PATH "build/bench/pool.json"

static void fail(const char *what)
{
    fprintf(stderr, "bench-pool: %s: %s\n", what, rebatch_last_error());
    exit(1);
}

static void check(rebatch_status status, const char *what)
{
    if (status)
        fail(what);
}

/* ---- figures ---- */

struct figure {
    char name[40];
    double value;
    const char *unit;
};

static struct figure figures[64];
static size_t figure_count;

static void add_figure(const char *contender, const char *name, double value, const char *unit)
{
    struct figure *figure = &figures[figure_count++];
    snprintf(figure->name, sizeof figure->name, "%s.%s", contender, name);
    figure->value = value;
    figure->unit = unit;
}

/* Samples of one measurement. */
struct samples {
    double values[RUNS];
    long faults; /* of pages, in all runs together */
};

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints a row and keeps its median. */
static void report(const char *contender, const char *name, struct samples *s, const char *unit)
{
    qsort(s->values, RUNS, sizeof *s->values, by_value);
    add_figure(contender, name, s->values[RUNS / 2], unit);
    printf("  %-26s %10.4g %10.4g %10.4g  %-10s %10ld\n", figures[figure_count - 1].name,
           s->values[0], s->values[RUNS / 2], s->values[RUNS - 1], unit, s->faults);
}

/* Prints a row of a figure that no clock is in. */
static void report_exact(const char *name, double value, const char *unit)
{
    add_figure("pool", name, value, unit);
    printf("  %-26s %10s %10.4f %10s  %s\n", figures[figure_count - 1].name, "", value, "", unit);
}

static long page_faults(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
}

/* ---- contenders ---- */

struct contender {
    const char *name;
    pat_alloc take;
    pat_free give;
    void *user;
};

static rebatch_device *open_dry(size_t capacity_bytes)
{
    rebatch_device *device;
    check(rebatch_device_open_dry(&device, capacity_bytes, 0), "opening a dry device");
    return device;
}

static rebatch_pool *make_pool(rebatch_device *device)
{
    rebatch_pool *pool;
    check(rebatch_pool_create(&pool, device, NULL), "making a pool");
    return pool;
}

static void *pool_take(size_t bytes, void *user)
{
    void *block;
    return rebatch_pool_alloc(&block, user, bytes, NULL, 0) ? NULL : block;
}

static void pool_give(void *block, size_t bytes, void *user)
{
    (void)bytes;
    (void)rebatch_pool_free(user, block);
}

static void *glibc_take(size_t bytes, void *user)
{
    (void)user;
    return malloc(bytes);
}

static void glibc_give(void *block, size_t bytes, void *user)
{
    (void)bytes;
    (void)user;
    free(block);
}

/* Fetches the pages of all that the patterns will have in use at once, so that no header lands on a
 * new one; not on a small machine. */
static void fetch_pages(void)
{
    const size_t bytes = (size_t)3 << 29;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t available = (size_t)sysconf(_SC_AVPHYS_PAGES) * page;
    volatile char *memory = available > 2 * bytes ? malloc(bytes) : NULL;
    for (size_t at = 0; memory && at < bytes; at += page)
        memory[at] = 0;
    free((void *)(uintptr_t)memory);
}

static void prepare_glibc(void)
{
    (void)mallopt(M_MMAP_MAX, 0);        /* no mapping of its own for a large block */
    (void)mallopt(M_TRIM_THRESHOLD, -1); /* nothing goes back to the kernel */
    fetch_pages();
}

static void *(*mi_malloc)(size_t bytes);
static void (*mi_free)(void *block);

static void *mimalloc_take(size_t bytes, void *user)
{
    (void)user;
    return mi_malloc(bytes);
}

static void mimalloc_give(void *block, size_t bytes, void *user)
{
    (void)bytes;
    (void)user;
    mi_free(block);
}

/* False when no mimalloc is installed. What the user has set in the environment stays. */
static bool find_mimalloc(void)
{
    static const char *const settings[][2] = {
        {"MIMALLOC_ALLOW_DECOMMIT", "0"}, /* versions 1 and 2.0 */
        {"MIMALLOC_PAGE_RESET", "0"},
        {"MIMALLOC_PURGE_DELAY", "-1"},         /* from 2.1 on */
        {"MIMALLOC_RESERVE_OS_MEMORY", "4GiB"}, /* huge blocks come from there, not from mmap */
    };
    static const char *const names[] = {"libmimalloc.so.3", "libmimalloc.so.2", "libmimalloc.so.1",
                                        "libmimalloc.so"};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        (void)setenv(settings[i][0], settings[i][1], 0);
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return false;
    void *symbol = dlsym(library, "mi_malloc");
    memcpy(&mi_malloc, &symbol, sizeof symbol); /* a data pointer is no function pointer in C */
    symbol = dlsym(library, "mi_free");
    memcpy(&mi_free, &symbol, sizeof symbol);
    return mi_malloc && mi_free;
}

static struct contender contenders[CONTENDERS_MOST] = {
    {"pool", pool_take, pool_give, NULL},
    {"glibc", glibc_take, glibc_give, NULL},
};
static size_t contender_count = 2;

static void add_contender(const char *name, pat_alloc take, pat_free give)
{
    contenders[contender_count++] = (struct contender){name, take, give, NULL};
}

/* ---- times a pair ---- */

struct pattern {
    const char *name;
    const char *unit;
    double (*run)(const struct contender *c);
};

static double run_hot(const struct contender *c)
{
    return pat_hot(c->take, c->give, c->user, 200000);
}

/* Each run makes the calls of the one before: a period of 202,048. */
static double run_random(const struct contender *c)
{
    return pat_random(c->take, c->give, c->user, 100000);
}

/* A run makes more calls than the pool's longest period has, 1,048,512, so none is known to it. */
static double run_random_unrepeated(const struct contender *c)
{
    return pat_random(c->take, c->give, c->user, 600000);
}

static double run_train(const struct contender *c)
{
    return pat_train(c->take, c->give, c->user, 500);
}

/* ---- threads ---- */

enum { THREADS_MOST = 2, THREAD_PAIRS = 500000, THREAD_LIVE = 256, THREAD_PLAN = 1 << 14 };

struct worker {
    const struct contender *contender;
    pthread_barrier_t *start;
    uint64_t seed;
    double began, ended;
    bool failed;
};

/* What a worker does, made before the clock starts: block `slot` is replaced by one of `bytes`. */
struct replacement {
    uint32_t slot, bytes;
};

static bool replace(const struct contender *c, void **blocks, size_t *sizes,
                    const struct replacement *r)
{
    if (blocks[r->slot])
        c->give(blocks[r->slot], sizes[r->slot], c->user);
    sizes[r->slot] = r->bytes;
    blocks[r->slot] = c->take(r->bytes, c->user);
    return blocks[r->slot] != NULL;
}

static void *work(void *user)
{
    struct worker *worker = user;
    const struct contender *c = worker->contender;
    static _Thread_local struct replacement plan[THREAD_PLAN];
    void *blocks[THREAD_LIVE] = {0};
    size_t sizes[THREAD_LIVE] = {0};
    uint64_t state = worker->seed;
    for (size_t i = 0; i < THREAD_PLAN; i++)
        plan[i] = (struct replacement){(uint32_t)(pat_rng(&state) % THREAD_LIVE),
                                       (uint32_t)exp2(9 + 6 * pat_unit(&state))};
    bool ok = true;
    for (size_t i = 0; i < THREAD_PLAN && ok; i++)
        ok = replace(c, blocks, sizes, &plan[i]);
    pthread_barrier_wait(worker->start);
    worker->began = pat_now();
    for (size_t i = 0; i < THREAD_PAIRS && ok; i++)
        ok = replace(c, blocks, sizes, &plan[i % THREAD_PLAN]);
    worker->ended = pat_now();
    for (size_t i = 0; i < THREAD_LIVE; i++)
        if (blocks[i])
            c->give(blocks[i], sizes[i], c->user);
    worker->failed = !ok;
    return NULL;
}

/* Random replacement of blocks of 512 B to 32 KiB in `count` threads: million pairs a second. */
static double run_threads(const struct contender *c, unsigned count)
{
    pthread_barrier_t start;
    pthread_t threads[THREADS_MOST];
    struct worker workers[THREADS_MOST];
    (void)pthread_barrier_init(&start, NULL, count);
    for (unsigned i = 0; i < count; i++) {
        workers[i] = (struct worker){c, &start, 7 + i, 0, 0, false};
        if (pthread_create(&threads[i], NULL, work, &workers[i]) != 0) {
            fputs("bench-pool: no thread to be had\n", stderr);
            exit(1);
        }
    }
    double began = INFINITY, ended = 0;
    bool failed = false;
    for (unsigned i = 0; i < count; i++) {
        (void)pthread_join(threads[i], NULL);
        began = fmin(began, workers[i].began);
        ended = fmax(ended, workers[i].ended);
        failed = failed || workers[i].failed;
    }
    (void)pthread_barrier_destroy(&start);
    return failed ? -1 : count * (double)THREAD_PAIRS / (ended - began) * 1e3;
}

static double run_threads1(const struct contender *c)
{
    return run_threads(c, 1);
}

static double run_threads2(const struct contender *c)
{
    return run_threads(c, 2);
}

static bool has_gpu;

static bool find_gpu(void)
{
    rebatch_device *device;
    if (rebatch_device_open_cuda(&device, NULL) != REBATCH_OK)
        return false;
    rebatch_device_close(device);
    return true;
}

/* Every contender in turn, run after run, so that what the machine does besides hits all alike. */
static void compare(const struct pattern *pattern)
{
    struct samples samples[CONTENDERS_MOST] = {0};
    rebatch_device *device = open_dry(REBATCH_UNLIMITED);
    rebatch_pool *pool = make_pool(device);
    contenders[0].user = pool;
    rebatch_device *gpu = NULL;
    rebatch_pool *gpu_pool = NULL;
    struct contender *on_gpu = &contenders[contender_count - 1];
    if (has_gpu) {
        check(rebatch_device_open_cuda(&gpu, NULL), "opening the GPU");
        on_gpu->user = gpu_pool = make_pool(gpu);
    }
    for (int run = -1; run < RUNS; run++) /* the first one warms */
        for (size_t c = 0; c < contender_count; c++) {
            const long faults = page_faults();
            const double value = pattern->run(&contenders[c]);
            if (value < 0) {
                fprintf(stderr, "bench-pool: %s.%s ran out of memory\n", contenders[c].name,
                        pattern->name);
                exit(1);
            }
            if (run < 0)
                continue;
            samples[c].values[run] = value;
            samples[c].faults += page_faults() - faults;
        }
    for (size_t c = 0; c < contender_count; c++)
        report(contenders[c].name, pattern->name, &samples[c], pattern->unit);
    rebatch_pool_stats stats;
    check(rebatch_pool_get_stats(&stats, pool), "reading the statistics");
    if (strcmp(pattern->name, "train") == 0)
        report_exact("train.utilisation",
                     (double)stats.live_peak_bytes / (double)stats.reserved_peak_bytes,
                     "live/reserved");
    rebatch_pool_destroy(gpu_pool);
    rebatch_device_close(gpu);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

/* ---- scopes ---- */

enum { ROLLBACK_BLOCKS = 10000, SCOPES = 100000 };

/* Milliseconds to take back 10,000 blocks of 512 B to 1 MiB. */
static double run_rollback(rebatch_pool *pool)
{
    uint64_t state = 11;
    rebatch_scope scope;
    check(rebatch_scope_begin(&scope, pool), "opening a scope");
    for (int i = 0; i < ROLLBACK_BLOCKS; i++) {
        void *block;
        check(rebatch_pool_alloc(&block, pool, (size_t)exp2(9 + 11 * pat_unit(&state)), NULL, 0),
              "allocating in a scope");
    }
    const double began = pat_now();
    check(rebatch_scope_rollback(pool, scope), "rolling back");
    return (pat_now() - began) / 1e6;
}

/* Nanoseconds to open a scope and commit it. */
static double run_scope(rebatch_pool *pool)
{
    const double began = pat_now();
    for (int i = 0; i < SCOPES; i++) {
        rebatch_scope scope;
        check(rebatch_scope_begin(&scope, pool), "opening a scope");
        check(rebatch_scope_commit(pool, scope), "committing a scope");
    }
    return (pat_now() - began) / SCOPES;
}

static void measure_pool(const char *name, const char *unit, double (*run)(rebatch_pool *pool))
{
    struct samples samples = {0};
    rebatch_device *device = open_dry(REBATCH_UNLIMITED);
    rebatch_pool *pool = make_pool(device);
    (void)run(pool);
    for (int i = 0; i < RUNS; i++) {
        const long faults = page_faults();
        samples.values[i] = run(pool);
        samples.faults += page_faults() - faults;
    }
    report("pool", name, &samples, unit);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

/* ---- churn ---- */

enum { CHURN_BLOCKS = 10000, CHURN_LIVE_MOST = 16384, CHURN_SEEDS = 5 };

struct churn {
    const char *name;
    size_t capacity_bytes;
    size_t (*size)(uint64_t *state);
};

/* 1 B to 1 GiB, each size as likely. */
static size_t size_even(uint64_t *state)
{
    return 1 + (size_t)(pat_unit(state) * 1073741824.0);
}

/* 512 B to 1 GiB, each octave as likely: small blocks between large ones. */
static size_t size_by_octave(uint64_t *state)
{
    return (size_t)exp2(9 + 21 * pat_unit(state));
}

struct churn_state {
    rebatch_pool *pool;
    void *blocks[CHURN_LIVE_MOST];
    size_t sizes[CHURN_LIVE_MOST];
    size_t count, live_bytes;
};

static void churn_free(struct churn_state *s, uint64_t *state)
{
    const size_t k = pat_rng(state) % s->count;
    check(rebatch_pool_free(s->pool, s->blocks[k]), "freeing in the churn");
    s->live_bytes -= s->sizes[k];
    s->count--;
    s->blocks[k] = s->blocks[s->count];
    s->sizes[k] = s->sizes[s->count];
}

/* False when memory ran out. */
static bool churn_alloc(struct churn_state *s, size_t bytes)
{
    const rebatch_status status =
        s->count == CHURN_LIVE_MOST
            ? REBATCH_OOM
            : rebatch_pool_alloc(&s->blocks[s->count], s->pool, bytes, NULL, 0);
    if (status == REBATCH_OOM)
        return false;
    check(status, "allocating in the churn");
    s->sizes[s->count++] = bytes;
    s->live_bytes += bytes;
    return true;
}

/* Allocates 10,000 blocks while others are freed in any order, so that at most 97 % of the device
 * is in use; then allocates until memory runs out, if it has not before. Live bytes over capacity
 * then: what is missing to 1 is what the pool could not use, and less than one block. */
static double run_churn(const struct churn *churn, uint64_t seed)
{
    static struct churn_state s;
    rebatch_device *device = open_dry(churn->capacity_bytes);
    s = (struct churn_state){.pool = make_pool(device)};
    const size_t most = churn->capacity_bytes / 100 * 97;
    uint64_t state = seed;
    bool ok = true;
    for (int i = 0; i < CHURN_BLOCKS && ok; i++) {
        const size_t bytes = churn->size(&state);
        while (s.count > 0 && (s.live_bytes + bytes > most || s.count == CHURN_LIVE_MOST))
            churn_free(&s, &state);
        ok = churn_alloc(&s, bytes);
    }
    while (ok)
        ok = churn_alloc(&s, churn->size(&state));
    const double utilisation = (double)s.live_bytes / (double)churn->capacity_bytes;
    rebatch_pool_destroy(s.pool);
    rebatch_device_close(device);
    return utilisation;
}

/* The worst of several seeds. */
static void measure_churn(const struct churn *churn)
{
    double worst = 1;
    for (uint64_t seed = 1; seed <= CHURN_SEEDS; seed++)
        worst = fmin(worst, run_churn(churn, seed));
    report_exact(churn->name, worst, "live/capacity");
}

/* ---- what it ran on, and what is kept ---- */

static void print_machine(void)
{
    char model[128] = "unknown processor";
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "model name : %127[^\n]", model) == 1)
            break;
    if (file)
        fclose(file);
    char date[32];
    const time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%d %H:%M UTC", gmtime_r(&now, &utc));
    printf("rebatch %s, %s, compiler %s, %s\n", rebatch_version(), model, __VERSION__, date);
    printf("median of %d runs, contenders in turn; page faults are those of all runs together\n\n",
           RUNS);
}

static void write_json(void)
{
    (void)mkdir("build", 0777);
    (void)mkdir("build/bench", 0777);
    errno = 0;
    FILE *file = fopen(JSON_PATH, "w");
    for (size_t i = 0; file && i < figure_count; i++)
        fprintf(file, "%s{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"}", i ? ",\n " : "[",
                figures[i].name, figures[i].value, figures[i].unit);
    if (!file || fputs("]\n", file) == EOF || fclose(file) != 0) {
        fprintf(stderr, "bench-pool: cannot write %s: %s\n", JSON_PATH, strerror(errno));
        exit(1);
    }
    printf("\nwritten to %s\n", JSON_PATH);
}

int main(void)
{
    static const struct pattern patterns[] = {
        {"hot", "ns", run_hot},
        {"random", "ns", run_random},
        {"random.unrepeated", "ns", run_random_unrepeated},
        {"train", "ns", run_train},
        {"threads1", "Mpairs/s", run_threads1},
        {"threads2", "Mpairs/s", run_threads2},
    };
    static const struct churn churns[] = {
        {"churn.utilisation", (size_t)1 << 40, size_even},
        {"churn.mixed.utilisation", (size_t)256 << 30, size_by_octave},
    };
    prepare_glibc();
    print_machine();
    if (find_mimalloc())
        add_contender("mimalloc", mimalloc_take, mimalloc_give);
    else
        puts("mimalloc is not installed (Debian, Ubuntu: libmimalloc2.0): left out\n");
    has_gpu = find_gpu();
    if (has_gpu) /* the same pool on a GPU's memory; the last contender */
        add_contender("cuda", pool_take, pool_give);
    printf("  %-26s %10s %10s %10s  %-10s %10s\n", "", "least", "median", "most", "", "faults");
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        compare(&patterns[i]);
    measure_pool("rollback", "ms", run_rollback);
    measure_pool("scope", "ns", run_scope);
    for (size_t i = 0; i < sizeof churns / sizeof *churns; i++)
        measure_churn(&churns[i]);
    write_json();
    return 0;
}
