/* SHA-256, for comparing training runs. Must not know what is hashed. */
#ifndef GPT_HASH_H
#define GPT_HASH_H

#include <sha2.h>
#include <stddef.h>

struct gpt_hash {
    SHA2_CTX context;
};

#define GPT_HASH_TEXT_BYTES 65 /* 64 hexadecimal digits and a zero byte */

void gpt_hash_begin(struct gpt_hash *hash);
void gpt_hash_add(struct gpt_hash *hash, const void *bytes, size_t count);
void gpt_hash_end(struct gpt_hash *hash, char text[GPT_HASH_TEXT_BYTES]);

#endif
