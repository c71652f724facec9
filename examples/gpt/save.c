/* Owns the file of a training run: a text header, arrays as they lie in memory, a SHA-256 of both.
 * Must not know how a step runs. */
#include "gpt/save.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpt/error.h"

static const char format_line[] = "rebatch gpt training state, version 1\n";

/* ---- the fields of the header: one line "name=value" each, in this order ---- */

enum kind { SIZE, WIDE, REAL, SWITCH, DTYPE };

struct field {
    const char *name;
    enum kind kind;
    size_t offset;
};

/* Settings: of struct gpt_train_options. The bits depend on all of them. */
static const struct field settings[] = {
#define SETTING(name, kind, member)                                                                \
    {                                                                                              \
        name, kind, offsetof(struct gpt_train_options, member)                                     \
    }
    SETTING("layers", SIZE, config.layers),
    SETTING("channels", SIZE, config.channels),
    SETTING("heads", SIZE, config.heads),
    SETTING("length", SIZE, config.length),
    SETTING("vocabulary", SIZE, config.vocabulary),
    SETTING("dropout", REAL, config.dropout),
    SETTING("dtype", DTYPE, config.dtype),
    SETTING("inexact", SWITCH, config.inexact),
    SETTING("batch", SIZE, batch),
    SETTING("seed", WIDE, seed),
    SETTING("learning_rate", REAL, learning_rate),
    SETTING("least_learning_rate", REAL, least_learning_rate),
    SETTING("warmup_steps", SIZE, warmup_steps),
    SETTING("total_steps", SIZE, total_steps),
    SETTING("beta1", REAL, beta1),
    SETTING("beta2", REAL, beta2),
    SETTING("epsilon", REAL, epsilon),
    SETTING("weight_decay", REAL, weight_decay),
    SETTING("clip", REAL, clip),
#undef SETTING
};

/* State: of struct gpt_trainer. Dropout and the choice of samples are functions of the seed and the
 * number of the step, which is that of the losses. */
static const struct field states[] = {
#define STATE(name, kind, member)                                                                  \
    {                                                                                              \
        name, kind, offsetof(struct gpt_trainer, member)                                           \
    }
    STATE("steps", SIZE, loss_count),
    STATE("updates", WIDE, updates),
    STATE("samples_seen", WIDE, samples_seen),
#undef STATE
};

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define LINE_BYTES 128

/* "name=value", as nine digits for a float, which are enough to give the same one back. */
static void format_field(char line[LINE_BYTES], const struct field *field, const void *object)
{
    const void *at = (const char *)object + field->offset;
    switch (field->kind) {
    case SIZE:
        (void)snprintf(line, LINE_BYTES, "%s=%zu", field->name, *(const size_t *)at);
        break;
    case WIDE:
        (void)snprintf(line, LINE_BYTES, "%s=%llu", field->name,
                       (unsigned long long)*(const uint64_t *)at);
        break;
    case REAL:
        (void)snprintf(line, LINE_BYTES, "%s=%.9g", field->name, (double)*(const float *)at);
        break;
    case SWITCH:
        (void)snprintf(line, LINE_BYTES, "%s=%d", field->name, *(const bool *)at);
        break;
    case DTYPE:
        (void)snprintf(line, LINE_BYTES, "%s=%s", field->name,
                       gpt_dtype_name(*(const enum gpt_dtype *)at));
        break;
    }
}

static bool parse_whole(uint64_t *out, const char *text)
{
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0;
}

static bool parse_value(void *object, const struct field *field, const char *text)
{
    void *at = (char *)object + field->offset;
    uint64_t whole = 0;
    char *end = NULL;
    if (field->kind == DTYPE)
        return gpt_dtype_parse(at, text) == REBATCH_OK;
    if (field->kind == REAL) {
        *(float *)at = strtof(text, &end);
        return end != text && *end == '\0';
    }
    if (!parse_whole(&whole, text) || (field->kind == SWITCH && whole > 1))
        return false;
    if (field->kind == SWITCH)
        *(bool *)at = whole != 0;
    else if (field->kind == SIZE)
        *(size_t *)at = (size_t)whole;
    else
        *(uint64_t *)at = whole;
    return true;
}

/* ---- what follows the header ---- */

/* Of losses, weights and both moments, which are not there before the first update. */
struct shape {
    size_t losses;
    bool has_moments;
    char text[GPT_HASH_TEXT_BYTES]; /* SHA-256 of what is trained on */
};

static size_t set_bytes(const struct gpt_config *config)
{
    size_t bytes = 0;
    for (size_t i = 0; i < gpt_block_count(config); i++)
        bytes += gpt_block_elements(config, i) * sizeof(float);
    return bytes;
}

static size_t payload_bytes(const struct gpt_config *config, const struct shape *shape)
{
    return shape->losses * sizeof(double) + (shape->has_moments ? 3 : 1) * set_bytes(config);
}

/* ---- writing ---- */

struct writer {
    const char *path;
    int file;
    struct gpt_hash hash;
};

static rebatch_status say(const char *path, const char *what)
{
    return gpt_error(REBATCH_E_IO, "%s cannot be %s: %s", path, what, strerror(errno));
}

static rebatch_status put_unhashed(struct writer *writer, const void *bytes, size_t count)
{
    for (size_t done = 0; done < count;) {
        const ssize_t put = write(writer->file, (const char *)bytes + done, count - done);
        if (put < 0 && errno != EINTR)
            return say(writer->path, "written");
        done += put > 0 ? (size_t)put : 0;
    }
    return REBATCH_OK;
}

static rebatch_status put(struct writer *writer, const void *bytes, size_t count)
{
    gpt_hash_add(&writer->hash, bytes, count);
    return put_unhashed(writer, bytes, count);
}

static rebatch_status put_line(struct writer *writer, const char *line)
{
    const rebatch_status status = put(writer, line, strlen(line));
    return status ? status : put(writer, "\n", 1);
}

static rebatch_status put_fields(struct writer *writer, const struct field *fields, size_t count,
                                 const void *object)
{
    char line[LINE_BYTES];
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < count && !status; i++) {
        format_field(line, &fields[i], object);
        status = put_line(writer, line);
    }
    return status;
}

static rebatch_status put_header(struct writer *writer, const struct gpt_trainer *trainer,
                                 const struct shape *shape)
{
    char line[LINE_BYTES];
    rebatch_status status = put(writer, format_line, sizeof format_line - 1);
    if (!status)
        status = put_fields(writer, settings, COUNT(settings), &trainer->options);
    if (!status)
        status = put_fields(writer, states, COUNT(states), trainer);
    if (status)
        return status;
    (void)snprintf(line, sizeof line, "text=%s\nmoments=%d\n", shape->text, shape->has_moments);
    return put_line(writer, line);
}

static rebatch_status put_set(struct writer *writer, const struct gpt_model *model,
                              const struct gpt_set *set, void *room)
{
    const struct gpt_queue *queue = &model->queue;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < gpt_block_count(&model->config) && !status; i++) {
        const size_t bytes = gpt_block_elements(&model->config, i) * sizeof(float);
        status = rebatch_copy(queue->device, room, set->blocks[i], bytes, queue->stream);
        if (!status)
            status = rebatch_stream_synchronize(queue->device, queue->stream);
        if (!status)
            status = put(writer, room, bytes);
    }
    return status;
}

static rebatch_status put_arrays(struct writer *writer, const struct gpt_trainer *trainer,
                                 const struct shape *shape, void *room)
{
    rebatch_status status = put(writer, trainer->losses, shape->losses * sizeof *trainer->losses);
    if (!status)
        status = put_set(writer, trainer->model, &trainer->model->parameters, room);
    for (int i = 0; i < 2 && shape->has_moments && !status; i++)
        status = put_set(writer, trainer->model, &trainer->moments[i], room);
    return status;
}

static rebatch_status put_all(struct writer *writer, const struct gpt_trainer *trainer)
{
    const struct gpt_config *config = &trainer->model->config;
    const size_t outer = gpt_block_elements(config, 0), layer = gpt_block_elements(config, 1);
    struct shape shape = {.losses = trainer->loss_count,
                          .has_moments = trainer->moments[1].count > 0};
    char sum[GPT_HASH_TEXT_BYTES];
    void *room = malloc((outer > layer ? outer : layer) * sizeof(float));
    if (!room)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory to save weights");
    gpt_data_hash(trainer->data, shape.text);
    gpt_hash_begin(&writer->hash);
    rebatch_status status = put_header(writer, trainer, &shape);
    if (!status)
        status = put_arrays(writer, trainer, &shape, room);
    free(room);
    gpt_hash_end(&writer->hash, sum);
    if (!status)
        status = put_unhashed(writer, sum, strlen(sum));
    if (!status && fsync(writer->file) != 0)
        status = say(writer->path, "written");
    return status;
}

/* A new name is on the disk when its folder is. */
static void sync_folder(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    const int length = slash ? (int)(slash - path) + 1 : 0;
    if ((size_t)snprintf(folder, sizeof folder, "%.*s.", length, path) >= sizeof folder)
        return;
    const int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file >= 0) {
        (void)fsync(file);
        (void)close(file);
    }
}

rebatch_status gpt_trainer_save(struct gpt_trainer *trainer, const char *path)
{
    char beside[PATH_MAX];
    const int length = snprintf(beside, sizeof beside, "%s.new", path);
    if (length < 0 || (size_t)length >= sizeof beside)
        return gpt_error(REBATCH_E_IO, "%.200s...: the name is too long", path);
    struct writer writer = {.path = beside};
    writer.file = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (writer.file < 0)
        return say(beside, "made");
    rebatch_status status = put_all(&writer, trainer);
    if (close(writer.file) != 0 && !status)
        status = say(beside, "written");
    if (!status && rename(beside, path) != 0)
        status = say(path, "replaced");
    if (status)
        (void)unlink(beside);
    else
        sync_folder(path);
    return status;
}

/* ---- reading ---- */

struct reader {
    const char *path;
    uint8_t *bytes;
    size_t count;
    size_t at; /* what comes next */
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
    const size_t digits = GPT_HASH_TEXT_BYTES - 1, head = sizeof format_line - 1;
    /* "..., version 1\n": what is before the number. */
    if (reader->count < head || memcmp(reader->bytes, format_line, head - 2) != 0)
        return refuse(reader, "is no saved training");
    if (memcmp(reader->bytes, format_line, head) != 0)
        return refuse(reader, "is of another version: expected version 1");
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
static void next_line(char line[LINE_BYTES], struct reader *reader)
{
    const uint8_t *from = reader->bytes + reader->at;
    const uint8_t *end = memchr(from, '\n', reader->count - reader->at);
    const size_t length = end ? (size_t)(end - from) : LINE_BYTES;
    line[0] = '\0';
    if (length >= LINE_BYTES)
        return;
    memcpy(line, from, length);
    line[length] = '\0';
    reader->at += length + 1;
}

/* The value of the line that must come next; NULL when it is another. */
static const char *next_value(char line[LINE_BYTES], struct reader *reader, const char *name)
{
    const size_t length = strlen(name);
    next_line(line, reader);
    return strncmp(line, name, length) == 0 && line[length] == '=' ? line + length + 1 : NULL;
}

static rebatch_status read_fields(void *object, struct reader *reader, const struct field *fields,
                                  size_t count)
{
    char line[LINE_BYTES], words[LINE_BYTES + 64];
    for (size_t i = 0; i < count; i++) {
        const char *value = next_value(line, reader, fields[i].name);
        if (value && parse_value(object, &fields[i], value))
            continue;
        (void)snprintf(words, sizeof words, "has \"%.60s\" where %s was expected", line,
                       fields[i].name);
        return refuse(reader, words);
    }
    return REBATCH_OK;
}

static rebatch_status read_shape(struct shape *out, struct reader *reader)
{
    char line[LINE_BYTES];
    uint64_t moments = 2;
    const char *value = next_value(line, reader, "text");
    if (value)
        (void)snprintf(out->text, sizeof out->text, "%.*s", (int)sizeof out->text - 1, value);
    value = value ? next_value(line, reader, "moments") : NULL;
    if (!value || !parse_whole(&moments, value) || moments > 1)
        return refuse(reader, "has no line of its text and moments where they were expected");
    out->has_moments = moments == 1;
    next_line(line, reader); /* an empty one ends the header */
    return line[0] ? refuse(reader, "has a line too many in its header") : REBATCH_OK;
}

rebatch_status gpt_saved_options(struct gpt_train_options *out, const char *path)
{
    struct reader reader;
    struct gpt_train_options options = {0};
    rebatch_status status = open_reader(&reader, path);
    if (!status)
        status = read_fields(&options, &reader, settings, COUNT(settings));
    if (!status)
        *out = options;
    close_reader(&reader);
    return status;
}

/* ---- taking it over ---- */

static rebatch_status compare_settings(const struct reader *reader,
                                       const struct gpt_train_options *saved,
                                       const struct gpt_train_options *ours)
{
    char theirs_line[LINE_BYTES], ours_line[LINE_BYTES];
    for (size_t i = 0; i < COUNT(settings); i++) {
        format_field(theirs_line, &settings[i], saved);
        format_field(ours_line, &settings[i], ours);
        if (strcmp(theirs_line, ours_line) != 0)
            return gpt_error(REBATCH_E_INVALID, "%s was saved with %s: this run has %s",
                             reader->path, theirs_line, ours_line);
    }
    return REBATCH_OK;
}

static rebatch_status compare_text(const struct reader *reader, const struct shape *shape,
                                   const struct gpt_data *data)
{
    char text[GPT_HASH_TEXT_BYTES];
    gpt_data_hash(data, text);
    return strcmp(text, shape->text) == 0
               ? REBATCH_OK
               : gpt_error(REBATCH_E_INVALID,
                           "%s was saved in training on another text than this run's",
                           reader->path);
}

/* All that is there before anything is changed: so that nothing is when it cannot be had. */
struct taken {
    double *losses;
    struct gpt_set moments[2]; /* empty: the trainer has them */
};

static void give_back(struct taken *taken, struct gpt_model *model)
{
    free(taken->losses);
    gpt_set_destroy(&taken->moments[0], model);
    gpt_set_destroy(&taken->moments[1], model);
}

static rebatch_status take(struct taken *taken, const struct gpt_trainer *trainer,
                           const struct shape *shape)
{
    struct gpt_model *model = trainer->model;
    rebatch_status status = REBATCH_OK;
    *taken = (struct taken){0};
    taken->losses = malloc((shape->losses + 1) * sizeof *taken->losses);
    if (!taken->losses)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu losses", shape->losses);
    for (int i = 0; i < 2 && shape->has_moments && !status; i++)
        if (trainer->moments[i].count == 0)
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

/* The reader's memory is in use until the stream has run. */
static rebatch_status fill_sets(struct gpt_trainer *trainer, struct reader *reader)
{
    struct gpt_model *model = trainer->model;
    rebatch_status status = fill_set(reader, &model->parameters, model);
    for (int i = 0; i < 2 && !status; i++)
        if (trainer->moments[i].count > 0)
            status = fill_set(reader, &trainer->moments[i], model);
    if (!status)
        status = gpt_model_refresh(model);
    const rebatch_status waited =
        rebatch_stream_synchronize(model->queue.device, model->queue.stream);
    return status ? status : waited;
}

/* From here on only the device can fail. */
static rebatch_status take_over(struct gpt_trainer *trainer, struct reader *reader,
                                const struct gpt_trainer *saved, const struct shape *shape,
                                struct taken *taken)
{
    for (size_t i = 0; i < COUNT(states); i++) {
        const size_t bytes = states[i].kind == WIDE ? sizeof(uint64_t) : sizeof(size_t);
        memcpy((char *)trainer + states[i].offset, (const char *)saved + states[i].offset, bytes);
    }
    memcpy(taken->losses, reader->bytes + reader->at, shape->losses * sizeof *taken->losses);
    reader->at += shape->losses * sizeof *taken->losses;
    free(trainer->losses);
    trainer->losses = taken->losses;
    trainer->loss_room = shape->losses + 1;
    for (int i = 0; i < 2; i++) {
        if (!shape->has_moments)
            gpt_set_destroy(&trainer->moments[i], trainer->model);
        else if (trainer->moments[i].count == 0)
            trainer->moments[i] = taken->moments[i];
    }
    return fill_sets(trainer, reader);
}

static rebatch_status load(struct gpt_trainer *trainer, struct reader *reader)
{
    struct gpt_train_options options = {0};
    struct gpt_trainer saved = {0};
    struct shape shape = {0};
    struct taken taken;
    rebatch_status status = read_fields(&options, reader, settings, COUNT(settings));
    if (!status)
        status = compare_settings(reader, &options, &trainer->options);
    if (!status)
        status = read_fields(&saved, reader, states, COUNT(states));
    if (!status)
        status = read_shape(&shape, reader);
    shape.losses = saved.loss_count;
    if (!status)
        status = compare_text(reader, &shape, trainer->data);
    if (!status && (shape.losses > reader->count ||
                    reader->count - reader->at != payload_bytes(&options.config, &shape)))
        status = refuse(reader, "has another size than its header says");
    if (!status)
        status = take(&taken, trainer, &shape);
    if (status)
        return status;
    status = rebatch_set_step(trainer->rb, shape.losses);
    if (status) {
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
