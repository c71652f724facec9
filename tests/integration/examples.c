/* Owns the tests of the examples of one file: what they print, in much memory and in little.
 * Must not know the library's inside. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "cli_common.h"
#include "unit/config_files.h"

TestSuite(examples, .init = cli_enter, .fini = config_leave);

static const char *program(const char *name)
{
    static char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%.*s/%s", (int)(strlen(cli_minimal) - strlen("/minimal")),
                   cli_minimal, name);
    return path;
}

/* What a line says from `words` on, up to `end`. */
static const char *part(const struct run *r, const char *words, const char *end)
{
    static char text[2][512];
    static int at;
    const char *from = strstr(r->out, words);
    cr_assert_not_null(from, "no %s in: %s%s", words, r->out, r->error);
    at = !at;
    (void)snprintf(text[at], sizeof text[at], "%.*s", (int)strcspn(from, end), from);
    return text[at];
}

static void expect_clean(const char *name)
{
    char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "--check -- '%s'", program(name));
    AUTO_DONE(r) = cli_run("", "run", line);
    cr_expect_eq(r.code, 0, "%s%s", r.out, r.error);
    cr_expect(strstr(r.out, "no mistakes: ") && !strstr(r.out, "note "), "%s%s", r.out, r.error);
}

Test(examples, mlp_has_the_bits_of_the_program_as_it_was)
{
    struct run before = cli_run_program(program("mlp-before"), "");
    struct run r = cli_run_program(program("mlp"), "");
    cr_assert_eq(before.code, 0, "%s", before.error);
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_assert(strstr(r.out, "\nweights "), "%s", r.out);
    cr_assert_str_eq(r.out, before.out);
    cr_assert(strstr(r.error, "; micro-batch 512 -> 256; "), "%s", r.error);
    double first, last;
    cr_assert_eq(sscanf(part(&r, "step  0", "\n"), "step 0 loss %lf", &first), 1);
    cr_assert_eq(sscanf(part(&r, "step 99", "\n"), "step 99 loss %lf", &last), 1);
    cr_assert_lt(last, first / 2, "it does not learn: %s", r.out);
    done(&before);
    done(&r);
    expect_clean("mlp");
}

Test(examples, evaluate_has_a_size_of_its_own_and_the_same_bits)
{
    struct run little = cli_run_program(program("evaluate"), "1");
    struct run much = cli_run_program(program("evaluate"), "64");
    cr_assert_eq(little.code, 0, "%s", little.error);
    cr_assert_eq(much.code, 0, "%s", much.error);
    cr_assert(strstr(part(&little, "step 5: loss ", "\n"), "micro-batches of 32"));
    cr_assert(strstr(part(&little, "step 5: loss ", "\n"), ", 62 at once"));
    cr_assert(strstr(part(&much, "step 5: loss ", "\n"), ", 500 at once"));
    cr_assert_str_eq(part(&little, "step 5: loss ", "i"), part(&much, "step 5: loss ", "i"));
    const char *held_out = strstr(little.out, "step 5: ");
    held_out = strstr(held_out, "held out: ");
    char text[32];
    (void)snprintf(text, sizeof text, "%.18s", held_out);
    cr_assert(strstr(much.out, text), "%s is not in %s", text, much.out);
    done(&little);
    done(&much);
    expect_clean("evaluate");
}

Test(examples, variable_length_is_cut_by_cost_and_has_the_same_bits)
{
    struct run little = cli_run_program(program("variable_length"), "128");
    struct run much = cli_run_program(program("variable_length"), "65536");
    cr_assert_eq(little.code, 0, "%s", little.error);
    cr_assert_str_eq(part(&little, "weights ", "\n"), part(&much, "weights ", "\n"));
    cr_assert_eq(much.code, 0, "%s", much.error);
    size_t count, longest_count = 0, with_long_one = 0, first, last, longest;
    for (const char *at = little.out; (at = strstr(at, "  sequences ")); at++) {
        cr_assert_eq(sscanf(at, " sequences %zu-%zu, longest %zu", &first, &last, &longest), 3);
        count = last - first + 1;
        if (longest == 300)
            with_long_one = count;
        else if (count > longest_count)
            longest_count = count;
    }
    cr_assert_gt(with_long_one, 0, "%s", little.out);
    cr_assert_gt(longest_count, 2 * with_long_one, "one long sequence makes all small: %s",
                 little.out);
    cr_assert(strstr(much.out, "sequences  0-47, longest 300, cost 14400\n"), "%s", much.out);
    done(&little);
    done(&much);
    expect_clean("variable_length");
}
