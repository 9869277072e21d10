// Arenas: virtual memory management, so that memory goes and comes back at the same addresses.
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/types.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "driver.cuh"
#include "memory.cuh"
#include "weightsync/cuda_arena.hpp"

namespace weightsync {
namespace {

using cuda::check;
using cuda::check_driver;
using cuda::checked_device;
using cuda::DeviceScope;

constexpr std::uint64_t kPoolPieceBytes = std::uint64_t{256} << 20;

template <typename Function>
Function find(const char* name, int device) {
    return cuda::driver_function<Function>(name, 10020, device);
}

struct Driver {
    explicit Driver(int device)
        : granularity(find<decltype(granularity)>("cuMemGetAllocationGranularity", device)),
          reserve(find<decltype(reserve)>("cuMemAddressReserve", device)),
          free_addresses(find<decltype(free_addresses)>("cuMemAddressFree", device)),
          create(find<decltype(create)>("cuMemCreate", device)),
          release(find<decltype(release)>("cuMemRelease", device)),
          map(find<decltype(map)>("cuMemMap", device)),
          unmap(find<decltype(unmap)>("cuMemUnmap", device)),
          set_access(find<decltype(set_access)>("cuMemSetAccess", device)) {}

    static const Driver& get(int device) {
        static const Driver driver(device);
        return driver;
    }

    CUresult (*granularity)(std::size_t*, const CUmemAllocationProp*,
                            CUmemAllocationGranularity_flags);
    CUresult (*reserve)(CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr, unsigned long long);
    CUresult (*free_addresses)(CUdeviceptr, std::size_t);
    CUresult (*create)(CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*map)(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,
                    unsigned long long);
    CUresult (*unmap)(CUdeviceptr, std::size_t);
    CUresult (*set_access)(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t);
};

struct Range {
    std::uint64_t num_bytes;
    std::uint64_t owner;  // of the pool; 0: an arena
    bool is_mapped;
};

std::mutex lock;
std::map<std::uint64_t, Range> ranges;
std::uint64_t pool_owner = 0;

CUmemAllocationProp properties_of(int device) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    return properties;
}

// The range that begins at `base`; with the lock held.
Range& found(std::uint64_t base, int device) {
    const auto place = ranges.find(base);
    if (place == ranges.end()) {
        throw CudaError("cudaErrorInvalidValue", "arena", device, "no range begins there");
    }
    return place->second;
}

ArenaRange reserve(std::uint64_t num_bytes, std::uint64_t owner, int device) {
    const DeviceScope scope(checked_device(device));
    const Driver& driver = Driver::get(device);
    const CUmemAllocationProp properties = properties_of(device);
    std::size_t unit = 0;
    check_driver(driver.granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "cuMemGetAllocationGranularity", device);
    num_bytes = std::max<std::uint64_t>((num_bytes + unit - 1) / unit, 1) * unit;
    CUdeviceptr base = 0;
    check_driver(driver.reserve(&base, num_bytes, 0, 0, 0), "cuMemAddressReserve", device);
    const std::scoped_lock guard(lock);
    ranges[base] = {num_bytes, owner, false};
    return {base, num_bytes};
}

void check_pieces(const std::vector<std::uint64_t>& piece_ends, std::uint64_t num_bytes,
                  int device) {
    std::uint64_t done = 0;
    for (const std::uint64_t end : piece_ends) {
        if (end <= done) throw CudaError("cudaErrorInvalidValue", "arena", device, "empty piece");
        done = end;
    }
    if (done != num_bytes) {
        throw CudaError("cudaErrorInvalidValue", "arena", device, "pieces are not the whole range");
    }
}

// The ends of pieces of kPoolPieceBytes and a rest.
std::vector<std::uint64_t> pool_pieces(std::uint64_t num_bytes) {
    std::vector<std::uint64_t> ends;
    for (std::uint64_t at = kPoolPieceBytes; at < num_bytes; at += kPoolPieceBytes) {
        ends.push_back(at);
    }
    ends.push_back(num_bytes);
    return ends;
}

// Creates and maps pieces from `base` on; `mapped` tells how far it came if it throws.
void map_pieces(std::uint64_t base, const std::vector<std::uint64_t>& piece_ends, int device,
                std::vector<std::uint64_t>& mapped) {
    const Driver& driver = Driver::get(device);
    const CUmemAllocationProp properties = properties_of(device);
    std::uint64_t done = 0;
    for (const std::uint64_t end : piece_ends) {
        const std::uint64_t size = end - done;
        CUmemGenericAllocationHandle handle = 0;
        check_driver(driver.create(&handle, size, &properties, 0), "cuMemCreate", device);
        const CUresult result = driver.map(base + done, size, 0, handle, 0);
        driver.release(handle);  // the mapping keeps the memory
        check_driver(result, "cuMemMap", device);
        mapped.push_back(size);
        done = end;
    }
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check_driver(driver.set_access(base, done, &access, 1), "cuMemSetAccess", device);
}

}  // namespace

ArenaRange cuda_arena_reserve(std::uint64_t num_bytes, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaFree(nullptr), "cudaFree", device);  // makes the context
    return reserve(num_bytes, 0, device);
}

void cuda_arena_map(std::uint64_t base, const std::vector<std::uint64_t>& piece_ends, int device) {
    const DeviceScope scope(checked_device(device));
    const std::scoped_lock guard(lock);
    Range& range = found(base, device);
    if (range.is_mapped) return;
    check_pieces(piece_ends, range.num_bytes, device);
    std::vector<std::uint64_t> mapped;
    try {
        map_pieces(base, piece_ends, device, mapped);
    } catch (...) {
        std::uint64_t done = 0;
        for (const std::uint64_t size : mapped) {
            Driver::get(device).unmap(base + done, size);
            done += size;
        }
        throw;
    }
    range.is_mapped = true;
}

void cuda_arena_unmap(std::uint64_t base, int device) {
    const DeviceScope scope(checked_device(device));
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", device);
    const std::scoped_lock guard(lock);
    Range& range = found(base, device);
    if (!range.is_mapped) return;
    check_driver(Driver::get(device).unmap(base, range.num_bytes), "cuMemUnmap", device);
    range.is_mapped = false;
}

void cuda_arena_free(std::uint64_t base, int device) {
    cuda_arena_unmap(base, device);
    const DeviceScope scope(checked_device(device));
    const std::scoped_lock guard(lock);
    const std::uint64_t num_bytes = found(base, device).num_bytes;
    check_driver(Driver::get(device).free_addresses(base, num_bytes), "cuMemAddressFree", device);
    ranges.erase(base);
}

void cuda_pool_own(std::uint64_t owner) {
    const std::scoped_lock guard(lock);
    pool_owner = owner;
}

std::vector<ArenaRange> cuda_pool_ranges(std::uint64_t owner) {
    const std::scoped_lock guard(lock);
    std::vector<ArenaRange> all;
    for (const auto& [base, range] : ranges) {
        if (range.owner == owner) all.push_back({base, range.num_bytes});
    }
    return all;
}

}  // namespace weightsync

// What torch's CUDAPluggableAllocator looks up by name. An error is null, which it reads as out of
// memory; nothing may be thrown into it.
extern "C" __attribute__((visibility("default"))) void* weightsync_pool_allocate(ssize_t num_bytes,
                                                                                 int device,
                                                                                 cudaStream_t) {
    try {
        std::uint64_t owner = 0;
        {
            const std::scoped_lock guard(weightsync::lock);
            owner = weightsync::pool_owner;
        }
        const auto range =
            weightsync::reserve(static_cast<std::uint64_t>(num_bytes), owner, device);
        try {
            weightsync::cuda_arena_map(range.base, weightsync::pool_pieces(range.num_bytes),
                                       device);
        } catch (...) {
            weightsync::cuda_arena_free(range.base, device);
            throw;
        }
        return reinterpret_cast<void*>(range.base);
    } catch (...) {
        return nullptr;
    }
}

extern "C" __attribute__((visibility("default"))) void weightsync_pool_free(void* pointer, ssize_t,
                                                                            int device,
                                                                            cudaStream_t) {
    try {
        weightsync::cuda_arena_free(reinterpret_cast<std::uint64_t>(pointer), device);
    } catch (...) {  // at the end of a process there may be no driver to give it to
        return;
    }
}
