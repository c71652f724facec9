/* Owns the answer to a misspelt word: which of the known ones was meant.
 * Must not know what the words are for. */
#include <string.h>

#include "config/settings.h"

/* Words longer than this have no near ones. */
#define WORD_MOST 47

static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

/* The fewest single-character insertions, deletions, replacements and swaps of neighbours that
 * make b of a, no character touched twice (optimal string alignment); in time and space of a
 * row. */
static size_t edit_distance(const char *a, size_t a_length, const char *b, size_t b_length)
{
    rbi_assert(a_length <= WORD_MOST && b_length <= WORD_MOST);
    size_t rows[3][WORD_MOST + 1]; /* row i is rows[i % 3] */
    for (size_t j = 0; j <= b_length; j++)
        rows[0][j] = j;
    for (size_t i = 1; i <= a_length; i++) {
        size_t *row = rows[i % 3];
        const size_t *above = rows[(i - 1) % 3];
        const size_t *above2 = rows[(i + 1) % 3]; /* row i - 2, read from i = 2 on */
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            const char x = lower(a[i - 1]);
            const char y = lower(b[j - 1]);
            row[j] = rbi_min(rbi_min(above[j], row[j - 1]) + 1, above[j - 1] + (x != y));
            if (i > 1 && j > 1 && x == lower(b[j - 2]) && lower(a[i - 2]) == y)
                row[j] = rbi_min(row[j], above2[j - 2] + 1);
        }
    }
    rbi_assert(rows[a_length % 3][b_length] <= rbi_max(a_length, b_length));
    return rows[a_length % 3][b_length];
}

struct rbi_nearest rbi_nearest_to(const char *word, size_t length)
{
    return (struct rbi_nearest){.word = word, .length = length, .distance = SIZE_MAX};
}

void rbi_nearest_offer(struct rbi_nearest *nearest, const char *candidate, const void *answer)
{
    const size_t length = strlen(candidate);
    if (length > WORD_MOST || nearest->length > WORD_MOST)
        return;
    const size_t distance = edit_distance(nearest->word, nearest->length, candidate, length);
    /* One slip in three characters, and no more than three, is still a slip. */
    if (distance > rbi_min(rbi_max(length, nearest->length) / 3, 3))
        return;
    if (distance < nearest->distance) {
        nearest->distance = distance;
        nearest->found = answer;
    }
}

const struct rbi_setting *rbi_nearest_setting(const char *group, const char *word, size_t length)
{
    struct rbi_nearest inside = rbi_nearest_to(word, length);
    struct rbi_nearest anywhere = rbi_nearest_to(word, length);
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const struct rbi_setting *setting = &rbi_settings[i];
        struct rbi_nearest *nearest =
            group && rbi_setting_is_in(setting, group) ? &inside : &anywhere;
        rbi_nearest_offer(nearest, rbi_setting_name(setting), setting);
        rbi_nearest_offer(nearest, setting->key, setting);
    }
    return inside.found ? inside.found : anywhere.found;
}
