/* Owns the header of a saved training: which members are in it, and how they are written.
 * Must not know files. */
#include "gpt/save_header.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t kind_bytes[] = {
    [GPT_SIZE] = sizeof(size_t),     [GPT_WIDE] = sizeof(uint64_t),
    [GPT_NARROW] = sizeof(uint32_t), [GPT_REAL] = sizeof(float),
    [GPT_SWITCH] = sizeof(bool),     [GPT_DTYPE] = sizeof(enum gpt_dtype)};

static const struct gpt_save_field settings[] = {
#define SETTING(name, kind, member)                                                                \
    {                                                                                              \
        name, kind, offsetof(struct gpt_train_options, member)                                     \
    }
    SETTING("layers", GPT_SIZE, config.layers),
    SETTING("channels", GPT_SIZE, config.channels),
    SETTING("heads", GPT_SIZE, config.heads),
    SETTING("length", GPT_SIZE, config.length),
    SETTING("vocabulary", GPT_SIZE, config.vocabulary),
    SETTING("dropout", GPT_REAL, config.dropout),
    SETTING("dtype", GPT_DTYPE, config.dtype),
    SETTING("inexact", GPT_SWITCH, config.inexact),
    SETTING("batch", GPT_SIZE, batch),
    SETTING("seed", GPT_WIDE, seed),
    SETTING("learning_rate", GPT_REAL, learning_rate),
    SETTING("least_learning_rate", GPT_REAL, least_learning_rate),
    SETTING("warmup_steps", GPT_SIZE, warmup_steps),
    SETTING("total_steps", GPT_SIZE, total_steps),
    SETTING("beta1", GPT_REAL, beta1),
    SETTING("beta2", GPT_REAL, beta2),
    SETTING("epsilon", GPT_REAL, epsilon),
    SETTING("weight_decay", GPT_REAL, weight_decay),
    SETTING("clip", GPT_REAL, clip),
    SETTING("loss_scale", GPT_REAL, loss_scale),
#undef SETTING
};

static const struct gpt_save_field states[] = {
#define STATE(name, kind, member)                                                                  \
    {                                                                                              \
        name, kind, offsetof(struct gpt_trainer, member)                                           \
    }
    STATE("steps", GPT_SIZE, loss_count),
    STATE("updates", GPT_WIDE, updates),
    STATE("skipped", GPT_WIDE, skipped),
    STATE("scale", GPT_REAL, scaler.scale),
    STATE("good_updates", GPT_NARROW, scaler.good),
    STATE("samples_seen", GPT_WIDE, samples_seen),
#undef STATE
};

#define FIELDS(array)                                                                              \
    {                                                                                              \
        array, sizeof(array) / sizeof *(array)                                                     \
    }
const struct gpt_save_fields gpt_save_settings = FIELDS(settings);
const struct gpt_save_fields gpt_save_states = FIELDS(states);

/* "name=value", as nine digits for a float, which are enough to give the same one back. */
void gpt_save_format(char line[GPT_SAVE_LINE_BYTES], const struct gpt_save_field *field,
                     const void *object)
{
    const void *at = (const char *)object + field->offset;
    switch (field->kind) {
    case GPT_SIZE:
        (void)snprintf(line, GPT_SAVE_LINE_BYTES, "%s=%zu", field->name, *(const size_t *)at);
        break;
    case GPT_WIDE:
        (void)snprintf(line, GPT_SAVE_LINE_BYTES, "%s=%llu", field->name,
                       (unsigned long long)*(const uint64_t *)at);
        break;
    case GPT_NARROW:
        (void)snprintf(line, GPT_SAVE_LINE_BYTES, "%s=%u", field->name, *(const uint32_t *)at);
        break;
    case GPT_REAL:
        (void)snprintf(line, GPT_SAVE_LINE_BYTES, "%s=%.9g", field->name,
                       (double)*(const float *)at);
        break;
    case GPT_SWITCH:
        (void)snprintf(line, GPT_SAVE_LINE_BYTES, "%s=%d", field->name, *(const bool *)at);
        break;
    case GPT_DTYPE:
        (void)snprintf(line, GPT_SAVE_LINE_BYTES, "%s=%s", field->name,
                       gpt_dtype_name(*(const enum gpt_dtype *)at));
        break;
    }
}

bool gpt_save_parse_whole(uint64_t *out, const char *text)
{
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0;
}

bool gpt_save_parse(void *object, const struct gpt_save_field *field, const char *text)
{
    void *at = (char *)object + field->offset;
    uint64_t whole = 0;
    char *end = NULL;
    if (field->kind == GPT_DTYPE)
        return gpt_dtype_parse(at, text) == REBATCH_OK;
    if (field->kind == GPT_REAL) {
        *(float *)at = strtof(text, &end);
        return end != text && *end == '\0';
    }
    if (!gpt_save_parse_whole(&whole, text) || (field->kind == GPT_SWITCH && whole > 1) ||
        (field->kind == GPT_NARROW && whole > UINT32_MAX))
        return false;
    if (field->kind == GPT_SWITCH)
        *(bool *)at = whole != 0;
    else if (field->kind == GPT_SIZE)
        *(size_t *)at = (size_t)whole;
    else if (field->kind == GPT_NARROW)
        *(uint32_t *)at = (uint32_t)whole;
    else
        *(uint64_t *)at = whole;
    return true;
}

#define SOURCE_NAME_BYTES 5 /* "data=", "root=" */

void gpt_save_format_source(char line[GPT_SAVE_SOURCE_BYTES], const struct gpt_source *source)
{
    char *to = stpcpy(line, source->is_default ? "root=" : "data=");
    for (const char *from = source->path; *from; from++) {
        if (*from == '\n' || *from == '%')
            to = stpcpy(to, *from == '%' ? "%25" : "%0A");
        else
            *to++ = *from;
    }
    *to = '\0';
}

bool gpt_save_parse_source(struct gpt_source *out, const char *line, size_t count)
{
    if (count < SOURCE_NAME_BYTES || (memcmp(line, "data=", SOURCE_NAME_BYTES) != 0 &&
                                      memcmp(line, "root=", SOURCE_NAME_BYTES) != 0))
        return false;
    out->is_default = line[0] == 'r';
    const char *const end = line + count;
    size_t length = 0;
    for (const char *from = line + SOURCE_NAME_BYTES; from < end; from++) {
        char c = *from;
        if (c == '%') {
            if (end - from < 3 || (memcmp(from, "%25", 3) != 0 && memcmp(from, "%0A", 3) != 0))
                return false;
            c = from[1] == '2' ? '%' : '\n';
            from += 2;
        }
        if (c == '\0' || length + 1 == sizeof out->path)
            return false;
        out->path[length++] = c;
    }
    out->path[length] = '\0';
    return true;
}

void gpt_save_copy(void *to, const void *from, const struct gpt_save_fields *fields)
{
    for (size_t i = 0; i < fields->count; i++) {
        const struct gpt_save_field *field = &fields->fields[i];
        memcpy((char *)to + field->offset, (const char *)from + field->offset,
               kind_bytes[field->kind]);
    }
}

/* ---- what follows it ---- */

static size_t set_bytes(const struct gpt_config *config)
{
    size_t bytes = 0;
    for (size_t i = 0; i < gpt_block_count(config); i++)
        bytes += gpt_block_elements(config, i) * sizeof(float);
    return bytes;
}

size_t gpt_save_payload_bytes(const struct gpt_config *config, const struct gpt_save_shape *shape)
{
    return shape->losses * sizeof(double) + (shape->has_moments ? 3 : 1) * set_bytes(config);
}
