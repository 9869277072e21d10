#include "weightsync/delta_scan.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weightsync {
namespace {

// Masks of one chunk.
struct ChunkMasks {
    std::uint64_t same;
    std::uint64_t below[kDeltaThresholds];
};

template <DeltaKind kind>
struct PortableChunk {
    static constexpr int bytes = DeltaElement<kind>::bytes;

    // Thresholds in the form in which they are compared.
    struct Limits {
        Limits(const std::uint8_t* from, int count) { std::copy_n(from, count, thresholds); }
        std::uint8_t thresholds[kDeltaThresholds];
    };

    static std::uint32_t load(const unsigned char* ptr, std::int64_t i) {
        std::uint32_t u = 0;
        std::memcpy(&u, ptr + i * bytes, bytes);
        return u;
    }
    template <int num_thresholds>
    static void look(const unsigned char* old, const unsigned char* current, const Limits& limits,
                     ChunkMasks* masks) {
        for (std::int64_t i = 0; i < kDeltaChunk; ++i) {
            const std::uint32_t u = load(old, i);
            if (current != nullptr && load(current, i) == u) masks->same |= std::uint64_t{1} << i;
            for (int t = 0; t < num_thresholds; ++t) {
                const std::uint64_t is_below = DeltaElement<kind>::key(u) < limits.thresholds[t];
                masks->below[t] |= is_below << i;
            }
        }
    }
};

// Asks for what is looked at two pieces later: work on what was found stands between the pieces,
// and by itself a processor looks ahead within a page only.
constexpr std::int64_t kFetchAheadBytes = 4096;

template <std::int64_t num_bytes>
WEIGHTSYNC_HD_INLINE void fetch_ahead(const unsigned char* ptr) {
    for (std::int64_t line = 0; line < num_bytes; line += 64) {
        __builtin_prefetch(ptr + kFetchAheadBytes + line);
    }
}

template <int num_thresholds>
WEIGHTSYNC_HD_INLINE void keep_masks(const ChunkMasks& masks, std::uint64_t valid, bool has_new,
                                     std::int64_t chunk, std::uint32_t* total, DeltaScan* scan) {
    scan->masks[chunk][kDeltaChangedRow] = has_new ? ~masks.same & valid : 0;
    for (int t = 0; t < num_thresholds; ++t) {
        const std::uint64_t below = masks.below[t] & valid;
        scan->masks[chunk][t + 1] = below;
        scan->before[t + 1][chunk] = static_cast<std::uint16_t>(total[t]);
        total[t] += static_cast<std::uint32_t>(__builtin_popcountll(below));
    }
}

template <DeltaKind kind, template <DeltaKind> class Chunk, int num_thresholds>
WEIGHTSYNC_HD_INLINE void scan_chunks(const unsigned char* old, const unsigned char* current,
                                      std::int64_t first, std::int64_t count,
                                      const std::uint8_t* thresholds, DeltaScan* scan) {
    constexpr std::int64_t chunk_bytes = kDeltaChunk * DeltaElement<kind>::bytes;
    // Made once: what is written here might be the thresholds, for all that the compiler knows.
    const typename Chunk<kind>::Limits limits(thresholds, num_thresholds);
    std::uint32_t total[kDeltaThresholds] = {};
    for (int t = 0; t < num_thresholds; ++t) total[t] = scan->total[t + 1];
    const std::int64_t end = (first + count) / kDeltaChunk;
    for (std::int64_t chunk = first / kDeltaChunk; chunk < end; ++chunk) {
        ChunkMasks masks{};
        fetch_ahead<chunk_bytes>(old + chunk * chunk_bytes);
        if (current != nullptr) fetch_ahead<chunk_bytes>(current + chunk * chunk_bytes);
        Chunk<kind>::template look<num_thresholds>(
            old + chunk * chunk_bytes, current == nullptr ? nullptr : current + chunk * chunk_bytes,
            limits, &masks);
        keep_masks<num_thresholds>(masks, ~std::uint64_t{0}, current != nullptr, chunk, total,
                                   scan);
    }
    const std::int64_t rest = first + count - end * kDeltaChunk;
    if (rest > 0) {  // a copy, so that nothing beyond the end is read
        unsigned char padded[2][chunk_bytes] = {};
        const auto rest_bytes = static_cast<std::size_t>(rest * DeltaElement<kind>::bytes);
        std::memcpy(padded[0], old + end * chunk_bytes, rest_bytes);
        if (current != nullptr) std::memcpy(padded[1], current + end * chunk_bytes, rest_bytes);
        ChunkMasks masks{};
        Chunk<kind>::template look<num_thresholds>(padded[0], padded[1], limits, &masks);
        keep_masks<num_thresholds>(masks, (std::uint64_t{1} << rest) - 1, current != nullptr, end,
                                   total, scan);
    }
    for (int t = 0; t < num_thresholds; ++t) scan->total[t + 1] = total[t];
}

template <DeltaKind kind, template <DeltaKind> class Chunk>
WEIGHTSYNC_HD_INLINE void scan_piece(const unsigned char* old, const unsigned char* current,
                                     std::int64_t first, std::int64_t count,
                                     const std::uint8_t* thresholds, DeltaScan* scan) {
    switch (scan->num_thresholds) {
        case 0:
            scan_chunks<kind, Chunk, 0>(old, current, first, count, thresholds, scan);
            break;
        case 1:
            scan_chunks<kind, Chunk, 1>(old, current, first, count, thresholds, scan);
            break;
        case 2:
            scan_chunks<kind, Chunk, 2>(old, current, first, count, thresholds, scan);
            break;
        case 3:
            scan_chunks<kind, Chunk, 3>(old, current, first, count, thresholds, scan);
            break;
        case 4:
            scan_chunks<kind, Chunk, 4>(old, current, first, count, thresholds, scan);
            break;
        default:
            scan_chunks<kind, Chunk, 5>(old, current, first, count, thresholds, scan);
            break;
    }
}

template <DeltaKind kind>
void scan_portable(const unsigned char* old, const unsigned char* current, std::int64_t first,
                   std::int64_t count, const std::uint8_t* thresholds, DeltaScan* scan) {
    scan_piece<kind, PortableChunk>(old, current, first, count, thresholds, scan);
}

int select_bit(std::uint64_t mask, std::uint32_t rank) {
    for (; rank > 0; --rank) mask &= mask - 1;
    return __builtin_ctzll(mask);
}

void locate_portable(const DeltaScan& scan, int c, const std::uint32_t* numbers, std::int64_t count,
                     std::uint32_t* positions) {
    const std::uint16_t* before_low = scan.before[c];
    const std::uint16_t* before_high = scan.before[c + 1];
    const std::int64_t last = scan.num_chunks - 1;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t number = numbers[i];
        // The last chunk with no more members before it than `number`.
        std::int64_t chunk = 0;
        for (std::int64_t step = kDeltaChunks / 2; step > 0; step /= 2) {
            const std::int64_t next = std::min(chunk + step, last);
            const auto before = static_cast<std::uint32_t>(before_high[next] - before_low[next]);
            chunk = before <= number ? next : chunk;
        }
        const auto rank =
            number - static_cast<std::uint32_t>(before_high[chunk] - before_low[chunk]);
        const int bit = select_bit(scan.masks[chunk][c + 1] & ~scan.masks[chunk][c], rank);
        positions[i] = static_cast<std::uint32_t>(chunk * kDeltaChunk + bit);
    }
}

#if defined(__x86_64__)
#define WEIGHTSYNC_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))

WEIGHTSYNC_AVX2 inline __m256i load(const unsigned char* ptr, int vector) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ptr) + vector);
}

// Elements 0..31 or 32..63 of a chunk as bytes in order: their keys, and 0xFF where two are equal.
template <DeltaKind kind>
struct Lanes;

template <>
struct Lanes<DeltaKind::bytes> {
    WEIGHTSYNC_AVX2 static __m256i keys(const unsigned char*, int) {
        return _mm256_setzero_si256();
    }
    WEIGHTSYNC_AVX2 static __m256i same(const unsigned char* a, const unsigned char* b, int half) {
        return _mm256_cmpeq_epi8(load(a, half), load(b, half));
    }
};

template <>
struct Lanes<DeltaKind::float8> {
    WEIGHTSYNC_AVX2 static __m256i keys(const unsigned char* a, int half) {
        return _mm256_and_si256(load(a, half), _mm256_set1_epi8(0x7F));
    }
    WEIGHTSYNC_AVX2 static __m256i same(const unsigned char* a, const unsigned char* b, int half) {
        return Lanes<DeltaKind::bytes>::same(a, b, half);
    }
};

template <>
struct Lanes<DeltaKind::float16> {
    WEIGHTSYNC_AVX2 static __m256i keys(const unsigned char* a, int half) {
        const __m256i mask = _mm256_set1_epi16(0xFF);
        const __m256i x = _mm256_and_si256(_mm256_srli_epi16(load(a, 2 * half), 7), mask);
        const __m256i y = _mm256_and_si256(_mm256_srli_epi16(load(a, 2 * half + 1), 7), mask);
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(x, y), 0xD8);
    }
    WEIGHTSYNC_AVX2 static __m256i same(const unsigned char* a, const unsigned char* b, int half) {
        const __m256i x = _mm256_cmpeq_epi16(load(a, 2 * half), load(b, 2 * half));
        const __m256i y = _mm256_cmpeq_epi16(load(a, 2 * half + 1), load(b, 2 * half + 1));
        return _mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xD8);
    }
};

template <>
struct Lanes<DeltaKind::float32> {
    WEIGHTSYNC_AVX2 static __m256i ordered(__m256i packed) {
        return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
    WEIGHTSYNC_AVX2 static __m256i exponent(__m256i bits) {
        return _mm256_and_si256(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(0xFF));
    }
    WEIGHTSYNC_AVX2 static __m256i keys(const unsigned char* a, int half) {
        const int v = 4 * half;
        const __m256i x = _mm256_packus_epi32(exponent(load(a, v)), exponent(load(a, v + 1)));
        const __m256i y = _mm256_packus_epi32(exponent(load(a, v + 2)), exponent(load(a, v + 3)));
        return ordered(_mm256_packus_epi16(x, y));
    }
    WEIGHTSYNC_AVX2 static __m256i equal(const unsigned char* a, const unsigned char* b, int v) {
        return _mm256_cmpeq_epi32(load(a, v), load(b, v));
    }
    WEIGHTSYNC_AVX2 static __m256i same(const unsigned char* a, const unsigned char* b, int half) {
        const int v = 4 * half;
        const __m256i x = _mm256_packs_epi32(equal(a, b, v), equal(a, b, v + 1));
        const __m256i y = _mm256_packs_epi32(equal(a, b, v + 2), equal(a, b, v + 3));
        return ordered(_mm256_packs_epi16(x, y));
    }
};

WEIGHTSYNC_AVX2 inline std::uint64_t mask_of(__m256i low, __m256i high) {
    const auto bits = static_cast<std::uint32_t>(_mm256_movemask_epi8(low));
    return bits | static_cast<std::uint64_t>(static_cast<std::uint32_t>(_mm256_movemask_epi8(high)))
                      << 32;
}

template <DeltaKind kind>
struct VectorChunk {
    // Comparisons are signed: a flipped top bit makes the order that of unsigned keys.
    struct Limits {
        WEIGHTSYNC_AVX2 Limits(const std::uint8_t* thresholds, int count) {
            for (int t = 0; t < count; ++t) {
                vectors[t] = _mm256_set1_epi8(static_cast<char>(thresholds[t] ^ 0x80));
            }
        }
        __m256i vectors[kDeltaThresholds];
    };
    template <int num_thresholds>
    WEIGHTSYNC_AVX2 static inline void look(const unsigned char* old, const unsigned char* current,
                                            const Limits& limits, ChunkMasks* masks) {
        if (current != nullptr) {
            masks->same =
                mask_of(Lanes<kind>::same(old, current, 0), Lanes<kind>::same(old, current, 1));
        }
        if (num_thresholds == 0) return;
        const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
        const __m256i low = _mm256_xor_si256(Lanes<kind>::keys(old, 0), flip);
        const __m256i high = _mm256_xor_si256(Lanes<kind>::keys(old, 1), flip);
        for (int t = 0; t < num_thresholds; ++t) {
            masks->below[t] = mask_of(_mm256_cmpgt_epi8(limits.vectors[t], low),
                                      _mm256_cmpgt_epi8(limits.vectors[t], high));
        }
    }
};

template <DeltaKind kind>
WEIGHTSYNC_AVX2 void scan_avx2(const unsigned char* old, const unsigned char* current,
                               std::int64_t first, std::int64_t count,
                               const std::uint8_t* thresholds, DeltaScan* scan) {
    scan_piece<kind, VectorChunk>(old, current, first, count, thresholds, scan);
}

// Entries of 32 rising ones that are at most `number` (as 16-bit lanes of `wanted`).
WEIGHTSYNC_AVX2 inline int count_up_to(const std::uint16_t* entries, __m256i wanted) {
    const auto* vectors = reinterpret_cast<const __m256i*>(entries);
    const __m256i low = _mm256_load_si256(vectors);
    const __m256i high = _mm256_load_si256(vectors + 1);
    const __m256i fits =
        _mm256_packs_epi16(_mm256_cmpeq_epi16(_mm256_max_epu16(low, wanted), wanted),
                           _mm256_cmpeq_epi16(_mm256_max_epu16(high, wanted), wanted));
    return __builtin_popcount(static_cast<std::uint32_t>(_mm256_movemask_epi8(fits)));
}

// Two looks at 32 entries each instead of ten halvings.
WEIGHTSYNC_AVX2 void locate_avx2(const DeltaScan& scan, int c, const std::uint32_t* numbers,
                                 std::int64_t count, std::uint32_t* positions) {
    // Members before each chunk. Behind the last chunk: more than any number, for only a whole
    // block has a number that large, and that has no chunk behind the last.
    alignas(32) std::uint16_t before[kDeltaChunks];
    alignas(32) std::uint16_t coarse[32];
    for (std::int64_t chunk = 0; chunk < scan.num_chunks; ++chunk) {
        before[chunk] =
            static_cast<std::uint16_t>(scan.before[c + 1][chunk] - scan.before[c][chunk]);
    }
    for (std::int64_t chunk = scan.num_chunks; chunk < kDeltaChunks; ++chunk) {
        before[chunk] = 0xFFFF;
    }
    for (std::int64_t i = 0; i < 32; ++i) coarse[i] = before[32 * i];
    for (std::int64_t i = 0; i < count; ++i) {
        const __m256i wanted = _mm256_set1_epi16(static_cast<short>(numbers[i]));
        const std::int64_t group = count_up_to(coarse, wanted) - 1;
        const std::int64_t chunk = 32 * group + count_up_to(before + 32 * group, wanted) - 1;
        const std::uint64_t rank = numbers[i] - std::uint32_t{before[chunk]};
        const std::uint64_t members = scan.masks[chunk][c + 1] & ~scan.masks[chunk][c];
        const auto bit = __builtin_ctzll(_pdep_u64(std::uint64_t{1} << (rank & 63), members));
        positions[i] = static_cast<std::uint32_t>(chunk * kDeltaChunk + bit);
    }
}
#endif

}  // namespace

void delta_scan_begin(std::int64_t num_elements, int num_thresholds, DeltaScan* scan) {
    std::fill(scan->total, scan->total + kDeltaClasses + 1, 0u);
    scan->total[num_thresholds + 1] = static_cast<std::uint32_t>(num_elements);
    // The first and the last row are those of the block before, nearly always.
    if (scan->num_elements == num_elements && scan->num_thresholds == num_thresholds) return;
    scan->num_elements = num_elements;
    scan->num_chunks = (num_elements + kDeltaChunk - 1) / kDeltaChunk;
    scan->num_thresholds = num_thresholds;
    std::uint16_t* before = scan->before[num_thresholds + 1];
    for (std::int64_t chunk = 0; chunk < scan->num_chunks; ++chunk) {
        scan->masks[chunk][0] = 0;
        scan->before[0][chunk] = 0;
        scan->masks[chunk][num_thresholds + 1] = ~std::uint64_t{0};
        before[chunk] = static_cast<std::uint16_t>(chunk * kDeltaChunk);
    }
    if (num_elements % kDeltaChunk != 0) {
        scan->masks[scan->num_chunks - 1][num_thresholds + 1] =
            (std::uint64_t{1} << (num_elements % kDeltaChunk)) - 1;
    }
}

const DeltaScanKernels& delta_scan_portable() {
    static const DeltaScanKernels kernels = {
        {scan_portable<DeltaKind::bytes>, scan_portable<DeltaKind::float8>,
         scan_portable<DeltaKind::float16>, scan_portable<DeltaKind::float32>},
        locate_portable,
        "portable"};
    return kernels;
}

const DeltaScanKernels& delta_scan_kernels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    static const DeltaScanKernels kernels = {
        {scan_avx2<DeltaKind::bytes>, scan_avx2<DeltaKind::float8>, scan_avx2<DeltaKind::float16>,
         scan_avx2<DeltaKind::float32>},
        locate_avx2,
        "avx2"};
    if (has_avx2) return kernels;
#endif
    return delta_scan_portable();
}

}  // namespace weightsync
