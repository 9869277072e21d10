// Ranges of device addresses whose memory can be given back and taken again in place.
#pragma once

#include <cstdint>
#include <vector>

namespace weightsync {

// Addresses for num_bytes, rounded up to what the device maps at a time; no memory yet.
struct ArenaRange {
    std::uint64_t base;
    std::uint64_t num_bytes;
};
ArenaRange cuda_arena_reserve(std::uint64_t num_bytes, int device);

// Memory for a whole range, in pieces that another process may open (cuda_export_fd). They end at
// these bytes from `base`, in order, the last at the range's end; what the device maps at a time
// divides them. All or nothing: throws CudaError and leaves none if there is too little. Contents
// are whatever was there.
void cuda_arena_map(std::uint64_t base, const std::vector<std::uint64_t>& piece_ends, int device);
// Waits for the device, then gives the memory back. A range without memory stays as it is.
void cuda_arena_unmap(std::uint64_t base, int device);
// Also the addresses.
void cuda_arena_free(std::uint64_t base, int device);

// The pool of a framework's allocator plug-in: the extension exports weightsync_pool_allocate and
// weightsync_pool_free, which take ranges for `owner`, the one named last.
void cuda_pool_own(std::uint64_t owner);
std::vector<ArenaRange> cuda_pool_ranges(std::uint64_t owner);

}  // namespace weightsync
