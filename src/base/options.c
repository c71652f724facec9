/* Owns the rules for options structs: zero is default, append only, no unknown tail.
 * Must not know any one struct. */
#include <string.h>

#include "base/base.h"

/* More than any version will add to a struct: what is beyond it is not read to see. */
#define ADDED_MOST 1024

rebatch_status rbi_options_copy(void *ours, size_t ours_size, size_t least, const void *given,
                                const char *name)
{
    if (!given)
        return REBATCH_OK;
    size_t given_size;
    memcpy(&given_size, given, sizeof given_size);
    if (given_size < least)
        return rbi_error(REBATCH_E_INVALID,
                         "%s.struct_size is %zu: expected sizeof(%s), at least %zu; use its _INIT "
                         "macro",
                         name, given_size, name, least);
    if (given_size > ours_size + ADDED_MOST)
        return rbi_error(REBATCH_E_INVALID,
                         "%s.struct_size is %zu: expected sizeof(%s), at most %zu; use its _INIT "
                         "macro",
                         name, given_size, name, ours_size + ADDED_MOST);
    const unsigned char *bytes = given;
    for (size_t i = ours_size; i < given_size; i++)
        if (bytes[i] != 0)
            return rbi_error(
                REBATCH_E_INVALID,
                "%s has %zu bytes, this library knows %zu, and byte %zu beyond them is "
                "not zero: an option that a newer header has",
                name, given_size, ours_size, i);
    memcpy(ours, given, rbi_min(ours_size, given_size));
    memcpy(ours, &ours_size, sizeof ours_size);
    return REBATCH_OK;
}

rebatch_status rbi_check_toggle(rebatch_toggle toggle, const char *name)
{
    if (toggle == REBATCH_DEFAULT || toggle == REBATCH_ON || toggle == REBATCH_OFF)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID, "%s is %d: expected REBATCH_DEFAULT, _ON or _OFF", name,
                     (int)toggle);
}
