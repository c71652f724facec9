/* What rebatch/nccl.h needs of NCCL, under its name, so that the header can be compiled and
 * tested without it. Who is linked with it defines the functions. Values are NCCL's. */
#ifndef NCCL_STANDIN_H
#define NCCL_STANDIN_H

#include <cuda_runtime.h>

typedef struct ncclComm *ncclComm_t;
typedef enum {
    ncclSuccess = 0,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;
typedef enum { ncclSum = 0, ncclMax = 2, ncclMin = 3 } ncclRedOp_t;
typedef enum { ncclUint64 = 5 } ncclDataType_t;

#ifdef __cplusplus
extern "C" {
#endif
ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank);
ncclResult_t ncclCommCount(ncclComm_t comm, int *count);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
#ifdef __cplusplus
}
#endif
#endif
