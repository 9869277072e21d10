#include "weightsync/linear_block.hpp"

#include <algorithm>
#include <cstring>

#include "weightsync/half.hpp"

#define WEIGHTSYNC_INLINE WEIGHTSYNC_HD_INLINE

namespace weightsync {
namespace {

using Vector = float __attribute__((vector_size(32)));
static_assert(sizeof(Vector) == kLinearLanes * sizeof(float));

// A tile of sums, the states and weights it needs: as many as a machine of 16 registers holds.
constexpr int kTileRows = 4;
constexpr int kTileColumns = 3;

WEIGHTSYNC_INLINE Vector load_vector(const float* source) {
    Vector value;
    std::memcpy(&value, source, sizeof(value));
    return value;
}

WEIGHTSYNC_INLINE float sum_vector(Vector lanes) {
    using Quad = float __attribute__((vector_size(16)));
    Quad halves[2];
    std::memcpy(halves, &lanes, sizeof(lanes));
    const Quad quads = halves[0] + halves[1];
    return (quads[0] + quads[2]) + (quads[1] + quads[3]);
}

struct Bf16 {
    static WEIGHTSYNC_INLINE float load(std::uint16_t half) { return bf16_to_fp32(half); }
    static WEIGHTSYNC_INLINE std::uint16_t store(float value) { return fp32_to_bf16(value); }
};

struct Fp16 {
    static WEIGHTSYNC_INLINE float load(std::uint16_t half) { return fp16_to_fp32(half); }
    static WEIGHTSYNC_INLINE std::uint16_t store(float value) { return fp32_to_fp16(value); }
};

template <typename Type>
WEIGHTSYNC_INLINE void widen(const std::uint16_t* source, std::int64_t count, std::int64_t padded,
                             float* target) {
    for (std::int64_t i = 0; i < count; ++i) target[i] = Type::load(source[i]);
    for (std::int64_t i = count; i < padded; ++i) target[i] = 0.0f;
}

template <typename Type>
WEIGHTSYNC_INLINE void widen_body(const LinearProduct& product, std::int64_t row_begin,
                                  std::int64_t num_rows, std::int64_t padded, float* target) {
    const auto* states = static_cast<const std::uint16_t*>(product.states);
    for (std::int64_t row = 0; row < num_rows; ++row) {
        widen<Type>(states + (row_begin + row) * product.states_stride, product.num_inputs, padded,
                    target + row * padded);
    }
}

// kRows x kColumns elements of the output.
template <typename Type, int kRows, int kColumns>
WEIGHTSYNC_INLINE void tile(const LinearProduct& product, const LinearBlock& block,
                            const float* weights, std::int64_t row, std::int64_t column) {
    const std::int64_t padded = block.padded_inputs;
    const float* states = block.states + row * padded;
    Vector sums[kRows][kColumns] = {};
    for (std::int64_t i = 0; i < padded; i += kLinearLanes) {
        Vector weight[kColumns];
        for (int c = 0; c < kColumns; ++c) weight[c] = load_vector(weights + c * padded + i);
        for (int r = 0; r < kRows; ++r) {
            const Vector state = load_vector(states + r * padded + i);
            for (int c = 0; c < kColumns; ++c) sums[r][c] += state * weight[c];
        }
    }
    const auto* bias = static_cast<const std::uint16_t*>(product.bias);
    auto* output = static_cast<std::uint16_t*>(product.output);
    for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kColumns; ++c) {
            float sum = sum_vector(sums[r][c]);
            if (bias != nullptr) sum += Type::load(bias[column + c]);
            output[(block.row_begin + row + r) * product.num_outputs + column + c] =
                Type::store(sum);
        }
    }
}

template <typename Type, int kColumns>
WEIGHTSYNC_INLINE void columns(const LinearProduct& product, const LinearBlock& block,
                               float* weights, std::int64_t column) {
    const auto* all = static_cast<const std::uint16_t*>(product.weight);
    for (int c = 0; c < kColumns; ++c) {
        widen<Type>(all + (column + c) * product.num_inputs, product.num_inputs,
                    block.padded_inputs, weights + c * block.padded_inputs);
    }
    std::int64_t row = 0;
    for (; row + kTileRows <= block.num_rows; row += kTileRows) {
        tile<Type, kTileRows, kColumns>(product, block, weights, row, column);
    }
    for (; row < block.num_rows; ++row) {
        tile<Type, 1, kColumns>(product, block, weights, row, column);
    }
}

template <typename Type>
WEIGHTSYNC_INLINE void block_body(const LinearProduct& product, const LinearBlock& block,
                                  std::vector<float>& scratch) {
    scratch.resize(static_cast<std::size_t>(kTileColumns * block.padded_inputs));
    float* weights = scratch.data();
    std::int64_t column = block.column_begin;
    for (; column + kTileColumns <= block.column_end; column += kTileColumns) {
        columns<Type, kTileColumns>(product, block, weights, column);
    }
    for (; column < block.column_end; ++column) columns<Type, 1>(product, block, weights, column);
}

template <typename Type>
void widen_portable(const LinearProduct& product, std::int64_t row_begin, std::int64_t num_rows,
                    std::int64_t padded, float* target) {
    widen_body<Type>(product, row_begin, num_rows, padded, target);
}

template <typename Type>
void block_portable(const LinearProduct& product, const LinearBlock& block,
                    std::vector<float>& scratch) {
    block_body<Type>(product, block, scratch);
}

#if defined(__x86_64__)
template <typename Type>
__attribute__((target("avx2,fma"))) void widen_avx2(const LinearProduct& product,
                                                    std::int64_t row_begin, std::int64_t num_rows,
                                                    std::int64_t padded, float* target) {
    widen_body<Type>(product, row_begin, num_rows, padded, target);
}

template <typename Type>
__attribute__((target("avx2,fma"))) void block_avx2(const LinearProduct& product,
                                                    const LinearBlock& block,
                                                    std::vector<float>& scratch) {
    block_body<Type>(product, block, scratch);
}
#endif

template <typename Type>
LinearKernel pick_kernel() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return {widen_avx2<Type>, block_avx2<Type>};
    }
#endif
    return {widen_portable<Type>, block_portable<Type>};
}

}  // namespace

LinearKernel linear_kernel(FloatType dtype) {
    return dtype == FloatType::bf16 ? pick_kernel<Bf16>() : pick_kernel<Fp16>();
}

}  // namespace weightsync
