/* Owns `rebatch doctor`: it prints what the library says of this machine.
 * Must not know the library's inside: public headers only. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/command.h"
#include "rebatch/cuda.h"

static const char help[] =
    "usage: rebatch doctor\n"
    "\n"
    "Prints one screen to paste into an issue: versions, GPUs, settings of the environment, and\n"
    "in lines that begin with \"not here\" what would not work on this machine, and why. For\n"
    "PyTorch: python3 -m rebatch.doctor. Look at it first: it has values of the variables\n"
    "REBATCH_* and CUDA_VISIBLE_DEVICES.\n"
    "exit status: 0 a training could use a GPU, 1 it could not, 2 wrong usage\n";

RBI_COMMAND_HELP(doctor, help)

int rbi_doctor_main(int count, char **arguments)
{
    static char text[1 << 16];
    bool has_gpu;
    if (count > 0 && rbi_command_is_help(arguments[0]))
        return rbi_doctor_help(0, NULL);
    if (count > 0)
        return rbi_command_refuse("doctor");
    (void)rebatch_doctor_format(text, sizeof text, &has_gpu);
    fputs(text, stdout);
    return has_gpu ? RBI_EXIT_OK : RBI_EXIT_FAILED;
}
