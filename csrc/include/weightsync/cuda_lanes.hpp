// What one lane of a warp does in a unit. Shared by the CUDA kernels and their twins on the CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "weightsync/convert.hpp"
#include "weightsync/hd.hpp"

// Before a loop whose arrays must stay in registers; the CPU has no need of it.
#ifdef __CUDA_ARCH__
#define WEIGHTSYNC_UNROLL _Pragma("unroll")
#else
#define WEIGHTSYNC_UNROLL
#endif

namespace weightsync::lanes {

struct alignas(16) Vec16 {
    std::uint32_t w[4];
};
struct alignas(8) Vec8 {
    std::uint32_t w[2];
};

// `ptr` is aligned to T.
template <typename T>
WEIGHTSYNC_HD inline T load(const unsigned char* ptr) {
#ifdef __CUDA_ARCH__
    return *reinterpret_cast<const T*>(ptr);
#else
    T value;
    std::memcpy(&value, ptr, sizeof(T));
    return value;
#endif
}

template <typename T>
WEIGHTSYNC_HD inline void store(unsigned char* ptr, T value) {
#ifdef __CUDA_ARCH__
    *reinterpret_cast<T*>(ptr) = value;
#else
    std::memcpy(ptr, &value, sizeof(T));
#endif
}

WEIGHTSYNC_HD inline bool is_aligned(const void* ptr, std::uint32_t num_bytes) {
    return (reinterpret_cast<std::uintptr_t>(ptr) & (num_bytes - 1)) == 0;
}

// Vec8 or Vec16 from any address. Reads whole 4-byte words: up to 3 bytes before `ptr` and up to 3
// after the last byte, always in words that hold a byte asked for.
template <typename Vec>
WEIGHTSYNC_HD inline Vec load_unaligned(const unsigned char* ptr) {
#ifdef __CUDA_ARCH__
    constexpr int num_words = sizeof(Vec) / 4;
    const auto address = reinterpret_cast<std::uintptr_t>(ptr);
    const auto* words = reinterpret_cast<const std::uint32_t*>(address & ~std::uintptr_t{3});
    const auto shift = static_cast<std::uint32_t>(address & 3) * 8;
    std::uint32_t w[num_words + 1];
    WEIGHTSYNC_UNROLL
    for (int i = 0; i < num_words; ++i) w[i] = words[i];
    w[num_words] = shift == 0 ? 0 : words[num_words];
    Vec value;
    WEIGHTSYNC_UNROLL
    for (int i = 0; i < num_words; ++i) value.w[i] = __funnelshift_r(w[i], w[i + 1], shift);
    return value;
#else
    return load<Vec>(ptr);
#endif
}

inline constexpr std::uint32_t kOverreadBytes = 3;

// T of 1, 2 or 4 bytes from any address, reading no other byte.
template <typename T>
WEIGHTSYNC_HD inline T load_bytes(const unsigned char* ptr) {
    if (is_aligned(ptr, sizeof(T))) return load<T>(ptr);
    std::uint32_t value = 0;
    for (unsigned i = 0; i < sizeof(T); ++i) value |= std::uint32_t{ptr[i]} << (8 * i);
    return static_cast<T>(value);
}

WEIGHTSYNC_HD inline std::uint32_t fp32_pair_to_bf16(std::uint32_t low, std::uint32_t high) {
    return std::uint32_t{fp32_bits_to_bf16(low)} | std::uint32_t{fp32_bits_to_bf16(high)} << 16;
}

}  // namespace weightsync::lanes
