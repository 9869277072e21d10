// What kernels of rows share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>

#include "weightsync/float_codecs.hpp"
#include "weightsync/gate.hpp"

namespace weightsync::cuda {

inline constexpr int kEight = 8;

template <typename Memory>
__device__ bool is_aligned(const Memory* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

// Up to eight elements, the rest zero; sixteen bytes at a time where they lie so.
template <typename Type>
__device__ void load_eight(const typename Type::Memory* source, int count,
                           float (&values)[kEight]) {
    using Memory = typename Type::Memory;
    if (count >= kEight && is_aligned(source)) {
        alignas(16) Memory raw[kEight];
#pragma unroll
        for (unsigned i = 0; i < sizeof(raw) / 16; ++i) {
            reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(source)[i];
        }
#pragma unroll
        for (int i = 0; i < kEight; ++i) values[i] = Type::load(raw[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = i < count ? Type::load(source[i]) : 0.0f;
}

inline __device__ float warp_total(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    }
    return value;
}

inline __device__ float norm_scale(float squares, std::int64_t width, float eps) {
    return 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
}

// Calls `launch` with the codec of a dtype.
template <typename Launch>
void with_type(FloatType dtype, Launch&& launch) {
    switch (dtype) {
        case FloatType::fp32:
            return launch(Fp32{});
        case FloatType::bf16:
            return launch(Bf16{});
        case FloatType::fp16:
            return launch(Fp16{});
    }
    throw std::invalid_argument("row kernels: unknown dtype");
}

inline unsigned blocks_for(std::int64_t work, std::int64_t a_block) {
    return static_cast<unsigned>((work + a_block - 1) / a_block);
}

}  // namespace weightsync::cuda
