/* Owns what is said of this machine: versions, GPUs, settings, what would not work here and why.
 * Must not know how a training uses them. */
#include <gnu/libc-version.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/base.h"
#include "config/settings.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include "device/nvml.h"
#include "rebatch/config.h"
#include "rebatch/cuda.h"
#include "rebatch/version.h"

/* Values of cuda.h. */
enum { ATTRIBUTE_INTEGRATED = 18, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

struct doctor {
    struct rbi_text text;
    struct rbi_text troubles; /* lines */
    char trouble_lines[4096];
    unsigned gpus; /* that can be opened */
};

/* Once, where several GPUs have it. */
static void add_trouble(struct doctor *d, const char *what)
{
    if (strstr(d->trouble_lines, what))
        return;
    rbi_text_add(&d->troubles, "not here      %s\n", what);
}

/* ---- the machine ---- */

static void add_system(struct doctor *d)
{
    struct utsname system = {.sysname = "?"};
    (void)uname(&system);
    const bool is_wsl = strstr(system.release, "icrosoft") != NULL;
    rbi_text_add(&d->text, "system        %s %s, %s, glibc %s%s\n", system.sysname, system.release,
                 system.machine, gnu_get_libc_version(), is_wsl ? ", WSL" : "");
    const long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    rbi_text_add(&d->text, "host memory   ");
    rbi_text_add_bytes(&d->text, pages > 0 ? (uint64_t)pages * (uint64_t)page_bytes : 0);
    rbi_text_add(&d->text, ", of which ");
    rbi_text_add_bytes(&d->text, rbi_host_free_bytes());
    rbi_text_add(&d->text, " available\n");
    if (is_wsl)
        add_trouble(d, "WSL pins little host memory: overflow and offload to it may fail");
}

/* It sees GPUs that CUDA does not. */
static void add_nvml(struct doctor *d)
{
    bool has_mig;
    rbi_text_add(&d->text, "NVML          ");
    rbi_nvml_describe(&d->text, &has_mig);
    rbi_text_add(&d->text, "\n");
    if (has_mig && d->gpus == 0)
        add_trouble(d, "MIG is on, and CUDA sees no instance: make one with `nvidia-smi mig`, and "
                       "name it in CUDA_VISIBLE_DEVICES");
}

/* ---- GPUs ---- */

static int attribute_of(const struct rbi_cuda_driver *driver, int gpu, int attribute)
{
    int value = 0;
    return driver->device_get_attribute(&value, attribute, gpu) ? 0 : value;
}

/* Maps a page as a pool does: of the GPU's memory, or of the host's. */
static rebatch_status try_page(rebatch_device *gpu, bool of_host)
{
    const size_t bytes = rbi_device_page_bytes(gpu);
    void *address;
    rbi_physical physical;
    rebatch_status status = rbi_device_reserve(gpu, &address, bytes);
    if (status)
        return status;
    status = of_host ? rbi_device_create_host(gpu, &physical, bytes)
                     : rbi_device_create_physical(gpu, &physical, bytes);
    if (!status) {
        status = rbi_device_map(gpu, address, bytes, physical);
        if (!status) {
            status = rbi_device_set_access(gpu, address, bytes);
            (void)rbi_device_unmap(gpu, address, bytes);
        }
        (void)(of_host ? rbi_device_release_host(gpu, physical, bytes)
                       : rbi_device_release_physical(gpu, physical, bytes));
    }
    (void)rbi_device_unreserve(gpu, address, bytes);
    return status;
}

/* What a driver says that it has, it may refuse. A GPU that is full has virtual memory. */
static bool has_pages(struct doctor *d, rebatch_device *gpu)
{
    if (!rbi_device_has_virtual_memory(gpu)) {
        add_trouble(d, "no virtual memory, as on some vGPUs: the pool cannot join pieces, so more "
                       "is lost to fragments, and host memory cannot stand in");
        return false;
    }
    const rebatch_status status = try_page(gpu, false);
    if (!status || status == REBATCH_OOM)
        return true;
    rbi_text_add(&d->troubles, "not here      virtual memory of %s: %s\n", rebatch_device_name(gpu),
                 rebatch_last_error());
    return false;
}

static bool has_host_pages(struct doctor *d, rebatch_device *gpu, bool is_integrated)
{
    if (is_integrated) {
        add_trouble(d, "the GPU uses the machine's memory: host memory cannot stand in, and what "
                       "is free for it is MemAvailable less a 16th");
        return false;
    }
    if (rbi_device_has_overflow(gpu)) {
        if (!try_page(gpu, true))
            return true;
        rbi_text_add(&d->troubles, "not here      host memory for %s: %s\n",
                     rebatch_device_name(gpu), rebatch_last_error());
    }
    if (rbi_device_has_virtual_memory(gpu))
        add_trouble(d, "the driver maps no host memory for the GPU: an allocation that must not "
                       "fail can fail");
    return false;
}

/* What MPS or HAMi leave of it. */
static void add_others_limit(struct doctor *d, const rebatch_device *gpu, int ordinal)
{
    struct rbi_others_limit limit;
    if (gpu->others.bytes != SIZE_MAX) {
        rbi_text_add(&d->text, "              limit ");
        rbi_text_add_bytes(&d->text, gpu->others.bytes);
        rbi_text_add(&d->text, ", set by %s\n", gpu->others.variable);
    }
    if (rbi_others_limit_read(&limit, ordinal))
        add_trouble(d, rebatch_last_error());
}

static void add_open_gpu(struct doctor *d, const struct rbi_cuda_driver *driver, int ordinal,
                         int handle, rebatch_device *gpu)
{
    char name[256] = ""; /* a device's own is cut */
    rebatch_memory_info memory = {0};
    const bool is_integrated = attribute_of(driver, handle, ATTRIBUTE_INTEGRATED) != 0;
    d->gpus++;
    (void)rebatch_device_memory(gpu, &memory);
    (void)driver->device_get_name(name, sizeof name, handle);
    rbi_text_add(&d->text, "cuda:%d %s, capability %d.%d, ", ordinal, name,
                 attribute_of(driver, handle, CAPABILITY_MAJOR),
                 attribute_of(driver, handle, CAPABILITY_MINOR));
    rbi_text_add_bytes(&d->text, memory.total_bytes);
    rbi_text_add(&d->text, ", of which ");
    rbi_text_add_bytes(&d->text, memory.free_bytes);
    rbi_text_add(&d->text, " free beside the context\n");
    add_others_limit(d, gpu, ordinal);
    if (strstr(name, " MIG "))
        add_trouble(d, "a MIG instance is no peer of another: each trains alone, without NCCL");
    const bool pages = has_pages(d, gpu), host_pages = has_host_pages(d, gpu, is_integrated);
    rbi_text_add(&d->text,
                 "              virtual memory %s, host memory stands in %s, integrated %s\n",
                 pages ? "yes" : "no", host_pages ? "yes" : "no", is_integrated ? "yes" : "no");
}

static void add_gpu(struct doctor *d, const struct rbi_cuda_driver *driver, int ordinal)
{
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    rebatch_device *gpu;
    int handle = 0;
    options.ordinal = ordinal;
    (void)driver->device_get(&handle, ordinal);
    rbi_text_add(&d->text, "GPU           ");
    if (rebatch_device_open_cuda(&gpu, &options)) {
        rbi_text_add(&d->text, "cuda:%d cannot be used: %s\n", ordinal, rebatch_last_error());
        return;
    }
    if (ordinal == 0)
        rbi_text_add(&d->text, "%s\n              ", gpu->driver);
    add_open_gpu(d, driver, ordinal, handle, gpu);
    rebatch_device_close(gpu);
}

static void add_gpus(struct doctor *d)
{
    const struct rbi_cuda_driver *driver;
    int count = 0;
    rebatch_status status = rbi_cuda_driver_load(&driver);
    if (!status)
        status = rebatch_from_cuda(NULL, driver->device_get_count(&count));
    if (status)
        rbi_text_add(&d->text, "GPU           %s\n", rebatch_last_error());
    else if (count == 0)
        rbi_text_add(&d->text, "GPU           the driver sees none\n");
    for (int i = 0; i < count; i++)
        add_gpu(d, driver, i);
    if (d->gpus == 0)
        add_trouble(d, "no GPU can be used: a training runs on the host device, and `rebatch fit` "
                       "answers for a named card");
}

/* ---- settings ---- */

static void add_settings(struct doctor *d)
{
    rebatch_config *config;
    bool is_any = false;
    for (char *const *at = environ; at && *at; at++) {
        if (strncmp(*at, "REBATCH_", 8) != 0 && strncmp(*at, "CUDA_VISIBLE_DEVICES=", 21) != 0)
            continue;
        rbi_text_add(&d->text, "%s", is_any ? "              " : "settings      ");
        rbi_text_add_shown(&d->text, *at, strlen(*at), 200);
        rbi_text_add(&d->text, "\n");
        is_any = true;
    }
    if (!is_any)
        rbi_text_add(&d->text, "settings      none in the environment\n");
    if (rbi_run_settings_check() || rebatch_config_load(&config, NULL)) {
        rbi_text_add(&d->troubles, "not here      a session: %s\n", rebatch_last_error());
        return;
    }
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_entry *entry = &config->entries[i];
        if (entry->origin && strchr(entry->origin, ':')) /* of the file that REBATCH_CONFIG names */
            rbi_text_add(&d->text, "              %s = %s (%s)\n", rbi_settings[i].key, entry->text,
                         entry->origin);
    }
    rebatch_config_free(config);
}

size_t rebatch_doctor_format(char *text, size_t size, bool *has_gpu)
{
    struct doctor d = {.text = {text, size, 0}};
    d.troubles = (struct rbi_text){d.trouble_lines, sizeof d.trouble_lines, 0};
    rbi_text_add(&d.text, "rebatch       %s\n", rebatch_version());
    add_system(&d);
    add_gpus(&d);
    add_nvml(&d);
    add_settings(&d);
    rbi_text_add(&d.text, "%s", d.trouble_lines);
    rebatch_clear_error();
    if (has_gpu)
        *has_gpu = d.gpus > 0;
    return d.text.length;
}
