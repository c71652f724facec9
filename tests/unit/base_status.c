/* Owns the tests of statuses and of the thread's error sentence.
 * Must not know who reports errors. */
#include <pthread.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/base.h"
#include "rebatch/version.h"

/* The numbers stand here a second time on purpose: they never change. */
static const struct {
    rebatch_status status;
    int number;
    const char *name;
} known[] = {
    {REBATCH_OK, 0, "REBATCH_OK"},
    {REBATCH_OOM, 1, "REBATCH_OOM"},
    {REBATCH_E_INVALID, 2, "REBATCH_E_INVALID"},
    {REBATCH_E_STATE, 3, "REBATCH_E_STATE"},
    {REBATCH_E_HOST_OOM, 4, "REBATCH_E_HOST_OOM"},
    {REBATCH_E_EXHAUSTED, 5, "REBATCH_E_EXHAUSTED"},
    {REBATCH_E_TORN, 6, "REBATCH_E_TORN"},
    {REBATCH_E_DEVICE, 7, "REBATCH_E_DEVICE"},
    {REBATCH_E_DEVICE_LOST, 8, "REBATCH_E_DEVICE_LOST"},
    {REBATCH_E_NO_DEVICE, 9, "REBATCH_E_NO_DEVICE"},
    {REBATCH_E_UNSUPPORTED, 10, "REBATCH_E_UNSUPPORTED"},
    {REBATCH_E_IO, 11, "REBATCH_E_IO"},
    {REBATCH_E_PARSE, 12, "REBATCH_E_PARSE"},
    {REBATCH_E_PEER, 13, "REBATCH_E_PEER"},
};
#define KNOWN (sizeof known / sizeof known[0])

Test(base_status, numbers_and_names_never_change)
{
    for (size_t i = 0; i < KNOWN; i++) {
        cr_assert_eq((int)known[i].status, known[i].number);
        cr_assert_str_eq(rebatch_status_name(known[i].status), known[i].name);
    }
    cr_assert_eq(REBATCH_E_USER, 1000);
}

Test(base_status, every_status_has_words_of_its_own)
{
    for (size_t i = 0; i < KNOWN; i++) {
        const char *text = rebatch_status_text(known[i].status);
        cr_assert_gt(strlen(text), 3);
        for (size_t j = 0; j < i; j++)
            cr_assert_str_neq(text, rebatch_status_text(known[j].status));
    }
}

Test(base_status, the_list_has_no_status_that_this_test_does_not_know)
{
    size_t count = 0;
#define COUNT(name, number, text) count++;
    REBATCH_STATUSES(COUNT)
#undef COUNT
    cr_assert_eq(count, KNOWN);
}

Test(base_status, a_callbacks_number_and_no_number_have_names_too)
{
    cr_assert_str_eq(rebatch_status_name(REBATCH_E_USER), "REBATCH_E_USER");
    cr_assert_str_eq(rebatch_status_name((rebatch_status)(REBATCH_E_USER + 7)), "REBATCH_E_USER");
    cr_assert_str_eq(rebatch_status_name(REBATCH_STATUS_MAX_), "REBATCH_E_USER");
    cr_assert_str_eq(rebatch_status_name((rebatch_status)-1), "REBATCH_E_UNKNOWN");
    cr_assert_str_eq(rebatch_status_text((rebatch_status)-1), "no such status");
    cr_assert_str_eq(rebatch_status_name((rebatch_status)14), "REBATCH_E_UNKNOWN");
    cr_assert_str_eq(rebatch_status_name((rebatch_status)999), "REBATCH_E_UNKNOWN");
    cr_assert_gt(strlen(rebatch_status_text(REBATCH_E_USER)), 0);
    cr_assert_gt(strlen(rebatch_status_text((rebatch_status)999)), 0);
}

Test(base_status, the_version_of_library_and_headers_agree)
{
    cr_assert_str_eq(rebatch_version(), REBATCH_VERSION);
}

/* ---- the error sentence ---- */

Test(base_status, an_error_is_kept_until_the_next_or_until_it_is_cleared)
{
    cr_assert_str_eq(rebatch_last_error(), "");
    cr_assert_eq(rbi_error(REBATCH_E_IO, "file %s is %d bytes", "a", 3), REBATCH_E_IO);
    cr_assert_str_eq(rebatch_last_error(), "file a is 3 bytes");
    cr_assert_str_eq(rebatch_last_error(), "file a is 3 bytes");
    cr_assert_eq(rbi_error(SIZE_MAX ? REBATCH_OOM : REBATCH_OK, "another"), REBATCH_OOM);
    cr_assert_str_eq(rebatch_last_error(), "another");
    rebatch_clear_error();
    cr_assert_str_eq(rebatch_last_error(), "");
}

Test(base_status, a_long_error_is_cut_and_ends)
{
    char words[4096];
    memset(words, 'w', sizeof words);
    words[sizeof words - 1] = '\0';
    (void)rbi_error(REBATCH_E_PARSE, "%s", words);
    const size_t length = strlen(rebatch_last_error());
    cr_assert(length >= 255 && length < sizeof words, "%zu bytes of it were kept", length);
    cr_assert_eq(strncmp(rebatch_last_error(), words, length), 0);
}

static void *fail_there(void *user)
{
    const char **seen = user;
    seen[0] = rebatch_last_error()[0] ? "not empty" : "empty";
    (void)rbi_error(REBATCH_E_STATE, "of the other thread");
    seen[1] = strcmp(rebatch_last_error(), "of the other thread") == 0 ? "its own" : "not its own";
    return NULL;
}

Test(base_status, every_thread_has_an_error_of_its_own)
{
    const char *seen[2] = {"", ""};
    pthread_t thread;
    (void)rbi_error(REBATCH_E_STATE, "of this thread");
    cr_assert_eq(pthread_create(&thread, NULL, fail_there, seen), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_str_eq(seen[0], "empty");
    cr_assert_str_eq(seen[1], "its own");
    cr_assert_str_eq(rebatch_last_error(), "of this thread");
}

Test(base_status, who_set_or_cleared_it_is_known)
{
    const uint64_t changes = rbi_error_changes();
    cr_assert_eq(rebatch_last_status(), REBATCH_OK);
    (void)rbi_error(REBATCH_E_IO, "a");
    cr_assert_eq(rebatch_last_status(), REBATCH_E_IO);
    cr_assert_eq(rbi_error_changes(), changes + 1);
    rebatch_clear_error();
    cr_assert_eq(rebatch_last_status(), REBATCH_OK);
    cr_assert_eq(rbi_error_changes(), changes + 2);
}

Test(base_status, an_error_takes_nothing_from_the_heap)
{
    const uint64_t calls = rbi_heap_calls();
    (void)rbi_error(REBATCH_E_STATE, "%s %d %f", "text", 4, 5.0);
    cr_assert_eq(rbi_heap_calls(), calls);
}
