/* Owns the tests of what a settings file means before libconfig sees it: lines, includes, numbers.
 * Must not know settings. Nothing here is random. */
#include <criterion/criterion.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/settings.h"
#include "unit/config_files.h"

TestSuite(config_source, .init = config_enter, .fini = config_leave);

static void expect_text(const char *file, const char *text)
{
    config_write("t.cfg", file);
    struct rbi_source source;
    cr_assert(rbi_source_read(&source, "t.cfg") == REBATCH_OK, "%s", rebatch_last_error());
    cr_expect(strcmp(source.text, text) == 0, "'%s' instead of '%s'", source.text, text);
    rbi_source_free(&source);
    cr_assert(rbi_heap_live() == 0);
}

Test(config_source, text_passes_through)
{
    expect_text("", "\n");
    expect_text("a = 1;", "a = 1;\n");
    expect_text("a = \"x # y // z /* \\\" @\";", "a = \"x # y // z /* \\\" @\";\n");
    expect_text("a = \"\\\\\"; b = 1;", "a = \"\\\\\"; b = 1;\n");
    expect_text("a : ( 1.5, .5e3, [ true, False ], { b = \"x\"; } )",
                "a : ( 1.5, .5e3, [ true, False ], { b = \"x\"; } )\n");
}

Test(config_source, comments_go_and_lines_stay)
{
    expect_text("# x", "\n");
    expect_text("a = 1 // x\r\n", "a = 1 \n\n");
    expect_text("a = 1 # x\nb = 2", "a = 1 \nb = 2\n");
    expect_text("/* 1\n2 */ a = 3", " \n a = 3\n");
    expect_text("a/**/=/**/1", "a = 1\n");
    expect_text("\xef\xbb\xbf"
                "a = 1",
                "a = 1\n");
}

Test(config_source, integers_mean_what_they_say)
{
    expect_text("a = 2147483647", "a = 2147483647\n");
    expect_text("a = 2147483648", "a = 2147483648L\n");
    expect_text("a = -2147483649", "a = -2147483649L\n");
    expect_text("a = 99999999999L", "a = 99999999999L\n");
    expect_text("a = 0xFFFFFFFF", "a = 4294967295L\n");
    expect_text("a = 0010", "a = 10\n");
}

Test(config_source, include_keeps_places)
{
    cr_assert(mkdir("sub", 0700) == 0);
    config_write("sub/b.cfg", "b1\nb2 = 1\n  @include \"c.cfg\"\nb4");
    config_write("sub/c.cfg", "c1");
    config_write("a.cfg", "a1\n@include \"sub/b.cfg\" a2\na3\n");
    struct rbi_source source;
    cr_assert(rbi_source_read(&source, "a.cfg") == REBATCH_OK, "%s", rebatch_last_error());
    static const struct {
        const char *text, *file;
        uint32_t line;
    } lines[] = {{"a1", "a.cfg", 1},         {"", "a.cfg", 2},       {"b1", "sub/b.cfg", 1},
                 {"b2 = 1", "sub/b.cfg", 2}, {"  ", "sub/b.cfg", 3}, {"c1", "sub/c.cfg", 1},
                 {"", "sub/b.cfg", 3},       {"b4", "sub/b.cfg", 4}, {" a2", "a.cfg", 2},
                 {"a3", "a.cfg", 3}};
    const char *at = source.text;
    for (unsigned i = 0; i < sizeof lines / sizeof *lines; i++) {
        const size_t length = strcspn(at, "\n");
        cr_expect(length == strlen(lines[i].text) && memcmp(at, lines[i].text, length) == 0,
                  "line %u is '%.*s' instead of '%s'", i + 1, (int)length, at, lines[i].text);
        const struct rbi_place place = rbi_source_place(&source, i + 1);
        cr_expect(strcmp(place.file, lines[i].file) == 0, "line %u: %s", i + 1, place.file);
        cr_expect(place.line == lines[i].line, "line %u: line %u", i + 1, place.line);
        at += length + 1;
    }
    rbi_source_free(&source);
    cr_assert(unlink("sub/b.cfg") == 0 && unlink("sub/c.cfg") == 0 && rmdir("sub") == 0);
}

Test(config_source, place_of_any_line_is_one)
{
    config_write("t.cfg", "a = 1;\nb = 2;\n");
    struct rbi_source source;
    cr_assert(rbi_source_read(&source, "t.cfg") == REBATCH_OK);
    cr_expect(rbi_source_place(&source, 0).line == 1);
    cr_expect(rbi_source_place(&source, 2).line == 2);
    cr_expect(rbi_source_place(&source, 1000000).line == 3);
    rbi_source_free(&source);
}
