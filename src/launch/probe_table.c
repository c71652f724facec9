/* Owns what is said of a probe: a table for people, an object for programs.
 * Must not know how the figures were found. */
#include <inttypes.h>

#include "launch/launch.h"

/* ---- for people ---- */

struct cell {
    char text[32];
};

static struct cell show_bytes(uint64_t bytes)
{
    struct cell cell;
    struct rbi_text t = {cell.text, sizeof cell.text, 0};
    rbi_text_add_bytes(&t, bytes);
    return bytes == UINT64_MAX ? (struct cell){"no limit"} : cell;
}

/* What stays free at a peak; below zero: what is missing. */
static struct cell show_room(uint64_t limit, uint64_t peak)
{
    if (limit >= peak)
        return show_bytes(limit - peak);
    struct cell cell = {"-"};
    struct rbi_text t = {cell.text, sizeof cell.text, 1};
    rbi_text_add_bytes(&t, peak - limit);
    return cell;
}

static void add_row(struct rbi_text *t, const struct rbi_probe_result *result,
                    const struct rbi_probe_row *row)
{
    const rebatch_prediction *prediction = &row->prediction;
    const uint64_t peak = row->has_prediction ? prediction->peak_bytes : row->measured_bytes;
    const struct cell none = {"-"}, failed = {"failed"};
    const struct cell predicted = row->has_prediction ? show_bytes(peak) : none;
    const struct cell measured = row->failed ? failed
                                 : row->ran  ? show_bytes(row->measured_bytes)
                                             : none;
    const struct cell room =
        result->limit_bytes != UINT64_MAX && peak > 0 ? show_room(result->limit_bytes, peak) : none;
    rbi_text_add(t, "%11zu  %5" PRIu64 "  %10s  %10s  %10s%s%s\n", prediction->size,
                 (result->total + prediction->size - 1) / prediction->size, predicted.text,
                 measured.text, room.text, row->remark[0] ? "  " : "", row->remark);
}

static void add_head(struct rbi_text *t, const struct rbi_probe_result *result)
{
    rbi_text_add(t, "batch   %zu sample%s", result->batch, result->batch == 1 ? "" : "s");
    if (result->by_cost)
        rbi_text_add(t, ", cost %" PRIu64, result->total);
    rbi_text_add(t, "\ndevice  %s, %s", result->device,
                 result->device_bytes == UINT64_MAX ? "no cap"
                                                    : show_bytes(result->device_bytes).text);
    if (result->limit_bytes != UINT64_MAX)
        rbi_text_add(t, "; %s for the pool", show_bytes(result->limit_bytes).text);
    rbi_text_add(t, "\n\n");
}

void rbi_probe_add_table(struct rbi_text *t, const struct rbi_probe_result *result)
{
    const rebatch_probe_report *report = &result->report;
    const uint64_t steps = (result->total + report->size - 1) / report->size;
    add_head(t, result);
    rbi_text_add(t, "%11s  %5s  %10s  %10s  %10s\n", result->by_cost ? "budget" : "micro-batch",
                 "steps", "predicted", "measured", "room");
    for (size_t i = 0; i < result->row_count; i++)
        add_row(t, result, &result->rows[i]);
    rbi_text_add(t, "\nlargest %s: %zu, in %" PRIu64 " accumulation step%s; %s\n",
                 result->by_cost ? "budget of cost" : "micro-batch", report->size, steps,
                 steps == 1 ? "" : "s", rebatch_confidence_text(report->confidence));
    if (report->saved != REBATCH_SAVED_NONE)
        rbi_text_add(t, "saved: %s\n", rebatch_saved_size_text(report->saved));
    rbi_text_add(t, "%u micro-batch%s ran in %.2f s, %u of them out of memory\n",
                 report->microbatches, report->microbatches == 1 ? "" : "es", result->seconds,
                 report->ooms);
}

/* ---- for programs ---- */

static void put_text(struct rbi_text *t, const char *name, const char *text)
{
    rbi_text_add(t, "\"%s\":", name);
    rbi_text_add_json(t, text);
    rbi_text_add(t, ",");
}

static void put_number(struct rbi_text *t, const char *name, uint64_t number)
{
    rbi_text_add(t, "\"%s\":%" PRIu64 ",", name, number);
}

/* null where it is not known, or has no limit. */
static void put_bytes(struct rbi_text *t, const char *name, uint64_t bytes, bool is_known)
{
    if (is_known)
        put_number(t, name, bytes);
    else
        rbi_text_add(t, "\"%s\":null,", name);
}

static void put_row(struct rbi_text *t, const struct rbi_probe_result *result,
                    const struct rbi_probe_row *row)
{
    const rebatch_prediction *prediction = &row->prediction;
    const bool known = row->has_prediction;
    rbi_text_add(t, "{");
    put_number(t, "size", prediction->size);
    put_number(t, "steps", (result->total + prediction->size - 1) / prediction->size);
    put_bytes(t, "predicted_peak_bytes", prediction->peak_bytes, known);
    put_bytes(t, "reserved_bytes", prediction->reserved_bytes, known && prediction->fits);
    put_bytes(t, "failing_bytes", prediction->failing_bytes, known && !prediction->fits);
    put_bytes(t, "measured_peak_bytes", row->measured_bytes, row->ran);
    rbi_text_add(t, "\"ran\":%s,\"fits\":%s}",
                 row->ran      ? "true"
                 : row->failed ? "false"
                               : "null",
                 known         ? prediction->fits ? "true" : "false"
                 : row->ran    ? "true"
                 : row->failed ? "false"
                               : "null");
}

/* As in C: "EXACT", "HELD". */
static const char *const confidences[] = {
#define NAME(name, text) #name,
    REBATCH_CONFIDENCES(NAME)
#undef NAME
};
static const char *const saved[] = {
#define NAME(name, text) #name,
    REBATCH_SAVED_SIZES(NAME)
#undef NAME
};

static void put_report(struct rbi_text *t, const rebatch_probe_report *report)
{
    const bool is_found = report->size > 0;
    put_number(t, "size", report->size);
    put_bytes(t, "predicted_peak_bytes", report->predicted_peak_bytes,
              is_found && report->predicted_peak_bytes);
    put_bytes(t, "measured_peak_bytes", report->measured_peak_bytes, is_found);
    put_bytes(t, "available_bytes", report->available_bytes,
              is_found && report->available_bytes < (uint64_t)1 << 62);
    put_number(t, "twice", 2 * report->size);
    put_bytes(t, "twice_bytes", report->twice_bytes, is_found && report->twice_bytes);
    put_text(t, "confidence", confidences[report->confidence]);
    put_text(t, "saved", saved[report->saved]);
    put_number(t, "saved_size", report->saved_size);
    put_number(t, "trials", report->trials);
    put_number(t, "microbatches", report->microbatches);
    put_number(t, "ooms", report->ooms);
    put_number(t, "oom_asked_bytes", report->oom.asked_bytes);
}

void rbi_probe_add_json(struct rbi_text *t, const struct rbi_probe_result *result)
{
    rbi_text_add(t, "{");
    put_text(t, "status", rebatch_status_name(result->status));
    put_text(t, "error", result->error);
    put_number(t, "batch", result->batch);
    put_bytes(t, "batch_cost", result->total, result->by_cost);
    put_text(t, "device", result->device);
    put_bytes(t, "device_bytes", result->device_bytes, result->device_bytes != UINT64_MAX);
    put_bytes(t, "limit_bytes", result->limit_bytes, result->limit_bytes != UINT64_MAX);
    put_report(t, &result->report);
    rbi_text_add(t, "\"seconds\":%.6f,\"sizes\":[", result->seconds);
    for (size_t i = 0; i < result->row_count; i++) {
        if (i > 0)
            rbi_text_add(t, ",");
        put_row(t, result, &result->rows[i]);
    }
    rbi_text_add(t, "]}\n");
}
