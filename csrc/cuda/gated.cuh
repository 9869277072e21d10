// silu(gate) * up of two elements that a product left in fp32, with the bits of the gate kernel.
#pragma once

#include <cstdint>

#include "attention_warp.cuh"
#include "weightsync/gate.hpp"

namespace weightsync::cuda {

inline __device__ float low_of(std::uint32_t both) { return __uint_as_float(both << 16); }
inline __device__ float high_of(std::uint32_t both) { return __uint_as_float(both & 0xFFFF0000u); }

// Two elements, rounded at each step as the gate kernel does.
inline __device__ std::uint32_t gated(float gate0, float gate1, float up0, float up1) {
    const std::uint32_t gates = TensorBf16::pack(gate0, gate1);
    const std::uint32_t ups = TensorBf16::pack(up0, up1);
    const std::uint32_t weighed = TensorBf16::pack(silu(low_of(gates)), silu(high_of(gates)));
    return TensorBf16::pack(low_of(weighed) * low_of(ups), high_of(weighed) * high_of(ups));
}

}  // namespace weightsync::cuda
