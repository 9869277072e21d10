// What decides the bits of an attention row, for CPU and CUDA alike.
//
// A row's context is cut into chunks of kAttentionChunk tokens, counted from the sequence's first
// token. A chunk yields a maximum, a sum and a weighted sum of V; chunks are merged in index order.
// So a row's bits depend on its query and on K and V before it, and on nothing else: not on the
// other rows of the step, nor on how prefill was cut, nor on where pages lie.
#pragma once

#include <cstdint>

#include "weightsync/half.hpp"
#include "weightsync/hd.hpp"

namespace weightsync {

inline constexpr std::int64_t kAttentionChunk = 256;

// Sums are taken in this many lanes: element i goes to lane i % kAttentionLanes.
inline constexpr int kAttentionLanes = 16;

// exp(x) for x <= 0, within 2 ulp; below -87 it is 0, and NaN stays NaN. Its own, because library
// functions differ between machines.
WEIGHTSYNC_HD inline float exp_nonpositive(float x) {
    constexpr float log2_e = 1.44269504f;
    constexpr float ln2_high = 0.693359375f;  // 355/512: a product with |n| < 2^15 is exact
    constexpr float ln2_low = -2.12194440e-4f;
    constexpr float round_shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float clamped = x < -87.0f ? -87.0f : x;
    const float shifted = clamped * log2_e + round_shift;
    const float n = shifted - round_shift;
    const float r = (clamped - n * ln2_high) - n * ln2_low;
    // Taylor to r^7; |r| <= ln(2) / 2, so what is left out is below 2^-27.
    float sum = 1.0f / 5040.0f;
    sum = sum * r + 1.0f / 720.0f;
    sum = sum * r + 1.0f / 120.0f;
    sum = sum * r + 1.0f / 24.0f;
    sum = sum * r + 1.0f / 6.0f;
    sum = sum * r + 0.5f;
    const float value = (sum * r) * r + r + 1.0f;
    // The integer n sits in the low bits of `shifted`; as an exponent it scales by 2^n.
    const float scale = float_from_bits((bits_from_float(shifted) + 127u) << 23);
    return x < -87.0f ? 0.0f : value * scale;
}

// The lanes' total, as a tree.
WEIGHTSYNC_HD inline float sum_lanes(const float* lanes) {
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

WEIGHTSYNC_HD inline SoftmaxScales merge_softmax(SoftmaxState& state, SoftmaxState chunk) {
    const float max = state.max < chunk.max ? chunk.max : state.max;
    const SoftmaxScales scales{exp_nonpositive(state.max - max), exp_nonpositive(chunk.max - max)};
    state.sum = state.sum * scales.before + chunk.sum * scales.chunk;
    state.max = max;
    return scales;
}

}  // namespace weightsync
