/* Owns SHA-256, which is libmd's.
 * Must not know what is hashed. */
#include "gpt/hash.h"

#include <stdint.h>

void gpt_hash_begin(struct gpt_hash *hash)
{
    SHA256Init(&hash->context);
}

void gpt_hash_add(struct gpt_hash *hash, const void *bytes, size_t count)
{
    SHA256Update(&hash->context, bytes, count);
}

void gpt_hash_end(struct gpt_hash *hash, char text[GPT_HASH_TEXT_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    uint8_t digest[SHA256_DIGEST_LENGTH];
    SHA256Final(digest, &hash->context);
    for (size_t i = 0; i < sizeof digest; i++) {
        text[2 * i] = digits[digest[i] >> 4];
        text[2 * i + 1] = digits[digest[i] & 15];
    }
    text[2 * sizeof digest] = '\0';
}
