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

// `value` and those of the lanes before this one. The shuffle itself says whether there is a lane
// so far below: two instructions a step.
__device__ __forceinline__ std::uint32_t scan_inclusive(std::uint32_t value) {
#pragma unroll
    for (unsigned distance = 1; distance < kWarpLanes; distance *= 2) {
        asm volatile(
            "{\n"
            "  .reg .u32 other;\n"
            "  .reg .pred has_other;\n"
            "  shfl.sync.up.b32 other|has_other, %0, %1, 0, 0xffffffff;\n"
            "  @has_other add.u32 %0, %0, other;\n"
            "}\n"
            : "+r"(value)
            : "r"(distance));
    }
    return value;
}

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
            const std::uint32_t upto = scan_inclusive(own);
            if (i < count) f(i, running + upto - own, own);
            running += __shfl_sync(kFull, upto, kWarpLanes - 1);
        }
        __syncwarp();
        return running;
    }
    template <typename IsChosen, typename F>
    __device__ std::uint32_t choose(std::uint32_t count, const IsChosen& is_chosen,
                                    const F& f) const {
        std::uint32_t running = 0;
        for (std::uint32_t first = 0; first < count; first += kWarpLanes) {
            const std::uint32_t i = first + lane;
            const bool is_one = i < count && is_chosen(i);
            const unsigned votes = __ballot_sync(kFull, is_one);
            if (is_one) f(i, running + static_cast<std::uint32_t>(__popc(votes & below())));
            running += static_cast<std::uint32_t>(__popc(votes));
        }
        __syncwarp();
        return running;
    }
    template <typename Class, typename F>
    __device__ void number(std::uint32_t count, const Class& class_of, const F& f) const {
        std::uint32_t running[kDeltaClasses] = {};
        for (std::uint32_t first = 0; first < count; first += kWarpLanes) {
            const std::uint32_t i = first + lane;
            const std::uint32_t c = i < count ? class_of(i) : kDeltaClasses;
            std::uint32_t before = 0;
#pragma unroll
            for (std::uint32_t one = 0; one < kDeltaClasses; ++one) {
                const unsigned votes = __ballot_sync(kFull, c == one);
                if (c == one) {
                    before = running[one] + static_cast<std::uint32_t>(__popc(votes & below()));
                }
                running[one] += static_cast<std::uint32_t>(__popc(votes));
            }
            if (i < count) f(i, c, before);
        }
        __syncwarp();
    }
    template <typename Value>
    __device__ std::uint32_t sum(std::uint32_t count, const Value& value) const {
        std::uint32_t own = 0;
        for (std::uint32_t i = lane; i < count; i += kWarpLanes) own += value(i);
        return __reduce_add_sync(kFull, own);
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

  private:
    // The lanes before this one.
    __device__ unsigned below() const { return (1u << lane) - 1; }
};

// Counts of the lanes before this one; `total` gets those of all.
__device__ __forceinline__ DeltaCounts scan_counts(const DeltaCounts& own, bool has_high,
                                                   DeltaCounts* total) {
    const DeltaCounts upto{scan_inclusive(own.low), has_high ? scan_inclusive(own.high) : own.high};
    total->low = __shfl_sync(kFull, upto.low, kWarpLanes - 1);
    total->high = __shfl_sync(kFull, upto.high, kWarpLanes - 1);
    return {upto.low - own.low, upto.high - own.high};
}

// A value that stays in its register: else what is quickly made is made again in every round.
__device__ __forceinline__ std::uint32_t held(std::uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// The same of an address in shared memory.
template <typename T>
__device__ __forceinline__ T* held_shared(T* ptr) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(ptr));
    return static_cast<T*>(__cvta_shared_to_generic(held(address)));
}

// The sum of one field of the rows' counts: in lane t the keys that reach threshold t, in the lane
// behind them the changes.
class FieldSum {
  public:
    __device__ __forceinline__ explicit FieldSum(std::uint32_t lane)
        : high_(held(lane >= 2 && lane < kDeltaThresholds ? ~0u : 0u)),
          shift_(held(lane >= kDeltaThresholds ? 0 : (lane < 2 ? lane + 1 : lane - 2) * 10)) {}

    __device__ __forceinline__ void add(const DeltaCounts& row) {
        sum_ += ((row.high & high_) | (row.low & ~high_)) >> shift_ & 1023u;
    }
    __device__ __forceinline__ std::uint32_t sum() const { return sum_; }

  private:
    std::uint32_t high_;
    std::uint32_t shift_;
    std::uint32_t sum_ = 0;
};

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
