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

constexpr int kWarps = 4;    // of a block
constexpr int kScores = 16;  // of a lane at a time
constexpr int kChunk = 32 * kScores;
constexpr int kChunks = static_cast<int>(kSampleSlice) / kChunk;
static_assert(kSampleSlice % kChunk == 0);

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

__device__ float larger(float a, float b) { return a > b ? a : b; }
__device__ float added(float a, float b) { return a + b; }

// The sum of exp((value - max) * scale) over a lane's values so far.
struct LaneSum {
    float scale_log2;
    float sum = 0.0f;

    __device__ void add(const float (&values)[kScores], float max_before, float max) {
        const float shift = max == -INFINITY ? 0.0f : max;
        sum *= cuda::exp2_fast((max_before - shift) * scale_log2);
        float more = 0.0f;
#pragma unroll
        for (float value : values) more += cuda::exp2_fast((value - shift) * scale_log2);
        sum += more;
    }

    __device__ float of_warp(float lane_max, float max) const {
        const float shift = max == -INFINITY ? 0.0f : max;
        return over_warp(sum * cuda::exp2_fast((lane_max - shift) * scale_log2), added);
    }
};

// A lane has kEight tokens side by side, and the next kEight after those of all other lanes.
__device__ std::int64_t token_at(std::int64_t chunk_start, int i) {
    return chunk_start + i / cuda::kEight * (32 * cuda::kEight) + threadIdx.x % 32 * cuda::kEight +
           i % cuda::kEight;
}

template <typename Type>
__device__ void load_chunk(const typename Type::Memory* logits, std::int64_t vocab_size,
                           std::int64_t chunk_start, float (&values)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; i += cuda::kEight) {
        const std::int64_t first = token_at(chunk_start, i);
        const std::int64_t left = vocab_size - first;
        const int count = static_cast<int>(left < 0 ? 0 : min(left, std::int64_t{cuda::kEight}));
        float some[cuda::kEight];
        cuda::load_eight<Type>(logits + first, count, some);
#pragma unroll
        for (int j = 0; j < cuda::kEight; ++j) values[i + j] = j < count ? some[j] : -INFINITY;
    }
}

constexpr float kLog2e = 1.44269504f;
// A score that is estimated by a product is 2^-22 of it off at most; what the bounds of noise leave
// for rounding covers scores up to some hundreds, this the larger ones.
constexpr float kScoreError = 4e-6f;

// Which token of a slice a row draws, by a warp. Nearly all are ruled out by the most that their
// noise can be; only the others' scores and noise are computed.
template <typename Type>
struct SliceDraw {
    const SampledRows& rows;
    std::int64_t row;
    const typename Type::Memory* logits;
    float temperature;
    float scale;  // 1 / temperature
    NoiseKey key;
    bool is_noisy;
    float bound = -INFINITY;  // what the best token of all lanes so far is not below
    float best = -INFINITY;
    std::int32_t kept = -1;

    __device__ float score(std::int64_t token) const {
        if (rows.drawn_from != nullptr) return rows.drawn_from[row * rows.vocab_size + token];
        return Type::load(logits[token]) / temperature;
    }

    __device__ void add(const float (&values)[kScores], std::int64_t chunk_start) {
        float most[kScores];
        float least = -INFINITY;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const std::int64_t token = token_at(chunk_start, i);
            most[i] = values[i] * scale;
            if (rows.drawn_from != nullptr) {
                most[i] = token < rows.vocab_size ? score(token) : -INFINITY;
            }
            float low = most[i];
            if (is_noisy) {
                const NoiseBounds noise =
                    gumbel_bounds(noise_bits(key, static_cast<std::uint32_t>(token)));
                low += noise.low;
                most[i] += noise.high;
            }
            least = larger(low, least);
        }
        bound = larger(over_warp(least, larger), bound);
        const float limit = bound - fabsf(bound) * kScoreError;
        std::uint32_t left = 0;
#pragma unroll
        for (int i = 0; i < kScores; ++i) left |= most[i] < limit ? 0u : 1u << i;
        for (; left != 0; left &= left - 1) {
            const std::int64_t token = token_at(chunk_start, __ffs(static_cast<int>(left)) - 1);
            if (token >= rows.vocab_size) continue;
            float value = score(token);
            if (is_noisy) value = value + gumbel_noise(key, static_cast<std::uint32_t>(token));
            keep_better(value, static_cast<std::int32_t>(token), best, kept);
        }
    }

    __device__ void join_lanes() {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            const float other = shuffled(best, distance);
            const std::int32_t token = __shfl_xor_sync(0xFFFFFFFFu, kept, distance);
            keep_better(other, token, best, kept);
        }
    }
};

// A warp has a slice of a row.
template <typename Type>
__global__ __launch_bounds__(kWarps * 32) void slice_kernel(SampledRows rows, int num_slices) {
    cuda::let_next_begin();
    cuda::wait_for_previous();
    const int slice = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
    if (slice >= num_slices) return;
    const std::int64_t row = blockIdx.y;
    const auto* logits =
        static_cast<const typename Type::Memory*>(rows.logits) + row * rows.row_stride;
    const float temperature = rows.temperatures[row];
    const bool is_drawn = rows.given[row] < 0;
    SliceDraw<Type> draw{rows,
                         row,
                         logits,
                         temperature,
                         1.0f / temperature,
                         noise_key(rows.seeds[row], rows.positions[row]),
                         rows.noise_scales[row] != 0.0f};
    LaneSum of_logits{kLog2e};
    LaneSum of_scores{kLog2e / temperature};
    float max = -INFINITY;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const std::int64_t start = slice * kSampleSlice + chunk * kChunk;
        if (start >= rows.vocab_size) break;
        float values[kScores];
        load_chunk<Type>(logits, rows.vocab_size, start, values);
        const float before = max;
#pragma unroll
        for (float value : values) max = larger(value, max);
        of_logits.add(values, before, max);
        if (temperature != 1.0f) of_scores.add(values, before, max);
        if (is_drawn) draw.add(values, start);
    }
    draw.join_lanes();
    const float most = over_warp(max, larger);
    Found found{};
    found.logits = found.scores = {most, of_logits.of_warp(max, most)};
    if (temperature != 1.0f) {
        found.scores = {most / temperature, of_scores.of_warp(max, most)};
    }
    found.best = draw.best;
    found.token = draw.kept;
    if (threadIdx.x % 32 == 0) {
        static_cast<Found*>(rows.scratch)[row * num_slices + slice] = found;
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
    const dim3 grid(static_cast<unsigned>((num_slices + kWarps - 1) / kWarps),
                    static_cast<unsigned>(rows.num_rows));
    cuda::launch_behind(slice_kernel<Type>, grid, kWarps * 32, 0, stream, device,
                        "launch of slice_kernel", rows, num_slices);
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
