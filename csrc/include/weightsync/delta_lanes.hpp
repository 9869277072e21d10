// What threads of a device do to code one block, shared with the CPU's twin; the bits are those of
// delta_block_encode.hpp.
//
// Look: a warp reads 8,192 elements of both versions in rows of 32 lanes with one or two vectors of
// 16 bytes, counts with integer arithmetic on whole words how many keys reach each threshold, and
// stages the position of what changed with the counts before its lane. Then all threads turn staged
// changes into numbers, steps and digests. This header is the look and that turn.
#pragma once

#include <cstdint>

#include "weightsync/cuda_lanes.hpp"
#include "weightsync/cuda_units.hpp"
#include "weightsync/delta_span.hpp"

namespace weightsync::lanes {

inline constexpr std::uint32_t kDeltaWarps = 8;  // of a block of threads, which codes one block
inline constexpr std::uint32_t kDeltaThreads = kDeltaWarps * kWarpLanes;
inline constexpr std::uint32_t kDeltaWarpElements = kDeltaBlock / kDeltaWarps;
// Bits of a crowded block: no more than would be dense.
inline constexpr std::uint32_t kDeltaCrowdedWords = kDeltaBlock * 4 / 4 + 16;
inline constexpr std::uint32_t kDeltaMaxRows = kDeltaWarpElements / (8 * kWarpLanes);

// Counters of one vector or row: `low` holds changes and the keys that reach thresholds 0 and 1,
// `high` those of thresholds 2 to 4; ten bits each.
struct DeltaCounts {
    std::uint32_t low;
    std::uint32_t high;
};

WEIGHTSYNC_HD_INLINE std::uint32_t count_bits(std::uint32_t word) {
#ifdef __CUDA_ARCH__
    return static_cast<std::uint32_t>(__popc(word));
#else
    return static_cast<std::uint32_t>(__builtin_popcount(word));
#endif
}

// Index of the highest set bit of value > 0.
WEIGHTSYNC_HD_INLINE int top_bit(std::uint64_t value) {
#ifdef __CUDA_ARCH__
    return 63 - __clzll(static_cast<long long>(value));
#else
    return 63 - __builtin_clzll(value);
#endif
}

WEIGHTSYNC_HD_INLINE std::uint32_t lowest_bit(std::uint32_t word) {
#ifdef __CUDA_ARCH__
    return static_cast<std::uint32_t>(__ffs(static_cast<int>(word))) - 1;
#else
    return static_cast<std::uint32_t>(__builtin_ctz(word));
#endif
}

// Bytes 1 and 3 of both words.
WEIGHTSYNC_HD_INLINE std::uint32_t odd_bytes(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, 0x7531);
#else
    return (a >> 8 & 0xFFu) | (a >> 16 & 0xFF00u) | (b << 8 & 0xFF0000u) | (b & 0xFF000000u);
#endif
}

// `sum`, and the products of the bytes of both words, in turn.
WEIGHTSYNC_HD_INLINE std::uint32_t add_products(std::uint32_t a, std::uint32_t b,
                                                std::uint32_t sum) {
#ifdef __CUDA_ARCH__
    return __dp4a(a, b, sum);
#else
    for (int byte = 0; byte < 32; byte += 8) sum += (a >> byte & 0xFFu) * (b >> byte & 0xFFu);
    return sum;
#endif
}

template <DeltaKind kind>
struct DeltaVector {
    using Element = DeltaElement<kind>;
    // What a lane has of a row: more than that, and the counts of a row would need more bits.
    static constexpr std::uint32_t vectors = Element::bytes == 1 ? 1 : 2;
    static constexpr std::uint32_t vector_elements = 16 / Element::bytes;
    static constexpr std::uint32_t elements = vectors * vector_elements;
    static constexpr std::uint32_t row_elements = elements * kWarpLanes;
    static constexpr std::uint32_t rows = kDeltaWarpElements / row_elements;
    // The top bit of each element of a word, and an element's lowest.
    static constexpr std::uint32_t unit =
        Element::bytes == 4 ? 1u : (Element::bytes == 2 ? 0x00010001u : 0x01010101u);
    static constexpr std::uint32_t guard = unit << (Element::bits - 1);

    struct Lane {
        Vec16 v[vectors];
    };

    // What a word's guarded keys are compared with; a threshold that is none is never reached.
    WEIGHTSYNC_HD_INLINE static std::uint32_t cut(const DeltaParameters& parameters, int t) {
        constexpr int shift =
            kind == DeltaKind::float32 ? 23 : (kind == DeltaKind::float16 ? 7 : 0);
        if (t >= parameters.num_thresholds) return guard;
        return (std::uint32_t{parameters.thresholds[t]} << shift) * unit;
    }
    // Top bits of the elements of a word whose keys reach a threshold.
    WEIGHTSYNC_HD_INLINE static std::uint32_t reached(std::uint32_t word, std::uint32_t cut) {
        return ((word | guard) - cut) & guard;
    }
    WEIGHTSYNC_HD_INLINE static std::uint32_t count_reached(const Lane& lane, std::uint32_t cut) {
        std::uint32_t count = 0;
        WEIGHTSYNC_UNROLL
        for (std::uint32_t v = 0; v < vectors; ++v) {
            std::uint32_t bits = 0;
            WEIGHTSYNC_UNROLL
            for (int w = 0; w < 4; ++w) bits = (bits >> 1) | reached(lane.v[v].w[w], cut);
            count += count_bits(bits);
        }
        return count;
    }
    // Top bits of a word to one bit an element, in order.
    WEIGHTSYNC_HD_INLINE static std::uint32_t gathered(std::uint32_t tops) {
        if constexpr (Element::bytes == 4) return tops >> 31;
        return (tops >> 7 & 1u) | (tops >> 14 & 2u) | (tops >> 21 & 4u) | (tops >> 28 & 8u);
    }
    WEIGHTSYNC_HD_INLINE static std::uint32_t reached_mask(const Lane& lane, std::uint32_t cut) {
        return mask_of(
            [&](std::uint32_t v, std::uint32_t w) { return reached(lane.v[v].w[w], cut); });
    }
    WEIGHTSYNC_HD_INLINE static std::uint32_t changed_mask(const Lane& old, const Lane& current) {
        std::uint32_t mask = 0;
        WEIGHTSYNC_UNROLL
        for (std::uint32_t v = 0; v < vectors; ++v) {
            WEIGHTSYNC_UNROLL
            for (std::uint32_t w = 0; w < 4; ++w) {
                const std::uint32_t ones = nonzero(old.v[v].w[w] ^ current.v[v].w[w]);
                const std::uint32_t first = v * vector_elements + w * 4 / Element::bytes;
                if constexpr (Element::bytes == 1) {
                    mask |= gathered(ones << 7) << first;
                } else {
                    mask += ones << first;
                }
            }
        }
        // Of 16-bit elements the upper ones of a word lie 16 bits above the lower ones.
        return Element::bytes == 2 ? (mask | mask >> 15) & 0xFFFFu : mask;
    }
    // How many of the first `place` elements of a lane reach a threshold.
    WEIGHTSYNC_HD_INLINE static std::uint32_t count_reached_before(const Lane& lane,
                                                                   std::uint32_t cut,
                                                                   std::uint32_t place) {
        if constexpr (Element::bytes != 2) {
            return count_bits(reached_mask(lane, cut) & ((1u << place) - 1));
        }
        std::uint32_t bits = 0;  // of word i at 8 + i and 24 + i
        WEIGHTSYNC_UNROLL
        for (std::uint32_t v = 0; v < vectors; ++v) {
            WEIGHTSYNC_UNROLL
            for (int w = 0; w < 4; ++w) bits = bits >> 1 | reached(lane.v[v].w[w], cut);
        }
        const std::uint32_t lower = (1u << (place + 1) / 2) - 1;
        const std::uint32_t upper = (1u << place / 2) - 1;
        return count_bits(bits & (lower << 8 | upper << 24));
    }
    // The same for a lane that ends in the block.
    WEIGHTSYNC_HD_INLINE static Lane read_whole(const unsigned char* block, std::uint32_t first) {
        Lane lane;
        WEIGHTSYNC_UNROLL
        for (std::uint32_t v = 0; v < vectors; ++v) {
            lane.v[v] = load<Vec16>(block + std::size_t{first} * Element::bytes + v * 16);
        }
        return lane;
    }
    // What a lane has at element `first` of a block of `size`; what lies behind the end is zero, in
    // both versions, and no key of zero reaches a threshold.
    WEIGHTSYNC_HD_INLINE static Lane read(const unsigned char* block, std::uint32_t first,
                                          std::uint32_t size) {
        Lane lane;
        WEIGHTSYNC_UNROLL
        for (std::uint32_t v = 0; v < vectors; ++v) {
            lane.v[v] = read_vector(block, first + v * vector_elements, size);
        }
        return lane;
    }

  private:
    // 1 in each element of a word that is not 0.
    WEIGHTSYNC_HD_INLINE static std::uint32_t nonzero(std::uint32_t word) {
        if constexpr (Element::bytes == 4) return word != 0 ? 1u : 0u;
#ifdef __CUDA_ARCH__
        if constexpr (Element::bytes == 2) return __vminu2(word, unit);  // one instruction
#endif
        return ((((word & ~guard) + ~guard) | word) & guard) >> (Element::bits - 1);
    }
    // One bit an element, in order, from the top bits of the elements of each word.
    template <typename Tops>
    WEIGHTSYNC_HD_INLINE static std::uint32_t mask_of(const Tops& tops) {
        std::uint32_t mask = 0;
        WEIGHTSYNC_UNROLL
        for (std::uint32_t v = 0; v < vectors; ++v) {
            WEIGHTSYNC_UNROLL
            for (std::uint32_t w = 0; w < 4; ++w) {
                if constexpr (Element::bytes == 2) {
                    mask = mask >> 1 | tops(v, w);
                } else {
                    mask |= gathered(tops(v, w)) << (v * vector_elements + w * 4 / Element::bytes);
                }
            }
        }
        if constexpr (Element::bytes != 2) return mask;
        // The words' lower elements are in byte 1, in order, and their upper ones in byte 3.
        std::uint32_t pairs = (mask >> 8 & 0xFFu) | (mask >> 24 << 16);
        pairs = (pairs | pairs << 4) & 0x0F0F0F0Fu;
        pairs = (pairs | pairs << 2) & 0x33333333u;
        pairs = (pairs | pairs << 1) & 0x55555555u;
        return (pairs | pairs >> 15) & 0xFFFFu;
    }
    WEIGHTSYNC_HD_INLINE static Vec16 read_vector(const unsigned char* block, std::uint32_t first,
                                                  std::uint32_t size) {
        if (first + vector_elements <= size) return load<Vec16>(block + first * Element::bytes);
        Vec16 vector{};
        for (std::uint32_t i = first; i < size; ++i) {
            std::uint32_t u = 0;
            for (int b = 0; b < Element::bytes; ++b) {
                u |= std::uint32_t{block[i * Element::bytes + b]} << (8 * b);
            }
            const std::uint32_t at = (i - first) * Element::bytes;
            vector.w[at / 4] |= u << (at % 4 * 8);
        }
        return vector;
    }
};

// One element of a block.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::uint32_t delta_element_at(const unsigned char* block, std::uint32_t i) {
    if constexpr (DeltaElement<kind>::bytes == 4) {
        return reinterpret_cast<const std::uint32_t*>(block)[i];
    } else if constexpr (DeltaElement<kind>::bytes == 2) {
        return reinterpret_cast<const std::uint16_t*>(block)[i];
    } else {
        return block[i];
    }
}

struct DeltaCuts {
    std::uint32_t at[kDeltaThresholds];
};

template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE DeltaCuts delta_cuts(const DeltaParameters& parameters) {
    DeltaCuts cuts;
    WEIGHTSYNC_UNROLL
    for (int t = 0; t < kDeltaThresholds; ++t) {
        cuts.at[t] = DeltaVector<kind>::cut(parameters, t);
    }
    return cuts;
}

// How many keys of a lane reach a threshold.
template <DeltaKind kind>
struct KeyCounter {
    const typename DeltaVector<kind>::Lane& lane;
    const DeltaCuts& cuts;

    // `sum`, and the count in units of 1 << shift; shift is 0, 10 or 20.
    WEIGHTSYNC_HD_INLINE std::uint32_t add(int t, int shift, std::uint32_t sum) const {
        return sum + (DeltaVector<kind>::count_reached(lane, cuts.at[t]) << shift);
    }
};

// The same of 16-bit elements whose thresholds are all below 128, a weight below 2: keys are taken
// out as bytes once, and four of them compared at once. A key of 128 and more reaches all of them.
struct ByteKeyCounter {
    using Lane = DeltaVector<DeltaKind::float16>::Lane;
    static constexpr std::uint32_t tops = 0x80808080u;
    std::uint32_t keys[4];
    const DeltaCuts& cuts;

    WEIGHTSYNC_HD_INLINE ByteKeyCounter(const Lane& lane, const DeltaCuts& of) : cuts(of) {
        WEIGHTSYNC_UNROLL
        for (int k = 0; k < 4; ++k) {
            const std::uint32_t* w = lane.v[k / 2].w + k % 2 * 2;
            keys[k] = odd_bytes(w[0] << 1, w[1] << 1);
        }
    }
    // As above. Tops are worth 128 each: products add them up in units of 128 or 1,024.
    WEIGHTSYNC_HD_INLINE std::uint32_t add(int t, int shift, std::uint32_t sum) const {
        // Of each half the threshold at its bits 7 to 13: brought to both of its bytes.
        const std::uint32_t cut = cuts.at[t] >> 7 | cuts.at[t] << 1;
        const std::uint32_t weights = shift == 0 ? 0x01010101u : 0x08080808u;
        std::uint32_t total = shift == 10 ? sum : 0;
        WEIGHTSYNC_UNROLL
        for (int k = 0; k < 4; ++k) {
            const std::uint32_t reached = (keys[k] | ((keys[k] | tops) - cut)) & tops;
            total = add_products(reached, weights, total);
        }
        return shift == 10 ? total : sum + (shift == 0 ? total >> 7 : total << 10);
    }
};

// Whether keys may be counted as bytes.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE bool delta_has_byte_keys(const DeltaParameters& parameters) {
    const int count = parameters.num_thresholds;
    return kind == DeltaKind::float16 && (count == 0 || parameters.thresholds[count - 1] < 128);
}

template <typename Counter>
WEIGHTSYNC_HD_INLINE DeltaCounts delta_counts_of(const Counter& keys, std::uint32_t changed,
                                                 int num_thresholds) {
    DeltaCounts counts{count_bits(changed), 0};
    if (num_thresholds == 0) return counts;
    counts.low = keys.add(0, 10, counts.low);
    if (num_thresholds > 1) counts.low = keys.add(1, 20, counts.low);
    if (num_thresholds > 2) counts.high = keys.add(2, 0, 0);
    if (num_thresholds > 3) counts.high = keys.add(3, 10, counts.high);
    if (num_thresholds > 4) counts.high = keys.add(4, 20, counts.high);
    return counts;
}

// `has_byte_keys` only if delta_has_byte_keys says so.
template <DeltaKind kind, bool has_byte_keys>
WEIGHTSYNC_HD_INLINE DeltaCounts delta_count(const typename DeltaVector<kind>::Lane& old,
                                             std::uint32_t changed, const DeltaCuts& cuts,
                                             int num_thresholds) {
    if constexpr (kind == DeltaKind::bytes) return {count_bits(changed), 0};
    if constexpr (has_byte_keys) {
        return delta_counts_of(ByteKeyCounter(old, cuts), changed, num_thresholds);
    }
    return delta_counts_of(KeyCounter<kind>{old, cuts}, changed, num_thresholds);
}

// As a device chooses, for its twin.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE DeltaCounts delta_count_any(const typename DeltaVector<kind>::Lane& old,
                                                 std::uint32_t changed, const DeltaCuts& cuts,
                                                 const DeltaParameters& parameters) {
    const int count = parameters.num_thresholds;
    return delta_has_byte_keys<kind>(parameters)
               ? delta_count<kind, kind == DeltaKind::float16>(old, changed, cuts, count)
               : delta_count<kind, false>(old, changed, cuts, count);
}

WEIGHTSYNC_HD_INLINE std::uint32_t delta_field(const DeltaCounts& counts, int t) {
    return (t < 2 ? counts.low >> (10 * t + 10) : counts.high >> (10 * t - 20)) & 1023u;
}

// Keys that reach each threshold, before a row of a warp; [kDeltaThresholds]: changes.
struct DeltaRowStart {
    std::uint16_t reached[kDeltaThresholds + 1];
};

// Where staged changes of a block lie, `capacity` a warp: in shared memory, or in memory of the
// device for blocks with too many. Arrays that share a line below are used one after the other.
struct DeltaStage {
    std::uint32_t* low;       // counts before the lane; then codes in coded order
    std::uint32_t* high;      // counts before the lane; then codes as staged; then the bits
    std::uint16_t* position;  // in the block; then exceptions
    std::uint16_t* number;    // in the class; then the unlisted numbers
    std::uint16_t* listed;    // numbers in coded order
    std::uint16_t* unlisted;  // of exceptions
    std::uint8_t* label;      // class, and bit 3: down
    std::uint8_t* coded_label;
    std::uint32_t capacity;
    std::uint32_t bit_words;  // that `high` holds
};

// Bytes of a stage, each array a multiple of 16; `stage` gets its pointers.
WEIGHTSYNC_HD_INLINE std::size_t delta_stage_at(unsigned char* memory, std::uint32_t capacity,
                                                std::uint32_t bit_words, DeltaStage* stage) {
    const std::size_t all = std::size_t{capacity} * kDeltaWarps;
    const std::size_t words = bit_words > all ? bit_words : all;
    std::size_t at = 0;
    const auto take = [&](std::size_t bytes) {
        unsigned char* ptr = memory + at;
        at += (bytes + 15) / 16 * 16;
        return ptr;
    };
    stage->low = reinterpret_cast<std::uint32_t*>(take(4 * all));
    stage->high = reinterpret_cast<std::uint32_t*>(take(4 * words));
    stage->position = reinterpret_cast<std::uint16_t*>(take(2 * all));
    stage->number = reinterpret_cast<std::uint16_t*>(take(2 * all));
    stage->listed = reinterpret_cast<std::uint16_t*>(take(2 * all));
    stage->unlisted = reinterpret_cast<std::uint16_t*>(take(2 * all));
    stage->label = take(all);
    stage->coded_label = take(all);
    stage->capacity = capacity;
    stage->bit_words = static_cast<std::uint32_t>(words);
    return at;
}

// Stages what changed in one lane of a warp's row. `before` are the counts of the row before it,
// `found` the warp's changes before the row. Changes beyond the capacity are dropped: they were
// counted, so that is seen.
WEIGHTSYNC_HD_INLINE void delta_stage_lane(const DeltaStage& stage, std::uint32_t warp,
                                           std::uint32_t first, std::uint32_t changed,
                                           const DeltaCounts& before, std::uint32_t found) {
    std::uint32_t i = found + (before.low & 1023u);
    for (; changed != 0 && i < stage.capacity; changed &= changed - 1, ++i) {
        const std::uint32_t at = warp * stage.capacity + i;
        stage.position[at] = static_cast<std::uint16_t>(first + lowest_bit(changed));
        stage.low[at] = before.low;
        stage.high[at] = before.high;
    }
}

// What a block is, and where.
struct DeltaBlockPlace {
    const unsigned char* old;
    const unsigned char* current;
    std::uint32_t size;
    std::uint64_t seed;
    std::uint64_t first_byte;  // of the tensor
    int word_shift;
};

// Block `block` of a span; `new_ptr` is 0 where there is no other version.
template <DeltaKind kind, typename Row>
WEIGHTSYNC_HD_INLINE DeltaBlockPlace delta_place_of(const Row& row, std::uint64_t new_ptr,
                                                    std::uint32_t block) {
    const auto bytes = static_cast<std::uint64_t>(DeltaElement<kind>::bytes);
    const std::uint64_t first = std::uint64_t{block} * kDeltaBlock;
    const std::uint64_t rest = row.num_elements - first;
    return {reinterpret_cast<const unsigned char*>(row.old_ptr + first * bytes),
            reinterpret_cast<const unsigned char*>(new_ptr == 0 ? 0 : new_ptr + first * bytes),
            static_cast<std::uint32_t>(rest < kDeltaBlock ? rest : kDeltaBlock),
            row.seed,
            (row.start_element + first) * bytes,
            row.word_bytes == 4 ? 2 : static_cast<int>(row.word_bytes) - 1};
}

// 0: the typical step of its exponent; else 1 + its number among the others. Fits: no step of 32
// bits is longer than 2^31.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::uint32_t delta_step_code(std::uint32_t from, std::uint32_t to,
                                                   std::uint32_t typical, std::uint32_t* down) {
    const std::uint32_t step = DeltaElement<kind>::step(from, to, down);
    return step == typical ? 0 : delta_fold(step, typical) + 1;
}

// Turns staged change `i` of a warp into number, label and code; returns its term of the digest.
// `starts` are those of the warp's rows. The number is still without what the warps before counted.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::uint64_t delta_turn(const DeltaStage& stage, const DeltaBlockPlace& block,
                                              const DeltaParameters& parameters,
                                              const DeltaRowStart* starts, std::uint32_t warp,
                                              std::uint32_t i) {
    using Element = DeltaElement<kind>;
    using Vector = DeltaVector<kind>;
    const std::uint32_t at = warp * stage.capacity + i;
    const std::uint32_t position = stage.position[at];
    const DeltaCounts before{stage.low[at], stage.high[at]};
    const std::uint32_t place = position % Vector::elements;
    const typename Vector::Lane lane = Vector::read(block.old, position - place, block.size);
    const std::uint32_t from = delta_element_at<kind>(block.old, position);
    const std::uint32_t to = delta_element_at<kind>(block.current, position);
    const std::uint32_t key = Element::key(from);
    int c = 0;
    WEIGHTSYNC_UNROLL
    for (int t = 0; t < kDeltaThresholds; ++t) {
        c += t < parameters.num_thresholds && key >= parameters.thresholds[t] ? 1 : 0;
    }
    const DeltaRowStart& start = starts[position % kDeltaWarpElements / Vector::row_elements];
    // How many before it reach threshold t - 1: all, for t = 0; none behind the last.
    const auto rank = [&](int t) {
        if (t == 0) return position;
        if (t > parameters.num_thresholds) return 0u;
        const std::uint32_t cut = Vector::cut(parameters, t - 1);
        const std::uint32_t within = Vector::count_reached_before(lane, cut, place);
        return start.reached[t - 1] + delta_field(before, t - 1) + within;
    };
    std::uint32_t down = 0;
    const std::uint32_t code = delta_step_code<kind>(from, to, parameters.typical[key], &down);
    stage.number[at] = static_cast<std::uint16_t>(rank(c) - rank(c + 1));
    stage.label[at] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(c) | down << 3);
    stage.high[at] = code;
    return delta_digest_term(block.seed,
                             block.first_byte + std::uint64_t{position} * Element::bytes,
                             block.word_shift, from, to);
}

}  // namespace weightsync::lanes
