/* A reader of pickles for tests. It knows the opcodes that PyTorch's memory viewer knows
 * (torch/utils/viz/MemoryViz.js), and refuses every other. */
#ifndef PICKLE_READER_H
#define PICKLE_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum pickle_kind {
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INTEGER,
    PICKLE_FLOAT,
    PICKLE_TEXT,
    PICKLE_LIST, /* or a tuple */
    PICKLE_DICT  /* items: a key, a value, a key, a value */
};

struct pickle_value {
    enum pickle_kind kind;
    bool is_tuple;
    bool is_huge; /* an integer that does not fit `number`: it is number + 2^64 */
    int64_t number;
    double real;
    char *text;
    struct pickle_value **items;
    size_t count, room;
    struct pickle_value *made_before; /* the list of all, for pickle_free() */
};

/* The value; a pickle that is none, or has bytes behind its end, fails the test. Protocol 2. */
struct pickle_value *pickle_read(const unsigned char *bytes, size_t size);
/* Frees every value of every pickle that was read. */
void pickle_free(void);
/* The value of a key; that it is not there fails the test. */
const struct pickle_value *pickle_get(const struct pickle_value *dict, const char *key);
/* The same of a key whose value is of that kind. */
int64_t pickle_number(const struct pickle_value *dict, const char *key);
const char *pickle_text(const struct pickle_value *dict, const char *key);
const struct pickle_value *pickle_list(const struct pickle_value *dict, const char *key);

#endif
