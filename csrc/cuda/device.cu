#include "weightsync/device.hpp"

#include <cuda_runtime.h>

#include "weightsync/cuda_device.hpp"

namespace weightsync {

bool has_cuda() { return cuda_unavailable_reason().empty(); }

std::string cuda_unavailable_reason() {
    int driver_version = 0;
    if (cudaDriverGetVersion(&driver_version) != cudaSuccess || driver_version == 0) {
        cudaGetLastError();  // or the next launch would report it
        return "no driver";
    }
    int num_devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&num_devices);
    if (error == cudaSuccess && num_devices > 0) return {};
    cudaGetLastError();
    if (error == cudaSuccess || error == cudaErrorNoDevice) return "no device";
    return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

std::string cuda_version() {
    return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

}  // namespace weightsync
