// Functions of the driver, which is never linked against: they are found at run time.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "memory.cuh"

namespace weightsync::cuda {

// The function `name` as CUDA `version` (such as 11040) knew it; throws if the driver has none.
template <typename Function>
Function driver_function(const char* name, unsigned int version, int device) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion", device);
#elif CUDART_VERSION >= 12000
    check(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found),
          "cudaGetDriverEntryPoint", device);
#else
    check(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault), "cudaGetDriverEntryPoint",
          device);
    if (function != nullptr) found = cudaDriverEntryPointSuccess;
#endif
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
        throw CudaError("cudaErrorNotSupported", name, device, "the driver is too old");
    }
    return reinterpret_cast<Function>(function);
}

// The driver's and the runtime's numbers of errors are the same.
inline void check_driver(CUresult result, const char* call, int device) {
    check(static_cast<cudaError_t>(result), call, device);
}

}  // namespace weightsync::cuda
