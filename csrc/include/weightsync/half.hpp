// 16-bit floats as bits. Written without branches on values, so that loops over them vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#include "weightsync/convert.hpp"
#include "weightsync/hd.hpp"

namespace weightsync {

WEIGHTSYNC_HD_INLINE float float_from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

WEIGHTSYNC_HD_INLINE std::uint32_t bits_from_float(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

WEIGHTSYNC_HD_INLINE float bf16_to_fp32(std::uint16_t half) {
    return float_from_bits(static_cast<std::uint32_t>(half) << 16);
}

WEIGHTSYNC_HD_INLINE std::uint16_t fp32_to_bf16(float value) {
    return fp32_bits_to_bf16(bits_from_float(value));
}

// Exact, subnormals included; an infinity stays one and a NaN keeps its payload.
WEIGHTSYNC_HD_INLINE float fp16_to_fp32(std::uint16_t half) {
    const std::uint32_t magnitude = half & 0x7FFFu;
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    // As fp32 bits the exponent is 112 too small; the product corrects it, subnormals as well.
    const float scaled = float_from_bits(magnitude << 13) * 0x1p112f;
    const std::uint32_t special = magnitude >= 0x7C00u ? 0x7F800000u : 0u;
    return float_from_bits(bits_from_float(scaled) | special | sign);
}

// Nearest, ties to even; overflow becomes infinity and every NaN 0x7E00 with its sign.
WEIGHTSYNC_HD_INLINE std::uint16_t fp32_to_fp16(float value) {
    const std::uint32_t bits = bits_from_float(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);
    if (magnitude < 0x38800000u) {
        // Below 2^-14: adding 0.5 leaves, in the low bits, a multiple of 2^-24 rounded to even.
        const float shifted = float_from_bits(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (bits_from_float(shifted) - 0x3F000000u));
    }
    const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

}  // namespace weightsync
