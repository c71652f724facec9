/* Owns what the process's allocations come to: live bytes of each device, the cap, failures on
 * purpose, and what is reported. Must not know which function allocates. */
#include <pthread.h>
#include <unistd.h>

#include "launch/launch.h"
#include "preload/preload.h"

#define DEVICES 64

/* live is the sum of what is charged in `holdings`, and of what is being allocated.
 *   0 <= live, peak; live <= cap after each rbi_ledger_begin() that was granted under a cap */
struct device {
    uint64_t live_bytes, peak_bytes;
    atomic_uint_fast64_t cap_bytes; /* 0: none, or not known yet */
};

static struct {
    pthread_mutex_t lock;
    struct rbi_run run; /* the settings, for failing_request.c and report.c */
    bool is_on;         /* something is asked for, or the command listens */
    atomic_bool is_forked;
    struct device devices[DEVICES];
    struct rbi_holdings holdings;
    struct rbi_record record;
    struct rbi_ledger_figures figures;
} ledger = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- what was asked for ---- */

/* CUDA does not work in a child process of fork(), so there is nothing to count. */
static void after_fork(void)
{
    atomic_store(&ledger.is_forked, true);
}

static bool has_injection(void)
{
    return ledger.run.settings.oom || ledger.run.settings.chance > 0;
}

static bool has_cap(void)
{
    return ledger.run.settings.limit_bytes || ledger.run.settings.limit_permille;
}

static void read_settings(void)
{
    struct rbi_run_settings *const settings = &ledger.run.settings;
    if (rbi_run_settings_read(settings)) {
        char text[400];
        struct rbi_text t = {text, sizeof text, 0};
        rbi_text_add(&t, "rebatch: %.380s\n", rebatch_last_error());
        (void)rbi_write_all(STDERR_FILENO, text, rbi_min(t.length, sizeof text - 1));
        return;
    }
    if (settings->probe)
        return; /* the process ends with the answer */
    ledger.record.path = settings->record;
    ledger.is_on = has_injection() || has_cap() || settings->record || settings->report >= 0;
    if (ledger.is_on)
        (void)pthread_atfork(NULL, NULL, after_fork);
}

static bool is_on(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, read_settings);
    return ledger.is_on && !atomic_load_explicit(&ledger.is_forked, memory_order_relaxed);
}

/* ---- reports ---- */

static struct rbi_ledger_figures figures_now(bool is_final)
{
    struct rbi_ledger_figures figures = ledger.figures;
    const struct device *highest = &ledger.devices[0];
    for (size_t i = 1; i < DEVICES; i++)
        if (ledger.devices[i].peak_bytes > highest->peak_bytes)
            highest = &ledger.devices[i];
    figures.peak_bytes = highest->peak_bytes;
    figures.cap_bytes = atomic_load(&highest->cap_bytes);
    figures.is_final = is_final;
    figures.trace = ledger.record.is_open ? ledger.record.name : NULL;
    return figures;
}

/* Where this library's own sessions report, only what they do not know is said. */
static bool has_something_to_say(void)
{
    return ledger.figures.requests > 0 && (!rbi_dlsym_has_rebatch() || ledger.record.is_open ||
                                           ledger.figures.injected || ledger.figures.beyond_cap);
}

static void say(bool is_final)
{
    char text[4800];
    struct rbi_text t = {text, sizeof text, 0};
    const struct rbi_ledger_figures figures = figures_now(is_final);
    const bool is_heard = ledger.run.settings.report >= 0;
    if (is_heard)
        rbi_text_add(&t, "run %ld ", (long)getpid());
    else if (is_final && has_something_to_say())
        rbi_text_add(&t, "rebatch run: ");
    else
        return;
    if (has_something_to_say())
        rbi_summary_add(&t, &ledger.run.settings, &figures);
    if (!is_heard)
        rbi_text_add(&t, "\n");
    const size_t length = rbi_min(t.length, sizeof text - 1);
    if (!is_heard || !rbi_report_send(&ledger.run, text, length))
        (void)(is_heard || rbi_write_all(STDERR_FILENO, text, length));
}

/* A program that crashes says nothing at its end. */
static void say_now_and_then(void)
{
    const uint64_t requests = ledger.figures.requests;
    if (ledger.run.settings.report >= 0 && (requests & (requests - 1)) == 0)
        say(false);
}

__attribute__((destructor)) static void end(void)
{
    if (!ledger.is_on || atomic_load(&ledger.is_forked))
        return;
    pthread_mutex_lock(&ledger.lock);
    if (ledger.figures.requests > 0)
        say(true);
    pthread_mutex_unlock(&ledger.lock);
}

/* ---- the cap ---- */

/* A share is one of the device's memory. */
static uint64_t find_cap(int ordinal)
{
    const struct rbi_run_settings *const settings = &ledger.run.settings;
    uint64_t cap = settings->limit_bytes;
    size_t total = 0;
    const rbi_function function =
        settings->limit_permille ? rbi_driver_find_other("cuDeviceTotalMem_v2") : NULL;
    if (function && ((int (*)(size_t *, int))function)(&total, ordinal) == RBI_CU_SUCCESS) {
        const uint64_t share = total / 1000 * settings->limit_permille;
        if (!cap || share < cap)
            cap = share;
    }
    return cap;
}

/* Asks the driver, so the lock must not be held: the driver's calls may wait for the loader's. */
static struct device *device_at(int ordinal)
{
    struct device *const device = &ledger.devices[ordinal];
    if (has_cap() && atomic_load(&device->cap_bytes) == 0)
        atomic_store(&device->cap_bytes, find_cap(ordinal));
    return device;
}

/* A session caps its pool, and the driver's memory that its device takes is not seen here. */
static uint64_t cap_of(const struct device *device)
{
    const uint64_t cap = atomic_load(&device->cap_bytes);
    return cap && !rbi_dlsym_has_rebatch() ? cap : UINT64_MAX;
}

void rbi_ledger_lower(uint64_t *free_bytes, uint64_t *total_bytes)
{
    const int ordinal = is_on() && has_cap() ? rbi_driver_current_device() : -1;
    if (ordinal < 0 || ordinal >= DEVICES)
        return;
    const struct device *const device = device_at(ordinal);
    pthread_mutex_lock(&ledger.lock);
    const uint64_t cap = cap_of(device);
    const uint64_t left = cap > device->live_bytes ? cap - device->live_bytes : 0;
    pthread_mutex_unlock(&ledger.lock);
    *total_bytes = rbi_min(*total_bytes, cap);
    *free_bytes = rbi_min(*free_bytes, left);
}

/* ---- allocations ---- */

static bool strikes(void)
{
    return has_injection() && !rbi_dlsym_has_rebatch() &&
           rbi_run_fails(&ledger.run.settings, ledger.figures.requests);
}

/* Charges the device with the request, or says that it fails. */
static bool grant(struct device *device, uint64_t bytes)
{
    ledger.figures.requests++;
    if (strikes()) {
        ledger.figures.injected++;
        return false;
    }
    const uint64_t cap = cap_of(device);
    if (device->live_bytes > cap || bytes > cap - device->live_bytes) {
        ledger.figures.beyond_cap++;
        return false;
    }
    device->live_bytes += bytes;
    return true;
}

bool rbi_ledger_begin(struct rbi_request *request, uint64_t bytes, cu_stream stream, int device)
{
    *request = (struct rbi_request){.bytes = bytes, .stream = stream, .device = -1};
    if (bytes == 0 || !is_on())
        return true;
    const int ordinal = device >= 0 ? device : rbi_driver_current_device();
    if (ordinal < 0 || ordinal >= DEVICES)
        return true;
    struct device *const account = device_at(ordinal);
    pthread_mutex_lock(&ledger.lock);
    const bool is_granted = grant(account, bytes);
    if (is_granted) {
        request->device = ordinal;
    } else {
        rbi_record_oom(&ledger.record, ordinal, bytes);
        say(false); /* a program that does not survive it says nothing any more */
    }
    pthread_mutex_unlock(&ledger.lock);
    return is_granted;
}

static void forget(const struct rbi_holding *holding, const cu_stream *stream)
{
    if (holding->device < 0)
        return;
    ledger.devices[holding->device].live_bytes -= holding->charged_bytes;
    rbi_record_free(&ledger.record, holding, stream);
}

/* An address that is held already was freed where nobody saw it. What the table has no room for is
 * not counted any more. */
static void hold(struct rbi_holding *holding)
{
    const struct rbi_holding before =
        rbi_holdings_take(&ledger.holdings, holding->key, holding->kind);
    forget(&before, NULL);
    holding->id = rbi_record_alloc(&ledger.record, holding);
    if (!rbi_holdings_add(&ledger.holdings, holding))
        forget(holding, NULL);
}

void rbi_ledger_end(const struct rbi_request *request, int code, uint64_t key,
                    enum rbi_holding_kind kind)
{
    if (request->device < 0)
        return;
    pthread_mutex_lock(&ledger.lock);
    struct device *const device = &ledger.devices[request->device];
    if (code) {
        device->live_bytes -= request->bytes;
    } else {
        struct rbi_holding holding = {.key = key,
                                      .kind = kind,
                                      .bytes = request->bytes,
                                      .charged_bytes = request->bytes,
                                      .stream = request->stream,
                                      .device = request->device};
        hold(&holding);
        if (device->live_bytes > device->peak_bytes)
            device->peak_bytes = device->live_bytes;
    }
    if (code == RBI_CU_OUT_OF_MEMORY) {
        ledger.figures.device_ooms++;
        rbi_record_oom(&ledger.record, request->device, request->bytes);
        say(false);
    } else {
        say_now_and_then();
    }
    pthread_mutex_unlock(&ledger.lock);
}

/* The pool's own memory is in no device's account. */
void rbi_ledger_note_pool(int code, uint64_t address, uint64_t bytes, cu_stream stream)
{
    const int ordinal = is_on() ? rbi_driver_current_device() : -1;
    if (ordinal < 0 || ordinal >= DEVICES)
        return;
    pthread_mutex_lock(&ledger.lock);
    ledger.figures.requests++;
    if (code == RBI_CU_SUCCESS) {
        struct rbi_holding holding = {
            .key = address, .bytes = bytes, .stream = stream, .device = ordinal};
        hold(&holding);
    } else if (code == RBI_CU_OUT_OF_MEMORY) {
        rbi_record_oom(&ledger.record, ordinal, bytes);
    }
    pthread_mutex_unlock(&ledger.lock);
}

/* ---- frees ---- */

struct rbi_holding rbi_ledger_take(uint64_t key, enum rbi_holding_kind kind,
                                   const cu_stream *stream)
{
    struct rbi_holding holding = {.device = -1};
    if (!is_on())
        return holding;
    pthread_mutex_lock(&ledger.lock);
    holding = rbi_holdings_take(&ledger.holdings, key, kind);
    forget(&holding, stream);
    pthread_mutex_unlock(&ledger.lock);
    return holding;
}

void rbi_ledger_put_back(const struct rbi_holding *holding)
{
    if (holding->device < 0)
        return;
    struct rbi_holding back = *holding;
    pthread_mutex_lock(&ledger.lock);
    ledger.devices[back.device].live_bytes += back.charged_bytes;
    hold(&back);
    pthread_mutex_unlock(&ledger.lock);
}
