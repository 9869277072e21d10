// Compiled without fused multiply-add: every sum is the CPU's, in the CPU's order.
#include <cuda_runtime.h>

#include "memory.cuh"
#include "weightsync/cuda_attention.hpp"
#include "weightsync/float_codecs.hpp"

namespace weightsync {
namespace {

constexpr int kThreads = 128;

// The sequence that row `row` belongs to; num_sequences for padding.
__device__ std::int32_t sequence_of(const AttentionStep& step, std::int32_t row) {
    auto low = std::int32_t{0};
    auto high = static_cast<std::int32_t>(step.num_sequences);
    while (low < high) {
        const std::int32_t middle = (low + high) / 2;
        if (step.query_starts[middle + 1] <= row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

template <typename Memory>
__device__ const Memory* token_at(const AttentionStep& step, const void* cache,
                                  std::int32_t sequence, std::int64_t kv_head, std::int64_t token) {
    const std::int64_t page =
        step.block_tables[sequence * step.table_width + token / step.page_size];
    const std::int64_t slot = page * step.page_size + token % step.page_size;
    return static_cast<const Memory*>(cache) + (slot * step.num_kv_heads + kv_head) * step.head_dim;
}

// A block has one head of one row.
template <typename Type>
__global__ __launch_bounds__(kThreads) void general_kernel(AttentionStep step) {
    using Memory = typename Type::Memory;
    extern __shared__ float memory[];  // query [head_dim], sums [head_dim]
    __shared__ float scores[kAttentionChunk];
    __shared__ float lanes[kAttentionLanes];
    __shared__ SoftmaxState shared_state;
    const std::int64_t dim = step.head_dim;
    const auto row = static_cast<std::int32_t>(blockIdx.x);
    const std::int64_t head = blockIdx.y;
    const std::int64_t kv_head = head / (step.num_heads / step.num_kv_heads);
    Memory* out = static_cast<Memory*>(step.output) + (row * step.num_heads + head) * dim;
    const std::int32_t sequence = sequence_of(step, row);
    if (sequence == step.num_sequences) {
        for (std::int64_t d = threadIdx.x; d < dim; d += kThreads) out[d] = Type::store(0.0f);
        return;
    }
    float* query = memory;
    float* sums = memory + dim;
    const auto* source =
        static_cast<const Memory*>(step.query) + row * step.query_stride + head * dim;
    for (std::int64_t d = threadIdx.x; d < dim; d += kThreads) {
        query[d] = Type::load(source[d]);
        sums[d] = 0.0f;
    }
    const std::int64_t context =
        step.context_lens[sequence] - (step.query_starts[sequence + 1] - row) + 1;
    SoftmaxState state{-INFINITY, 0.0f};
    for (std::int64_t begin = 0; begin < context; begin += kAttentionChunk) {
        const std::int64_t left = context - begin;
        const std::int64_t count = left < kAttentionChunk ? left : kAttentionChunk;
        __syncthreads();
        for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
            const Memory* key =
                token_at<Memory>(step, step.cache_keys, sequence, kv_head, begin + i);
            float parts[kAttentionLanes] = {};
            for (std::int64_t d = 0; d < dim; d += kAttentionLanes) {
#pragma unroll
                for (int lane = 0; lane < kAttentionLanes; ++lane) {
                    if (d + lane < dim) parts[lane] += query[d + lane] * Type::load(key[d + lane]);
                }
            }
            scores[i] = sum_lanes(parts) * step.scale;
        }
        __syncthreads();
        float max = -INFINITY;
        for (std::int64_t i = 0; i < count; ++i) max = scores[i] > max ? scores[i] : max;
        __syncthreads();
        for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
            scores[i] = exp_nonpositive(scores[i] - max);
        }
        __syncthreads();
        if (threadIdx.x < kAttentionLanes) {
            float sum = 0.0f;
            for (std::int64_t i = threadIdx.x; i < count; i += kAttentionLanes) sum += scores[i];
            lanes[threadIdx.x] = sum;
        }
        __syncthreads();
        if (threadIdx.x == 0) shared_state = {max, sum_lanes(lanes)};
        __syncthreads();
        const SoftmaxScales scales = merge_softmax(state, shared_state);
        for (std::int64_t d = threadIdx.x; d < dim; d += kThreads) {
            float partial = 0.0f;
            for (std::int64_t i = 0; i < count; ++i) {
                const Memory* value =
                    token_at<Memory>(step, step.cache_values, sequence, kv_head, begin + i);
                partial += Type::load(value[d]) * scores[i];
            }
            sums[d] = sums[d] * scales.before + partial * scales.chunk;
        }
    }
    for (std::int64_t d = threadIdx.x; d < dim; d += kThreads) {
        out[d] = Type::store(sums[d] / state.sum);
    }
}

template <typename Type>
void launch(const AttentionStep& step, cudaStream_t stream, int device) {
    const dim3 grid(static_cast<unsigned>(step.num_rows), static_cast<unsigned>(step.num_heads));
    const auto shared_bytes = static_cast<std::size_t>(2 * step.head_dim) * sizeof(float);
    general_kernel<Type><<<grid, kThreads, shared_bytes, stream>>>(step);
    cuda::check(cudaGetLastError(), "launch of general_kernel", device);
}

}  // namespace

void cuda_attend_general(const AttentionStep& step, std::uintptr_t stream, int device) {
    if (step.num_rows == 0) return;
    const cuda::DeviceScope scope(cuda::checked_device(device));
    const cudaStream_t on = cuda::as_stream(stream);
    switch (step.dtype) {
        case FloatType::fp32:
            return launch<Fp32>(step, on, device);
        case FloatType::bf16:
            return launch<Bf16>(step, on, device);
        case FloatType::fp16:
            return launch<Fp16>(step, on, device);
    }
}

}  // namespace weightsync
