/* A writer of Python's pickle format, protocol 2, with the opcodes that PyTorch's memory viewer
 * reads. It needs no heap. Must not know what is written. */
#ifndef RBI_PICKLE_H
#define RBI_PICKLE_H

#include "pool/snapshot.h"

void rbi_pickle_begin(struct rbi_sink *sink);
void rbi_pickle_end(struct rbi_sink *sink);

/* Between begin and end: a key, a value, a key, a value. */
void rbi_pickle_begin_dict(struct rbi_sink *sink);
void rbi_pickle_end_dict(struct rbi_sink *sink);
/* Then rbi_pickle_append() after each value. */
void rbi_pickle_list(struct rbi_sink *sink);
void rbi_pickle_append(struct rbi_sink *sink);
/* Makes the last two values a tuple. */
void rbi_pickle_pair(struct rbi_sink *sink);

void rbi_pickle_integer(struct rbi_sink *sink, int64_t number);
void rbi_pickle_unsigned(struct rbi_sink *sink, uint64_t number);
void rbi_pickle_float(struct rbi_sink *sink, double number);
void rbi_pickle_bool(struct rbi_sink *sink, bool value);
/* Bytes that are no UTF-8 become '?'. */
void rbi_pickle_text(struct rbi_sink *sink, const char *text);

/* Keeps the last value under a number, and gives it again: the same object, not a copy. */
void rbi_pickle_keep(struct rbi_sink *sink, uint32_t number);
void rbi_pickle_again(struct rbi_sink *sink, uint32_t number);

#endif
