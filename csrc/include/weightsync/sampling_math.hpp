// The noise of sampling: a function of (seed, position, token) and nothing else, for CPU and CUDA
// alike. A token drawn as argmax(score + noise) therefore depends neither on the batch nor on how
// the work was cut; noise is Gumbel distributed, so it follows softmax(score).
#pragma once

#include <cstdint>
#include <cstring>

#include "weightsync/hd.hpp"

namespace weightsync {

struct NoiseKey {
    std::uint32_t first;
    std::uint32_t second;
};

// The finaliser of splitmix64.
WEIGHTSYNC_HD_INLINE std::uint64_t noise_mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

WEIGHTSYNC_HD_INLINE NoiseKey noise_key(std::uint64_t seed, std::int64_t position) {
    constexpr std::uint64_t golden = 0x9E3779B97F4A7C15u;
    const std::uint64_t key =
        noise_mix(noise_mix(seed + golden) + static_cast<std::uint64_t>(position) * golden);
    return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
}

// 32 random bits: two rounds of xor-shift and multiply, one for each half of the key.
WEIGHTSYNC_HD_INLINE std::uint32_t noise_bits(NoiseKey key, std::uint32_t token) {
    std::uint32_t x = token * 0x9E3779B9u + key.first;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    x = (x ^ (x >> 16)) + key.second;
    x = (x ^ (x >> 15)) * 0x2C1B3C6Du;
    x = (x ^ (x >> 12)) * 0x297A2D39u;
    return x ^ (x >> 15);
}

// log(x) for normal x > 0, by atanh: log(m) = 2 (s + s^3/3 + ...), s = (m - 1) / (m + 1). With m
// in [sqrt(1/2), sqrt(2)) what is left out is below 2^-30. Of 1 - v if `v` is not 0: near one, v
// itself is the exact distance.
WEIGHTSYNC_HD_INLINE float noise_log(float x, float v) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const std::uint32_t offset = bits - 0x3F3504F3u;  // sqrt(1/2)
    const std::int32_t exponent = static_cast<std::int32_t>(offset) >> 23;
    bits = (offset & 0x007FFFFFu) + 0x3F3504F3u;
    float m;
    std::memcpy(&m, &bits, sizeof(m));
    const float f = (exponent == 0 && v != 0.0f) ? -v : m - 1.0f;
    const float s = f / (f + 2.0f);
    const float s2 = s * s;
    const float tail = s2 * (1.0f / 3.0f + s2 * (1.0f / 5.0f + s2 * (1.0f / 7.0f + s2 / 9.0f)));
    return static_cast<float>(exponent) * 0.693147182f + 2.0f * (s + s * tail);
}

// -log(-log(u)). With u = 1 - v and v a multiple of 2^-32, the large values, which decide, are
// finely graded: the largest is 22.9.
WEIGHTSYNC_HD_INLINE float gumbel_of_bits(std::uint32_t bits) {
    // As two exact halves, so that one rounding gives (bits + 0.5) * 2^-32.
    const float high = static_cast<float>(static_cast<std::int32_t>(bits >> 16)) * 0x1p-16f;
    const float low =
        (static_cast<float>(static_cast<std::int32_t>(bits & 0xFFFFu)) + 0.5f) * 0x1p-32f;
    const float sum = high + low;
    const float v = sum < 0x1.fffffep-1f ? sum : 0x1.fffffep-1f;  // below one
    const float exponential = -noise_log(1.0f - v, v);
    return -noise_log(exponential, 0.0f);
}

WEIGHTSYNC_HD_INLINE float gumbel_noise(NoiseKey key, std::uint32_t token) {
    return gumbel_of_bits(noise_bits(key, token));
}

// Between which numbers the noise of some bits lies, without a logarithm. With 2^-(z+1) <= v < 2^-z
// (z zeros lead): v <= -log(1 - v), so the noise is at most -log(v) <= (z + 1) log 2; and up to
// v = 1/2, -log(1 - v) <= 2 log(2) v, so it is at least z log 2 - log(2 log 2). The slack of 1e-4
// is more than rounding takes.
struct NoiseBounds {
    float low;
    float high;
};

WEIGHTSYNC_HD_INLINE NoiseBounds gumbel_bounds(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
    const int leading = __clz(static_cast<int>(bits));
#else
    const int leading = bits == 0 ? 32 : __builtin_clz(bits);
#endif
    const float zeros = static_cast<float>(leading) * 0.693147182f;
    return {leading == 0 ? -4.0f : zeros - 0.3268f, zeros + 0.6933f};
}

}  // namespace weightsync
