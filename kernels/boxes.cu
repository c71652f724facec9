/* Descriptions of arrays for copies of boxes. Owns describe_boxes and has_sm90. Must not know: what
 * the arrays hold. */
#include "boxes.cuh"

cudaError_t has_sm90(bool *out)
{
    *out = false;
#ifdef RBK_SM90A
    int device, major = 0, minor = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    *out = status == cudaSuccess && major == 9 && minor == 0;
    return status;
#else
    return cudaSuccess;
#endif
}

using encode_function = decltype(&cuTensorMapEncodeTiled);

/* The driver's function that describes an array for copies of boxes. It stays where it is. */
static cudaError_t find_encode(encode_function *out)
{
    static encode_function found;
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (!found) {
        const cudaError_t status = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        if (status != cudaSuccess)
            return status;
        if (result != cudaDriverEntryPointSuccess)
            return cudaErrorNotSupported;
        found = (encode_function)function;
    }
    *out = found;
    return cudaSuccess;
}

cudaError_t describe_boxes(CUtensorMap *out, const void *array, size_t batch, size_t length,
                           size_t width, int box_rows, int box_columns, rbk_dtype dtype)
{
    encode_function encode;
    const cudaError_t status = find_encode(&encode);
    if (status != cudaSuccess)
        return status;
    const cuuint64_t sizes[] = {width, length, batch};
    const cuuint64_t strides[] = {width * 2, length * width * 2};
    const cuuint32_t box[] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows, 1};
    const cuuint32_t steps[] = {1, 1, 1};
    const CUresult result = encode(
        out, dtype == RBK_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        3, (void *)array, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
