/* Owns the text in memory and the choice of samples.
 * Must not know the model, or how batches are cut. */
#include "gpt/data.h"

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "gpt/error.h"
#include "gpt/random.h"

struct gpt_data {
    uint8_t *bytes;
    size_t count, room;
    /* The splits: [0, training) and [held_out, count). */
    size_t training, held_out;
    struct gpt_source source;
};

/* ---- reading ---- */

static rebatch_status make_room(struct gpt_data *data, size_t more)
{
    if (data->room - data->count >= more)
        return REBATCH_OK;
    const size_t room = 2 * data->room > data->count + more ? 2 * data->room : data->count + more;
    uint8_t *bytes = realloc(data->bytes, room);
    if (!bytes)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu bytes of text", room);
    data->bytes = bytes;
    data->room = room;
    return REBATCH_OK;
}

static rebatch_status append_stream(struct gpt_data *data, FILE *file, const char *path)
{
    enum { PIECE = 65536 };
    for (;;) {
        const rebatch_status status = make_room(data, PIECE);
        if (status)
            return status;
        const size_t got = fread(data->bytes + data->count, 1, PIECE, file);
        data->count += got;
        if (got < PIECE && ferror(file))
            return gpt_error(REBATCH_E_IO, "%s cannot be read: %s", path, strerror(errno));
        if (got < PIECE)
            return REBATCH_OK;
    }
}

static rebatch_status append_file(struct gpt_data *data, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return gpt_error(REBATCH_E_IO, "%s cannot be opened: %s", path, strerror(errno));
    const rebatch_status status = append_stream(data, file, path);
    fclose(file);
    return status;
}

/* What was read becomes two splits; the same one twice when a tenth is no sample. */
static rebatch_status split(struct gpt_data *data, const char *name, size_t length)
{
    if (data->count == 0)
        return gpt_error(REBATCH_E_INVALID, "%s is empty: expected text to train on", name);
    if (data->count <= length)
        return gpt_error(REBATCH_E_INVALID,
                         "%s has %zu bytes: expected at least the %zu of one sample", name,
                         data->count, length + 1);
    const bool is_long = data->count / 10 > length;
    data->training = is_long ? data->count - data->count / 10 : data->count;
    data->held_out = is_long ? data->training : 0;
    return REBATCH_OK;
}

static rebatch_status create(struct gpt_data **out)
{
    *out = calloc(1, sizeof **out);
    return *out ? REBATCH_OK : gpt_error(REBATCH_E_HOST_OOM, "no host memory for text");
}

/* What is found there from any folder. */
static void set_source(struct gpt_data *data, const char *path, bool is_default)
{
    data->source.is_default = is_default;
    if (!realpath(path, data->source.path))
        data->source.path[0] = '\0';
}

/* Keeps the text when `status` is good, else closes it. */
static rebatch_status finish(struct gpt_data **out, const char *name, size_t length,
                             rebatch_status status)
{
    if (!status)
        status = split(*out, name, length);
    if (status) {
        gpt_data_close(*out);
        *out = NULL;
    }
    return status;
}

rebatch_status gpt_data_open(struct gpt_data **out, const char *path, size_t length)
{
    const rebatch_status status = create(out);
    if (status)
        return status;
    set_source(*out, path, false);
    return finish(out, path, length, append_file(*out, path));
}

/* ---- the default text ---- */

static bool ends_with(const char *name, const char *end)
{
    const size_t length = strlen(name), tail = strlen(end);
    return length >= tail && strcmp(name + length - tail, end) == 0;
}

/* Appends a regular file; one that is not there, or a link, is left out. */
static rebatch_status append_if_regular(struct gpt_data *data, const char *folder, const char *name)
{
    char path[4096];
    const int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    struct stat about;
    if (length < 0 || (size_t)length >= sizeof path || lstat(path, &about) != 0 ||
        !S_ISREG(about.st_mode))
        return REBATCH_OK;
    return append_file(data, path);
}

/* The same order in every locale. */
static int by_bytes(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* Appends the regular files of a folder whose names end in `end`, by name. */
static rebatch_status append_folder(struct gpt_data *data, const char *root, const char *folder,
                                    const char *end)
{
    char path[4096];
    const int length = snprintf(path, sizeof path, "%s/%s", root, folder);
    if (length < 0 || (size_t)length >= sizeof path)
        return REBATCH_OK;
    struct dirent **entries;
    const int count = scandir(path, &entries, NULL, by_bytes);
    if (count < 0)
        return REBATCH_OK;
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < count; i++) {
        if (!status && ends_with(entries[i]->d_name, end))
            status = append_if_regular(data, path, entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
    return status;
}

static rebatch_status append_default(struct gpt_data *data, const char *root)
{
    static const char *const files[] = {"README.md", "CHANGELOG.md", "LICENSE"};
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof files / sizeof *files && !status; i++)
        status = append_if_regular(data, root, files[i]);
    if (!status)
        status = append_folder(data, root, "docs", ".md");
    if (!status)
        status = append_folder(data, root, "include/rebatch", ".h");
    if (!status)
        status = append_folder(data, "/usr/share", "common-licenses", "");
    return status;
}

rebatch_status gpt_data_open_default(struct gpt_data **out, const char *root, size_t length)
{
    const rebatch_status status = create(out);
    if (status)
        return status;
    set_source(*out, root, true);
    return finish(out, "the text found on this machine", length, append_default(*out, root));
}

void gpt_data_close(struct gpt_data *data)
{
    if (!data)
        return;
    free(data->bytes);
    free(data);
}

size_t gpt_data_bytes(const struct gpt_data *data)
{
    return data->count;
}

const struct gpt_source *gpt_data_source(const struct gpt_data *data)
{
    return &data->source;
}

void gpt_data_hash(const struct gpt_data *data, char text[GPT_HASH_TEXT_BYTES])
{
    struct gpt_hash hash;
    gpt_hash_begin(&hash);
    gpt_hash_add(&hash, data->bytes, data->count);
    gpt_hash_end(&hash, text);
}

/* ---- samples ---- */

void gpt_data_sample(int32_t *out, const struct gpt_data *data, enum gpt_split split_of,
                     uint64_t seed, uint64_t step, size_t index, size_t length)
{
    const bool held_out = split_of == GPT_HELD_OUT;
    const uint8_t *bytes = held_out ? data->bytes + data->held_out : data->bytes;
    const size_t count = held_out ? data->count - data->held_out : data->training;
    const uint32_t counter[4] = {(uint32_t)((uint64_t)index >> 32), (uint32_t)index,
                                 held_out ? GPT_RANDOM_HELD_OUT : GPT_RANDOM_TRAINING,
                                 (uint32_t)step};
    uint32_t words[4];
    gpt_philox(words, counter, seed ^ (step & 0xffffffff00000000u));
    const uint64_t number = (uint64_t)words[0] << 32 | words[1];
    const uint8_t *from = bytes + number % (count - length);
    for (size_t t = 0; t <= length; t++)
        out[t] = from[t];
}
