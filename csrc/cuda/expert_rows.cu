// Compiled without fused multiply-add: sums of experts have the bits of torch's single operations.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "memory.cuh"
#include "row_parts.cuh"
#include "weightsync/attention_math.hpp"
#include "weightsync/expert_rows.hpp"
#include "weightsync/float_codecs.hpp"

namespace weightsync {
namespace {

using cuda::as_stream;
using cuda::blocks_for;
using cuda::checked_device;
using cuda::DeviceScope;
using cuda::kEight;
using cuda::launch_behind;
using cuda::warp_total;

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kRouteWarps = 4;
constexpr int kSortThreads = 1024;
constexpr int kSortedRows = 256;  // of a block
constexpr int kWords = kSortedRows / 32;
constexpr int kCombineThreads = 128;

// Larger for larger numbers and, of equal ones, for the first expert; never 0. NaN is largest.
__device__ std::uint64_t rank_of(float logit, std::uint32_t expert) {
    std::uint32_t bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);
    bits = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    return static_cast<std::uint64_t>(bits) << 32 | (0xFFFFFFFFu - expert);
}
__device__ std::uint32_t expert_of(std::uint64_t rank) {
    return 0xFFFFFFFFu - static_cast<std::uint32_t>(rank);
}

__device__ float warp_max(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(kAll, value, distance);
        value = other > value ? other : value;
    }
    return value;
}
__device__ std::uint64_t warp_max(std::uint64_t value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const std::uint64_t other = __shfl_xor_sync(kAll, value, distance);
        value = other > value ? other : value;
    }
    return value;
}

// A warp has a row, a lane every 32nd expert of it; lane i keeps the i-th pick.
template <int kOfLane>
__global__ __launch_bounds__(kRouteWarps * 32) void route_kernel(RoutedRows rows) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
    if (row >= rows.num_rows) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto num_experts = static_cast<int>(rows.num_experts);
    const auto num_picks = static_cast<int>(rows.num_picks);
    const auto* logits = static_cast<const std::uint16_t*>(rows.logits) + row * num_experts;
    float values[kOfLane];
    std::uint64_t ranks[kOfLane];
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
        const int expert = lane + 32 * i;
        const bool is_there = expert < num_experts;
        values[i] = is_there ? Bf16::load(logits[expert]) : -INFINITY;
        ranks[i] = is_there ? rank_of(values[i], static_cast<std::uint32_t>(expert)) : 0;
        max = values[i] > max ? values[i] : max;
    }
    max = warp_max(max);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
        values[i] = lane + 32 * i < num_experts ? exp_nonpositive(values[i] - max) : 0.0f;
        total += values[i];
    }
    total = warp_total(total);

    int picked = num_experts;  // of lane i < num_picks, the i-th pick's expert
    float weight = 0.0f;
    float picked_total = 0.0f;
    for (int pick = 0; pick < num_picks; ++pick) {
        std::uint64_t best = 0;
#pragma unroll
        for (std::uint64_t rank : ranks) best = rank > best ? rank : best;
        best = warp_max(best);
        const auto expert = static_cast<int>(expert_of(best));
        float own = 0.0f;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            if (ranks[i] != best) continue;
            ranks[i] = 0;
            own = values[i];
        }
        const float share = __shfl_sync(kAll, own, expert % 32) / total;
        picked_total += share;
        if (lane == pick) {
            picked = expert;
            weight = share;
        }
    }
    int place = 0;
    for (int pick = 0; pick < num_picks; ++pick) {
        place += __shfl_sync(kAll, picked, pick) < picked ? 1 : 0;
    }
    if (lane >= num_picks) return;
    if (rows.is_normalised) weight = weight / picked_total;
    rows.experts[row * num_picks + place] = picked;
    static_cast<std::uint16_t*>(rows.weights)[row * num_picks + place] = Bf16::store(weight);
}

// A block places kSortedRows rows, and counts all others to know where theirs begin. Of each expert
// it has a bit for every row of its own that goes there, so that a pick's place among its expert's
// is a count of bits, whichever thread comes first.
__global__ __launch_bounds__(kSortThreads) void sort_kernel(SortedPicks picks) {
    __shared__ std::uint32_t bits[kMaxExperts][kWords];
    __shared__ std::int32_t before[kMaxExperts];  // picks of rows before the block's, then places
    __shared__ std::int32_t others[kMaxExperts];
    cuda::let_next_begin();
    cuda::wait_for_previous();
    const int thread = static_cast<int>(threadIdx.x);
    const auto num_here = static_cast<int>(picks.num_here);
    const auto num_picks = static_cast<int>(picks.num_picks);
    const auto total = static_cast<int>(picks.num_rows * num_picks);
    const auto first_row = static_cast<int>(blockIdx.x) * kSortedRows;
    const int begin = first_row * num_picks;
    const int end = min(total, begin + kSortedRows * num_picks);
    const auto here = [&](int pick) {
        const int expert = picks.experts[pick] - static_cast<int>(picks.first_expert);
        return expert >= 0 && expert < num_here ? expert : -1;
    };
    for (int i = thread; i < num_here; i += kSortThreads) {
        before[i] = others[i] = 0;
#pragma unroll
        for (std::uint32_t& word : bits[i]) word = 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int pick = thread; pick < total; pick += kSortThreads) {
        const int expert = here(pick);
        if (expert < 0) continue;
        atomicAdd(pick < begin ? &before[expert] : &others[expert], 1);
        if (pick < begin || pick >= end) continue;
        const int row = pick / num_picks - first_row;
        atomicOr(&bits[expert][row / 32], 1u << (row % 32));
    }
    __syncthreads();
    if (thread < 32) {  // counts become sums over the experts before
        int sum_before = 0;
        for (int first = 0; first < num_here; first += 32) {
            const int expert = first + thread;
            const int count = expert < num_here ? before[expert] + others[expert] : 0;
            int sum = count;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int of_lower = __shfl_up_sync(kAll, sum, distance);
                if (thread >= distance) sum += of_lower;
            }
            if (expert < num_here) {
                if (blockIdx.x == 0) picks.offsets[expert] = sum_before + sum;
                before[expert] += sum_before + sum - count;
            }
            sum_before += __shfl_sync(kAll, sum, 31);
        }
    }
    __syncthreads();
    for (int pick = begin + thread; pick < end; pick += kSortThreads) {
        const int expert = here(pick);
        const int row = pick / num_picks - first_row;
        int place = -1;
        if (expert >= 0) {
            place = before[expert] + __popc(bits[expert][row / 32] & ((1u << (row % 32)) - 1));
            for (int word = 0; word < row / 32; ++word) place += __popc(bits[expert][word]);
            picks.rows[place] = first_row + row;
        }
        picks.places[pick] = place;
    }
}

// Eight elements of a row a thread.
__global__ __launch_bounds__(kCombineThreads) void combine_picks_kernel(CombinedRows rows) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    const std::int64_t row = blockIdx.x;
    const std::int64_t column =
        (static_cast<std::int64_t>(blockIdx.y) * kCombineThreads + threadIdx.x) * kEight;
    if (column >= rows.width) return;
    const auto* states = static_cast<const std::uint16_t*>(rows.states) + column;
    const auto* weights = static_cast<const std::uint16_t*>(rows.weights) + row * rows.num_picks;
    const std::int32_t* places = rows.places + row * rows.num_picks;
    float sums[kEight] = {};
#pragma unroll 8
    for (int pick = 0; pick < rows.num_picks; ++pick) {
        const std::int32_t place = places[pick];
        const float weight = Bf16::load(weights[pick]);
        alignas(16) std::uint16_t found[kEight] = {};
        if (place >= 0) {
            *reinterpret_cast<uint4*>(found) =
                *reinterpret_cast<const uint4*>(states + place * rows.width);
        }
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
            const float part =
                place >= 0 ? Bf16::load(Bf16::store(Bf16::load(found[i]) * weight)) : 0.0f;
            sums[i] = pick == 0 ? part : Bf16::load(Bf16::store(sums[i] + part));
        }
    }
    alignas(16) std::uint16_t out[kEight];
#pragma unroll
    for (int i = 0; i < kEight; ++i) out[i] = Bf16::store(sums[i]);
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(rows.output) + row * rows.width +
                              column) = *reinterpret_cast<const uint4*>(out);
}

void check_experts(std::int64_t num_experts, std::int64_t num_picks) {
    if (num_experts < 1 || num_experts > kMaxExperts || num_picks < 1 || num_picks > kMaxPicks) {
        throw std::invalid_argument("experts: 1 to 512, of which a row goes to 1 to 32");
    }
}

}  // namespace

void cuda_route_rows(const RoutedRows& rows, std::uintptr_t stream, int device) {
    check_experts(rows.num_experts, rows.num_picks);
    if (rows.num_picks > rows.num_experts) {
        throw std::invalid_argument("experts: a row goes to more than there are");
    }
    if (rows.num_rows == 0) return;
    const DeviceScope scope(checked_device(device));
    const auto kernel = rows.num_experts <= 128 ? route_kernel<4> : route_kernel<16>;
    launch_behind(kernel, dim3(blocks_for(rows.num_rows, kRouteWarps)), kRouteWarps * 32, 0,
                  as_stream(stream), device, "launch of route_kernel", rows);
}

void cuda_sort_picks(const SortedPicks& picks, std::uintptr_t stream, int device) {
    check_experts(picks.num_here, picks.num_picks);
    if (picks.num_rows * picks.num_picks >= std::int64_t{1} << 31) {
        throw std::invalid_argument("experts: too many rows at once");
    }
    const DeviceScope scope(checked_device(device));
    const unsigned blocks = std::max(1u, blocks_for(picks.num_rows, kSortedRows));
    launch_behind(sort_kernel, dim3(blocks), kSortThreads, 0, as_stream(stream), device,
                  "launch of sort_kernel", picks);
}

void cuda_combine_rows(const CombinedRows& rows, std::uintptr_t stream, int device) {
    check_experts(1, rows.num_picks);
    if (rows.width % kEight != 0) {
        throw std::invalid_argument("experts: the width is no multiple of 8");
    }
    if (rows.num_rows == 0) return;
    const DeviceScope scope(checked_device(device));
    const dim3 grid(static_cast<unsigned>(rows.num_rows),
                    blocks_for(rows.width, kCombineThreads * kEight));
    launch_behind(combine_picks_kernel, grid, kCombineThreads, 0, as_stream(stream), device,
                  "launch of combine_picks_kernel", rows);
}

}  // namespace weightsync
