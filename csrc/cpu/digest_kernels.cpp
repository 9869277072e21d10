#include "weightsync/digest_kernels.hpp"

#include <cstring>

#include "weightsync/convert.hpp"
#include "weightsync/digest.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weightsync {
namespace {

template <typename Memory>
struct Plain {
    static constexpr std::int64_t memory_bytes = sizeof(Memory);
    static std::uint32_t load(const unsigned char* ptr) {
        Memory word;
        std::memcpy(&word, ptr, sizeof(word));
        return word;
    }
};

struct Rounded {
    static constexpr std::int64_t memory_bytes = 4;
    static std::uint32_t load(const unsigned char* ptr) {
        return fp32_bits_to_bf16(Plain<std::uint32_t>::load(ptr));
    }
};

template <typename Word>
std::uint64_t blocks_portable(std::uint64_t seed, std::uint64_t first_block,
                              const unsigned char* ptr, std::int64_t num_blocks) {
    constexpr std::uint32_t k[kDigestBlockWords] = WEIGHTSYNC_DIGEST_K;
    std::uint64_t sum = 0;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
        std::uint64_t inner = 0;
        for (std::int64_t j = 0; j < kDigestBlockWords; ++j) {
            inner += std::uint64_t{k[j]} * Word::load(ptr + j * Word::memory_bytes);
        }
        sum += digest_block_factor(seed, first_block + static_cast<std::uint64_t>(block)) * inner;
        ptr += kDigestBlockWords * Word::memory_bytes;
    }
    return sum;
}

#if defined(__x86_64__)
#define WEIGHTSYNC_AVX2 __attribute__((target("avx2")))

// Eight words as 32-bit lanes.
template <typename Word>
WEIGHTSYNC_AVX2 inline __m256i load_block(const unsigned char* ptr);

template <>
WEIGHTSYNC_AVX2 inline __m256i load_block<Plain<std::uint8_t>>(const unsigned char* ptr) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(ptr)));
}

template <>
WEIGHTSYNC_AVX2 inline __m256i load_block<Plain<std::uint16_t>>(const unsigned char* ptr) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(ptr)));
}

template <>
WEIGHTSYNC_AVX2 inline __m256i load_block<Plain<std::uint32_t>>(const unsigned char* ptr) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ptr));
}

template <>
WEIGHTSYNC_AVX2 inline __m256i load_block<Rounded>(const unsigned char* ptr) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ptr));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
}

// k_j * u_j of one block, two of the eight products added in each of four 64-bit lanes.
template <typename Word>
WEIGHTSYNC_AVX2 inline __m256i block_products(const unsigned char* ptr, __m256i k) {
    const __m256i words = load_block<Word>(ptr);
    return _mm256_add_epi64(
        _mm256_mul_epu32(words, k),
        _mm256_mul_epu32(_mm256_srli_epi64(words, 32), _mm256_srli_epi64(k, 32)));
}

// Keeps a value in a general register. Without it the compiler turns the block factors into vector
// code, which AVX2 has no 64-bit multiplication for: 1.6 times slower.
inline std::uint64_t scalar(std::uint64_t value) {
    asm("" : "+r"(value));
    return value;
}

// The inner sums are vector work and the block factors scalar work, so that both halves of the core
// are busy.
template <typename Word>
WEIGHTSYNC_AVX2 std::uint64_t blocks_avx2(std::uint64_t seed, std::uint64_t first_block,
                                          const unsigned char* ptr, std::int64_t num_blocks) {
    constexpr std::int64_t block_bytes = kDigestBlockWords * Word::memory_bytes;
    alignas(32) constexpr std::uint32_t constants[kDigestBlockWords] = WEIGHTSYNC_DIGEST_K;
    const __m256i k = _mm256_load_si256(reinterpret_cast<const __m256i*>(constants));
    std::uint64_t sums[4] = {0, 0, 0, 0};
    std::uint64_t unmixed = seed + first_block * kDigestGolden;
    const std::int64_t grouped = num_blocks / 4 * 4;
    for (std::int64_t block = 0; block < grouped; block += 4) {
        _mm_prefetch(reinterpret_cast<const char*>(ptr + 2048), _MM_HINT_T0);
        if constexpr (block_bytes * 4 > 64) {
            _mm_prefetch(reinterpret_cast<const char*>(ptr + 2048 + 64), _MM_HINT_T0);
        }
        const __m256i p0 = block_products<Word>(ptr, k);
        const __m256i p1 = block_products<Word>(ptr + block_bytes, k);
        const __m256i p2 = block_products<Word>(ptr + 2 * block_bytes, k);
        const __m256i p3 = block_products<Word>(ptr + 3 * block_bytes, k);
        const __m256i p01 =
            _mm256_add_epi64(_mm256_unpacklo_epi64(p0, p1), _mm256_unpackhi_epi64(p0, p1));
        const __m256i p23 =
            _mm256_add_epi64(_mm256_unpacklo_epi64(p2, p3), _mm256_unpackhi_epi64(p2, p3));
        alignas(32) std::uint64_t inner[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(inner),
                           _mm256_add_epi64(_mm256_permute2x128_si256(p01, p23, 0x20),
                                            _mm256_permute2x128_si256(p01, p23, 0x31)));
        for (int i = 0; i < 4; ++i) {
            sums[i] += digest_mix(scalar(unmixed)) * inner[i];
            unmixed += kDigestGolden;
        }
        ptr += 4 * block_bytes;
    }
    return sums[0] + sums[1] + sums[2] + sums[3] +
           blocks_portable<Word>(seed, first_block + static_cast<std::uint64_t>(grouped), ptr,
                                 num_blocks - grouped);
}
#endif

DigestKernels pick_kernels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        return {blocks_avx2<Plain<std::uint8_t>>, blocks_avx2<Plain<std::uint16_t>>,
                blocks_avx2<Plain<std::uint32_t>>, blocks_avx2<Rounded>, "avx2"};
    }
#endif
    return {blocks_portable<Plain<std::uint8_t>>, blocks_portable<Plain<std::uint16_t>>,
            blocks_portable<Plain<std::uint32_t>>, blocks_portable<Rounded>, "portable"};
}

}  // namespace

const DigestKernels& digest_kernels() {
    static const DigestKernels kernels = pick_kernels();
    return kernels;
}

}  // namespace weightsync
