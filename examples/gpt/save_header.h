/* The header of a saved training, as its writer and its reader share it. Must not know files. */
#ifndef GPT_SAVE_HEADER_H
#define GPT_SAVE_HEADER_H

#include <stdbool.h>

#include "gpt/train.h"

/* Version 1 does not say where the text was read from. */
#define GPT_SAVE_FIRST_LINE "rebatch gpt training state, version 2\n"
#define GPT_SAVE_LINE_BYTES 128
#define GPT_SAVE_SOURCE_BYTES (3 * PATH_MAX + 8)

enum gpt_save_kind { GPT_SIZE, GPT_WIDE, GPT_NARROW, GPT_REAL, GPT_SWITCH, GPT_DTYPE };

/* A member of a struct: one line "name=value". */
struct gpt_save_field {
    const char *name;
    enum gpt_save_kind kind;
    size_t offset;
};

struct gpt_save_fields {
    const struct gpt_save_field *fields;
    size_t count;
};

/* Of struct gpt_train_options: the bits depend on all of them. */
extern const struct gpt_save_fields gpt_save_settings;
/* Of struct gpt_trainer. Dropout and the choice of samples are functions of the seed and the number
 * of the step, which is that of the losses. */
extern const struct gpt_save_fields gpt_save_states;

void gpt_save_format(char line[GPT_SAVE_LINE_BYTES], const struct gpt_save_field *field,
                     const void *object);
/* False, and the member is not to be used, when the text is no value of its kind. */
bool gpt_save_parse(void *object, const struct gpt_save_field *field, const char *text);
/* Digits alone. */
bool gpt_save_parse_whole(uint64_t *out, const char *text);
/* "data=FILE", or "root=FOLDER" for the default text, with what would end the line as %0A. */
void gpt_save_format_source(char line[GPT_SAVE_SOURCE_BYTES], const struct gpt_source *source);
/* From the `count` bytes of such a line, of which none is '\n'; false when they are none. */
bool gpt_save_parse_source(struct gpt_source *out, const char *line, size_t count);
/* Copies those members from one struct to another. */
void gpt_save_copy(void *to, const void *from, const struct gpt_save_fields *fields);

/* What follows the header: losses, weights and both moments, which are not there before the first
 * update. */
struct gpt_save_shape {
    size_t losses;
    bool has_moments;
    char text[GPT_HASH_TEXT_BYTES]; /* SHA-256 of what is trained on */
    struct gpt_source source;       /* of it */
};
size_t gpt_save_payload_bytes(const struct gpt_config *config, const struct gpt_save_shape *shape);

#endif
