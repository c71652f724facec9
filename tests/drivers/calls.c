/* Every call that the library looks for in CUDA's driver, so that a stand-in has them all: none of
 * them can do anything. Must not know which of them a stand-in answers itself. */
#include "device/cuda_driver.h"

#define NOT_SUPPORTED 801 /* CUDA_ERROR_NOT_SUPPORTED */

#define CALL(member, symbol, arguments)                                                            \
    __attribute__((weak)) int symbol(void);                                                        \
    __attribute__((weak)) int symbol(void)                                                         \
    {                                                                                              \
        return NOT_SUPPORTED;                                                                      \
    }
RBI_CUDA_CALLS(CALL)
