// Compiled without fused multiply-add: scores and noise, which decide the token, have the CPU's
// bits.
#include <cuda_runtime.h>

#include <stdexcept>

#include "attention_warp.cuh"
#include "memory.cuh"
#include "row_parts.cuh"
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

// Over the block, warps in order; the same on every thread.
template <typename Combine>
__device__ float over_block(float value, Combine&& combine) {
    __shared__ float warps[kThreads / 32];
    value = over_warp(value, combine);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = warps[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) value = combine(value, warps[warp]);
    return value;
}

__device__ float larger(float a, float b) { return a > b ? a : b; }
__device__ float added(float a, float b) { return a + b; }

// Of exp((value - max) * scale), over the block.
__device__ float sum_of_block(const float (&values)[kScores], float max, float scale_log2) {
    float sum = 0.0f;
#pragma unroll
    for (float value : values) sum += cuda::exp2_fast((value - max) * scale_log2);
    return over_block(sum, added);
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

// A thread has kEight tokens side by side, and the next kEight after those of all other threads.
__device__ std::int64_t token_at(int i) {
    return blockIdx.x * kSampleSlice + i / cuda::kEight * (kThreads * cuda::kEight) +
           threadIdx.x * cuda::kEight + i % cuda::kEight;
}

template <typename Type>
__device__ void load_slice(const typename Type::Memory* logits, std::int64_t vocab_size,
                           float (&values)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; i += cuda::kEight) {
        const std::int64_t left = vocab_size - token_at(i);
        const int count = static_cast<int>(left < 0 ? 0 : min(left, std::int64_t{cuda::kEight}));
        float some[cuda::kEight];
        cuda::load_eight<Type>(logits + token_at(i), count, some);
#pragma unroll
        for (int j = 0; j < cuda::kEight; ++j) values[i + j] = j < count ? some[j] : -INFINITY;
    }
}

constexpr float kLog2e = 1.44269504f;
// A score that is estimated by a product is 2^-22 of it off at most; what the bounds of noise leave
// for rounding covers scores up to some hundreds, this the larger ones.
constexpr float kScoreError = 4e-6f;

// Which token of a slice a row draws. Nearly all are ruled out by the most that their noise can be;
// only the others' scores and noise are computed.
template <typename Type>
struct SliceDraw {
    const SampledRows& rows;
    std::int64_t row;
    const typename Type::Memory* logits;
    float temperature;
    NoiseKey key;
    bool is_noisy;

    __device__ float score(std::int64_t token) const {
        if (rows.drawn_from != nullptr) return rows.drawn_from[row * rows.vocab_size + token];
        return Type::load(logits[token]) / temperature;
    }

    __device__ void draw(const float (&values)[kScores], float& best, std::int32_t& kept) const {
        const float scale = 1.0f / temperature;
        float most[kScores];
        float bound = -INFINITY;  // that the best token's `most` is not below
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const std::int64_t token = token_at(i);
            most[i] = values[i] * scale;
            if (rows.drawn_from != nullptr) {
                most[i] = token < rows.vocab_size ? score(token) : -INFINITY;
            }
            float least = most[i];
            if (is_noisy) {
                const NoiseBounds noise =
                    gumbel_bounds(noise_bits(key, static_cast<std::uint32_t>(token)));
                least += noise.low;
                most[i] += noise.high;
            }
            bound = larger(least, bound);
        }
        bound = over_block(bound, larger);
        bound -= fabsf(bound) * kScoreError;
        std::uint32_t left = 0;
#pragma unroll
        for (int i = 0; i < kScores; ++i) left |= most[i] < bound ? 0u : 1u << i;
        for (; left != 0; left &= left - 1) {
            const std::int64_t token = token_at(__ffs(static_cast<int>(left)) - 1);
            if (token >= rows.vocab_size) continue;
            float value = score(token);
            if (is_noisy) value = value + gumbel_noise(key, static_cast<std::uint32_t>(token));
            keep_better(value, static_cast<std::int32_t>(token), best, kept);
        }
        best_of_block(best, kept);
    }
};

// A block has a slice of a row.
template <typename Type>
__global__ __launch_bounds__(kThreads) void slice_kernel(SampledRows rows) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    const std::int64_t row = blockIdx.y;
    const auto* logits =
        static_cast<const typename Type::Memory*>(rows.logits) + row * rows.row_stride;
    float values[kScores];
    load_slice<Type>(logits, rows.vocab_size, values);
    float max = -INFINITY;
#pragma unroll
    for (float value : values) max = larger(value, max);
    max = over_block(max, larger);
    const float shift = max == -INFINITY ? 0.0f : max;
    Found found{};
    found.logits = found.scores = {max, sum_of_block(values, shift, kLog2e)};
    const float temperature = rows.temperatures[row];
    if (temperature != 1.0f) {
        found.scores = {max / temperature, sum_of_block(values, shift, kLog2e / temperature)};
    }
    found.best = -INFINITY;
    found.token = -1;
    if (rows.given[row] < 0) {
        const SliceDraw<Type> slice{rows,
                                    row,
                                    logits,
                                    temperature,
                                    noise_key(rows.seeds[row], rows.positions[row]),
                                    rows.noise_scales[row] != 0.0f};
        slice.draw(values, found.best, found.token);
    }
    if (threadIdx.x == 0) {
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
