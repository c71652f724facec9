/* Owns the tests of what the machine's memory is, by control groups of both versions.
 * Must not know what the memory is for. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <criterion/criterion.h>

#include "base/base.h"

static char root[] = "/tmp/rebatch-machine-XXXXXX";

static void write_file(const char *name, const char *text)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *at = path + sizeof root; *at; at++)
        if (*at == '/') {
            *at = '\0';
            (void)mkdir(path, 0700);
            *at = '/';
        }
    FILE *const file = fopen(path, "w");
    cr_assert_not_null(file);
    (void)fputs(text, file);
    cr_assert_eq(fclose(file), 0);
}

static void make_root(void)
{
    cr_assert_not_null(mkdtemp(root));
}

static void remove_root(void)
{
    char command[64];
    (void)snprintf(command, sizeof command, "rm -r %s", root);
    cr_assert_eq(system(command), 0);
}

TestSuite(base_machine, .init = make_root, .fini = remove_root);

static uint64_t free_by(const char *self)
{
    char path[256];
    write_file("self", self);
    (void)snprintf(path, sizeof path, "%s/self", root);
    return rbi_cgroup_free_bytes(root, path);
}

Test(base_machine, a_group_of_version_2_has_its_limit_less_what_it_uses_but_for_cached_files)
{
    write_file("job/step/memory.max", "1000000\n");
    write_file("job/step/memory.current", "400000\n");
    cr_expect_eq(free_by("0::/job/step\n"), 600000);
    write_file("job/step/memory.stat",
               "anon 1\nfile 150000\nactive_file 50000\ninactive_file 100000\n");
    cr_expect_eq(free_by("0::/job/step\n"), 700000);
    write_file("job/step/memory.current", "2000000\n");
    cr_expect_eq(free_by("0::/job/step\n"), 0);
}

Test(base_machine, the_least_of_the_groups_around_it_holds)
{
    write_file("job/step/memory.max", "max\n");
    write_file("job/step/memory.current", "400000\n");
    cr_expect_eq(free_by("0::/job/step\n"), UINT64_MAX);
    write_file("job/memory.max", "500000\n");
    write_file("job/memory.current", "450000\n");
    cr_expect_eq(free_by("0::/job/step\n"), 50000);
}

Test(base_machine, a_group_of_version_1_is_in_the_tree_of_memory)
{
    write_file("memory/job/memory.limit_in_bytes", "1000000\n");
    write_file("memory/job/memory.usage_in_bytes", "400000\n");
    write_file("memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n");
    cr_expect_eq(free_by("5:cpu:/\n4:memory:/job\n0::/\n"), 700000);
}

Test(base_machine, a_path_that_leads_nowhere_is_that_of_a_container_at_the_root)
{
    write_file("memory.max", "1000\n");
    write_file("memory.current", "400\n");
    cr_expect_eq(free_by("0::/kubepods/pod1/abc\n"), 600);
    cr_expect_eq(free_by("0::/\n"), 600);
    cr_expect_eq(free_by(""), UINT64_MAX);
}

Test(base_machine, this_machine_has_free_memory_and_not_more_than_it_could_have)
{
    const size_t bytes = rbi_host_free_bytes();
    cr_expect_gt(bytes, 0);
    cr_expect_lt(bytes, UINT64_C(1) << 50);
}
