// Device memory of our own, and device memory that another process may open. Every call throws
// CudaError if CUDA refuses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weightsync {

// How an allocation can be opened by another process.
enum class CudaSharing : int {
    kNone = 0,
    kHandle = 1,  // cuda_export
    kFd = 2,      // cuda_export_fd
};

// An allocation of this process, or one mapped piece of virtual memory management. `id` is never
// used again for another one, even at the same address; mapping a piece again makes a new one.
struct CudaAllocation {
    std::uint64_t base;
    std::uint64_t num_bytes;
    std::uint64_t id;
    CudaSharing sharing;
};

// What this process holds through the extension, tables included; to see that nothing grows.
struct CudaHeld {
    std::int64_t num_allocations;
    std::int64_t num_mappings;
};
CudaHeld cuda_held();

std::uint64_t cuda_malloc(std::uint64_t num_bytes, int device);
void cuda_free(std::uint64_t ptr, int device);
// Memory of the host that copies to and from a device take at full speed.
std::uint64_t cuda_malloc_host(std::uint64_t num_bytes, int device);
void cuda_free_host(std::uint64_t ptr, int device);

// Bytes that are free on the device now.
std::uint64_t cuda_free_bytes(int device);

// The device that is current for this thread, as frameworks set it.
int cuda_current_device();
// Makes it the current device of this thread; for threads of our own.
void cuda_use_device(int device);
// A device as people know it; asking makes no context.
struct CudaDeviceInfo {
    std::string name;
    std::uint64_t num_bytes;
    int major;  // compute capability
    int minor;
};
int cuda_num_devices();
CudaDeviceInfo cuda_device_info(int device);
// "13.0": the newest CUDA that the driver knows; empty without one.
std::string cuda_driver_version();

// 16 bytes that name the physical device, whatever its number in this process.
std::string cuda_device_uuid(int device);

CudaAllocation cuda_allocation(std::uint64_t ptr, int device);

// The handle of the whole allocation at `base`, valid while the allocation lives.
std::string cuda_export(std::uint64_t base, int device);
// Maps an allocation of another process, which stays alive until cuda_unmap.
std::uint64_t cuda_map(const std::string& handle, int device);
void cuda_unmap(std::uint64_t base, int device);

// The piece mapped at `base` as a file descriptor, which the caller closes and which keeps the
// memory until then.
int cuda_export_fd(std::uint64_t base, int device);
// A handle of the memory behind `fd`, which stays the caller's; it keeps the memory until released.
std::uint64_t cuda_import_fd(int fd, int device);
void cuda_release_handle(std::uint64_t handle, int device);
// Maps whole pieces side by side; the mapping needs the handles no longer.
std::uint64_t cuda_map_handles(const std::vector<std::uint64_t>& handles,
                               const std::vector<std::uint64_t>& num_bytes, int device);
void cuda_unmap_handles(std::uint64_t base, const std::vector<std::uint64_t>& num_bytes,
                        int device);

// A stream that never waits for the legacy default stream. Of work that is ready, that with the
// lower priority number goes first, as far as the device has levels.
std::uint64_t cuda_create_stream(int device, int priority);
void cuda_wait_stream(std::uint64_t stream, int device);
// Marks on a stream; the time between two that were passed is the device's own.
std::uint64_t cuda_create_event(int device);
void cuda_destroy_event(std::uint64_t event, int device);
void cuda_record_event(std::uint64_t event, std::uint64_t stream, int device);
double cuda_elapsed_s(std::uint64_t start, std::uint64_t stop, int device);
// Waits for everything before a mark, whatever its stream does after it.
void cuda_wait_event(std::uint64_t event, int device);
// Whether everything before a mark is done; never waits.
bool cuda_event_passed(std::uint64_t event, int device);
// Waits for all work of this process on the device.
void cuda_synchronize(int device);

// Copies and waits; each side may be memory of the host or of the device.
void cuda_copy(std::uint64_t target_ptr, std::uint64_t source_ptr, std::uint64_t num_bytes,
               int device);

}  // namespace weightsync
