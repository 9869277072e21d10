// What decides the bits of an attention row, for CPU and CUDA alike.
//
// A row's context is cut into chunks of kAttentionChunk tokens, counted from the sequence's first
// token. A chunk yields a maximum, a sum and a weighted sum of V; chunks are merged in index order.
// So a row's bits depend on its query and on K and V before it, and on nothing else: not on the
// other rows of the step, nor on how prefill was cut, nor on where pages lie.
#pragma once

#include <cstdint>
#include <cstring>

#include "weightsync/half.hpp"
#include "weightsync/hd.hpp"

namespace weightsync {

inline constexpr std::int64_t kAttentionChunk = 256;

// Sums are taken in this many lanes: element i goes to lane i % kAttentionLanes.
inline constexpr int kAttentionLanes = 16;

// exp(x) for x <= 0, within 2 ulp; below -87 it is 0, and NaN stays NaN. Its own, because library
// functions differ between machines. `Float` is float or a vector of them, `Bits` its bits.
template <typename Float, typename Bits>
WEIGHTSYNC_HD_INLINE Float exp_nonpositive_of(Float x) {
    constexpr float log2_e = 1.44269504f;
    constexpr float ln2_high = 0.693359375f;  // 355/512: a product with |n| < 2^15 is exact
    constexpr float ln2_low = -2.12194440e-4f;
    constexpr float round_shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Float zero{};
    const Float lowest = zero - 87.0f;
    const Float clamped = x < lowest ? lowest : x;
    const Float shifted = clamped * log2_e + round_shift;
    const Float n = shifted - round_shift;
    const Float r = (clamped - n * ln2_high) - n * ln2_low;
    // Taylor to r^7; |r| <= ln(2) / 2, so what is left out is below 2^-27.
    Float sum = zero + 1.0f / 5040.0f;
    sum = sum * r + 1.0f / 720.0f;
    sum = sum * r + 1.0f / 120.0f;
    sum = sum * r + 1.0f / 24.0f;
    sum = sum * r + 1.0f / 6.0f;
    sum = sum * r + 0.5f;
    const Float value = (sum * r) * r + r + 1.0f;
    // The integer n sits in the low bits of `shifted`; as an exponent it scales by 2^n.
    Bits bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits + 127u) << 23;
    Float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return x < lowest ? zero : value * scale;
}

WEIGHTSYNC_HD_INLINE float exp_nonpositive(float x) {
    return exp_nonpositive_of<float, std::uint32_t>(x);
}

// The lanes' total, as a tree.
WEIGHTSYNC_HD_INLINE float sum_lanes(const float* lanes) {
    float pairs[kAttentionLanes / 2];
    for (int i = 0; i < 8; ++i) pairs[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; ++i) pairs[i] += pairs[i + 4];
    return (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]);
}

// A row's softmax so far: the largest score and the sum of exp(score - max).
struct SoftmaxState {
    float max;
    float sum;
};

// By what each side is multiplied when a chunk joins.
struct SoftmaxScales {
    float before;
    float chunk;
};

WEIGHTSYNC_HD_INLINE SoftmaxScales merge_softmax(SoftmaxState& state, SoftmaxState chunk) {
    const float max = state.max < chunk.max ? chunk.max : state.max;
    const SoftmaxScales scales{exp_nonpositive(state.max - max), exp_nonpositive(chunk.max - max)};
    state.sum = state.sum * scales.before + chunk.sum * scales.chunk;
    state.max = max;
    return scales;
}

}  // namespace weightsync
