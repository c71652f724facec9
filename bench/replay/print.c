/* Owns what the replay of traces prints: a table for people, objects for programs.
 * Must not know how the figures were found. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "replay.h"

#define PATH_LEAST 5
#define PATH_MOST 44
#define CELL_BYTES 32

/* ---- the table ---- */

static const struct column {
    const char *heading;
    int width;
} columns[] = {
    {"requested", 10}, {"peak live", 10},    {"reserved", 10},     {"utilisation", 11},
    {"PyTorch", 8},    {"ns/pair", 8},       {"device calls", 12}, {"first ms", 8},
    {"warm ms", 8},    {"largest hole", 12}, {"smallest", 10},     {"smallest/live", 13},
};
enum {
    COLUMNS = sizeof columns / sizeof *columns,
    COLUMNS_OF_SMALLEST = 2 /* the last ones */
};

struct cell {
    char text[CELL_BYTES];
};

static size_t column_count(const struct replay_settings *settings)
{
    return settings->smallest ? COLUMNS : COLUMNS - COLUMNS_OF_SMALLEST;
}

/* How wide the first column is: as the longest path, within bounds. */
static int path_width(const struct replay_settings *settings)
{
    size_t width = PATH_LEAST;
    for (size_t i = 0; i < settings->path_count; i++) {
        const size_t length = strlen(settings->paths[i]);
        width = length > width ? length : width;
    }
    return (int)(width < PATH_MOST ? width : PATH_MOST);
}

void replay_print_head(const struct replay_settings *settings)
{
    if (settings->json)
        return;
    printf("%-*s", path_width(settings), "trace");
    for (size_t i = 0; i < column_count(settings); i++)
        printf("  %*s", columns[i].width, columns[i].heading);
    fputs("\n", stdout);
}

static struct cell show_bytes(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    struct cell cell;
    double value = (double)bytes;
    size_t unit = 0;
    for (; value >= 999.95; unit++) /* so that rounding never shows four digits before the point */
        value /= 1024;
    const int decimals = unit == 0 ? 0 : value < 9.9995 ? 3 : value < 99.995 ? 2 : 1;
    snprintf(cell.text, sizeof cell.text, "%.*f %s", decimals, value, units[unit]);
    return cell;
}

static struct cell show_count(uint64_t count)
{
    struct cell cell;
    snprintf(cell.text, sizeof cell.text, "%" PRIu64, count);
    return cell;
}

static struct cell show_number(int decimals, double number)
{
    struct cell cell;
    snprintf(cell.text, sizeof cell.text, "%.*f", decimals, number);
    return cell;
}

static struct cell show_percent(uint64_t part, uint64_t whole)
{
    struct cell cell = {"-"};
    if (whole > 0)
        snprintf(cell.text, sizeof cell.text, "%.2f %%", 100 * (double)part / (double)whole);
    return cell;
}

static struct cell show_ratio(uint64_t part, uint64_t whole)
{
    return whole > 0 ? show_number(4, (double)part / (double)whole) : (struct cell){"-"};
}

static void print_row(const struct trace *trace, const struct replay_result *result,
                      const struct replay_settings *settings)
{
    const struct cell cells[COLUMNS] = {
        show_bytes(trace->peak_requested_bytes),
        show_bytes(trace->peak_live_bytes),
        show_bytes(result->peak_reserved_bytes),
        show_percent(trace->peak_live_bytes, result->peak_reserved_bytes),
        show_percent(trace->torch_allocated_bytes, trace->torch_reserved_bytes),
        show_number(1, result->ns_per_pair),
        show_count(result->device_calls),
        show_number(2, (double)result->first.driver_ns / 1e6),
        show_number(2, (double)result->warm_driver_ns / 1e6),
        show_bytes(result->largest_hole_bytes),
        show_bytes(result->smallest_capacity_bytes),
        show_ratio(result->smallest_capacity_bytes, trace->peak_live_bytes),
    };
    /* Of a path that is too long the end says more than the beginning. */
    const size_t length = strlen(trace->path);
    if (length > PATH_MOST)
        printf("...%s", trace->path + length - (PATH_MOST - strlen("...")));
    else
        printf("%-*s", path_width(settings), trace->path);
    for (size_t i = 0; i < column_count(settings); i++)
        printf("  %*s", columns[i].width, cells[i].text);
    fputs("\n", stdout);
}

/* ---- JSON ---- */

static void print_string(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            printf("\\%c", *text);
        else if ((unsigned char)*text < ' ')
            printf("\\u%04x", (unsigned)*text);
        else
            putchar(*text);
    }
    putchar('"');
}

static void print_count(const char *key, uint64_t count)
{
    printf(", \"%s\": %" PRIu64, key, count);
}

/* null when there is no whole. */
static void print_ratio(const char *key, uint64_t part, uint64_t whole)
{
    if (whole > 0)
        printf(", \"%s\": %.6f", key, (double)part / (double)whole);
    else
        printf(", \"%s\": null", key);
}

static void print_object(const struct trace *trace, const struct replay_result *result,
                         const struct replay_settings *settings)
{
    fputs("{\"trace\": ", stdout);
    print_string(trace->path);
    print_count("allocations", trace->allocations);
    print_count("peak_requested_bytes", trace->peak_requested_bytes);
    print_count("peak_live_bytes", trace->peak_live_bytes);
    print_count("pool_peak_live_bytes", result->pool_live_bytes);
    print_count("peak_reserved_bytes", result->peak_reserved_bytes);
    print_ratio("utilisation", trace->peak_live_bytes, result->peak_reserved_bytes);
    print_ratio("pytorch_utilisation", trace->torch_allocated_bytes, trace->torch_reserved_bytes);
    printf(", \"ns_per_pair\": %.2f", result->ns_per_pair);
    print_count("device_calls", result->device_calls);
    print_count("driver_creates", result->first.driver_creates);
    print_count("driver_maps", result->first.driver_maps);
    print_count("driver_accesses", result->first.driver_accesses);
    print_count("driver_unmaps", result->first.driver_unmaps);
    print_count("driver_releases", result->first.driver_releases);
    print_count("driver_pieces", result->first.driver_pieces);
    print_count("driver_ns", result->first.driver_ns);
    print_count("third_driver_ns", result->third_driver_ns);
    print_count("warm_driver_ns", result->warm_driver_ns);
    print_count("largest_hole_bytes", result->largest_hole_bytes);
    if (settings->smallest) {
        print_count("smallest_capacity_bytes", result->smallest_capacity_bytes);
        print_ratio("smallest_to_live", result->smallest_capacity_bytes, trace->peak_live_bytes);
    }
    fputs("}\n", stdout);
}

void replay_print_result(const struct trace *trace, const struct replay_result *result,
                         const struct replay_settings *settings)
{
    if (settings->json)
        print_object(trace, result, settings);
    else
        print_row(trace, result, settings);
    fflush(stdout); /* a long list is seen as it grows; the command looks for errors at its end */
}
