#include "weightsync/attention_block.hpp"

#include <algorithm>
#include <limits>

#include "weightsync/attention_math.hpp"

#define WEIGHTSYNC_INLINE inline __attribute__((always_inline))

namespace weightsync {
namespace {

struct Fp32 {
    using Memory = float;
    static WEIGHTSYNC_INLINE float load(float value) { return value; }
    static WEIGHTSYNC_INLINE float store(float value) { return value; }
};

struct Bf16 {
    using Memory = std::uint16_t;
    static WEIGHTSYNC_INLINE float load(std::uint16_t half) { return bf16_to_fp32(half); }
    static WEIGHTSYNC_INLINE std::uint16_t store(float value) { return fp32_to_bf16(value); }
};

struct Fp16 {
    using Memory = std::uint16_t;
    static WEIGHTSYNC_INLINE float load(std::uint16_t half) { return fp16_to_fp32(half); }
    static WEIGHTSYNC_INLINE std::uint16_t store(float value) { return fp32_to_fp16(value); }
};

// Lanes beyond head_dim stay zero from the scratch's construction.
template <typename Type>
WEIGHTSYNC_INLINE void load_row(float* target, const void* source, std::int64_t offset,
                                std::int64_t head_dim) {
    const auto* elements = static_cast<const typename Type::Memory*>(source) + offset;
    for (std::int64_t d = 0; d < head_dim; ++d) target[d] = Type::load(elements[d]);
}

// K and V of tokens [begin, begin + count) of a sequence, as fp32.
template <typename Type>
WEIGHTSYNC_INLINE void load_chunk(const AttentionStep& step, const AttentionBlock& block,
                                  std::int64_t begin, std::int64_t count,
                                  AttentionScratch& scratch) {
    const std::int32_t* table = step.block_tables + block.sequence * step.table_width;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t token = begin + i;
        const std::int64_t page = table[token / step.page_size];
        const std::int64_t slot = page * step.page_size + token % step.page_size;
        const std::int64_t offset = (slot * step.num_kv_heads + block.kv_head) * step.head_dim;
        load_row<Type>(&scratch.keys[i * scratch.padded_dim], step.cache_keys, offset,
                       step.head_dim);
        load_row<Type>(&scratch.values[i * scratch.padded_dim], step.cache_values, offset,
                       step.head_dim);
    }
}

WEIGHTSYNC_INLINE float dot(const float* a, const float* b, std::int64_t padded_dim) {
    float lanes[kAttentionLanes] = {};
    for (std::int64_t d = 0; d < padded_dim; d += kAttentionLanes) {
        for (int lane = 0; lane < kAttentionLanes; ++lane) lanes[lane] += a[d + lane] * b[d + lane];
    }
    return sum_lanes(lanes);
}

// Turns scores into exp(score - max) and returns their maximum and sum.
WEIGHTSYNC_INLINE SoftmaxState exponentiate(float* scores, std::int64_t count) {
    SoftmaxState state{-std::numeric_limits<float>::infinity(), 0.0f};
    for (std::int64_t i = 0; i < count; ++i) state.max = std::max(state.max, scores[i]);
    const std::int64_t padded = (count + kAttentionLanes - 1) / kAttentionLanes * kAttentionLanes;
    for (std::int64_t i = 0; i < count; ++i) scores[i] = exp_nonpositive(scores[i] - state.max);
    for (std::int64_t i = count; i < padded; ++i) scores[i] = 0.0f;
    float lanes[kAttentionLanes] = {};
    for (std::int64_t i = 0; i < padded; i += kAttentionLanes) {
        for (int lane = 0; lane < kAttentionLanes; ++lane) lanes[lane] += scores[i + lane];
    }
    state.sum = sum_lanes(lanes);
    return state;
}

// sums[d] = sums[d] * before + (sum over tokens, in order, of weight * value) * chunk.
template <int kWidth>
WEIGHTSYNC_INLINE void add_values(float* sums, const float* weights, const float* values,
                                  std::int64_t count, std::int64_t padded_dim,
                                  SoftmaxScales scales) {
    float partial[kWidth] = {};
    for (std::int64_t i = 0; i < count; ++i) {
        const float weight = weights[i];
        const float* row = values + i * padded_dim;
        for (int d = 0; d < kWidth; ++d) partial[d] += weight * row[d];
    }
    for (int d = 0; d < kWidth; ++d) sums[d] = sums[d] * scales.before + partial[d] * scales.chunk;
}

// One query head of one row against the first `count` tokens of the loaded chunk.
WEIGHTSYNC_INLINE void attend_chunk(const AttentionStep& step, AttentionScratch& scratch,
                                    std::int64_t index, std::int64_t count) {
    const std::int64_t dim = scratch.padded_dim;
    const float* query = &scratch.queries[index * dim];
    alignas(64) float scores[kAttentionChunk];
    for (std::int64_t i = 0; i < count; ++i) {
        scores[i] = dot(query, &scratch.keys[i * dim], dim) * step.scale;
    }
    SoftmaxState state{scratch.states[index * 2], scratch.states[index * 2 + 1]};
    const SoftmaxScales scales = merge_softmax(state, exponentiate(scores, count));
    scratch.states[index * 2] = state.max;
    scratch.states[index * 2 + 1] = state.sum;
    float* sums = &scratch.sums[index * dim];
    const float* values = scratch.values.data();
    std::int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
        add_values<32>(sums + d, scores, values + d, count, dim, scales);
    }
    for (; d < dim; d += 16) add_values<16>(sums + d, scores, values + d, count, dim, scales);
}

template <typename Type>
WEIGHTSYNC_INLINE void block_body(const AttentionStep& step, const AttentionBlock& block,
                                  AttentionScratch& scratch) {
    const std::int64_t group = step.num_heads / step.num_kv_heads;
    const std::int64_t dim = scratch.padded_dim;
    const std::int64_t num_rows = block.row_end - block.row_begin;
    for (std::int64_t index = 0; index < num_rows * group; ++index) {
        const std::int64_t row = block.row_begin + index / group;
        const std::int64_t head = block.kv_head * group + index % group;
        load_row<Type>(&scratch.queries[index * dim], step.query,
                       row * step.query_stride + head * step.head_dim, step.head_dim);
        scratch.states[index * 2] = -std::numeric_limits<float>::infinity();
        scratch.states[index * 2 + 1] = 0.0f;
        std::fill_n(&scratch.sums[index * dim], dim, 0.0f);
    }
    // The context of row r is what comes up to and including its own token.
    const std::int64_t last_row = step.query_starts[block.sequence + 1];
    const std::int64_t context_of_row0 = step.context_lens[block.sequence] - last_row + 1;
    const std::int64_t longest = context_of_row0 + block.row_end - 1;
    for (std::int64_t begin = 0; begin < longest; begin += kAttentionChunk) {
        load_chunk<Type>(step, block, begin, std::min(kAttentionChunk, longest - begin), scratch);
        for (std::int64_t index = 0; index < num_rows * group; ++index) {
            const std::int64_t context = context_of_row0 + block.row_begin + index / group;
            const std::int64_t count = std::min(kAttentionChunk, context - begin);
            if (count > 0) attend_chunk(step, scratch, index, count);
        }
    }
    for (std::int64_t index = 0; index < num_rows * group; ++index) {
        const std::int64_t row = block.row_begin + index / group;
        const std::int64_t head = block.kv_head * group + index % group;
        auto* out = static_cast<typename Type::Memory*>(step.output) +
                    (row * step.num_heads + head) * step.head_dim;
        const float* sums = &scratch.sums[index * dim];
        const float total = scratch.states[index * 2 + 1];
        for (std::int64_t d = 0; d < step.head_dim; ++d) out[d] = Type::store(sums[d] / total);
    }
}

template <typename Type>
void block_portable(const AttentionStep& step, const AttentionBlock& block,
                    AttentionScratch& scratch) {
    block_body<Type>(step, block, scratch);
}

#if defined(__x86_64__)
// Without fused multiply-add, which would round differently from the portable kernel.
template <typename Type>
__attribute__((target("avx2"))) void block_avx2(const AttentionStep& step,
                                                const AttentionBlock& block,
                                                AttentionScratch& scratch) {
    block_body<Type>(step, block, scratch);
}
#endif

template <typename Type>
AttendBlock pick_block() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return block_avx2<Type>;
#endif
    return block_portable<Type>;
}

}  // namespace

AttentionScratch::AttentionScratch(const AttentionStep& step)
    : padded_dim((step.head_dim + kAttentionLanes - 1) / kAttentionLanes * kAttentionLanes),
      keys(static_cast<std::size_t>(kAttentionChunk * padded_dim)),
      values(keys.size()),
      queries(static_cast<std::size_t>(kAttentionRowBlock * step.num_heads / step.num_kv_heads *
                                       padded_dim)),
      sums(queries.size()),
      states(
          static_cast<std::size_t>(kAttentionRowBlock * step.num_heads / step.num_kv_heads * 2)) {}

AttendBlock attend_block_kernel(FloatType dtype) {
    switch (dtype) {
        case FloatType::fp32:
            return pick_block<Fp32>();
        case FloatType::bf16:
            return pick_block<Bf16>();
        case FloatType::fp16:
            return pick_block<Fp16>();
    }
    return nullptr;
}

}  // namespace weightsync
