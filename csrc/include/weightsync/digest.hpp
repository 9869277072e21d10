// The digest of a tensor: position-dependent, and a sum, so that parts add up.
//
//   D = sum_b m(seed, b) * sum_{j<8} k_j * u(8b + j)   mod 2^64
//
// u(i) is word i of the tensor in row-major order of its wire form. Elements of 1, 2 and 4 bytes
// are one word; wider elements are little-endian 32-bit words (as whole 64-bit words, a pair of
// sign flips would differ by 2^63 * (odd + odd) = 0). k_j is odd, so that no bit of a word is lost.
//
// These constants are part of the protocol: both sides of an update must use the same ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weightsync/convert.hpp"
#include "weightsync/hd.hpp"

namespace weightsync {

inline constexpr std::int64_t kDigestBlockWords = 8;

// Odd and below 2^32, so that k_j * u is one 32 x 32 -> 64 multiplication.
#define WEIGHTSYNC_DIGEST_K                              \
    {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du, 0x27D4EB2Fu, \
     0x165667B1u, 0xD3A2646Du, 0xFD7046C5u, 0xB55A4F09u}

// The golden ratio in 64 bits, and the multipliers of the splitmix64 finaliser.
inline constexpr std::uint64_t kDigestGolden = 0x9E3779B97F4A7C15u;
inline constexpr std::uint64_t kDigestMix1 = 0xBF58476D1CE4E5B9u;
inline constexpr std::uint64_t kDigestMix2 = 0x94D049BB133111EBu;

// k_j for the word at global index `index`.
WEIGHTSYNC_HD inline std::uint64_t digest_word_factor(std::uint64_t index) {
    static constexpr std::uint32_t k[kDigestBlockWords] = WEIGHTSYNC_DIGEST_K;  // on no stack
    return k[index % kDigestBlockWords];
}

// The finaliser of splitmix64, forced odd.
WEIGHTSYNC_HD inline std::uint64_t digest_mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * kDigestMix1;
    x = (x ^ (x >> 27)) * kDigestMix2;
    return (x ^ (x >> 31)) | 1u;
}

// m(seed, block). The argument of the mix grows by kDigestGolden from block to block.
WEIGHTSYNC_HD inline std::uint64_t digest_block_factor(std::uint64_t seed, std::uint64_t block) {
    return digest_mix(seed + block * kDigestGolden);
}

// What one word adds to the digest.
WEIGHTSYNC_HD inline std::uint64_t digest_term(std::uint64_t seed, std::uint64_t index,
                                               std::uint32_t word) {
    return digest_block_factor(seed, index / kDigestBlockWords) *
           (digest_word_factor(index) * word);
}

struct DigestDim {
    std::int64_t count;
    std::int64_t stride_bytes;
    std::int64_t index_stride;  // words
};

inline constexpr int kDigestDims = 3;

// One row of a digest table: count0 * count1 * count2 runs of `num_words` contiguous words, whose
// global indices are contiguous too. `dims` is outermost first; unused dims have count 1.
struct DigestRow {
    std::int64_t ptr;
    std::int64_t word_bytes;  // 1, 2 or 4: of the words digested, after conversion
    std::int64_t num_words;
    std::int64_t seed;  // the bits of a uint64
    std::int64_t start_index;
    std::int64_t convert;
    DigestDim dims[kDigestDims];

    WEIGHTSYNC_HD Convert conversion() const { return static_cast<Convert>(convert); }
    // Bytes between two words in memory, before conversion.
    WEIGHTSYNC_HD std::int64_t memory_word_bytes() const {
        return conversion() == Convert::fp32_to_bf16 ? 4 : word_bytes;
    }
    WEIGHTSYNC_HD std::int64_t num_runs() const {
        return dims[0].count * dims[1].count * dims[2].count;
    }
};

inline constexpr std::size_t kDigestColumns = 15;
static_assert(sizeof(DigestRow) == kDigestColumns * sizeof(std::int64_t));

// Throws std::invalid_argument naming the row and the column.
void validate_digest_rows(const DigestRow* rows, std::int64_t num_rows);

// The part of a digest that `num_words` words at `ptr` with indices from `index` on make up; word
// size, conversion and seed are the row's, its dims are ignored.
std::uint64_t digest_run(const DigestRow& row, const unsigned char* ptr, std::uint64_t index,
                         std::int64_t num_words);

// Writes the digest of row i to out[i], with up to `num_threads` threads.
void digest_segments(const DigestRow* rows, std::int64_t num_rows, std::uint64_t* out,
                     int num_threads);

}  // namespace weightsync
