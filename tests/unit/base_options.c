/* Owns the tests of the rules for options structs, of checked arithmetic and of the clock.
 * Must not know any one module's options. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "base/base.h"

#define assert_text_has(part)                                                                      \
    cr_assert(strstr(rebatch_last_error(), part), "\"%s\" is missing in: \"%s\"", part,            \
              rebatch_last_error())

struct ours {
    size_t struct_size;
    uint64_t a, b, c;
};

struct newer {
    struct ours known;
    uint64_t d;
    unsigned char last[8];
};

/* The first version had no b and no c. */
#define LEAST RBI_SIZE_TO(struct ours, a)

static const struct ours defaults = {sizeof(struct ours), 1, 2, 3};

/* ---- rbi_options_copy() ---- */

Test(base_options, the_same_size_is_copied)
{
    struct ours ours = defaults;
    const struct ours given = {sizeof given, 7, 0, 9};
    cr_assert_eq(rbi_options_copy(&ours, sizeof ours, LEAST, &given, "ours"), REBATCH_OK);
    cr_assert_eq(memcmp(&ours, &given, sizeof ours), 0);
}

Test(base_options, null_copies_nothing)
{
    struct ours ours = defaults;
    cr_assert_eq(rbi_options_copy(&ours, sizeof ours, LEAST, NULL, "ours"), REBATCH_OK);
    cr_assert_eq(memcmp(&ours, &defaults, sizeof ours), 0);
}

Test(base_options, an_older_and_shorter_struct_leaves_the_tail_alone)
{
    for (size_t size = LEAST; size <= sizeof(struct ours); size += sizeof(uint64_t)) {
        struct ours ours = defaults;
        struct ours given = {size, 7, 8, 9};
        cr_assert_eq(rbi_options_copy(&ours, sizeof ours, LEAST, &given, "ours"), REBATCH_OK);
        cr_assert_eq(ours.struct_size, sizeof ours, "it is our struct still");
        cr_assert_eq(ours.a, 7);
        cr_assert_eq(ours.b, size > offsetof(struct ours, b) ? 8 : 2);
        cr_assert_eq(ours.c, size > offsetof(struct ours, c) ? 9 : 3);
    }
}

Test(base_options, a_newer_and_longer_struct_is_taken_when_its_tail_is_zero)
{
    struct ours ours = defaults;
    struct newer given;
    memset(&given, 0, sizeof given);
    given.known = (struct ours){sizeof given, 7, 8, 9};
    cr_assert_eq(rbi_options_copy(&ours, sizeof ours, LEAST, &given, "ours"), REBATCH_OK);
    cr_assert_eq(ours.a, 7);
    cr_assert_eq(ours.c, 9);
    cr_assert_eq(ours.struct_size, sizeof ours);
}

Test(base_options, a_newer_and_longer_struct_is_refused_when_its_tail_says_something)
{
    struct newer given;
    const size_t tail = sizeof given - sizeof(struct ours);
    for (size_t byte = 0; byte < tail; byte++) {
        struct ours ours = defaults;
        memset(&given, 0, sizeof given);
        given.known = (struct ours){sizeof given, 7, 8, 9};
        ((unsigned char *)&given)[sizeof(struct ours) + byte] = 0x80;
        rebatch_clear_error();
        cr_assert_eq(rbi_options_copy(&ours, sizeof ours, LEAST, &given, "some_options"),
                     REBATCH_E_INVALID);
        assert_text_has("some_options");
        cr_assert_eq(memcmp(&ours, &defaults, sizeof ours), 0, "nothing is half applied");
    }
}

static void refuse_size(size_t size)
{
    struct ours ours = defaults;
    const struct ours given = {size, 7, 8, 9};
    char text[64];
    (void)snprintf(text, sizeof text, "some_options.struct_size is %zu: expected sizeof", size);
    rebatch_clear_error();
    cr_assert_eq(rbi_options_copy(&ours, sizeof ours, LEAST, &given, "some_options"),
                 REBATCH_E_INVALID);
    assert_text_has(text);
    assert_text_has("use its _INIT macro");
    cr_assert_eq(memcmp(&ours, &defaults, sizeof ours), 0);
}

Test(base_options, a_size_that_cannot_be_is_refused)
{
    for (size_t size = 0; size < LEAST; size++)
        refuse_size(size);
}

/* A size that was never set may be anything: nothing is read so far beyond the struct. */
Test(base_options, a_size_that_no_version_will_have_is_refused_unread)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(pages, MAP_FAILED);
    cr_assert_eq(mprotect(pages + page, page, PROT_NONE), 0);
    static const size_t sizes[] = {2048, 65536, SIZE_MAX / 2, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct ours ours = defaults;
        const struct ours given = {sizes[i], 0, 0, 0};
        char *const at = pages + page - sizeof given;
        memcpy(at, &given, sizeof given);
        cr_assert_eq(rbi_options_copy(&ours, sizeof ours, LEAST, at, "some_options"),
                     REBATCH_E_INVALID);
        refuse_size(sizes[i]);
    }
    cr_assert_eq(munmap(pages, 2 * page), 0);
}

Test(base_options, toggles_are_default_on_or_off)
{
    cr_assert_eq(rbi_check_toggle(REBATCH_DEFAULT, "x"), REBATCH_OK);
    cr_assert_eq(rbi_check_toggle(REBATCH_ON, "x"), REBATCH_OK);
    cr_assert_eq(rbi_check_toggle(REBATCH_OFF, "x"), REBATCH_OK);
    cr_assert_eq(rbi_check_toggle((rebatch_toggle)3, "some_switch"), REBATCH_E_INVALID);
    assert_text_has("some_switch");
    assert_text_has("3");
    cr_assert(rbi_is_on(REBATCH_DEFAULT));
    cr_assert(rbi_is_on(REBATCH_ON));
    cr_assert(!rbi_is_on(REBATCH_OFF));
}

/* ---- checked arithmetic ---- */

Test(base_options, sums_and_products_that_overflow_are_seen)
{
    size_t out = 5;
    cr_assert(rbi_add(SIZE_MAX - 1, 1, &out));
    cr_assert_eq(out, SIZE_MAX);
    cr_assert(rbi_mul(SIZE_MAX / 3, 3, &out));
    cr_assert_eq(out, SIZE_MAX / 3 * 3);
    cr_assert(rbi_mul(SIZE_MAX, 0, &out));
    cr_assert_eq(out, 0);
    cr_assert(!rbi_mul(SIZE_MAX / 3 + 1, 3, &out));
    cr_assert(!rbi_mul(SIZE_MAX, SIZE_MAX, &out));
    cr_assert(!rbi_add(SIZE_MAX, 1, &out));
}

Test(base_options, rounding_up_that_overflows_is_seen_and_changes_nothing)
{
    size_t out = 5;
    cr_assert(rbi_round_up(0, 512, &out));
    cr_assert_eq(out, 0);
    cr_assert(rbi_round_up(1, 512, &out));
    cr_assert_eq(out, 512);
    cr_assert(rbi_round_up(512, 512, &out));
    cr_assert_eq(out, 512);
    cr_assert(rbi_round_up(513, 512, &out));
    cr_assert_eq(out, 1024);
    cr_assert(rbi_round_up(77, 1, &out));
    cr_assert_eq(out, 77);
    cr_assert(rbi_round_up(SIZE_MAX - 511, 512, &out));
    cr_assert_eq(out, SIZE_MAX - 511);
    out = 5;
    for (size_t off = 0; off < 511; off++)
        cr_assert(!rbi_round_up(SIZE_MAX - off, 512, &out));
    cr_assert_eq(out, 5);
}

Test(base_options, powers_of_two_are_known)
{
    cr_assert(!rbi_is_power_of_two(0));
    for (unsigned shift = 0; shift < sizeof(size_t) * 8; shift++) {
        const size_t power = (size_t)1 << shift;
        cr_assert(rbi_is_power_of_two(power));
        cr_assert_eq(rbi_is_power_of_two(power + 1), shift == 0);
    }
    cr_assert_eq(rbi_min(3, 4), 3);
    cr_assert_eq(rbi_max(3, 4), 4);
    cr_assert_eq(rbi_min(SIZE_MAX, 0), 0);
}

Test(base_options, the_clock_never_goes_back)
{
    uint64_t before = rbi_now_ns();
    for (int i = 0; i < 10000; i++) {
        const uint64_t now = rbi_now_ns();
        cr_assert_geq(now, before);
        before = now;
    }
}
