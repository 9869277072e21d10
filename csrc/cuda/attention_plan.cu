#include <cuda_runtime.h>

#include "memory.cuh"
#include "weightsync/cuda_attention.hpp"

namespace weightsync {
namespace {

constexpr int kPlanThreads = 256;

// The sum of `value` over the threads before this one; `total` over all of them.
__device__ int sum_before(int value, int* shared, int& total) {
    shared[threadIdx.x] = value;
    __syncthreads();
    for (int distance = 1; distance < kPlanThreads; distance *= 2) {
        const int other = threadIdx.x >= distance ? shared[threadIdx.x - distance] : 0;
        __syncthreads();
        shared[threadIdx.x] += other;
        __syncthreads();
    }
    total = shared[kPlanThreads - 1];
    const int before = shared[threadIdx.x] - value;
    __syncthreads();
    return before;
}

__global__ __launch_bounds__(kPlanThreads) void plan_kernel(AttentionStep step,
                                                            AttentionWork work) {
    __shared__ int shared[kPlanThreads];
    const auto group = static_cast<std::int32_t>(step.num_heads / step.num_kv_heads);
    std::int64_t split_base = 0;
    std::int64_t tile_base = 0;
    for (std::int64_t first = 0; first < step.num_sequences; first += kPlanThreads) {
        const auto sequence = static_cast<std::int32_t>(first + threadIdx.x);
        const bool is_there = sequence < step.num_sequences;
        const std::int32_t context = is_there ? step.context_lens[sequence] : 0;
        const std::int32_t rows =
            is_there ? step.query_starts[sequence + 1] - step.query_starts[sequence] : 0;
        const AttentionCounts counts =
            is_there ? items_of(rows, context, group) : AttentionCounts{0, 0};
        int num_split = 0;
        int num_tiles = 0;
        const std::int64_t split = split_base + sum_before(counts.num_split, shared, num_split);
        const std::int64_t tile = tile_base + sum_before(counts.num_tiles, shared, num_tiles);
        if (is_there) {
            const bool is_whole =
                counts.num_split > 0 && split + counts.num_split <= work.max_split;
            work.first_split[sequence] = is_whole ? static_cast<std::int32_t>(split) : -1;
        }
        for (std::int32_t i = 0; i < counts.num_split && split + i < work.max_split; ++i) {
            work.split[split + i] = split_item(sequence, context, i);
        }
        for (std::int32_t i = 0; i < counts.num_tiles && tile + i < work.max_tiles; ++i) {
            work.tiles[tile + i] = {sequence, i * kTileEntries};
        }
        split_base += num_split;
        tile_base += num_tiles;
    }
    if (threadIdx.x == 0) {
        *work.counts = {static_cast<std::int32_t>(min(split_base, work.max_split)),
                        static_cast<std::int32_t>(min(tile_base, work.max_tiles))};
    }
}

}  // namespace

void cuda_plan_attention(const AttentionStep& step, const AttentionWork& work,
                         std::uintptr_t stream, int device) {
    const cuda::DeviceScope scope(cuda::checked_device(device));
    plan_kernel<<<1, kPlanThreads, 0, cuda::as_stream(stream)>>>(step, work);
    cuda::check(cudaGetLastError(), "launch of plan_kernel", device);
}

}  // namespace weightsync
