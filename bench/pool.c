/* What the pool costs and how tightly it packs, beside glibc's malloc and mimalloc on the same
 * calls. Public headers only: it measures any pool.
 *
 * What is measured: bookkeeping. Nobody touches the blocks, as nobody does on the host when they
 * are a GPU's. The pool runs on a dry device and touches none of them either. The other two keep
 * headers next to the blocks, and by default give large blocks back to the kernel at once, which
 * then has to fetch and clear pages again, thousands of nanoseconds each: the patterns ask for
 * nothing of the kind, so it would not be fair to count it. Hence both are told to keep what they
 * have, glibc's pages are fetched beforehand, each contender runs the same calls once before the
 * clock starts, and the faults that are still left are shown beside the figures. */
#include <dlfcn.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "alloc_patterns.h"
#include "rebatch/pool.h"
#include "rebatch/version.h"

#define RUNS 9
#define CONTENDERS_MOST 3

static void check(rebatch_status status, const char *what)
{
    if (status == REBATCH_OK)
        return;
    fprintf(stderr, "bench-pool: %s: %s\n", what, rebatch_last_error());
    exit(1);
}

/* Samples of one measurement. */
struct samples {
    double values[RUNS];
    long faults; /* of pages, in all runs together */
};

static void report(const char *contender, const char *name, struct samples *s)
{
    const double median = measure_median(s->values, RUNS);
    printf("  %-10s %-8s %10.4g %10.4g %10.4g ns %10ld\n", contender, name, s->values[0], median,
           s->values[RUNS - 1], s->faults);
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

/* ---- times a pair ---- */

struct pattern {
    const char *name;
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

static double run_train(const struct contender *c)
{
    return pat_train(c->take, c->give, c->user, 500);
}

/* Every contender in turn, run after run, so that what the machine does besides hits all alike. */
static void compare(const struct pattern *pattern)
{
    struct samples samples[CONTENDERS_MOST] = {0};
    rebatch_device *device;
    rebatch_pool *pool;
    check(rebatch_device_open_dry(&device, REBATCH_UNLIMITED, 0), "opening a dry device");
    check(rebatch_pool_create(&pool, device, NULL), "making a pool");
    contenders[0].user = pool;
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
        report(contenders[c].name, pattern->name, &samples[c]);
    rebatch_pool_stats stats;
    check(rebatch_pool_get_stats(&stats, pool), "reading the statistics");
    if (strcmp(pattern->name, "train") == 0)
        printf("  pool, train: %.4f of what is reserved is live at the peak\n",
               (double)stats.live_peak_bytes / (double)stats.reserved_peak_bytes);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

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

int main(void)
{
    static const struct pattern patterns[] = {
        {"hot", run_hot}, {"random", run_random}, {"train", run_train}};
    prepare_glibc();
    print_machine();
    if (find_mimalloc())
        contenders[contender_count++] =
            (struct contender){"mimalloc", mimalloc_take, mimalloc_give, NULL};
    else
        puts("mimalloc is not installed (Debian, Ubuntu: libmimalloc2.0): left out\n");
    printf("  %-10s %-8s %10s %10s %10s    %10s\n", "", "", "least", "median", "most", "faults");
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        compare(&patterns[i]);
    return 0;
}
