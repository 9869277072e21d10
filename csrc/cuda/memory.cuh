// Calls that throw, the current device for a scope, and device memory that is owned.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "weightsync/cuda_device.hpp"

namespace weightsync::cuda {

inline void check(cudaError_t error, const char* call, int device) {
    if (error != cudaSuccess) {
        throw CudaError(cudaGetErrorName(error), call, device, cudaGetErrorString(error));
    }
}

inline cudaStream_t as_stream(std::uintptr_t stream) {
    return reinterpret_cast<cudaStream_t>(stream);
}

// Live allocations and mappings of this process, for cuda_held.
inline std::atomic<std::int64_t> num_allocations{0};
inline std::atomic<std::int64_t> num_mappings{0};

// Makes `device` current for a scope.
class DeviceScope {
  public:
    explicit DeviceScope(int device) {
        check(cudaGetDevice(&previous_), "cudaGetDevice", device);
        if (previous_ == device) return;
        check(cudaSetDevice(device), "cudaSetDevice", device);
        is_changed_ = true;
    }
    ~DeviceScope() {
        if (is_changed_) cudaSetDevice(previous_);
    }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int previous_ = 0;
    bool is_changed_ = false;
};

// Throws unless the device can be used, also for a table without a row.
inline int checked_device(int device) {
    int num_devices = 0;
    check(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount", device);
    if (device < 0 || device >= num_devices) check(cudaErrorInvalidDevice, "cudaSetDevice", device);
    return device;
}

// `size` elements on the device. Freed by close(), or else by the destructor, which cannot tell if
// that failed.
template <typename T>
class DeviceArray {
  public:
    DeviceArray() = default;
    DeviceArray(std::size_t size, int device) : size_(size), device_(device) {
        if (size == 0) return;
        const DeviceScope scope(device);
        void* memory = nullptr;
        const cudaError_t error = cudaMalloc(&memory, size * sizeof(T));
        if (error != cudaSuccess) cudaGetLastError();  // no fault of the next launch
        check(error, "cudaMalloc", device);
        ptr_ = static_cast<T*>(memory);
        ++num_allocations;
    }
    DeviceArray(const std::vector<T>& values, int device) : DeviceArray(values.size(), device) {
        if (values.empty()) return;
        const DeviceScope scope(device);
        // The stream of this thread: the legacy one would wait for, and hold up, all others.
        check(cudaMemcpyAsync(ptr_, values.data(), values.size() * sizeof(T),
                              cudaMemcpyHostToDevice, cudaStreamPerThread),
              "cudaMemcpyAsync", device);
        check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize", device);
    }
    DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
    DeviceArray& operator=(DeviceArray&& other) noexcept {
        std::swap(ptr_, other.ptr_);
        std::swap(size_, other.size_);
        std::swap(device_, other.device_);
        return *this;
    }
    ~DeviceArray() { free(); }

    T* get() const { return ptr_; }
    std::size_t size() const { return size_; }

    void close() { check(free(), "cudaFree", device_); }

  private:
    cudaError_t free() {
        if (ptr_ == nullptr) return cudaSuccess;
        --num_allocations;
        return cudaFree(std::exchange(ptr_, nullptr));  // finds the device by the address
    }

    T* ptr_ = nullptr;
    std::size_t size_ = 0;
    int device_ = 0;
};

// In a kernel: whatever is launched behind it may take its place on the device already.
inline __device__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// In a kernel that was launched so: until everything before it has been done.
inline __device__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel that begins with wait_for_previous: on devices that can, it takes its place
// while the kernel before it still runs.
template <typename... Parameters>
void launch_behind(void (*kernel)(Parameters...), dim3 grid, int num_threads, int shared_bytes,
                   cudaStream_t stream, int device, const char* name, Parameters... arguments) {
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "cudaDeviceGetAttribute", device);
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(num_threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = major >= 9 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), name, device);
}

}  // namespace weightsync::cuda
