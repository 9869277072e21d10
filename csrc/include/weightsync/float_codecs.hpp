// How each float type is read from and written to memory; arithmetic is in fp32.
#pragma once

#include <cstdint>

#include "weightsync/half.hpp"

namespace weightsync {

struct Fp32 {
    using Memory = float;
    static WEIGHTSYNC_HD_INLINE float load(float value) { return value; }
    static WEIGHTSYNC_HD_INLINE float store(float value) { return value; }
};

struct Bf16 {
    using Memory = std::uint16_t;
    static WEIGHTSYNC_HD_INLINE float load(std::uint16_t half) { return bf16_to_fp32(half); }
    // One instruction on a device, with the same bits but for which NaN a NaN becomes.
    static WEIGHTSYNC_HD_INLINE std::uint16_t store(float value) {
#if defined(__CUDA_ARCH__)
        std::uint16_t half;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
        return half;
#else
        return fp32_to_bf16(value);
#endif
    }
};

struct Fp16 {
    using Memory = std::uint16_t;
    static WEIGHTSYNC_HD_INLINE float load(std::uint16_t half) { return fp16_to_fp32(half); }
    static WEIGHTSYNC_HD_INLINE std::uint16_t store(float value) { return fp32_to_fp16(value); }
};

}  // namespace weightsync
