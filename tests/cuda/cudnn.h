/* What rebatch/wrap.h and a trainer need of cuDNN, under its name. Values are those of cuDNN 9, and
 * the functions are of who includes it (tests/wrap/darknet.h). */
#ifndef CUDNN_STANDIN_H
#define CUDNN_STANDIN_H

#define CUDNN_MAJOR 9

typedef enum {
    CUDNN_STATUS_SUCCESS = 0,
    CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004
} cudnnStatus_t;

#endif
