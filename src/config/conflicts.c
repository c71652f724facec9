/* Owns what values must fit together: each pair that cannot hold is said with both keys and places.
 * Must not know where values come from. */
#include <string.h>

#include "config/settings.h"
#include "device/device.h"
#include "recover/size_limits.h"

/* 'batch.smallest is 8 (t.cfg:1)' */
static void add_setting(struct rbi_text *t, const struct rebatch_config *config,
                        enum rbi_setting_id id)
{
    const struct rbi_entry *entry = &config->entries[id];
    rbi_text_add(t, "%s is %s (%s)", rbi_settings[id].key,
                 rbi_shown_text(entry->text, strlen(entry->text)).text,
                 rbi_shown_path(entry->origin ? entry->origin : "default").text);
}

static rebatch_status refuse(const struct rebatch_config *config, enum rbi_setting_id a,
                             enum rbi_setting_id b, const char *expected)
{
    char text[448];
    struct rbi_text t = {text, sizeof text, 0};
    add_setting(&t, config, a);
    rbi_text_add(&t, " and ");
    add_setting(&t, config, b);
    return rbi_error(REBATCH_E_PARSE, "%s: expected %s", text, expected);
}

static rebatch_status check_order(const struct rebatch_config *config, enum rbi_setting_id low,
                                  enum rbi_setting_id high)
{
    if (config->entries[low].number <= config->entries[high].number)
        return REBATCH_OK;
    char expected[96];
    struct rbi_text t = {expected, sizeof expected, 0};
    rbi_text_add(&t, "%s <= %s", rbi_settings[low].key, rbi_settings[high].key);
    return refuse(config, low, high, expected);
}

/* ---- the list and the multiple ---- */

static rebatch_status check_start(const struct rebatch_config *config,
                                  const rebatch_options *limits)
{
    if (limits->micro_start == 0 ||
        rbi_round_size(limits, limits->micro_start) == limits->micro_start)
        return REBATCH_OK;
    if (limits->micro_start % limits->micro_multiple_of)
        return refuse(config, RBI_BATCH_START, RBI_BATCH_MULTIPLE_OF,
                      "batch.start to be a multiple of it");
    return refuse(config, RBI_BATCH_START, RBI_BATCH_ALLOWED, "batch.start to be in the list");
}

/* Finds which pair of limits leaves no size; `limits` has no size that all of them allow. */
static rebatch_status refuse_no_size(const struct rebatch_config *config,
                                     const rebatch_options *limits)
{
    rebatch_options alone = *limits;
    alone.micro_multiple_of = 1;
    if (limits->micro_allowed[0] == 0)
        return refuse(config, RBI_BATCH_MULTIPLE_OF,
                      limits->micro_largest / limits->micro_multiple_of ? RBI_BATCH_SMALLEST
                                                                        : RBI_BATCH_LARGEST,
                      "a multiple between batch.smallest and batch.largest");
    if (rbi_round_size_up(&alone, 1))
        return refuse(config, RBI_BATCH_ALLOWED, RBI_BATCH_MULTIPLE_OF,
                      "a multiple of it in the list, between batch.smallest and batch.largest");
    alone.micro_smallest = 1;
    if (rbi_round_size_up(&alone, 1))
        return refuse(config, RBI_BATCH_ALLOWED, RBI_BATCH_SMALLEST,
                      "a size in the list between batch.smallest and batch.largest");
    return refuse(config, RBI_BATCH_ALLOWED, RBI_BATCH_LARGEST,
                  "a size in the list of at most batch.largest");
}

static rebatch_status check_sizes(const struct rebatch_config *config)
{
    const struct rbi_entry *e = config->entries;
    rebatch_options limits = REBATCH_OPTIONS_INIT;
    limits.micro_start = e[RBI_BATCH_START].number;
    limits.micro_smallest = e[RBI_BATCH_SMALLEST].number;
    limits.micro_largest = e[RBI_BATCH_LARGEST].number;
    limits.micro_multiple_of = e[RBI_BATCH_MULTIPLE_OF].number;
    memcpy(limits.micro_allowed, e[RBI_BATCH_ALLOWED].list, sizeof limits.micro_allowed);
    return rbi_round_size_up(&limits, 1) ? check_start(config, &limits)
                                         : refuse_no_size(config, &limits);
}

/* A headroom or a floor beyond the limit in bytes was meant for another key, or another card. A
 * limit that is a share is known only when there is a device. */
static rebatch_status check_memory(const struct rebatch_config *config)
{
    const struct rbi_entry *e = config->entries;
    rebatch_status status = REBATCH_OK;
    if (e[RBI_MEMORY_LIMIT].number != 0)
        status = check_order(config, RBI_MEMORY_HEADROOM, RBI_MEMORY_LIMIT);
    if (!status && e[RBI_MEMORY_LIMIT].number != 0)
        status = check_order(config, RBI_MEMORY_FLOOR, RBI_MEMORY_LIMIT);
    if (!status && e[RBI_DEVICE_CAPACITY].number != 0)
        status = check_order(config, RBI_MEMORY_HEADROOM, RBI_DEVICE_CAPACITY);
    return status;
}

static rebatch_status refuse_bytes(const struct rebatch_config *config, enum rbi_setting_id id,
                                   const char *expected, size_t bytes)
{
    char text[224];
    struct rbi_text t = {text, sizeof text, 0};
    add_setting(&t, config, id);
    return rbi_error(REBATCH_E_INVALID, "%s: expected %s, %zu bytes", text, expected, bytes);
}

rebatch_status rbi_config_check_kind(const struct rebatch_config *config)
{
    const struct rbi_entry *const e = config->entries, *const kind = &e[RBI_DEVICE_KIND];
    if (kind->number == RBI_KIND_CUDA && !e[RBI_DEVICE_CAPACITY].is_none)
        return refuse(config, RBI_DEVICE_CAPACITY, RBI_DEVICE_KIND,
                      "device.kind to be host with it; memory.limit is a limit on any device");
    if (kind->number == RBI_KIND_HOST && !kind->origin && e[RBI_DEVICE_ORDINAL].number != 0)
        return refuse(config, RBI_DEVICE_ORDINAL, RBI_DEVICE_KIND,
                      "device.kind to be cuda or auto with it");
    return REBATCH_OK;
}

rebatch_status rbi_config_check_device(const struct rebatch_config *config, rebatch_device *device)
{
    const struct rbi_entry *e = config->entries;
    const size_t page_bytes = rbi_device_page_bytes(device);
    if (e[RBI_MEMORY_LIMIT].number != 0 && e[RBI_MEMORY_LIMIT].number < page_bytes)
        return refuse_bytes(config, RBI_MEMORY_LIMIT, "at least a page of the device", page_bytes);
    rebatch_memory_info info;
    if (e[RBI_MEMORY_HEADROOM].number == 0)
        return REBATCH_OK;
    const rebatch_status status = rebatch_device_memory(device, &info);
    return status || e[RBI_MEMORY_HEADROOM].number <= info.total_bytes
               ? status
               : refuse_bytes(config, RBI_MEMORY_HEADROOM, "at most the memory of the device",
                              info.total_bytes);
}

/* 0 samples: the effective batch, whatever it will be. */
rebatch_status rbi_config_check_conflicts(const struct rebatch_config *config)
{
    const uint64_t start = config->entries[RBI_BATCH_START].number;
    const uint64_t largest = config->entries[RBI_BATCH_LARGEST].number;
    rebatch_status status = REBATCH_OK;
    if (largest != 0)
        status = check_order(config, RBI_BATCH_SMALLEST, RBI_BATCH_LARGEST);
    if (!status && start != 0)
        status = check_order(config, RBI_BATCH_SMALLEST, RBI_BATCH_START);
    if (!status && start != 0 && config->entries[RBI_BATCH_LEARN].number)
        status = refuse(config, RBI_BATCH_LEARN, RBI_BATCH_START, "batch.start to be 0 with it");
    if (!status && start != 0 && largest != 0)
        status = check_order(config, RBI_BATCH_START, RBI_BATCH_LARGEST);
    if (!status && largest != 0)
        status = check_order(config, RBI_BATCH_MULTIPLE_OF, RBI_BATCH_LARGEST);
    if (!status)
        status = check_sizes(config);
    if (!status)
        status = check_order(config, RBI_GROWTH_AFTER, RBI_GROWTH_WAIT_MAX);
    return status ? status : check_memory(config);
}
