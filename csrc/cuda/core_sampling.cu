// Compiled without fused multiply-add: noise and exponentials have the CPU's bits.
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

__device__ SoftmaxState softmax_of(const float (&values)[kScores]) {
    float max = -INFINITY;
#pragma unroll
    for (float value : values) max = value > max ? value : max;
    max = over_block(max, [](float a, float b) { return a > b ? a : b; });
    const float shift = max == -INFINITY ? 0.0f : max;
    float sum = 0.0f;
#pragma unroll
    for (float value : values) sum += exp_nonpositive(value - shift);
    return {max, over_block(sum, [](float a, float b) { return a + b; })};
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

// A block has a slice of a row.
template <typename Type>
__global__ __launch_bounds__(kThreads) void slice_kernel(SampledRows rows) {
    const std::int64_t row = blockIdx.y;
    const std::int64_t first = blockIdx.x * kSampleSlice + threadIdx.x;
    const auto* logits =
        static_cast<const typename Type::Memory*>(rows.logits) + row * rows.row_stride;
    float values[kScores];
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        const std::int64_t token = first + i * kThreads;
        values[i] = token < rows.vocab_size ? Type::load(logits[token]) : -INFINITY;
    }
    Found found{};
    found.logits = found.scores = softmax_of(values);
    const float temperature = rows.temperatures[row];
    if (temperature != 1.0f) {
#pragma unroll
        for (float& value : values) value = value / temperature;
        found.scores = softmax_of(values);
    }
    found.best = -INFINITY;
    found.token = -1;
    if (rows.given[row] < 0) {
        const bool is_noisy = rows.noise_scales[row] != 0.0f;
        const NoiseKey key = noise_key(rows.seeds[row], rows.positions[row]);
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const std::int64_t token = first + i * kThreads;
            if (token >= rows.vocab_size) continue;
            float value = values[i];
            if (rows.drawn_from != nullptr) value = rows.drawn_from[row * rows.vocab_size + token];
            if (is_noisy) value = value + gumbel_noise(key, static_cast<std::uint32_t>(token));
            keep_better(value, static_cast<std::int32_t>(token), found.best, found.token);
        }
        best_of_block(found.best, found.token);
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
    slice_kernel<Type><<<grid, kThreads, 0, stream>>>(rows);
    cuda::check(cudaGetLastError(), "launch of slice_kernel", device);
    row_kernel<Type><<<static_cast<unsigned>(rows.num_rows), 32, 0, stream>>>(rows, num_slices);
    cuda::check(cudaGetLastError(), "launch of row_kernel", device);
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
