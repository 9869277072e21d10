#include "weightsync/cuda_memory.hpp"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

#include "driver.cuh"
#include "memory.cuh"

namespace weightsync {
namespace {

using cuda::check;
using cuda::checked_device;
using cuda::DeviceScope;

void* as_pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

std::uint64_t as_address(const void* ptr) { return reinterpret_cast<std::uint64_t>(ptr); }

cudaEvent_t as_event(std::uint64_t event) { return reinterpret_cast<cudaEvent_t>(event); }

using GetAttributes = CUresult (*)(unsigned int, CUpointer_attribute*, void**, CUdeviceptr);

}  // namespace

std::uint64_t cuda_malloc(std::uint64_t num_bytes, int device) {
    const DeviceScope scope(checked_device(device));
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, num_bytes);
    if (error != cudaSuccess) cudaGetLastError();  // out of memory is no fault of the next launch
    check(error, "cudaMalloc", device);
    ++cuda::num_allocations;
    return as_address(memory);
}

void cuda_free(std::uint64_t ptr, int device) {
    check(cudaFree(as_pointer(ptr)), "cudaFree", device);
    --cuda::num_allocations;
}

std::uint64_t cuda_malloc_host(std::uint64_t num_bytes, int device) {
    const DeviceScope scope(checked_device(device));
    void* memory = nullptr;
    const cudaError_t error = cudaMallocHost(&memory, num_bytes);
    if (error != cudaSuccess) cudaGetLastError();
    check(error, "cudaMallocHost", device);
    return as_address(memory);
}

void cuda_free_host(std::uint64_t ptr, int device) {
    check(cudaFreeHost(as_pointer(ptr)), "cudaFreeHost", device);
}

CudaHeld cuda_held() { return {cuda::num_allocations.load(), cuda::num_mappings.load()}; }

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

void cuda_use_device(int device) {
    check(cudaSetDevice(checked_device(device)), "cudaSetDevice", device);
}

int cuda_num_devices() {
    int num_devices = 0;
    if (cudaGetDeviceCount(&num_devices) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return num_devices;
}

CudaDeviceInfo cuda_device_info(int device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, checked_device(device)), "cudaGetDeviceProperties",
          device);
    return {properties.name, properties.totalGlobalMem, properties.major, properties.minor};
}

std::string cuda_driver_version() {
    int version = 0;
    if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) {
        cudaGetLastError();
        return {};
    }
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
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
    static const auto get_attributes =
        cuda::driver_function<GetAttributes>("cuPointerGetAttributes", 11040, device);
    CUdeviceptr base = 0;
    CUdeviceptr piece = 0;
    std::size_t num_bytes = 0;
    std::size_t piece_bytes = 0;
    unsigned long long id = 0;
    unsigned long long handle_types = 0;
    int has_legacy_handle = 0;
    int ordinal = -1;
    CUpointer_attribute wanted[] = {
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_BUFFER_ID,        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,   CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
        CU_POINTER_ATTRIBUTE_MAPPING_SIZE,     CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES};
    void* values[] = {&base,    &num_bytes, &id,          &has_legacy_handle,
                      &ordinal, &piece,     &piece_bytes, &handle_types};
    const CUresult result = get_attributes(8, wanted, values, ptr);
    if (result != CUDA_SUCCESS || base == 0 || ordinal != device) {
        throw CudaError("cudaErrorInvalidValue", "cuPointerGetAttributes", device,
                        "not memory of this device (" + std::to_string(result) + ")");
    }
    if (has_legacy_handle != 0) return {base, num_bytes, id, CudaSharing::kHandle};
    // Of virtual memory management: the range is all that was reserved, and mapped piece by piece.
    const bool has_fd = (handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
    if (piece == 0) return {base, num_bytes, id, CudaSharing::kNone};
    return {piece, piece_bytes, id, has_fd ? CudaSharing::kFd : CudaSharing::kNone};
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
    ++cuda::num_mappings;
    return as_address(memory);
}

void cuda_unmap(std::uint64_t base, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaIpcCloseMemHandle(as_pointer(base)), "cudaIpcCloseMemHandle", device);
    --cuda::num_mappings;
}

std::uint64_t cuda_create_stream(int device, int priority) {
    const DeviceScope scope(checked_device(device));
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
          "cudaStreamCreateWithPriority", device);
    return as_address(stream);
}

void cuda_wait_stream(std::uint64_t stream, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaStreamSynchronize(cuda::as_stream(stream)), "cudaStreamSynchronize", device);
}

std::uint64_t cuda_create_event(int device) {
    const DeviceScope scope(checked_device(device));
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate", device);
    return as_address(event);
}

void cuda_destroy_event(std::uint64_t event, int device) {
    check(cudaEventDestroy(as_event(event)), "cudaEventDestroy", device);
}

void cuda_record_event(std::uint64_t event, std::uint64_t stream, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaEventRecord(as_event(event), cuda::as_stream(stream)), "cudaEventRecord", device);
}

double cuda_elapsed_s(std::uint64_t start, std::uint64_t stop, int device) {
    const DeviceScope scope(checked_device(device));
    float spent_ms = 0;
    check(cudaEventElapsedTime(&spent_ms, as_event(start), as_event(stop)), "cudaEventElapsedTime",
          device);
    return spent_ms * 1e-3;
}

void cuda_wait_event(std::uint64_t event, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaEventSynchronize(as_event(event)), "cudaEventSynchronize", device);
}

bool cuda_event_passed(std::uint64_t event, int device) {
    const DeviceScope scope(checked_device(device));
    const cudaError_t found = cudaEventQuery(as_event(event));
    if (found == cudaErrorNotReady) return false;
    check(found, "cudaEventQuery", device);
    return true;
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
