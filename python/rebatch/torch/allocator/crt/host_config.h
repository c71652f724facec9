/* As host_defines.h: CUDA's own checks the compiler's version, and names two things of Windows. */
#pragma once
#include <features.h>
