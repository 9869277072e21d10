#include "weightsync/attention_block.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "weightsync/attention_math.hpp"
#include "weightsync/float_codecs.hpp"

#define WEIGHTSYNC_INLINE WEIGHTSYNC_HD_INLINE

namespace weightsync {
namespace {

// Eight elements; two of them are the kAttentionLanes lanes of a sum. Compilers split a vector that
// is wider than the machine's, without changing a result.
using Vector = float __attribute__((vector_size(32)));
using VectorBits = std::uint32_t __attribute__((vector_size(32)));
constexpr std::int64_t kWidth = 8;
static_assert(kAttentionLanes == 2 * kWidth);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

WEIGHTSYNC_INLINE Vector load_vector(const float* source) {
    Vector value;
    std::memcpy(&value, source, sizeof(value));
    return value;
}

WEIGHTSYNC_INLINE void store_vector(float* target, Vector value) {
    std::memcpy(target, &value, sizeof(value));
}

// The tree of sum_lanes, in registers.
WEIGHTSYNC_INLINE float sum_vectors(Vector low, Vector high) {
    using Quad = float __attribute__((vector_size(16)));
    const Vector pairs = low + high;
    Quad halves[2];
    std::memcpy(halves, &pairs, sizeof(pairs));
    const Quad quads = halves[0] + halves[1];
    return (quads[0] + quads[2]) + (quads[1] + quads[3]);
}

// Lanes beyond head_dim stay zero from the scratch's construction.
template <typename Type>
WEIGHTSYNC_INLINE void load_row(float* target, const void* source, std::int64_t offset,
                                std::int64_t head_dim) {
    const auto* elements = static_cast<const typename Type::Memory*>(source) + offset;
    for (std::int64_t d = 0; d < head_dim; ++d) target[d] = Type::load(elements[d]);
}

// Where a token's K and V begin in the layer's cache, in elements.
WEIGHTSYNC_INLINE std::int64_t cache_offset(const AttentionStep& step, const AttentionBlock& block,
                                            std::int64_t token) {
    const std::int32_t* table = step.block_tables + block.sequence * step.table_width;
    const std::int64_t page = table[token / step.page_size];
    const std::int64_t slot = page * step.page_size + token % step.page_size;
    return (slot * step.num_kv_heads + block.kv_head) * step.head_dim;
}

template <typename Memory>
WEIGHTSYNC_INLINE void prefetch_row(const void* source, std::int64_t offset,
                                    std::int64_t head_dim) {
    const auto* begin = reinterpret_cast<const char*>(static_cast<const Memory*>(source) + offset);
    const std::int64_t num_bytes = head_dim * static_cast<std::int64_t>(sizeof(Memory));
    for (std::int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(begin + byte);
}

// K and V of tokens [begin, begin + count) of a sequence, as fp32. One head's rows lie far apart,
// so that only asking ahead hides the wait for them.
template <typename Type>
WEIGHTSYNC_INLINE void load_chunk(const AttentionStep& step, const AttentionBlock& block,
                                  std::int64_t begin, std::int64_t count,
                                  AttentionScratch& scratch) {
    constexpr std::int64_t rows_ahead = 12;
    for (std::int64_t i = -rows_ahead; i < count; ++i) {
        if (i + rows_ahead < count) {
            const std::int64_t ahead = cache_offset(step, block, begin + i + rows_ahead);
            prefetch_row<typename Type::Memory>(step.cache_keys, ahead, step.head_dim);
            prefetch_row<typename Type::Memory>(step.cache_values, ahead, step.head_dim);
        }
        if (i < 0) continue;
        const std::int64_t offset = cache_offset(step, block, begin + i);
        const std::int64_t place = i * scratch.padded_dim;
        load_row<Type>(&scratch.keys[place], step.cache_keys, offset, step.head_dim);
        load_row<Type>(&scratch.values[place], step.cache_values, offset, step.head_dim);
    }
}

WEIGHTSYNC_INLINE float dot(const float* a, const float* b, std::int64_t padded_dim) {
    Vector low{}, high{};
    for (std::int64_t d = 0; d < padded_dim; d += kAttentionLanes) {
        low += load_vector(a + d) * load_vector(b + d);
        high += load_vector(a + d + kWidth) * load_vector(b + d + kWidth);
    }
    return sum_vectors(low, high);
}

// Turns `count` scores, padded with -infinity to whole lanes, into exp(score - max).
WEIGHTSYNC_INLINE SoftmaxState exponentiate(float* scores, std::int64_t count) {
    const std::int64_t padded = (count + kAttentionLanes - 1) / kAttentionLanes * kAttentionLanes;
    for (std::int64_t i = count; i < padded; ++i) scores[i] = -kInfinity;
    Vector largest = Vector{} - kInfinity;
    for (std::int64_t i = 0; i < padded; i += kWidth) {
        const Vector score = load_vector(scores + i);
        largest = score > largest ? score : largest;
    }
    float max = -kInfinity;
    for (int lane = 0; lane < kWidth; ++lane) max = std::max(max, largest[lane]);
    Vector low{}, high{};
    for (std::int64_t i = 0; i < padded; i += kAttentionLanes) {
        const Vector first = exp_nonpositive_of<Vector, VectorBits>(load_vector(scores + i) - max);
        const Vector second =
            exp_nonpositive_of<Vector, VectorBits>(load_vector(scores + i + kWidth) - max);
        store_vector(scores + i, first);
        store_vector(scores + i + kWidth, second);
        low += first;
        high += second;
    }
    return {max, sum_vectors(low, high)};
}

// sums[d] = sums[d] * before + (sum over tokens, in order, of weight * value) * chunk, for
// kVectors * kWidth elements.
template <int kVectors>
WEIGHTSYNC_INLINE void add_values(float* sums, const float* weights, const float* values,
                                  std::int64_t count, std::int64_t padded_dim,
                                  SoftmaxScales scales) {
    Vector partial[kVectors] = {};
    for (std::int64_t i = 0; i < count; ++i) {
        const float* row = values + i * padded_dim;
        for (int v = 0; v < kVectors; ++v) partial[v] += load_vector(row + v * kWidth) * weights[i];
    }
    for (int v = 0; v < kVectors; ++v) {
        const Vector before = load_vector(sums + v * kWidth) * scales.before;
        store_vector(sums + v * kWidth, before + partial[v] * scales.chunk);
    }
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
    for (; d + 8 * kWidth <= dim; d += 8 * kWidth) {
        add_values<8>(sums + d, scores, values + d, count, dim, scales);
    }
    for (; d + 4 * kWidth <= dim; d += 4 * kWidth) {
        add_values<4>(sums + d, scores, values + d, count, dim, scales);
    }
    for (; d < dim; d += 2 * kWidth) {
        add_values<2>(sums + d, scores, values + d, count, dim, scales);
    }
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
        scratch.states[index * 2] = -kInfinity;
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
