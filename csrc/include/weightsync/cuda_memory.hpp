// Device memory of our own, and device memory that another process may open. Every call throws
// CudaError if CUDA refuses.
#pragma once

#include <cstdint>
#include <string>

namespace weightsync {

// An allocation of this process. `id` is never used again for another one, even at the same
// address; `is_shareable` is false for memory that no handle can name (virtual memory management).
struct CudaAllocation {
    std::uint64_t base;
    std::uint64_t num_bytes;
    std::uint64_t id;
    bool is_shareable;
};

std::uint64_t cuda_malloc(std::uint64_t num_bytes, int device);
void cuda_free(std::uint64_t ptr, int device);

// Bytes that are free on the device now.
std::uint64_t cuda_free_bytes(int device);

// The device that is current for this thread, as frameworks set it.
int cuda_current_device();

// 16 bytes that name the physical device, whatever its number in this process.
std::string cuda_device_uuid(int device);

CudaAllocation cuda_allocation(std::uint64_t ptr, int device);

// The handle of the whole allocation at `base`, valid while the allocation lives.
std::string cuda_export(std::uint64_t base, int device);
// Maps an allocation of another process, which stays alive until cuda_unmap.
std::uint64_t cuda_map(const std::string& handle, int device);
void cuda_unmap(std::uint64_t base, int device);

// A stream that never waits for the legacy default stream.
std::uint64_t cuda_create_stream(int device);
void cuda_wait_stream(std::uint64_t stream, int device);
// Waits for all work of this process on the device.
void cuda_synchronize(int device);

// Copies and waits; each side may be memory of the host or of the device.
void cuda_copy(std::uint64_t target_ptr, std::uint64_t source_ptr, std::uint64_t num_bytes,
               int device);

}  // namespace weightsync
