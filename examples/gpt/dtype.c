/* Owns the names and sizes of the types that elements can have.
 * Must not know what is computed in them. */
#include <string.h>

#include "gpt/error.h"
#include "gpt/ops.h"

static const struct {
    const char *name;
    size_t bytes;
} dtypes[GPT_DTYPE_COUNT] = {
#define DTYPE(name, text, bytes) {text, bytes},
    GPT_DTYPES(DTYPE)
#undef DTYPE
};

size_t gpt_dtype_bytes(enum gpt_dtype dtype)
{
    return (size_t)dtype < GPT_DTYPE_COUNT ? dtypes[dtype].bytes : 0;
}

const char *gpt_dtype_name(enum gpt_dtype dtype)
{
    return (size_t)dtype < GPT_DTYPE_COUNT ? dtypes[dtype].name : NULL;
}

rebatch_status gpt_dtype_parse(enum gpt_dtype *out, const char *name)
{
    for (size_t i = 0; i < GPT_DTYPE_COUNT; i++)
        if (strcmp(name, dtypes[i].name) == 0) {
            *out = (enum gpt_dtype)i;
            return REBATCH_OK;
        }
#define LIST(name, text, bytes) " " text
    return gpt_error(REBATCH_E_INVALID, "dtype is \"%s\": expected one of" GPT_DTYPES(LIST), name);
#undef LIST
}
