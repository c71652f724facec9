/* Owns the file of what probes have found: its format, and what of it is believed.
 * Must not know sessions, or how a size was found. */
#include "probe/store.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "rebatch/status.h"

/* How long another process may take over its own entry. */
#define PATIENCE_NS 2000000000u

/* ---- the checksum ---- */

#define SUM_FIELD " sum="
#define SUM_DIGITS 16

/* CRC-64 of ECMA-182, reflected, four bits at a time: any change within 64 bits in a row is noticed
 * for certain. */
static uint64_t checksum(const char *bytes, size_t length)
{
    uint64_t table[16];
    for (size_t i = 0; i < 16; i++) {
        table[i] = i;
        for (int bit = 0; bit < 4; bit++)
            table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xc96c5795d7870f42u : 0);
    }
    uint64_t sum = UINT64_MAX;
    for (size_t i = 0; i < length; i++) {
        sum ^= (unsigned char)bytes[i];
        sum = sum >> 4 ^ table[sum & 15];
        sum = sum >> 4 ^ table[sum & 15];
    }
    return ~sum;
}

/* ---- lines ---- */

struct line {
    const char *at;
    size_t length; /* without its end */
    bool has_end;
};

/* The line that begins at `from`; false at the end of the text. */
static bool next_line(struct line *line, const char *text, size_t length, size_t *from)
{
    if (*from >= length)
        return false;
    const char *end = memchr(text + *from, '\n', length - *from);
    line->at = text + *from;
    line->has_end = end != NULL;
    line->length = end ? (size_t)(end - line->at) : length - *from;
    *from += line->length + line->has_end;
    return true;
}

/* The length of what the checksum is of; 0 when it does not hold. */
static size_t checked_length(const struct line *line)
{
    const size_t tail = sizeof SUM_FIELD - 1 + SUM_DIGITS;
    if (!line->has_end || line->length <= tail)
        return 0;
    const size_t length = line->length - tail;
    char expected[sizeof SUM_FIELD + SUM_DIGITS];
    struct rbi_text t = {expected, sizeof expected, 0};
    rbi_text_add(&t, SUM_FIELD "%016" PRIx64, checksum(line->at, length));
    return memcmp(line->at + length, expected, tail) == 0 ? length : 0;
}

/* ---- fields ---- */

/* In quotes, so that it has no quote, no end of line and nothing unprintable in it. */
static void add_quoted(struct rbi_text *t, const char *name, const char *value)
{
    rbi_text_add(t, "%s=\"", name);
    for (const char *c = value; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ' || *c == 0x7f)
            rbi_text_add(t, "\\x%02x", (unsigned)(unsigned char)*c);
        else
            rbi_text_add(t, "%c", *c);
    rbi_text_add(t, "\" ");
}

static void add_key(struct rbi_text *t, const struct rbi_store_key *key)
{
    add_quoted(t, "key", key->model);
    add_quoted(t, "device", key->device);
    rbi_text_add(t, "total_bytes=%" PRIu64 " ", key->total_bytes);
    add_quoted(t, "driver", key->driver);
    add_quoted(t, "library", key->library);
    add_quoted(t, "settings", key->settings);
}

/* "NAME=123 ", and what is behind it; NULL when it is not there. */
static const char *read_number(uint64_t *out, const char *at, const char *end, const char *name)
{
    const size_t length = strlen(name);
    if ((size_t)(end - at) < length || memcmp(at, name, length) != 0)
        return NULL;
    at += length;
    const char *first = at;
    for (*out = 0; at < end && *at >= '0' && *at <= '9'; at++)
        if (__builtin_mul_overflow(*out, 10, out) || __builtin_add_overflow(*out, *at - '0', out))
            return NULL;
    return at > first && at < end && *at == ' ' ? at + 1 : NULL;
}

/* What was too large is said only where it is known. */
static void read_bound(struct rbi_store_result *out, const char *at, const char *end)
{
    uint64_t size = 0, room = 0;
    at = read_number(&size, at, end, "too_large=");
    if (!at || size <= out->size || size > SIZE_MAX || !read_number(&room, at, end, "room_bytes="))
        return;
    out->too_large = (size_t)size;
    out->room_bytes = room;
}

/* Fields behind these may come with a later version of the library, and are none of an older. */
static bool read_result(struct rbi_store_result *out, const char *at, const char *end)
{
    uint64_t size = 0;
    *out = (struct rbi_store_result){0};
    at = read_number(&size, at, end, "size=");
    if (!at || size == 0 || size > SIZE_MAX)
        return false;
    out->size = (size_t)size;
    at = read_number(&out->peak_bytes, at, end, "peak_bytes=");
    if (at)
        read_bound(out, at, end);
    return at != NULL;
}

static void add_entry(struct rbi_text *t, const struct rbi_store_key *key,
                      const struct rbi_store_result *result)
{
    char when[32] = "";
    const time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc))
        (void)strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", &utc);
    const size_t from = t->length;
    add_key(t, key);
    rbi_text_add(t, "size=%zu peak_bytes=%" PRIu64 " ", result->size, result->peak_bytes);
    if (result->too_large)
        rbi_text_add(t, "too_large=%zu room_bytes=%" PRIu64 " ", result->too_large,
                     result->room_bytes);
    rbi_text_add(t, "found=%s", when);
    if (t->length < t->size)
        rbi_text_add(t, SUM_FIELD "%016" PRIx64 "\n", checksum(t->text + from, t->length - from));
}

/* ---- the file ---- */

struct store {
    const char *path;
    char *text;
    size_t length;
    size_t begin; /* of the first entry */
    char *key;    /* how the line of the key begins */
    size_t key_length;
    struct rbi_store_result found;
    size_t others, damaged; /* lines: good ones of other keys, and bad ones */
    size_t first_damaged;   /* its number in the file, from 1 */
};

static void close_store(struct store *store)
{
    rbi_heap_free(store->text);
    rbi_heap_free(store->key);
}

static rebatch_status make_key(struct store *store, const struct rbi_store_key *key)
{
    struct rbi_text t = {NULL, 0, 0};
    add_key(&t, key);
    store->key_length = t.length;
    store->key = rbi_heap_calloc(t.length + 1, 1);
    if (!store->key)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for the results in %.200s",
                         store->path);
    t = (struct rbi_text){store->key, t.length + 1, 0};
    add_key(&t, key);
    return REBATCH_OK;
}

/* Of an empty file, or one that begins as ours do. */
static rebatch_status check_header(struct store *store)
{
    static const char header[] = RBI_STORE_HEADER;
    const size_t all = sizeof header - 1, name = all - sizeof "1\n" + 1;
    if (store->length == 0)
        return REBATCH_OK;
    store->begin = all;
    if (store->length >= all && memcmp(store->text, header, all) == 0)
        return REBATCH_OK;
    const bool is_named = store->length > name && memcmp(store->text, header, name) == 0;
    const char *number = is_named ? store->text + name : "";
    const int digits = (int)strspn(number, "0123456789");
    if (digits > 1 || (digits == 1 && *number != '1'))
        return rbi_error(REBATCH_E_PARSE,
                         "%.200s has version %.*s of the results of probes, expected 1: it is left "
                         "alone",
                         store->path, digits, number);
    return rbi_error(REBATCH_E_PARSE, "%.200s has no results of probes in it: it is left alone",
                     store->path);
}

static bool is_of_key(const struct store *store, const struct line *line)
{
    return line->length >= store->key_length &&
           memcmp(line->at, store->key, store->key_length) == 0;
}

static void look_through(struct store *store)
{
    struct line line;
    size_t number = 1;
    for (size_t from = store->begin; next_line(&line, store->text, store->length, &from);) {
        number++;
        const size_t length = checked_length(&line);
        struct rbi_store_result result;
        if (length == 0) {
            store->first_damaged = store->damaged++ ? store->first_damaged : number;
            continue;
        }
        if (!is_of_key(store, &line))
            store->others++;
        else if (read_result(&result, line.at + store->key_length, line.at + length))
            store->found = result;
    }
}

static rebatch_status open_store(struct store *store, const char *path,
                                 const struct rbi_store_key *key)
{
    *store = (struct store){.path = path};
    rebatch_status status = make_key(store, key);
    if (!status)
        status = rbi_file_read(&store->text, &store->length, path, RBI_STORE_BYTES_MOST);
    if (!status)
        status = check_header(store);
    if (!status)
        look_through(store);
    return status;
}

rebatch_status rbi_store_find(struct rbi_store_result *out, const char *path,
                              const struct rbi_store_key *key)
{
    struct store store;
    *out = (struct rbi_store_result){0};
    rebatch_status status = open_store(&store, path, key);
    if (!status) {
        *out = store.found;
        if (store.damaged)
            status = rbi_error(REBATCH_E_PARSE,
                               "%.200s:%zu: %zu damaged line%s, which cannot be believed", path,
                               store.first_damaged, store.damaged, store.damaged > 1 ? "s" : "");
    }
    close_store(&store);
    return status;
}

/* ---- writing ---- */

/* The new text: what stays, and the new entry last, so that the first are the oldest. */
static void compose(struct rbi_text *t, const struct store *store, const struct rbi_store_key *key,
                    const struct rbi_store_result *result)
{
    size_t surplus = store->others >= RBI_STORE_ENTRIES ? store->others - RBI_STORE_ENTRIES + 1 : 0;
    rbi_text_add(t, "%s", RBI_STORE_HEADER);
    struct line line;
    for (size_t from = store->begin; next_line(&line, store->text, store->length, &from);) {
        if (checked_length(&line) == 0 || is_of_key(store, &line))
            continue;
        if (surplus > 0) {
            surplus--;
            continue;
        }
        rbi_text_add(t, "%.*s\n", (int)line.length, line.at);
    }
    add_entry(t, key, result);
}

static rebatch_status write_store(const struct store *store, int lock,
                                  const struct rbi_store_key *key,
                                  const struct rbi_store_result *result)
{
    char damaged[PATH_MAX];
    const int name_length = snprintf(damaged, sizeof damaged, "%s" RBI_STORE_DAMAGED, store->path);
    if (name_length < 0 || (size_t)name_length >= sizeof damaged)
        return rbi_error(REBATCH_E_IO, "%.200s...: the name is too long", store->path);
    struct rbi_text t = {NULL, 0, 0};
    compose(&t, store, key, result);
    const size_t room = t.length + sizeof SUM_FIELD + SUM_DIGITS + 1; /* the sum is of what fits */
    char *text = rbi_heap_calloc(room, 1);
    if (!text)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for the results in %.200s",
                         store->path);
    t = (struct rbi_text){text, room, 0};
    compose(&t, store, key, result);
    rebatch_status status = REBATCH_OK;
    if (t.length > RBI_STORE_BYTES_MOST / 2)
        status = rbi_error(REBATCH_E_IO, "%.200s would be larger than %zu bytes", store->path,
                           RBI_STORE_BYTES_MOST / 2);
    if (!status)
        status =
            rbi_file_replace(store->path, lock, text, t.length, store->damaged ? damaged : NULL);
    rbi_heap_free(text);
    return status;
}

rebatch_status rbi_store_put(const char *path, const struct rbi_store_key *key,
                             const struct rbi_store_result *result)
{
    int lock;
    rebatch_status status = rbi_file_lock(&lock, path, PATIENCE_NS);
    if (status)
        return status;
    struct store store;
    status = open_store(&store, path, key);
    if (!status)
        status = write_store(&store, lock, key, result);
    close_store(&store);
    rbi_file_unlock(lock);
    return status;
}
