// Memory of virtual memory management: pieces of it travel as file descriptors, and are mapped
// side by side into one range of addresses.
#include <cuda.h>
#include <cuda_runtime.h>

#include <vector>

#include "driver.cuh"
#include "memory.cuh"
#include "weightsync/cuda_memory.hpp"

namespace weightsync {
namespace {

using cuda::check;
using cuda::check_driver;
using cuda::checked_device;
using cuda::DeviceScope;

constexpr CUmemAllocationHandleType kFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// The driver's functions, found once.
struct Driver {
    explicit Driver(int device)
        : retain(find<decltype(retain)>("cuMemRetainAllocationHandle", 11000, device)),
          release(find<decltype(release)>("cuMemRelease", 10020, device)),
          export_handle(
              find<decltype(export_handle)>("cuMemExportToShareableHandle", 10020, device)),
          import_handle(
              find<decltype(import_handle)>("cuMemImportFromShareableHandle", 10020, device)),
          reserve(find<decltype(reserve)>("cuMemAddressReserve", 10020, device)),
          free_addresses(find<decltype(free_addresses)>("cuMemAddressFree", 10020, device)),
          map(find<decltype(map)>("cuMemMap", 10020, device)),
          unmap(find<decltype(unmap)>("cuMemUnmap", 10020, device)),
          set_access(find<decltype(set_access)>("cuMemSetAccess", 10020, device)) {}

    static const Driver& get(int device) {
        static const Driver driver(device);
        return driver;
    }

    CUresult (*retain)(CUmemGenericAllocationHandle*, void*);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*export_handle)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                              unsigned long long);
    CUresult (*import_handle)(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType);
    CUresult (*reserve)(CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr, unsigned long long);
    CUresult (*free_addresses)(CUdeviceptr, std::size_t);
    CUresult (*map)(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,
                    unsigned long long);
    CUresult (*unmap)(CUdeviceptr, std::size_t);
    CUresult (*set_access)(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t);

  private:
    template <typename Function>
    static Function find(const char* name, unsigned int version, int device) {
        return cuda::driver_function<Function>(name, version, device);
    }
};

// Addresses with pieces mapped into them from the front; given back unless kept.
class MappedRange {
  public:
    MappedRange(const Driver& driver, std::uint64_t num_bytes, int device)
        : driver_(driver), num_bytes_(num_bytes), device_(device) {
        check_driver(driver_.reserve(&base_, num_bytes, 0, 0, 0), "cuMemAddressReserve", device);
    }
    MappedRange(const MappedRange&) = delete;
    MappedRange& operator=(const MappedRange&) = delete;
    ~MappedRange() {
        if (is_kept_) return;
        for (auto size = mapped_.rbegin(); size != mapped_.rend(); ++size) {
            mapped_bytes_ -= *size;
            driver_.unmap(base_ + mapped_bytes_, *size);
        }
        driver_.free_addresses(base_, num_bytes_);
    }

    void map(CUmemGenericAllocationHandle handle, std::uint64_t num_bytes) {
        check_driver(driver_.map(base_ + mapped_bytes_, num_bytes, 0, handle, 0), "cuMemMap",
                     device_);
        mapped_.push_back(num_bytes);
        mapped_bytes_ += num_bytes;
    }

    // For reading, where the driver has such a mapping: nobody writes into a peer's weights.
    std::uint64_t keep() {
        CUmemAccessDesc access{};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = device_;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
        CUresult result = driver_.set_access(base_, num_bytes_, &access, 1);
        if (result != CUDA_SUCCESS) {
            access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            result = driver_.set_access(base_, num_bytes_, &access, 1);
        }
        check_driver(result, "cuMemSetAccess", device_);
        is_kept_ = true;
        return base_;
    }

  private:
    const Driver& driver_;
    std::uint64_t num_bytes_;
    int device_;
    CUdeviceptr base_ = 0;
    std::uint64_t mapped_bytes_ = 0;
    std::vector<std::uint64_t> mapped_;
    bool is_kept_ = false;
};

}  // namespace

int cuda_export_fd(std::uint64_t base, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaFree(nullptr), "cudaFree", device);  // makes the context
    const Driver& driver = Driver::get(device);
    CUmemGenericAllocationHandle handle = 0;
    check_driver(driver.retain(&handle, reinterpret_cast<void*>(base)),
                 "cuMemRetainAllocationHandle", device);
    int fd = -1;
    const CUresult result = driver.export_handle(&fd, handle, kFd, 0);
    driver.release(handle);  // the descriptor keeps the memory
    check_driver(result, "cuMemExportToShareableHandle", device);
    return fd;
}

std::uint64_t cuda_import_fd(int fd, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaFree(nullptr), "cudaFree", device);
    CUmemGenericAllocationHandle handle = 0;
    void* os_handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd));
    check_driver(Driver::get(device).import_handle(&handle, os_handle, kFd),
                 "cuMemImportFromShareableHandle", device);
    ++cuda::num_mappings;
    return handle;
}

void cuda_release_handle(std::uint64_t handle, int device) {
    const DeviceScope scope(checked_device(device));
    check_driver(Driver::get(device).release(handle), "cuMemRelease", device);
    --cuda::num_mappings;
}

std::uint64_t cuda_map_handles(const std::vector<std::uint64_t>& handles,
                               const std::vector<std::uint64_t>& num_bytes, int device) {
    if (handles.empty() || handles.size() != num_bytes.size()) {
        throw CudaError("cudaErrorInvalidValue", "cuMemMap", device,
                        "one size for each handle, and at least one");
    }
    const DeviceScope scope(checked_device(device));
    std::uint64_t all_bytes = 0;
    for (const std::uint64_t size : num_bytes) all_bytes += size;
    MappedRange range(Driver::get(device), all_bytes, device);
    for (std::size_t i = 0; i < handles.size(); ++i) range.map(handles[i], num_bytes[i]);
    const std::uint64_t base = range.keep();
    ++cuda::num_mappings;
    return base;
}

void cuda_unmap_handles(std::uint64_t base, const std::vector<std::uint64_t>& num_bytes,
                        int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", device);
    const Driver& driver = Driver::get(device);
    std::uint64_t done_bytes = 0;
    for (const std::uint64_t size : num_bytes) {
        check_driver(driver.unmap(base + done_bytes, size), "cuMemUnmap", device);
        done_bytes += size;
    }
    check_driver(driver.free_addresses(base, done_bytes), "cuMemAddressFree", device);
    --cuda::num_mappings;
}

}  // namespace weightsync
