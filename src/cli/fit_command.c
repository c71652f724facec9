/* Owns `rebatch fit`: it finds the Python that has the package, which does the rest.
 * Must not know what a fit is. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/child.h"
#include "cli/command.h"

static const char help[] =
    "usage: rebatch fit [OPTION]... -- PROGRAM [ARGUMENT]...\n"
    "\n"
    "Finds the largest micro-batch of your own program that fits on a card, on a machine without\n"
    "a GPU. PROGRAM runs unchanged up to its first Step or rebatch_step(), or of PyTorch without\n"
    "a Step to its first training pass, on a stand-in for CUDA that has memory and no kernels.\n"
    "There sizes are tried, of a PyTorch program on PyTorch's own allocator, and the program\n"
    "ends. What the program prints goes to standard error.\n"
    "A compiled program is linked with nvcc's -cudart shared.\n"
    "\n"
    "  --gpu CARD[,CARD]...      for example \"H100 80GB\" or t4,l4,a100-40\n"
    "  --memory SIZE[,SIZE]...   memory that is free before PROGRAM starts, for example 24GiB\n"
    "                            (default: all of the card's)\n"
    "  --install                 PyTorch with rebatch's allocator, as after install()\n"
    "  --lighten                 a row for each way of the Step's `lighten` too\n"
    "  --ranks N                 as one of N ranks: a Python program, without its torchrun\n"
    "  --batch N                 without a Step: {batch} in PROGRAM's arguments stands for its\n"
    "                            batch size, and N is its own\n"
    "  --json                    print one JSON object instead of the table\n"
    "  --cards                   list the cards, and end\n"
    "  --help, -h                print this text\n"
    "\n"
    "example: rebatch fit --gpu h100,l4 -- python3 train.py\n"
    "         rebatch fit --gpu a100-40 --memory 30GiB -- ./train --epochs 3\n"
    "This needs Python's package rebatch, in the Python of PROGRAM or in python3, and a C++\n"
    "compiler once. Without this command: python3 -m rebatch.fit --gpu l4 -- python3 train.py\n"
    "exit status: 0 a size was found, 1 failure, 2 wrong usage, 3 nothing fits,\n"
    "126 PROGRAM is not executable, 127 PROGRAM does not exist\n";

RBI_COMMAND_HELP(fit, help)

/* That of the program, where it is a Python: its PyTorch is the one that counts. */
static char *python_of(int count, char **arguments)
{
    static char usual[] = "python3";
    for (int i = 0; i + 1 < count; i++) {
        if (strcmp(arguments[i], "--") != 0)
            continue;
        char *program = arguments[i + 1];
        const char *slash = strrchr(program, '/');
        if (strncmp(slash ? slash + 1 : program, "python", strlen("python")) == 0)
            return program;
        break;
    }
    return usual;
}

int rbi_fit_main(int count, char **arguments)
{
    if (count > 0 && rbi_command_is_help(arguments[0]))
        return rbi_fit_help(0, NULL);
    static char
        code[] = "-c",
        start[] =
            "import importlib.util, runpy, sys\n"
            "try:\n"
            "    found = importlib.util.find_spec('rebatch.fit')\n"
            "except ModuleNotFoundError:\n"
            "    found = None\n"
            "if not found:\n"
            "    sys.exit('rebatch: ' + sys.executable + ' has no package rebatch, which does a "
            "fit: '\n"
            "             'expected it there by pip install, or a Python that has it as PROGRAM')\n"
            "runpy.run_module('rebatch.fit', run_name='__main__', alter_sys=True)\n";
    char *python = python_of(count, arguments);
    char **words = calloc((size_t)count + 4, sizeof *words);
    if (!words) {
        fputs("rebatch: there is no memory for the arguments\n", stderr);
        return RBI_EXIT_FAILED;
    }
    words[0] = python;
    words[1] = code;
    words[2] = start;
    memcpy(words + 3, arguments, (size_t)count * sizeof *words);
    (void)execvp(python, words);
    const int error = errno;
    free(words);
    const bool is_program = strcmp(python, "python3") != 0;
    return rbi_child_refuse(is_program ? python : "python3, whose package rebatch does a fit,",
                            error);
}
