// Unit lists on the device, and how they are launched.
#pragma once

#include <cstdint>

#include "memory.cuh"
#include "weightsync/cuda_units.hpp"

namespace weightsync::cuda {

inline constexpr int kBlockThreads = kWarpLanes * kBlockWarps;

template <typename Unit>
struct DeviceUnits {
    DeviceArray<Unit> units;
    UnitCounts counts;

    DeviceUnits() = default;
    DeviceUnits(const UnitList<Unit>& list, int device)
        : units(list.joined(), device), counts(list.counts()) {}

    bool is_empty() const { return counts.total() == 0; }
};

// The warp's unit in a launch, and its share of it.
inline __device__ WarpShare this_share(const UnitCounts& counts) {
    return warp_share(counts, blockIdx.x, threadIdx.x / kWarpLanes);
}

inline __device__ std::uint32_t this_lane() { return threadIdx.x % kWarpLanes; }

inline __device__ std::uint64_t warp_sum(std::uint64_t value) {
#pragma unroll
    for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    }
    return value;
}

// Adds the sum over the lanes, or over the block if its warps share a unit, to `*out`. All threads
// of a block that shares a unit must call it; warps without a unit of their own need not.
inline __device__ void add_sum(std::uint64_t value, bool is_shared, std::uint64_t* out) {
    auto* address = reinterpret_cast<unsigned long long*>(out);
    value = warp_sum(value);
    if (!is_shared) {
        if (this_lane() == 0) atomicAdd(address, static_cast<unsigned long long>(value));
        return;
    }
    __shared__ std::uint64_t sums[kBlockWarps];
    if (this_lane() == 0) sums[threadIdx.x / kWarpLanes] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        std::uint64_t total = 0;
#pragma unroll
        for (std::uint32_t warp = 0; warp < kBlockWarps; ++warp) total += sums[warp];
        atomicAdd(address, static_cast<unsigned long long>(total));
    }
}

// The segments of a table on the device: one kernel for each kind of unit that it has.
class DeviceSegments {
  public:
    DeviceSegments(const SegmentUnits& units, int device);
    void launch(cudaStream_t stream, std::int64_t source_base, std::int64_t target_base,
                std::uint32_t max_blocks) const;
    void close();

  private:
    int device_;
    DeviceUnits<CopyUnit> pieces_[kNumConverts];
    DeviceUnits<GridUnit> grid_;
    DeviceArray<Segment> grid_rows_;
};

class DeviceDigests {
  public:
    DeviceDigests(const DigestUnits& units, int device);
    // Sets all digests to zero and adds those of the table.
    void launch(cudaStream_t stream) const;
    void read(cudaStream_t stream, std::uint64_t* out) const;
    void close();

    const DigestOwner* rows() const { return rows_.get(); }
    std::uint64_t* digests() const { return digests_.get(); }

  private:
    template <WordKind kind>
    void launch_kind(cudaStream_t stream) const;

    int device_;
    DeviceUnits<DigestUnit> pieces_[kNumWordKinds];
    DeviceUnits<GridUnit> grid_[kNumWordKinds];
    DeviceArray<DigestRow> grid_rows_;
    DeviceArray<std::uint32_t> grid_owners_;
    DeviceArray<DigestOwner> rows_;
    DeviceArray<std::uint64_t> digests_;
};

}  // namespace weightsync::cuda
