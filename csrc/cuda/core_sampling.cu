// Compiled without fused multiply-add: scores and noise have the CPU's bits, so that tokens are the
// same. Sums of exponentials have bits of their own.
#include <cuda_runtime.h>

#include <stdexcept>

#include "memory.cuh"
#include "weightsync/attention_math.hpp"
#include "weightsync/cuda_core.hpp"
#include "weightsync/float_codecs.hpp"
#include "weightsync/sampling_math.hpp"

namespace weightsync {
namespace {

constexpr int kThreads = 256;
constexpr int kScores = static_cast<int>(kSampleSlice) / kThreads;  // of a thread

// What a slice of a row, or the row, has: softmax over logits and over scores, and the token whose
// score and noise are largest.
struct Found {
    SoftmaxState logits;
    SoftmaxState scores;
    float best;
    std::int32_t token;  // -1: no number above -infinity
};

// An empty side (nothing above -infinity) leaves the other as it is; NaN in a sum stays.
__device__ SoftmaxState joined(SoftmaxState a, SoftmaxState b) {
    const float max = a.max < b.max ? b.max : a.max;
    const float shift = max == -INFINITY ? 0.0f : max;
    return {max, a.sum * exp_nonpositive(a.max - shift) + b.sum * exp_nonpositive(b.max - shift)};
}

__device__ void keep_better(float value, std::int32_t token, float& best, std::int32_t& kept) {
    const bool is_better =
        value > best || (value == best && token >= 0 && (kept < 0 || token < kept));
    if (is_better && value > -INFINITY) {
        best = value;
        kept = token;
    }
}

__device__ float shuffled(float value, int distance) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, distance);
}

template <typename Combine>
__device__ float over_warp(float value, Combine&& combine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = combine(value, shuffled(value, distance));
    }
    return value;
}

struct Pair {
    float first;
    float second;
};

__device__ float larger(float a, float b) { return a > b ? a : b; }

// The largest over the block, the same on every thread. NaN is passed over.
__device__ float largest_of_block(float value) {
    __shared__ float warps[kThreads / 32];
    value = over_warp(value, larger);
    __syncthreads();  // another call may still read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = warps[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) value = larger(value, warps[warp]);
    return value;
}

// Sums over the block, warps in order; on the first thread.
__device__ Pair sum_of_block(Pair value) {
    __shared__ Pair warps[kThreads / 32];
    const auto add = [](float a, float b) { return a + b; };
    value = {over_warp(value.first, add), over_warp(value.second, add)};
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = warps[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) {
        value = {value.first + warps[warp].first, value.second + warps[warp].second};
    }
    return value;
}

// exp(x - max) of numbers up to max; 0 if there is none above -infinity.
__device__ float exp_below(float x, float max) {
    return __expf(x - (max == -INFINITY ? 0.0f : max));
}

__device__ void best_of_block(float& best, std::int32_t& token) {
    __shared__ float values[kThreads / 32];
    __shared__ std::int32_t tokens[kThreads / 32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other = shuffled(best, distance);
        const std::int32_t other_token = __shfl_xor_sync(0xFFFFFFFFu, token, distance);
        keep_better(other, other_token, best, token);
    }
    if (threadIdx.x % 32 == 0) {
        values[threadIdx.x / 32] = best;
        tokens[threadIdx.x / 32] = token;
    }
    __syncthreads();
    best = values[0];
    token = tokens[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) {
        keep_better(values[warp], tokens[warp], best, token);
    }
}

// A thread has vectors of 16 bytes of the slice, every 256th.
template <typename Type>
constexpr int kVector = 16 / static_cast<int>(sizeof(typename Type::Memory));

template <typename Type>
__device__ std::int64_t token_of(int i) {
    constexpr int vector = kVector<Type>;
    return blockIdx.x * kSampleSlice +
           (static_cast<std::int64_t>(i / vector) * kThreads + threadIdx.x) * vector + i % vector;
}

template <typename Type>
__device__ void load_slice(const SampledRows& rows, std::int64_t row, float (&values)[kScores]) {
    using Memory = typename Type::Memory;
    constexpr int vector = kVector<Type>;
    const Memory* logits = static_cast<const Memory*>(rows.logits) + row * rows.row_stride;
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(logits) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kScores; i += vector) {
        const std::int64_t first = token_of<Type>(i);
        if (is_aligned && first + vector <= rows.vocab_size) {
            const uint4 bytes = __ldcs(reinterpret_cast<const uint4*>(logits + first));
            Memory parts[vector];
            memcpy(parts, &bytes, sizeof(bytes));
#pragma unroll
            for (int j = 0; j < vector; ++j) values[i + j] = Type::load(parts[j]);
            continue;
        }
#pragma unroll
        for (int j = 0; j < vector; ++j) {
            const bool is_there = first + j < rows.vocab_size;
            values[i + j] = is_there ? Type::load(logits[first + j]) : -INFINITY;
        }
    }
}

// Scores that a token is drawn from, in place of those of the logits.
template <typename Type>
__device__ void load_drawn_from(const SampledRows& rows, std::int64_t row,
                                float (&scores)[kScores]) {
    const float* from = rows.drawn_from + row * rows.vocab_size;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        const std::int64_t token = token_of<Type>(i);
        scores[i] = token < rows.vocab_size ? from[token] : -INFINITY;
    }
}

// The largest of score plus noise. Where the bounds of the noise tell that a token cannot be it,
// `least` (no more than score plus noise of one of the slice) is all that it is compared with: some
// three in a slice are left.
template <typename Type, bool kIsNoisy>
__device__ void draw(const SampledRows& rows, NoiseKey key, const float (&scores)[kScores],
                     float least, Found& found) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        const auto token = static_cast<std::int32_t>(token_of<Type>(i));
        float value = scores[i];
        if (kIsNoisy) {
            const std::uint32_t bits = noise_bits(key, static_cast<std::uint32_t>(token));
            if (value + gumbel_bounds(bits).high < least) continue;
            value = value + gumbel_of_bits(bits);
        }
        keep_better(value, token, found.best, found.token);
    }
}

template <typename Type>
__device__ float least_of(NoiseKey key, const float (&scores)[kScores]) {
    float least = -INFINITY;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        const auto token = static_cast<std::uint32_t>(token_of<Type>(i));
        least = larger(least, scores[i] + gumbel_bounds(noise_bits(key, token)).low);
    }
    return least;
}

// A block has a slice of a row.
template <typename Type>
__global__ __launch_bounds__(kThreads) void slice_kernel(SampledRows rows) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    const std::int64_t row = blockIdx.y;
    const float temperature = rows.temperatures[row];
    const bool is_drawn = rows.given[row] < 0;
    const bool is_noisy = is_drawn && rows.noise_scales[row] != 0.0f;
    const NoiseKey key = noise_key(rows.seeds[row], rows.positions[row]);
    float scores[kScores];
    load_slice<Type>(rows, row, scores);
    float max = -INFINITY;
#pragma unroll
    for (float value : scores) max = larger(max, value);
    max = largest_of_block(max);
    Pair sums{0.0f, 0.0f};
#pragma unroll
    for (float value : scores) sums.first += exp_below(value, max);
    // Dividing keeps the order, so the largest score is that of the largest logit.
    const float score_max = temperature == 1.0f ? max : max / temperature;
    if (temperature != 1.0f) {
#pragma unroll
        for (float& value : scores) {
            value = value / temperature;
            sums.second += exp_below(value, score_max);
        }
    }
    Found found{};
    found.best = -INFINITY;
    found.token = -1;
    if (is_drawn) {
        if (rows.drawn_from != nullptr) load_drawn_from<Type>(rows, row, scores);
        if (is_noisy) {
            const float least = largest_of_block(least_of<Type>(key, scores));
            draw<Type, true>(rows, key, scores, least, found);
        } else {
            draw<Type, false>(rows, key, scores, 0.0f, found);
        }
        best_of_block(found.best, found.token);
    }
    sums = sum_of_block(sums);
    if (threadIdx.x == 0) {
        found.logits = {max, sums.first};
        found.scores = temperature == 1.0f ? found.logits : SoftmaxState{score_max, sums.second};
        static_cast<Found*>(rows.scratch)[row * gridDim.x + blockIdx.x] = found;
    }
}

__device__ SoftmaxState shuffled(SoftmaxState state, int distance) {
    return {shuffled(state.max, distance), shuffled(state.sum, distance)};
}

// A warp has a row: lanes join every 32nd slice in order, then the lanes as a tree.
template <typename Type>
__global__ __launch_bounds__(32) void row_kernel(SampledRows rows, int num_slices) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    const std::int64_t row = blockIdx.x;
    const auto* slices = static_cast<const Found*>(rows.scratch) + row * num_slices;
    Found total{{-INFINITY, 0.0f}, {-INFINITY, 0.0f}, -INFINITY, -1};
    for (int i = threadIdx.x; i < num_slices; i += 32) {
        const Found slice = slices[i];
        total.logits = joined(total.logits, slice.logits);
        total.scores = joined(total.scores, slice.scores);
        keep_better(slice.best, slice.token, total.best, total.token);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        total.logits = joined(total.logits, shuffled(total.logits, distance));
        total.scores = joined(total.scores, shuffled(total.scores, distance));
        const float other = shuffled(total.best, distance);
        const std::int32_t token = __shfl_xor_sync(0xFFFFFFFFu, total.token, distance);
        keep_better(other, token, total.best, total.token);
    }
    if (threadIdx.x != 0) return;
    const std::int64_t token = rows.given[row] < 0 ? total.token : rows.given[row];
    rows.tokens[row] = token;
    float* out = rows.numbers + 4 * row;
    out[2] = total.logits.max;
    out[3] = logf(total.logits.sum);
    if (token < 0) {
        out[0] = out[1] = NAN;
        return;
    }
    const auto* logits =
        static_cast<const typename Type::Memory*>(rows.logits) + row * rows.row_stride;
    const float logit = Type::load(logits[token]);
    const float score = logit / rows.temperatures[row];
    out[0] = (logit - out[2]) - out[3];
    out[1] = (score - total.scores.max) - logf(total.scores.sum);
}

int slices_of(std::int64_t vocab_size) {
    return static_cast<int>((vocab_size + kSampleSlice - 1) / kSampleSlice);
}

template <typename Type>
void launch(const SampledRows& rows, cudaStream_t stream, int device) {
    const int num_slices = slices_of(rows.vocab_size);
    const dim3 grid(static_cast<unsigned>(num_slices), static_cast<unsigned>(rows.num_rows));
    cuda::launch_behind(slice_kernel<Type>, grid, kThreads, 0, stream, device,
                        "launch of slice_kernel", rows);
    cuda::launch_behind(row_kernel<Type>, dim3(static_cast<unsigned>(rows.num_rows)), 32, 0, stream,
                        device, "launch of row_kernel", rows, num_slices);
}

}  // namespace

std::int64_t sample_scratch_bytes(std::int64_t num_rows, std::int64_t vocab_size) {
    return num_rows * slices_of(vocab_size) * static_cast<std::int64_t>(sizeof(Found));
}

void cuda_sample_rows(const SampledRows& rows, std::uintptr_t stream, int device) {
    if (rows.num_rows == 0) return;
    const cuda::DeviceScope scope(cuda::checked_device(device));
    const cudaStream_t on = cuda::as_stream(stream);
    switch (rows.dtype) {
        case FloatType::fp32:
            return launch<Fp32>(rows, on, device);
        case FloatType::bf16:
            return launch<Bf16>(rows, on, device);
        case FloatType::fp16:
            return launch<Fp16>(rows, on, device);
    }
    throw std::invalid_argument("sampling: unknown dtype");
}

}  // namespace weightsync
