/* Owns the tests of `rebatch fit` as far as no PyTorch is needed: which Python it is.
 * Must not know the library's inside. What it prints is of tests/python/test_fit.py. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "cli_common.h"
#include "unit/config_files.h"

TestSuite(cli_fit, .init = cli_enter, .fini = config_leave);

Test(cli_fit, a_system_without_python_is_told_what_for)
{
    AUTO_DONE(r) = cli_run("PATH=/none", "fit", "--gpu l4 -- ./train");
    cr_expect_eq(r.code, 127);
    cr_expect_str_eq(r.error, "rebatch: python3, whose package rebatch does a fit, cannot be run: "
                              "No such file or directory\n");
}

/* One that sees no installed package. */
Test(cli_fit, a_python_without_the_package_is_named)
{
    if (system("python=$(command -v python3) && echo '#!/bin/sh' >python-bare && "
               "echo \"exec $python -I -S \\\"\\$@\\\"\" >>python-bare && chmod +x python-bare"))
        return;
    AUTO_DONE(r) = cli_run("", "fit", "--gpu l4 -- ./python-bare train.py");
    cr_expect_eq(r.code, 1);
    cr_expect(strstr(r.error, " has no package rebatch, which does a fit: expected it there"), "%s",
              r.error);
    cr_expect_eq(strchr(r.error, '\n')[1], '\0', "%s", r.error);
}
