/* What the programs of this folder assert with: `shared` has an atomic `failures`. */
#ifndef THREADS_HOLDS_H
#define THREADS_HOLDS_H

#include <stdatomic.h>
#include <stdio.h>

#include "rebatch/status.h"

#define HOLDS(shared, condition)                                                                   \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: does not hold: %s (%s)\n", __func__, __LINE__, #condition,     \
                    rebatch_last_error());                                                         \
            atomic_fetch_add(&(shared)->failures, 1);                                              \
        }                                                                                          \
    } while (0)

#endif
