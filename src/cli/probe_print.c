/* Owns what `rebatch probe` prints: a table for people, an object for programs.
 * Must not know how the figures were found. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/probe.h"

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
    (void)strcpy(cell.text + 1 + BAR_WIDTH, share > 1 ? ">" : "]");
    return cell;
}

static void print_row(const struct rbi_probe_result *result, const struct rbi_probe_row *row)
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
    char line[256];
    (void)snprintf(line, sizeof line, "%11zu  %5zu  %10s  %10s  %10s  %s  %s", prediction->size,
                   (result->train.batch + prediction->size - 1) / prediction->size, predicted.text,
                   row->failed ? "failed" : measured.text, room.text, bar.text, row->remark);
    size_t length = strlen(line);
    while (length > 0 && line[length - 1] == ' ')
        line[--length] = '\0';
    printf("%s\n", line);
}

static void print_head(const struct rbi_probe_result *result)
{
    const struct gpt_config *config = &result->train.config;
    printf("model   %zu layers x %zu channels, %zu heads, %zu tokens a sample, %s; batch of %zu\n",
           config->layers, config->channels, config->heads, config->length,
           gpt_dtype_name(config->dtype), result->train.batch);
    printf("device  %s, %s", result->device,
           result->device_bytes == UINT64_MAX ? "no cap" : show_limit(result->device_bytes).text);
    if (result->limit_bytes != UINT64_MAX)
        printf("; %s for the pool", show_limit(result->limit_bytes).text);
    printf("\n\n");
}

static void print_twice(const struct rbi_probe_result *result)
{
    const rebatch_probe_report *report = &result->report;
    if (report->twice_bytes == 0)
        return;
    printf("twice that, %zu, needs %s", 2 * report->size,
           show_bytes((double)report->twice_bytes).text);
    if (result->limit_bytes == UINT64_MAX)
        printf("\n");
    else if (report->twice_bytes > result->limit_bytes)
        printf(", %s more than there is\n",
               show_bytes((double)(report->twice_bytes - result->limit_bytes)).text);
    else
        printf(", which is there\n");
}

void rbi_probe_print(const struct rbi_probe_result *result)
{
    const rebatch_probe_report *report = &result->report;
    const size_t batch = result->train.batch;
    const size_t steps = (batch + report->size - 1) / report->size;
    print_head(result);
    printf("%11s  %5s  %10s  %10s  %10s\n", "micro-batch", "steps", "predicted", "measured",
           "room");
    for (size_t i = 0; i < result->row_count; i++)
        print_row(result, &result->rows[i]);
    printf("\nlargest micro-batch: %zu, in %zu accumulation step%s; %s\n", report->size, steps,
           steps == 1 ? "" : "s", rebatch_confidence_text(report->confidence));
    print_twice(result);
    if (report->saved != REBATCH_SAVED_NONE)
        printf("saved: %s\n", rebatch_saved_size_text(report->saved));
    printf("%u micro-batch%s ran in %.2f s, %u of them out of memory\n", report->microbatches,
           report->microbatches == 1 ? "" : "es", result->seconds, report->ooms);
}

/* ---- for programs ---- */

static void put_text(const char *name, const char *text)
{
    printf("\"%s\":\"", name);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if (*c == '"' || *c == '\\')
            printf("\\%c", *c);
        else if (*c < ' ' || *c == 0x7f)
            printf("\\u%04x", *c);
        else
            (void)putchar(*c);
    printf("\",");
}

static void put_number(const char *name, uint64_t number)
{
    printf("\"%s\":%" PRIu64 ",", name, number);
}

/* null where it is not known, or has no limit. */
static void put_bytes(const char *name, uint64_t bytes, bool is_known)
{
    if (is_known)
        put_number(name, bytes);
    else
        printf("\"%s\":null,", name);
}

static void put_row(const struct rbi_probe_result *result, const struct rbi_probe_row *row)
{
    const rebatch_prediction *prediction = &row->prediction;
    const bool known = row->has_prediction;
    printf("{");
    put_number("size", prediction->size);
    put_number("steps", (result->train.batch + prediction->size - 1) / prediction->size);
    put_bytes("predicted_peak_bytes", prediction->peak_bytes, known);
    put_bytes("reserved_bytes", prediction->reserved_bytes, known && prediction->fits);
    put_bytes("failing_bytes", prediction->failing_bytes, known && !prediction->fits);
    put_bytes("measured_peak_bytes", row->measured_bytes, row->ran);
    printf("\"ran\":%s,\"fits\":%s}",
           row->ran      ? "true"
           : row->failed ? "false"
                         : "null",
           known         ? prediction->fits ? "true" : "false"
           : row->ran    ? "true"
           : row->failed ? "false"
                         : "null");
}

static void put_model(const struct gpt_config *config)
{
    printf("\"model\":{");
    put_number("layers", config->layers);
    put_number("channels", config->channels);
    put_number("heads", config->heads);
    put_number("length", config->length);
    put_number("vocabulary", config->vocabulary);
    printf("\"dtype\":\"%s\"},", gpt_dtype_name(config->dtype));
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

static void put_report(const rebatch_probe_report *report)
{
    const bool is_found = report->size > 0;
    put_number("size", report->size);
    put_bytes("predicted_peak_bytes", report->predicted_peak_bytes,
              is_found && report->predicted_peak_bytes);
    put_bytes("measured_peak_bytes", report->measured_peak_bytes, is_found);
    put_bytes("available_bytes", report->available_bytes,
              is_found && report->available_bytes < (uint64_t)1 << 62);
    put_number("twice", 2 * report->size);
    put_bytes("twice_bytes", report->twice_bytes, is_found && report->twice_bytes);
    put_text("confidence", confidences[report->confidence]);
    put_text("saved", saved[report->saved]);
    put_number("saved_size", report->saved_size);
    put_number("trials", report->trials);
    put_number("microbatches", report->microbatches);
    put_number("ooms", report->ooms);
    put_number("oom_asked_bytes", report->oom.asked_bytes);
}

void rbi_probe_print_json(const struct rbi_probe_result *result)
{
    printf("{");
    put_text("status", rebatch_status_name(result->status));
    put_text("error", result->error);
    put_model(&result->train.config);
    put_number("batch", result->train.batch);
    put_text("device", result->device);
    put_bytes("device_bytes", result->device_bytes, result->device_bytes != UINT64_MAX);
    put_bytes("limit_bytes", result->limit_bytes, result->limit_bytes != UINT64_MAX);
    put_report(&result->report);
    printf("\"seconds\":%.6f,\"sizes\":[", result->seconds);
    for (size_t i = 0; i < result->row_count; i++) {
        if (i > 0)
            printf(",");
        put_row(result, &result->rows[i]);
    }
    printf("]}\n");
}
