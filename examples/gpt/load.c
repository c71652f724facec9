/* Owns the reading of a saved training run, and when of it anything is believed.
 * Must not know how a step runs. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpt/error.h"
#include "gpt/save.h"
#include "gpt/save_header.h"
#include "gpt/update.h"

static rebatch_status say(const char *path, const char *what)
{
    return gpt_error(REBATCH_E_IO, "%s cannot be %s: %s", path, what, strerror(errno));
}

/* ---- reading ---- */

struct reader {
    const char *path;
    uint8_t *bytes;
    size_t count;
    size_t at; /* what comes next */
    int version;
};

static void close_reader(struct reader *reader)
{
    free(reader->bytes);
}

static rebatch_status refuse(const struct reader *reader, const char *what)
{
    return gpt_error(REBATCH_E_PARSE, "%s %s", reader->path, what);
}

static rebatch_status read_file(struct reader *reader, int file)
{
    struct stat about;
    if (fstat(file, &about) != 0)
        return say(reader->path, "looked at");
    if (!S_ISREG(about.st_mode))
        return gpt_error(REBATCH_E_IO, "%s is no regular file", reader->path);
    const size_t size = (size_t)about.st_size;
    reader->bytes = malloc(size + 1);
    if (!reader->bytes)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for the %zu bytes of %s", size,
                         reader->path);
    while (reader->count < size) {
        const ssize_t got = read(file, reader->bytes + reader->count, size - reader->count);
        if (got < 0 && errno != EINTR)
            return say(reader->path, "read");
        if (got == 0)
            break;
        reader->count += got > 0 ? (size_t)got : 0;
    }
    return REBATCH_OK;
}

/* The checksum is the last thing in the file. */
static rebatch_status check_sum(struct reader *reader)
{
    const size_t digits = GPT_HASH_TEXT_BYTES - 1, head = sizeof GPT_SAVE_FIRST_LINE - 1;
    /* "..., version 2\n": what is before the number. */
    if (reader->count < head || memcmp(reader->bytes, GPT_SAVE_FIRST_LINE, head - 2) != 0)
        return refuse(reader, "is no saved training");
    reader->version = reader->bytes[head - 2] - '0';
    if (reader->version < 1 || reader->version > 2 || reader->bytes[head - 1] != '\n')
        return refuse(reader, "is of another version: expected version 1 or 2");
    if (reader->count < head + digits)
        return refuse(reader, "is cut short");
    struct gpt_hash hash;
    char sum[GPT_HASH_TEXT_BYTES];
    reader->count -= digits;
    gpt_hash_begin(&hash);
    gpt_hash_add(&hash, reader->bytes, reader->count);
    gpt_hash_end(&hash, sum);
    if (memcmp(reader->bytes + reader->count, sum, digits) != 0)
        return refuse(reader, "is damaged: its checksum does not hold");
    reader->at = head;
    return REBATCH_OK;
}

static rebatch_status open_reader(struct reader *reader, const char *path)
{
    *reader = (struct reader){.path = path};
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return say(path, "opened");
    rebatch_status status = read_file(reader, file);
    (void)close(file);
    if (!status)
        status = check_sum(reader);
    return status;
}

/* The next line as text, without its end; "" when there is none. */
static void next_line(char line[GPT_SAVE_LINE_BYTES], struct reader *reader)
{
    const uint8_t *from = reader->bytes + reader->at;
    const uint8_t *end = memchr(from, '\n', reader->count - reader->at);
    const size_t length = end ? (size_t)(end - from) : GPT_SAVE_LINE_BYTES;
    line[0] = '\0';
    if (length >= GPT_SAVE_LINE_BYTES)
        return;
    memcpy(line, from, length);
    line[length] = '\0';
    reader->at += length + 1;
}

/* The value of the line that must come next; NULL when it is another. */
static const char *next_value(char line[GPT_SAVE_LINE_BYTES], struct reader *reader,
                              const char *name)
{
    const size_t length = strlen(name);
    next_line(line, reader);
    return strncmp(line, name, length) == 0 && line[length] == '=' ? line + length + 1 : NULL;
}

static rebatch_status read_fields(void *object, struct reader *reader,
                                  const struct gpt_save_fields *fields)
{
    char line[GPT_SAVE_LINE_BYTES], words[GPT_SAVE_LINE_BYTES + 64];
    for (size_t i = 0; i < fields->count; i++) {
        const struct gpt_save_field *field = &fields->fields[i];
        const char *value = next_value(line, reader, field->name);
        if (value && gpt_save_parse(object, field, value))
            continue;
        (void)snprintf(words, sizeof words, "has \"%.60s\" where %s was expected", line,
                       field->name);
        return refuse(reader, words);
    }
    return REBATCH_OK;
}

static rebatch_status read_source(struct gpt_source *out, struct reader *reader)
{
    if (reader->version == 1)
        return REBATCH_OK;
    const char *const from = (const char *)reader->bytes + reader->at;
    const char *const end = memchr(from, '\n', reader->count - reader->at);
    if (!end || !gpt_save_parse_source(out, from, (size_t)(end - from)))
        return refuse(reader, "has no line of where its text is from where it was expected");
    reader->at += (size_t)(end - from) + 1;
    return REBATCH_OK;
}

static rebatch_status read_shape(struct gpt_save_shape *out, struct reader *reader)
{
    char line[GPT_SAVE_LINE_BYTES];
    uint64_t moments = 2;
    const char *value = next_value(line, reader, "text");
    if (value)
        (void)snprintf(out->text, sizeof out->text, "%.*s", (int)sizeof out->text - 1, value);
    const rebatch_status status = value ? read_source(&out->source, reader) : REBATCH_OK;
    if (status)
        return status;
    value = value ? next_value(line, reader, "moments") : NULL;
    if (!value || !gpt_save_parse_whole(&moments, value) || moments > 1)
        return refuse(reader, "has no line of its text and moments where they were expected");
    out->has_moments = moments == 1;
    next_line(line, reader); /* an empty one ends the header */
    return line[0] ? refuse(reader, "has a line too many in its header") : REBATCH_OK;
}

rebatch_status gpt_saved_options(struct gpt_train_options *out, struct gpt_source *source,
                                 const char *path)
{
    struct reader reader;
    struct gpt_train_options options = {0};
    struct gpt_trainer saved = {0};
    struct gpt_save_shape shape = {0};
    rebatch_status status = open_reader(&reader, path);
    if (!status)
        status = read_fields(&options, &reader, &gpt_save_settings);
    if (!status)
        status = read_fields(&saved, &reader, &gpt_save_states);
    if (!status)
        status = read_shape(&shape, &reader);
    if (!status)
        *out = options;
    if (!status && source)
        *source = shape.source;
    close_reader(&reader);
    return status;
}

/* ---- taking it over ---- */

static rebatch_status compare_settings(const struct reader *reader,
                                       const struct gpt_train_options *saved,
                                       const struct gpt_train_options *ours)
{
    char theirs_line[GPT_SAVE_LINE_BYTES], ours_line[GPT_SAVE_LINE_BYTES];
    for (size_t i = 0; i < gpt_save_settings.count; i++) {
        gpt_save_format(theirs_line, &gpt_save_settings.fields[i], saved);
        gpt_save_format(ours_line, &gpt_save_settings.fields[i], ours);
        if (strcmp(theirs_line, ours_line) != 0)
            return gpt_error(REBATCH_E_INVALID, "%s was saved with %s: this run has %s",
                             reader->path, theirs_line, ours_line);
    }
    return REBATCH_OK;
}

/* The same bytes are the same text, wherever they are now. */
static rebatch_status compare_text(const struct reader *reader, const struct gpt_save_shape *shape,
                                   const struct gpt_data *data)
{
    const struct gpt_source *const theirs = &shape->source, *const ours = gpt_data_source(data);
    const char *const found = theirs->is_default ? "what was found under " : "";
    char text[GPT_HASH_TEXT_BYTES];
    gpt_data_hash(data, text);
    if (strcmp(text, shape->text) == 0)
        return REBATCH_OK;
    if (!theirs->path[0])
        return gpt_error(REBATCH_E_INVALID,
                         "%s was saved in training on another text than this run's: expected that "
                         "one as --data",
                         reader->path);
    if (theirs->is_default == ours->is_default && strcmp(theirs->path, ours->path) == 0)
        return gpt_error(REBATCH_E_INVALID,
                         "%s was saved in training on %s%s, which is another text now",
                         reader->path, found, theirs->path);
    return gpt_error(REBATCH_E_INVALID,
                     "%s was saved in training on %s%s: this run has another text", reader->path,
                     found, theirs->path);
}

/* All that is there before anything is changed: so that nothing is when it cannot be had. */
struct taken {
    double *losses;
    struct gpt_set moments[2]; /* empty: the trainer has them, in the pool or pinned */
};

static void give_back(struct taken *taken, struct gpt_model *model)
{
    free(taken->losses);
    gpt_set_destroy(&taken->moments[0], model);
    gpt_set_destroy(&taken->moments[1], model);
}

static rebatch_status take(struct taken *taken, const struct gpt_trainer *trainer,
                           const struct gpt_save_shape *shape)
{
    struct gpt_model *model = trainer->model;
    rebatch_status status = REBATCH_OK;
    *taken = (struct taken){0};
    taken->losses = malloc((shape->losses + 1) * sizeof *taken->losses);
    if (!taken->losses)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu losses", shape->losses);
    for (int i = 0; i < 2 && shape->has_moments && !status; i++)
        if (gpt_moments_of(trainer)[i].count == 0)
            status = gpt_set_create(&taken->moments[i], model, gpt_block_count(&model->config),
                                    GPT_TAG_MOMENTS);
    if (status)
        give_back(taken, model);
    return status;
}

static rebatch_status fill_set(struct reader *reader, const struct gpt_set *set,
                               struct gpt_model *model)
{
    const struct gpt_queue *queue = &model->queue;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < gpt_block_count(&model->config) && !status; i++) {
        const size_t bytes = gpt_block_elements(&model->config, i) * sizeof(float);
        status = rebatch_copy(queue->device, set->blocks[i], reader->bytes + reader->at, bytes,
                              queue->stream);
        reader->at += bytes;
    }
    return status;
}

/* Before the first update moments are zeros, or not there. */
static rebatch_status clear_set(const struct gpt_set *set, struct gpt_model *model)
{
    const struct gpt_queue *queue = &model->queue;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < set->count && !status; i++)
        status = rebatch_fill(queue->device, set->blocks[i], 0,
                              gpt_block_elements(&model->config, i) * sizeof(float), queue->stream);
    return status;
}

/* The reader's memory is in use until the stream has run. */
static rebatch_status fill_sets(struct gpt_trainer *trainer, struct reader *reader,
                                const struct gpt_save_shape *shape)
{
    struct gpt_model *model = trainer->model;
    const struct gpt_set *moments = gpt_moments_of(trainer);
    rebatch_status status = fill_set(reader, &model->parameters, model);
    for (int i = 0; i < 2 && !status; i++)
        status = shape->has_moments ? fill_set(reader, &moments[i], model)
                                    : clear_set(&moments[i], model);
    if (!status)
        status = gpt_model_refresh(model);
    const rebatch_status waited =
        rebatch_stream_synchronize(model->queue.device, model->queue.stream);
    return status ? status : waited;
}

/* From here on only the device can fail. */
static rebatch_status take_over(struct gpt_trainer *trainer, struct reader *reader,
                                const struct gpt_trainer *saved, const struct gpt_save_shape *shape,
                                struct taken *taken)
{
    gpt_save_copy(trainer, saved, &gpt_save_states);
    memcpy(taken->losses, reader->bytes + reader->at, shape->losses * sizeof *taken->losses);
    reader->at += shape->losses * sizeof *taken->losses;
    free(trainer->losses);
    trainer->losses = taken->losses;
    trainer->loss_room = shape->losses + 1;
    for (int i = 0; i < 2; i++)
        if (taken->moments[i].count > 0)
            trainer->moments[i] = taken->moments[i];
    return fill_sets(trainer, reader, shape);
}

static rebatch_status load(struct gpt_trainer *trainer, struct reader *reader)
{
    struct gpt_train_options options = {0};
    struct gpt_trainer saved = {0};
    struct gpt_save_shape shape = {0};
    struct taken taken;
    rebatch_status status = read_fields(&options, reader, &gpt_save_settings);
    if (!status)
        status = compare_settings(reader, &options, &trainer->options);
    if (!status)
        status = read_fields(&saved, reader, &gpt_save_states);
    if (!status)
        status = read_shape(&shape, reader);
    shape.losses = saved.loss_count;
    if (!status)
        status = compare_text(reader, &shape, trainer->data);
    if (!status && (shape.losses > reader->count ||
                    reader->count - reader->at != gpt_save_payload_bytes(&options.config, &shape)))
        status = refuse(reader, "has another size than its header says");
    if (!status)
        status = take(&taken, trainer, &shape);
    if (status)
        return status;
    status = rebatch_set_step(trainer->rb, shape.losses);
    if (status) { /* called from within a callback */
        give_back(&taken, trainer->model);
        return status;
    }
    return take_over(trainer, reader, &saved, &shape, &taken);
}

rebatch_status gpt_trainer_load(struct gpt_trainer *trainer, const char *path)
{
    struct reader reader;
    rebatch_status status = open_reader(&reader, path);
    if (!status)
        status = load(trainer, &reader);
    close_reader(&reader);
    return status;
}
