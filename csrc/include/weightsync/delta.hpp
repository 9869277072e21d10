// Sparse deltas: the numbers of the format (docs/delta.md) and the maths of one element.
//
// A tensor is cut into spans of 64 blocks of 65,536 elements; a span is one self-contained record.
// Which elements change is mostly decided by the old value's exponent, which the receiver has: in
// class mode the elements of a block are numbered within ranges of exponents ("classes"), and the
// changed ones are gaps of those numbers. A change is a step in the order of all values (ULPs); a
// step as long as is typical for its exponent costs its sign only.
#pragma once

#include <cstdint>

#include "weightsync/hd.hpp"

namespace weightsync {

enum class DeltaKind : std::uint8_t {
    bytes = 0,    // any dtype, byte by byte; no exponent
    float8 = 1,   // e4m3, e5m2
    float16 = 2,  // bf16 and fp16: bits 7..14 order magnitudes in both
    float32 = 3,
};

enum class DeltaMode : std::uint8_t {
    unchanged = 0,
    gaps = 1,      // one class: numbers are positions
    classes = 2,   // classes of exponents
    dense = 3,     // the new elements, in the dense section
    absolute = 4,  // positions and new bits; needs no old values
};

inline constexpr std::uint32_t kDeltaMagic = 0x31445357u;  // "WSD1"
inline constexpr std::int64_t kDeltaBlock = 65536;         // elements
inline constexpr std::int64_t kDeltaChunk = 64;            // elements of one mask
inline constexpr std::int64_t kDeltaChunks = kDeltaBlock / kDeltaChunk;
inline constexpr std::int64_t kDeltaSpanBlocks = 64;
inline constexpr std::int64_t kDeltaSpan = kDeltaSpanBlocks * kDeltaBlock;
inline constexpr int kDeltaThresholds = 5;
inline constexpr int kDeltaClasses = kDeltaThresholds + 1;
inline constexpr int kDeltaMaxTypical = 63;
inline constexpr int kDeltaMaxRice = 15;
inline constexpr std::uint64_t kDeltaSeed = 0x7765696768747379u;  // of record checksums
inline constexpr std::uint8_t kDeltaFlagAbsolute = 1;

// Orders of the exponential Golomb codes of counts: of changes in a class, of exceptions.
inline constexpr int kDeltaCountOrder = 4;
inline constexpr int kDeltaExceptionOrder = 2;

struct DeltaHeader {
    std::uint32_t magic;
    std::uint8_t kind;
    std::uint8_t flags;
    std::uint8_t num_thresholds;
    std::uint8_t dense_coding;    // 0: elements; 1: byte planes, compressed outside the core
    std::uint64_t start_element;  // of the span within its tensor
    std::uint32_t num_elements;
    std::uint32_t num_changed;
    std::uint32_t num_typical;  // exponents with a typical step other than 1
    std::uint32_t index_bytes;
    std::uint32_t sparse_bytes;
    std::uint32_t dense_elements;
    std::uint32_t dense_bytes;    // as stored
    std::uint32_t word_bytes;     // of the digest
    std::uint64_t result_digest;  // of the span's new elements
    std::uint64_t checksum;       // of the record, this field apart
};
static_assert(sizeof(DeltaHeader) == 64);

inline constexpr std::int64_t kDeltaEntryBytes = 7;  // block index: u24 bytes, u32 digest

WEIGHTSYNC_HD constexpr int delta_element_bytes(DeltaKind kind) {
    return kind == DeltaKind::float32 ? 4 : (kind == DeltaKind::float16 ? 2 : 1);
}

template <DeltaKind kind>
struct DeltaElement {
    static constexpr int bytes = delta_element_bytes(kind);
    static constexpr int bits = bytes * 8;
    static constexpr std::uint32_t sign = 1u << (bits - 1);
    static constexpr std::uint32_t mask =
        static_cast<std::uint32_t>((std::uint64_t{1} << bits) - 1);

    // What classes are made of: rises with the magnitude.
    WEIGHTSYNC_HD_INLINE static std::uint32_t key(std::uint32_t u) {
        if (kind == DeltaKind::float32) return (u >> 23) & 0xFF;
        if (kind == DeltaKind::float16) return (u >> 7) & 0xFF;
        return kind == DeltaKind::float8 ? u & 0x7F : 0;
    }
    // A bijection that orders bit patterns as values; -0 lies just below +0.
    WEIGHTSYNC_HD_INLINE static std::uint32_t ordered(std::uint32_t u) {
        if (kind == DeltaKind::bytes) return u;
        // Negative: all bits flipped; else the top one. Signs are random, so no branch.
        return (u ^ (sign | (0u - (u >> (bits - 1))))) & mask;
    }
    WEIGHTSYNC_HD_INLINE static std::uint32_t unordered(std::uint32_t m) {
        if (kind == DeltaKind::bytes) return m;
        return (m ^ (sign | ((m >> (bits - 1)) - 1u))) & mask;
    }
    // |step| from old to new, 1 .. 2^(bits-1), the shorter way round; `down` is its sign.
    WEIGHTSYNC_HD_INLINE static std::uint32_t step(std::uint32_t from, std::uint32_t to,
                                                   std::uint32_t* down) {
        const std::uint32_t up = (ordered(to) - ordered(from)) & mask;
        *down = up >> (bits - 1);
        return ((up ^ (0u - *down)) + *down) & mask;
    }
    WEIGHTSYNC_HD_INLINE static std::uint32_t stepped(std::uint32_t from, std::uint32_t magnitude,
                                                      std::uint32_t down) {
        const std::uint32_t m = ordered(from);
        return unordered((m + ((magnitude ^ (0u - down)) + down)) & mask);
    }
};

// Numbers magnitudes other than `typical` from 0, the nearest first.
WEIGHTSYNC_HD_INLINE std::uint32_t delta_fold(std::uint32_t magnitude, std::uint32_t typical) {
    if (magnitude > typical) {
        const std::uint32_t over = magnitude - typical;
        return over < typical ? 2 * over - 2 : over + typical - 2;
    }
    return 2 * (typical - magnitude) - 1;
}

WEIGHTSYNC_HD_INLINE std::uint64_t delta_unfold(std::uint64_t z, std::uint64_t typical) {
    if (z >= 2 * (typical - 1)) return z + 2;
    return z % 2 == 0 ? typical + z / 2 + 1 : typical - (z + 1) / 2;
}

// Bits of `count` Rice codes with parameter k that lie below `size`: an upper bound.
WEIGHTSYNC_HD_INLINE std::uint32_t delta_rice_bits(std::uint32_t count, std::uint32_t size, int k) {
    return count * static_cast<std::uint32_t>(k + 1) + ((size - count) >> k);
}

// The parameter both sides use for `count` >= 1 of `size` numbers.
WEIGHTSYNC_HD_INLINE int delta_rice_parameter(std::uint32_t count, std::uint32_t size) {
    int best = 0;
    std::uint32_t fewest = delta_rice_bits(count, size, 0);
    for (int k = 1; k <= kDeltaMaxRice; ++k) {
        const std::uint32_t bits = delta_rice_bits(count, size, k);
        if (bits >= fewest) break;
        fewest = bits;
        best = k;
    }
    return best;
}

// A 32-bit form of a block's digest.
WEIGHTSYNC_HD_INLINE std::uint32_t delta_block_check(std::uint64_t digest) {
    return static_cast<std::uint32_t>(digest >> 32) ^ static_cast<std::uint32_t>(digest);
}

// More sparse bytes than this, and a block is dense: 11/16 is what byte planes compress weights to.
WEIGHTSYNC_HD_INLINE std::int64_t delta_dense_limit(std::int64_t raw_bytes) {
    return raw_bytes / 16 * 11 + 16;
}

}  // namespace weightsync
