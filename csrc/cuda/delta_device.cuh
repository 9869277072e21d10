// What the launches that code and decode deltas share: a warp as a team, and memory that grows.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "tables.cuh"
#include "weightsync/delta_team_encode.hpp"

namespace weightsync {
namespace lanes {

constexpr unsigned kFull = 0xFFFFFFFFu;

// A warp; see SoloTeam.
struct WarpTeam {
    std::uint32_t lane;

    template <typename F>
    __device__ void each(std::uint32_t count, const F& f) const {
        for (std::uint32_t i = lane; i < count; i += kWarpLanes) f(i);
        __syncwarp();
    }
    template <typename Value, typename F>
    __device__ std::uint32_t scan(std::uint32_t count, const Value& value, const F& f) const {
        std::uint32_t running = 0;
        for (std::uint32_t first = 0; first < count; first += kWarpLanes) {
            const std::uint32_t i = first + lane;
            const std::uint32_t own = i < count ? value(i) : 0;
            std::uint32_t upto = own;
#pragma unroll
            for (int distance = 1; distance < static_cast<int>(kWarpLanes); distance *= 2) {
                const std::uint32_t other = __shfl_up_sync(kFull, upto, distance);
                if (static_cast<int>(lane) >= distance) upto += other;
            }
            if (i < count) f(i, running + upto - own, own);
            running += __shfl_sync(kFull, upto, kWarpLanes - 1);
        }
        __syncwarp();
        return running;
    }
    template <typename Cost>
    __device__ std::uint32_t least(std::uint32_t count, const Cost& cost) const {
        std::uint64_t fewest = lane < count ? cost(lane) : ~std::uint64_t{0};
        std::uint32_t best = lane;
#pragma unroll
        for (int distance = 1; distance < static_cast<int>(kWarpLanes); distance *= 2) {
            const std::uint64_t other = __shfl_xor_sync(kFull, fewest, distance);
            const std::uint32_t i = __shfl_xor_sync(kFull, best, distance);
            if (other < fewest || (other == fewest && i < best)) {
                fewest = other;
                best = i;
            }
        }
        return best;
    }
};

// Counts of the lanes before this one; `total` gets those of all.
__device__ __forceinline__ DeltaCounts scan_counts(const DeltaCounts& own, bool has_high,
                                                   std::uint32_t lane, DeltaCounts* total) {
    DeltaCounts upto = own;
#pragma unroll
    for (int distance = 1; distance < static_cast<int>(kWarpLanes); distance *= 2) {
        const std::uint32_t low = __shfl_up_sync(kFull, upto.low, distance);
        if (static_cast<int>(lane) >= distance) upto.low += low;
    }
    if (has_high) {
#pragma unroll
        for (int distance = 1; distance < static_cast<int>(kWarpLanes); distance *= 2) {
            const std::uint32_t high = __shfl_up_sync(kFull, upto.high, distance);
            if (static_cast<int>(lane) >= distance) upto.high += high;
        }
    }
    total->low = __shfl_sync(kFull, upto.low, kWarpLanes - 1);
    total->high = __shfl_sync(kFull, upto.high, kWarpLanes - 1);
    return {upto.low - own.low, upto.high - own.high};
}

// Counts of all lanes.
__device__ __forceinline__ DeltaCounts sum_counts(const DeltaCounts& own) {
    return {__reduce_add_sync(kFull, own.low), __reduce_add_sync(kFull, own.high)};
}

}  // namespace lanes

inline double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Memory of the host that a device copies to at full speed; grows.
class PinnedBytes {
  public:
    ~PinnedBytes() { cudaFreeHost(ptr_); }
    unsigned char* fit(std::size_t bytes, int device) {
        if (bytes <= size_) return ptr_;
        close(device);
        const std::size_t room = bytes + bytes / 4;  // pinning takes longer than what it is for
        void* memory = nullptr;
        const cudaError_t error = cudaMallocHost(&memory, room);
        if (error != cudaSuccess) cudaGetLastError();  // no fault of the next launch
        cuda::check(error, "cudaMallocHost", device);
        ptr_ = static_cast<unsigned char*>(memory);
        size_ = room;
        return ptr_;
    }
    void close(int device) {
        size_ = 0;
        cuda::check(cudaFreeHost(std::exchange(ptr_, nullptr)), "cudaFreeHost", device);
    }

  private:
    unsigned char* ptr_ = nullptr;
    std::size_t size_ = 0;
};

// Memory of the device that grows.
template <typename T>
T* fit(cuda::DeviceArray<T>* array, std::size_t size, int device) {
    if (array->get() == nullptr || array->size() < size) {
        array->close();
        *array = cuda::DeviceArray<T>(size, device);
    }
    return array->get();
}

// Values of the host to memory that grows.
template <typename T>
T* upload(cuda::DeviceArray<T>* array, const T* values, std::size_t size, int device,
          cudaStream_t stream) {
    T* to = fit(array, size, device);
    if (size > 0) {
        cuda::check(cudaMemcpyAsync(to, values, size * sizeof(T), cudaMemcpyHostToDevice, stream),
                    "cudaMemcpyAsync", device);
    }
    return to;
}

}  // namespace weightsync
