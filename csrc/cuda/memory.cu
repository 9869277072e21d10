#include "weightsync/cuda_memory.hpp"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

#include "memory.cuh"

namespace weightsync {
namespace {

using cuda::check;
using cuda::checked_device;
using cuda::DeviceScope;

void* as_pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

std::uint64_t as_address(const void* ptr) { return reinterpret_cast<std::uint64_t>(ptr); }

using GetAttributes = CUresult (*)(unsigned int, CUpointer_attribute*, void**, CUdeviceptr);

// The driver is never linked against: it is found at run time.
GetAttributes find_get_attributes(int device) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const char* name = "cuPointerGetAttributes";
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion(name, &function, 11040, cudaEnableDefault, &found),
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
    return reinterpret_cast<GetAttributes>(function);
}

}  // namespace

std::uint64_t cuda_malloc(std::uint64_t num_bytes, int device) {
    const DeviceScope scope(checked_device(device));
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, num_bytes);
    if (error != cudaSuccess) cudaGetLastError();  // out of memory is no fault of the next launch
    check(error, "cudaMalloc", device);
    return as_address(memory);
}

void cuda_free(std::uint64_t ptr, int device) {
    check(cudaFree(as_pointer(ptr)), "cudaFree", device);
}

std::uint64_t cuda_free_bytes(int device) {
    const DeviceScope scope(checked_device(device));
    std::size_t free_bytes = 0;
    std::size_t all_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo", device);
    return free_bytes;
}

int cuda_current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice", 0);
    return device;
}

std::string cuda_device_uuid(int device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, checked_device(device)), "cudaGetDeviceProperties",
          device);
    return {properties.uuid.bytes, sizeof properties.uuid.bytes};
}

CudaAllocation cuda_allocation(std::uint64_t ptr, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaFree(nullptr), "cudaFree", device);  // the driver answers only in a context
    static const GetAttributes get_attributes = find_get_attributes(device);
    CUdeviceptr base = 0;
    std::size_t num_bytes = 0;
    unsigned long long id = 0;
    int is_shareable = 0;
    int ordinal = -1;
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                    CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void* values[] = {&base, &num_bytes, &id, &is_shareable, &ordinal};
    const CUresult result = get_attributes(5, wanted, values, ptr);
    if (result != CUDA_SUCCESS || base == 0 || ordinal != device) {
        throw CudaError("cudaErrorInvalidValue", "cuPointerGetAttributes", device,
                        "not memory of this device (" + std::to_string(result) + ")");
    }
    return {base, num_bytes, id, is_shareable != 0};
}

std::string cuda_export(std::uint64_t base, int device) {
    const DeviceScope scope(checked_device(device));
    cudaIpcMemHandle_t handle{};
    const cudaError_t error = cudaIpcGetMemHandle(&handle, as_pointer(base));
    if (error != cudaSuccess) cudaGetLastError();
    check(error, "cudaIpcGetMemHandle", device);
    return {handle.reserved, sizeof handle.reserved};
}

std::uint64_t cuda_map(const std::string& handle, int device) {
    const DeviceScope scope(checked_device(device));
    cudaIpcMemHandle_t raw{};
    if (handle.size() != sizeof raw.reserved) {
        throw CudaError("cudaErrorInvalidValue", "cudaIpcOpenMemHandle", device,
                        "a handle has 64 bytes");
    }
    std::memcpy(raw.reserved, handle.data(), handle.size());
    void* memory = nullptr;
    const cudaError_t error = cudaIpcOpenMemHandle(&memory, raw, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) cudaGetLastError();
    check(error, "cudaIpcOpenMemHandle", device);
    return as_address(memory);
}

void cuda_unmap(std::uint64_t base, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaIpcCloseMemHandle(as_pointer(base)), "cudaIpcCloseMemHandle", device);
}

std::uint64_t cuda_create_stream(int device) {
    const DeviceScope scope(checked_device(device));
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags",
          device);
    return as_address(stream);
}

void cuda_wait_stream(std::uint64_t stream, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaStreamSynchronize(cuda::as_stream(stream)), "cudaStreamSynchronize", device);
}

void cuda_synchronize(int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", device);
}

void cuda_copy(std::uint64_t target_ptr, std::uint64_t source_ptr, std::uint64_t num_bytes,
               int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaMemcpyAsync(as_pointer(target_ptr), as_pointer(source_ptr), num_bytes,
                          cudaMemcpyDefault, cudaStreamPerThread),
          "cudaMemcpyAsync", device);
    check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize", device);
}

}  // namespace weightsync
