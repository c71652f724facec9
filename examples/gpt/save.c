/* Owns the writing of a training run: a text header, arrays as they lie in memory, a SHA-256 of
 * both. Must not know how a step runs. */
#include "gpt/save.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpt/error.h"
#include "gpt/save_header.h"
#include "gpt/update.h"

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

static rebatch_status put_fields(struct writer *writer, const struct gpt_save_fields *fields,
                                 const void *object)
{
    char line[GPT_SAVE_LINE_BYTES];
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < fields->count && !status; i++) {
        gpt_save_format(line, &fields->fields[i], object);
        status = put_line(writer, line);
    }
    return status;
}

static rebatch_status put_header(struct writer *writer, const struct gpt_trainer *trainer,
                                 const struct gpt_save_shape *shape)
{
    char line[GPT_SAVE_LINE_BYTES], source[GPT_SAVE_SOURCE_BYTES];
    rebatch_status status = put(writer, GPT_SAVE_FIRST_LINE, sizeof GPT_SAVE_FIRST_LINE - 1);
    if (!status)
        status = put_fields(writer, &gpt_save_settings, &trainer->options);
    if (!status)
        status = put_fields(writer, &gpt_save_states, trainer);
    if (status)
        return status;
    (void)snprintf(line, sizeof line, "text=%s", shape->text);
    status = put_line(writer, line);
    gpt_save_format_source(source, &shape->source);
    if (!status)
        status = put_line(writer, source);
    (void)snprintf(line, sizeof line, "moments=%d\n", shape->has_moments);
    return status ? status : put_line(writer, line);
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
                                 const struct gpt_save_shape *shape, void *room)
{
    rebatch_status status = put(writer, trainer->losses, shape->losses * sizeof *trainer->losses);
    if (!status)
        status = put_set(writer, trainer->model, &trainer->model->parameters, room);
    for (int i = 0; i < 2 && shape->has_moments && !status; i++)
        status = put_set(writer, trainer->model, &gpt_moments_of(trainer)[i], room);
    return status;
}

static rebatch_status put_all(struct writer *writer, const struct gpt_trainer *trainer)
{
    const struct gpt_config *config = &trainer->model->config;
    const size_t outer = gpt_block_elements(config, 0), layer = gpt_block_elements(config, 1);
    struct gpt_save_shape shape = {.losses = trainer->loss_count,
                                   .has_moments = gpt_moments_of(trainer)[1].count > 0};
    char sum[GPT_HASH_TEXT_BYTES];
    void *room = malloc((outer > layer ? outer : layer) * sizeof(float));
    if (!room)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory to save weights");
    gpt_data_hash(trainer->data, shape.text);
    shape.source = *gpt_data_source(trainer->data);
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

rebatch_status gpt_save_check_path(const char *path)
{
    struct stat about;
    if (stat(path, &about) == 0 && !S_ISREG(about.st_mode))
        return gpt_error(REBATCH_E_IO, "%s is no regular file, and a save would replace it", path);
    return REBATCH_OK;
}

rebatch_status gpt_trainer_save(struct gpt_trainer *trainer, const char *path)
{
    rebatch_status status = gpt_save_check_path(path);
    if (status)
        return status;
    char beside[PATH_MAX];
    const int length = snprintf(beside, sizeof beside, "%s.new", path);
    if (length < 0 || (size_t)length >= sizeof beside)
        return gpt_error(REBATCH_E_IO, "%.200s...: the name is too long", path);
    struct writer writer = {.path = beside};
    writer.file = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (writer.file < 0)
        return say(beside, "made");
    status = put_all(&writer, trainer);
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
