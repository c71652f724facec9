/* Owns what is said of a probe: a table for people, an object for programs.
 * Must not know how the figures were found. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "launch/launch.h"

#define BAR_WIDTH 20

/* ---- for people ---- */

struct cell {
    char text[32];
};

/* Three significant digits. */
static struct cell show_bytes(double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    struct cell cell;
    size_t unit = 0;
    double value = bytes < 0 ? -bytes : bytes;
    while (value >= 1023.5 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1024;
        unit++;
    }
    const int digits = unit == 0 ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    (void)snprintf(cell.text, sizeof cell.text, "%s%.*f %s", bytes < 0 ? "-" : "", digits, value,
                   units[unit]);
    return cell;
}

static struct cell show_limit(uint64_t bytes)
{
    return bytes == UINT64_MAX ? (struct cell){"no limit"} : show_bytes((double)bytes);
}

/* '#' for what is live at most, '.' for what stays free, '>' for what is beyond the limit. */
static struct cell draw_bar(uint64_t peak_bytes, uint64_t limit_bytes)
{
    struct cell cell = {"["};
    const double share = (double)peak_bytes / (double)limit_bytes;
    const int filled = share >= 1 ? BAR_WIDTH : (int)(share * BAR_WIDTH + 0.5);
    for (int i = 0; i < BAR_WIDTH; i++)
        cell.text[1 + i] = i < filled ? '#' : '.';
    cell.text[1 + BAR_WIDTH] = share > 1 ? '>' : ']';
    cell.text[2 + BAR_WIDTH] = '\0';
    return cell;
}

static void add_row(struct rbi_text *t, const struct rbi_probe_result *result,
                    const struct rbi_probe_row *row)
{
    const rebatch_prediction *prediction = &row->prediction;
    const bool has_limit = result->limit_bytes != UINT64_MAX;
    const uint64_t peak = row->has_prediction ? prediction->peak_bytes : row->measured_bytes;
    struct cell predicted = {"-"}, measured = {"-"}, room = {"-"}, bar = {""};
    if (row->has_prediction)
        predicted = show_bytes((double)prediction->peak_bytes);
    if (row->ran)
        measured = show_bytes((double)row->measured_bytes);
    if (has_limit && peak > 0) {
        room = show_bytes((double)result->limit_bytes - (double)peak);
        bar = draw_bar(peak, result->limit_bytes);
    }
    char text[256];
    struct rbi_text line = {text, sizeof text, 0};
    rbi_text_add(&line, "%11zu  %5" PRIu64 "  %10s  %10s  %10s  %s  %s", prediction->size,
                 (result->total + prediction->size - 1) / prediction->size, predicted.text,
                 row->failed ? "failed" : measured.text, room.text, bar.text, row->remark);
    size_t length = rbi_min(line.length, sizeof text - 1);
    while (length > 0 && text[length - 1] == ' ')
        length--;
    rbi_text_add(t, "%.*s\n", (int)length, text);
}

static void add_head(struct rbi_text *t, const struct rbi_probe_result *result)
{
    rbi_text_add(t, "batch   %zu sample%s", result->batch, result->batch == 1 ? "" : "s");
    if (result->by_cost)
        rbi_text_add(t, ", cost %" PRIu64, result->total);
    rbi_text_add(t, "\ndevice  %s, %s", result->device,
                 result->device_bytes == UINT64_MAX ? "no cap"
                                                    : show_limit(result->device_bytes).text);
    if (result->limit_bytes != UINT64_MAX)
        rbi_text_add(t, "; %s for the pool", show_limit(result->limit_bytes).text);
    rbi_text_add(t, "\n\n");
}

static bool is_predicted_to_fit(const struct rbi_probe_result *result, size_t size)
{
    for (size_t i = 0; i < result->row_count; i++)
        if (result->rows[i].prediction.size == size && result->rows[i].has_prediction)
            return result->rows[i].prediction.fits;
    return true;
}

static void add_twice(struct rbi_text *t, const struct rbi_probe_result *result)
{
    const rebatch_probe_report *report = &result->report;
    if (report->twice_bytes == 0)
        return;
    rbi_text_add(t, "twice that, %zu, needs %s", 2 * report->size,
                 show_bytes((double)report->twice_bytes).text);
    if (result->limit_bytes == UINT64_MAX)
        rbi_text_add(t, "\n");
    else if (report->twice_bytes > result->limit_bytes)
        rbi_text_add(t, ", %s more than there is\n",
                     show_bytes((double)(report->twice_bytes - result->limit_bytes)).text);
    else
        rbi_text_add(t, is_predicted_to_fit(result, 2 * report->size) ? ", which is there\n"
                                                                      : ", which does not fit\n");
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
    add_twice(t, result);
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
