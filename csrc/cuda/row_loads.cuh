// Elements of a row by a thread, eight at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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

}  // namespace weightsync::cuda
