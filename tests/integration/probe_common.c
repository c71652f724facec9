/* Owns what the probe_* tests share.
 * Must not know more of the library than its public headers say. */
#include "probe_common.h"

/* ---- the step ---- */

static rebatch_status zero_grad(void *user)
{
    struct load *load = user;
    rebatch_mutating(load->rb);
    load->accumulated = 0;
    load->zeroed++;
    return REBATCH_OK;
}

static size_t bytes_of(const struct load_item *item, size_t count)
{
    const size_t bytes = item->fixed + item->each * count;
    return item->unit ? (bytes + item->unit - 1) / item->unit * item->unit : bytes;
}

static rebatch_status alloc(const struct load *load, void **out, size_t bytes)
{
    return rebatch_pool_alloc(out, rebatch_get_pool(load->rb), bytes, NULL, 0);
}

static rebatch_status make_lazy(struct load *load, size_t i)
{
    if (load->lazy[i])
        return REBATCH_OK;
    void *made;
    const rebatch_status status = alloc(load, &made, load->items[i].fixed);
    if (status == REBATCH_OK)
        load->lazy[i] = made;
    return status;
}

/* Allocates the activations, in order; short ones go again at once. */
static rebatch_status forward(struct load *load, void **blocks, size_t count)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < load->item_count && !status; i++) {
        const struct load_item *item = &load->items[i];
        if (item->is_late)
            continue;
        if (item->is_lazy)
            status = make_lazy(load, i);
        else
            status = alloc(load, &blocks[i], bytes_of(item, count));
        if (!status && item->is_short) {
            status = rebatch_pool_free(rebatch_get_pool(load->rb), blocks[i]);
            blocks[i] = NULL;
        }
    }
    return status;
}

static size_t late_bytes(const struct load *load, size_t count)
{
    size_t sum = 0;
    for (size_t i = 0; i < load->item_count; i++)
        if (load->items[i].is_late)
            sum += (bytes_of(&load->items[i], count) + REBATCH_POOL_UNIT_BYTES - 1) /
                   REBATCH_POOL_UNIT_BYTES * REBATCH_POOL_UNIT_BYTES;
    return sum;
}

static rebatch_status backward(struct load *load, void **blocks, size_t count)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = load->item_count; i-- > 0 && !status;) {
        if (load->items[i].is_late)
            status = alloc(load, &blocks[i], bytes_of(&load->items[i], count));
        if (!status)
            status = rebatch_pool_free(rebatch_get_pool(load->rb), blocks[i]);
    }
    return status;
}

static rebatch_status run_list(const struct load *load, const size_t *bytes, size_t count)
{
    void *blocks[256];
    size_t made = 0;
    rebatch_status status = REBATCH_OK;
    while (made < count && !status)
        if (!(status = alloc(load, &blocks[made], bytes[made])))
            made++;
    while (made > 0 && !status)
        status = rebatch_pool_free(rebatch_get_pool(load->rb), blocks[--made]);
    return status;
}

/* Lists whose length depends on the size: by turns, or with no law that could be told from a few
 * sizes. */
static rebatch_status run_chunks(const struct load *load, size_t count)
{
    size_t bytes[256] = {0};
    size_t chunks = 0, bits = 0;
    for (size_t at = 0; load->chunk && at < count && chunks < 256; at += load->chunk)
        bytes[chunks++] = (size_t)100 << 10;
    rebatch_status status = run_list(load, bytes, chunks);
    for (size_t bit = 1; load->bit_bytes && bit <= count; bit *= 2)
        if (count & bit)
            bytes[bits++] = bit * load->bit_bytes;
    return status ? status : run_list(load, bytes, bits);
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct load *load = user;
    void *blocks[LOAD_ITEMS] = {NULL};
    if (load->ran < sizeof load->sizes / sizeof *load->sizes)
        load->sizes[load->ran] = mb->count;
    load->ran++;
    load->probing += mb->probing;
    load->random = load->random * 6364136223846793005u + mb->count;
    if (load->ran == load->answer_at)
        return load->answer;
    if (load->wall && mb->count > load->wall)
        return REBATCH_OOM;
    rebatch_status status = forward(load, blocks, mb->count);
    if (!status)
        status = run_chunks(load, mb->count);
    if (!status)
        status = rebatch_reserve(load->rb, late_bytes(load, mb->count));
    if (status)
        return status;
    rebatch_mutating(load->rb);
    load->accumulated += (double)mb->count / (double)mb->batch;
    return backward(load, blocks, mb->count);
}

static rebatch_status optimizer_step(void *user)
{
    struct load *load = user;
    void *made = load->moments;
    if (!made) {
        const rebatch_status status = alloc(load, &made, load->moments_bytes);
        if (status)
            return status;
    }
    rebatch_mutating(load->rb);
    load->moments = made;
    load->updated++;
    return REBATCH_OK;
}

rebatch_step_ops load_ops(void)
{
    return (rebatch_step_ops)OPS(zero_grad, forward_backward, optimizer_step,
                                 .flags = REBATCH_DECLARES_MUTATION);
}

/* ---- the bed ---- */

void bed_open(struct bed *bed, size_t capacity_bytes, const rebatch_options *options)
{
    memset(bed, 0, sizeof *bed);
    open_on_host(&bed->device, &bed->rb, capacity_bytes, options);
    bed->load.rb = bed->rb;
    bed->ops = load_ops();
}

void bed_close(struct bed *bed)
{
    rebatch_close(bed->rb);
    cr_assert_eq(used_bytes_of(bed->device), 0);
    rebatch_device_close(bed->device);
}

void bed_open_typical(struct bed *bed, size_t capacity_bytes, const rebatch_options *options)
{
    static const struct load_item items[] = {{.fixed = 3000, .each = 4096},
                                             {.each = 70000},
                                             {.each = 50003, .is_short = true},
                                             {.each = 120001},
                                             {.fixed = 200000, .is_short = true},
                                             {.fixed = 1 << 20, .is_lazy = true},
                                             {.each = 333},
                                             {.fixed = 777, .each = 90001, .is_late = true},
                                             {.each = 40000, .is_late = true}};
    bed_open(bed, capacity_bytes, options);
    memcpy(bed->load.items, items, sizeof items);
    bed->load.item_count = sizeof items / sizeof *items;
}

rebatch_status bed_probe(struct bed *bed, size_t batch, const rebatch_probe_options *options)
{
    return rebatch_probe(bed->rb, &bed->ops, batch, &bed->load, options, &bed->report);
}

uint64_t bed_live_bytes(const struct bed *bed)
{
    return pool_stats_of(rebatch_get_pool(bed->rb)).live_bytes;
}

static bool runs_whole_steps(const struct bed *bed, size_t capacity_bytes,
                             const rebatch_options *options, size_t batch, size_t micro)
{
    rebatch_options o = options ? *options : (rebatch_options)REBATCH_OPTIONS_INIT;
    o.micro_start = o.micro_smallest = o.micro_largest = micro;
    o.on_oom = REBATCH_ON_OOM_STOP;
    OPEN(bed, other, capacity_bytes, &o);
    other.load = bed->load;
    other.load.rb = other.rb;
    bool fits = rebatch_step(other.rb, &other.ops, 1, &other.load, NULL) == REBATCH_OK;
    for (int i = 0; i < 2 && fits; i++) {
        rebatch_step_report report;
        fits = rebatch_step(other.rb, &other.ops, batch, &other.load, &report) == REBATCH_OK &&
               (i == 0 || report.ooms == 0);
    }
    return fits;
}

size_t true_largest(const struct bed *bed, size_t capacity_bytes, const rebatch_options *options,
                    size_t batch)
{
    size_t largest = 0;
    for (size_t micro = 1; micro <= batch; micro++)
        if (runs_whole_steps(bed, capacity_bytes, options, batch, micro))
            largest = micro;
    return largest;
}
