// One block's bits back to changes by a block of threads, shared with the CPU's twin; the changes
// are those of delta_block_decode.hpp, in no order.
//
// The bits name changed elements by their number within their class of old values, so the old
// values are read twice: first to count how many keys reach each threshold, then, once a bitmap
// over all numbers says which changed, to find those. Codes are decoded side by side: the unary
// parts of all gaps lie in one plane, where the i-th set bit ends the i-th code, whatever its
// class.
#pragma once

#include "weightsync/delta_team_encode.hpp"

namespace weightsync::lanes {

// Changes of a block that a device takes; a span with more in any block is the host's.
inline constexpr std::uint32_t kDecodeCapacity = 2304;
inline constexpr std::uint32_t kDecodeMapWords = kDeltaBlock / 32;
inline constexpr std::uint32_t kDecodeExceptionWords = kDecodeCapacity / 32;
inline constexpr std::uint32_t kDecodeChunkWords = kDecodeMapWords / kDeltaWarps;

// Bits of a word of states: any of them makes the span the host's, which says what is wrong with
// it.
inline constexpr std::uint32_t kDecodeCrowded = 1;
inline constexpr std::uint32_t kDecodeDamaged = 2;

// A block's bits. Whole words are read: up to 16 bytes behind its last one.
struct DeltaCodes {
    const std::uint32_t* words;
    std::uint32_t shift;  // where bit 0 is in words[0]
    std::uint32_t num_bits;

    WEIGHTSYNC_HD_INLINE static DeltaCodes at(std::uint64_t ptr, std::uint32_t num_bytes) {
        return {reinterpret_cast<const std::uint32_t*>(ptr & ~std::uint64_t{3}),
                static_cast<std::uint32_t>(ptr & 3) * 8, num_bytes * 8};
    }
    // 64 bits from `bit` <= num_bits on; what lies behind the end is anything.
    WEIGHTSYNC_HD_INLINE std::uint64_t peek(std::uint32_t bit) const {
        const std::uint32_t place = bit + shift;
        const std::uint32_t* from = words + (place >> 5);
        const std::uint32_t skip = place & 31;
        const std::uint64_t low = (std::uint64_t{from[0]} | std::uint64_t{from[1]} << 32) >> skip;
        return skip == 0 ? low : low | std::uint64_t{from[2]} << (64 - skip);
    }
    WEIGHTSYNC_HD_INLINE bool has(std::uint64_t end) const { return end <= num_bits; }

    // False for a code that cannot be or that runs past the end; the bounds are the host's.
    WEIGHTSYNC_HD_INLINE bool take_golomb(std::uint32_t* bit, int order,
                                          std::uint64_t* value) const {
        if (!has(*bit)) return false;
        const std::uint64_t word = peek(*bit) | std::uint64_t{1} << 40;
        const int zeros = static_cast<int>(
            (word & 0xFFFFFFFFu) != 0 ? lowest_bit(static_cast<std::uint32_t>(word))
                                      : 32 + lowest_bit(static_cast<std::uint32_t>(word >> 32)));
        const int top = zeros + order;
        if (zeros > 34 || top > 40) return false;
        const std::uint32_t next = *bit + static_cast<std::uint32_t>(zeros) + 1;
        if (!has(std::uint64_t{next} + static_cast<std::uint32_t>(top))) return false;
        const std::uint64_t one = std::uint64_t{1} << top;
        *value = ((peek(next) & (one - 1)) | one) - (std::uint64_t{1} << order);
        *bit = next + static_cast<std::uint32_t>(top);
        return true;
    }
};

// A list of rising numbers below `limit` as it lies in its planes.
struct DeltaCodedList {
    std::uint32_t limit;
    std::uint32_t begin;  // of its codes among those of all classes
    std::uint32_t count;
    std::uint32_t low;  // first bit of its low parts
    int rice;
    bool is_inverted;  // what is listed did not change
};

struct DeltaDecodeClass {
    std::uint32_t map_begin;  // of its numbers in the map
    std::uint32_t begin;      // of its changes
    std::uint32_t changes;
    std::uint32_t exceptions_begin;
    std::uint32_t exceptions;
    int order;
    DeltaCodedList numbers;
    DeltaCodedList exception_numbers;
};

// What a block of threads shares.
struct DeltaDecodeBlock {
    DeltaRowStart starts[kDeltaWarps][kDeltaMaxRows];
    std::uint32_t totals[kDeltaWarps][kDeltaThresholds];
    std::uint32_t base[kDeltaWarps][kDeltaThresholds];  // of the warps before
    std::uint32_t map[kDecodeMapWords + 2];             // a bit a number, classes in turn
    std::uint16_t before[kDecodeMapWords];              // set bits before a word, in its chunk
    std::uint32_t chunk_before[kDeltaWarps];
    std::uint32_t exception_map[kDecodeExceptionWords];  // a bit a change
    std::uint16_t exceptions_before[kDecodeExceptionWords];
    std::uint32_t work[kDecodeCapacity];       // where codes end; then the exceptions' steps
    std::uint16_t found_at[kDecodeCapacity];   // elements that changed, in some order
    std::uint16_t found_bit[kDecodeCapacity];  // of each its bit of the map
    DeltaDecodeClass classes[kDeltaClasses];
    int num_classes;
    std::uint32_t num_changed;
    std::uint32_t num_found;
    std::uint32_t num_codes;  // of all numbers
    std::uint32_t num_exceptions;
    std::uint32_t num_exception_codes;
    std::uint32_t signs;  // first bits of planes
    std::uint32_t high;
    std::uint32_t exception_high;
    std::uint32_t state;
};

WEIGHTSYNC_HD_INLINE DeltaCodedList delta_coded_list(std::uint32_t listed, std::uint32_t limit,
                                                     std::uint32_t* begin, std::uint64_t* low) {
    const DeltaNumbers numbers(listed, limit);
    const DeltaCodedList list{limit,         *begin,
                              numbers.count, static_cast<std::uint32_t>(*low),
                              numbers.rice,  DeltaNumbers::is_inverted(listed, limit)};
    *begin += numbers.count;
    *low += std::uint64_t{numbers.count} * static_cast<std::uint32_t>(numbers.rice);
    return list;
}

// By one thread, once all warps have counted: sizes of the classes, and what the bits say of them.
WEIGHTSYNC_HD_INLINE std::uint32_t delta_open_block(const DeltaCodes& codes, std::uint32_t size,
                                                    int num_thresholds, bool is_gaps,
                                                    DeltaDecodeBlock* block) {
    std::uint32_t reached[kDeltaThresholds] = {};
    for (std::uint32_t warp = 0; warp < kDeltaWarps; ++warp) {
        for (int t = 0; t < kDeltaThresholds; ++t) {
            block->base[warp][t] = reached[t];
            reached[t] += block->totals[warp][t];
        }
    }
    block->num_classes = is_gaps ? 1 : num_thresholds + 1;
    std::uint32_t bit = 0;
    std::uint32_t map_begin = 0;
    block->num_changed = block->num_exceptions = 0;
    for (int c = 0; c < block->num_classes; ++c) {
        DeltaDecodeClass& one = block->classes[c];
        const std::uint32_t from = c == 0 ? size : reached[c - 1];
        const std::uint32_t further = c + 1 < block->num_classes ? reached[c] : 0;
        // A threshold of zero is reached by what lies behind the end, too.
        if (further > from) return kDecodeDamaged;
        const std::uint32_t in_class = from - further;
        std::uint64_t changes = 0;
        std::uint64_t exceptions = 0;
        if (in_class > 0 && !codes.take_golomb(&bit, kDeltaCountOrder, &changes)) {
            return kDecodeDamaged;
        }
        if (changes > in_class) return kDecodeDamaged;
        if (changes > 0 && !codes.take_golomb(&bit, kDeltaExceptionOrder, &exceptions)) {
            return kDecodeDamaged;
        }
        if (exceptions > changes) return kDecodeDamaged;
        one.order = 0;
        if (exceptions > 0) {
            if (!codes.has(std::uint64_t{bit} + 4)) return kDecodeDamaged;
            one.order = static_cast<int>(codes.peek(bit) & 15);
            bit += 4;
        }
        one.map_begin = map_begin;
        one.numbers.limit = in_class;
        one.begin = block->num_changed;
        one.changes = static_cast<std::uint32_t>(changes);
        one.exceptions_begin = block->num_exceptions;
        one.exceptions = static_cast<std::uint32_t>(exceptions);
        map_begin += in_class;
        block->num_changed += one.changes;
        block->num_exceptions += one.exceptions;
    }
    if (block->num_changed > kDecodeCapacity) return kDecodeCrowded;
    block->signs = bit;
    std::uint64_t low = std::uint64_t{bit} + block->num_changed;
    block->num_codes = 0;
    for (int c = 0; c < block->num_classes; ++c) {
        DeltaDecodeClass& one = block->classes[c];
        one.numbers = delta_coded_list(one.changes, one.numbers.limit, &block->num_codes, &low);
    }
    // A list of what did not change may be longer than that of what did.
    if (block->num_codes > kDecodeCapacity) return kDecodeCrowded;
    block->high = static_cast<std::uint32_t>(low);
    return codes.has(low) ? 0 : kDecodeDamaged;
}

// By one thread, once the plane of all gaps is known to end at `end`: where those of exceptions
// lie.
WEIGHTSYNC_HD_INLINE std::uint32_t delta_open_exceptions(const DeltaCodes& codes, std::uint32_t end,
                                                         DeltaDecodeBlock* block) {
    std::uint64_t low = end;
    block->num_exception_codes = 0;
    for (int c = 0; c < block->num_classes; ++c) {
        DeltaDecodeClass& one = block->classes[c];
        one.exception_numbers =
            delta_coded_list(one.exceptions, one.changes, &block->num_exception_codes, &low);
    }
    block->exception_high = static_cast<std::uint32_t>(low);
    return codes.has(low) ? 0 : kDecodeDamaged;
}

// Where `count` codes of a unary plane end, as bits behind `from`; and the bit behind the last.
// Nothing where there are not so many.
template <typename Team>
WEIGHTSYNC_HD_INLINE std::uint32_t delta_find_ends(const Team& team, const DeltaCodes& codes,
                                                   std::uint32_t from, std::uint32_t count,
                                                   DeltaDecodeBlock* block) {
    if (count == 0) return from;
    const std::uint32_t rest = codes.num_bits - from;
    const std::uint32_t found = team.scan(
        (rest + 31) / 32,
        [&](std::uint32_t w) {
            auto word = static_cast<std::uint32_t>(codes.peek(from + w * 32));
            if (rest - w * 32 < 32) word &= (1u << (rest - w * 32)) - 1;
            return count_bits(word);
        },
        [&](std::uint32_t w, std::uint32_t before, std::uint32_t) {
            auto word = static_cast<std::uint32_t>(codes.peek(from + w * 32));
            if (rest - w * 32 < 32) word &= (1u << (rest - w * 32)) - 1;
            for (std::uint32_t i = before; word != 0 && i < count; word &= word - 1, ++i) {
                block->work[i] = w * 32 + lowest_bit(word);
            }
        });
    if (found < count) {
        set_bits(&block->state, kDecodeDamaged);
        return from;
    }
    return from + block->work[count - 1] + 1;
}

// Sets the bit of every number of a list, from bit `map_begin` of `map` on.
template <typename Team>
WEIGHTSYNC_HD_INLINE void delta_map_list(const Team& team, const DeltaCodes& codes,
                                         const DeltaCodedList& list, std::uint32_t map_begin,
                                         std::uint32_t* map, DeltaDecodeBlock* block) {
    const std::uint64_t mask = (std::uint64_t{1} << list.rice) - 1;
    const auto rice = static_cast<std::uint32_t>(list.rice);
    team.scan(
        list.count,
        [&](std::uint32_t i) {
            const std::uint32_t at = list.begin + i;
            const std::uint32_t last = at == 0 ? 0 : block->work[at - 1] + 1;
            const std::uint64_t gap = std::uint64_t{block->work[at] - last} << rice |
                                      (codes.peek(list.low + i * rice) & mask);
            // As many as are in a class and no more: what is longer cannot be.
            return gap < list.limit ? static_cast<std::uint32_t>(gap) + 1 : list.limit + 1;
        },
        [&](std::uint32_t, std::uint32_t before, std::uint32_t own) {
            const std::uint64_t number = std::uint64_t{before} + own - 1;
            if (number >= list.limit) {
                set_bits(&block->state, kDecodeDamaged);
                return;
            }
            const auto bit = static_cast<std::uint32_t>(map_begin + number);
            set_bits(map + bit / 32, 1u << (bit % 32));
        });
}

// Set bits of the words of one chunk before each of them; returns those of the chunk.
template <typename Team>
WEIGHTSYNC_HD_INLINE std::uint32_t delta_count_chunk(const Team& team, std::uint32_t chunk,
                                                     DeltaDecodeBlock* block) {
    const std::uint32_t first = chunk * kDecodeChunkWords;
    return team.scan(
        kDecodeChunkWords, [&](std::uint32_t i) { return count_bits(block->map[first + i]); },
        [&](std::uint32_t i, std::uint32_t before, std::uint32_t) {
            block->before[first + i] = static_cast<std::uint16_t>(before);
        });
}

template <typename Team>
WEIGHTSYNC_HD_INLINE void delta_count_exceptions(const Team& team, DeltaDecodeBlock* block) {
    team.scan(
        kDecodeExceptionWords, [&](std::uint32_t i) { return count_bits(block->exception_map[i]); },
        [&](std::uint32_t i, std::uint32_t before, std::uint32_t) {
            block->exceptions_before[i] = static_cast<std::uint16_t>(before);
        });
}

// By one thread: the steps of all exceptions, one code after the other, in place of where gaps end.
WEIGHTSYNC_HD_INLINE std::uint32_t delta_take_steps(const DeltaCodes& codes, std::uint32_t bit,
                                                    DeltaDecodeBlock* block) {
    for (int c = 0; c < block->num_classes; ++c) {
        const DeltaDecodeClass& one = block->classes[c];
        for (std::uint32_t e = 0; e < one.exceptions; ++e) {
            std::uint64_t folded = 0;
            if (!codes.take_golomb(&bit, one.order, &folded)) return kDecodeDamaged;
            // No step is so long; which are too long for their dtype, unfolding says.
            block->work[one.exceptions_begin + e] =
                folded < 0xFFFFFFFFu ? static_cast<std::uint32_t>(folded) : 0xFFFFFFFFu;
        }
    }
    return 0;
}

WEIGHTSYNC_HD_INLINE std::uint32_t below(std::uint32_t bit) { return (1u << (bit % 32)) - 1; }

// Set bits of the map before one of its bits.
WEIGHTSYNC_HD_INLINE std::uint32_t delta_map_rank(const DeltaDecodeBlock& block,
                                                  std::uint32_t bit) {
    const std::uint32_t w = bit / 32;
    if (w == kDecodeMapWords) {
        return block.chunk_before[kDeltaWarps - 1] + block.before[w - 1] +
               count_bits(block.map[w - 1]);
    }
    return block.chunk_before[w / kDecodeChunkWords] + block.before[w] +
           count_bits(block.map[w] & below(bit));
}

// The exception's number of change `i` of a class, or -1.
WEIGHTSYNC_HD_INLINE std::int32_t delta_exception_of(const DeltaDecodeBlock& block,
                                                     const DeltaDecodeClass& of, std::uint32_t i) {
    if (of.exceptions == 0) return -1;
    const std::uint32_t bit = of.begin + i;
    const bool is_set = (block.exception_map[bit / 32] >> (bit % 32) & 1) != 0;
    if (is_set == of.exception_numbers.is_inverted) return -1;
    const auto rank = [&](std::uint32_t at) {
        return std::uint32_t{block.exceptions_before[at / 32]} +
               count_bits(block.exception_map[at / 32] & below(at));
    };
    const std::uint32_t set = rank(bit) - rank(of.begin);
    const std::uint32_t number = of.exception_numbers.is_inverted ? i - set : set;
    return static_cast<std::int32_t>(of.exceptions_begin + number);
}

// Where changes of a span go: `first` of this block.
struct DeltaDecodeOutput {
    std::uint32_t* positions;
    unsigned char* values;
    std::uint32_t first;
    std::uint32_t first_position;  // of the block in its span
};

// What it takes to find and to make the changes of one block.
template <DeltaKind kind>
struct DeltaEmit {
    using Element = DeltaElement<kind>;
    using Vector = DeltaVector<kind>;

    DeltaDecodeBlock* block;
    DeltaCodes codes;
    DeltaBlockPlace place;
    const DeltaParameters* parameters;
    DeltaCuts cuts;
    DeltaDecodeOutput out;

    // Lists what changed in the lane at element `first` of the block. `own` counts its keys,
    // `before` those of the lanes before this one in its row.
    WEIGHTSYNC_HD_INLINE void find(const typename Vector::Lane& lane, std::uint32_t first,
                                   const DeltaCounts& own, const DeltaCounts& before) const {
        if (first >= place.size) return;
        const std::uint32_t rest = place.size - first;
        const std::uint32_t all =
            rest >= Vector::elements ? (1u << Vector::elements) - 1 : (1u << rest) - 1;
        const std::uint32_t warp = first / kDeltaWarpElements;
        const DeltaRowStart& start =
            block->starts[warp][first % kDeltaWarpElements / Vector::row_elements];
        std::uint32_t rank = first;  // of the first that reaches the class
        std::uint32_t reach = count_bits(all);
        WEIGHTSYNC_UNROLL
        for (int c = 0; c < kDeltaClasses; ++c) {
            if (c >= block->num_classes) break;
            std::uint32_t further = 0;
            std::uint32_t further_rank = 0;
            if (c < kDeltaThresholds && c + 1 < block->num_classes) {
                further = delta_field(own, c);
                further_rank = block->base[warp][c] + start.reached[c] + delta_field(before, c);
            }
            const DeltaDecodeClass& of = block->classes[c];
            const std::uint32_t bit = of.map_begin + rank - further_rank;
            const std::uint32_t found = changed_of(of, bit, reach - further);
            if (found != 0) list(found, bit, first, members(lane, c) & all);
            rank = further_rank;
            reach = further;
        }
    }

    // Makes change `k` of the list; returns its term of the digest.
    WEIGHTSYNC_HD_INLINE std::uint64_t put(std::uint32_t k) const {
        const std::uint32_t position = block->found_at[k];
        const std::uint32_t bit = block->found_bit[k];
        int c = 0;
        while (bit - block->classes[c].map_begin >= block->classes[c].numbers.limit) ++c;
        const DeltaDecodeClass& of = block->classes[c];
        const std::uint32_t set =
            delta_map_rank(*block, bit) - delta_map_rank(*block, of.map_begin);
        const std::uint32_t i = of.numbers.is_inverted ? bit - of.map_begin - set : set;
        return put_as(k, position, of, i);
    }

  private:
    // Which of `count` elements of a class changed, the first of which has bit `bit`.
    WEIGHTSYNC_HD_INLINE std::uint32_t changed_of(const DeltaDecodeClass& of, std::uint32_t bit,
                                                  std::uint32_t count) const {
        if (count == 0 || of.changes == 0) return 0;
        const std::uint32_t* words = block->map + bit / 32;
        const std::uint64_t pair = std::uint64_t{words[0]} | std::uint64_t{words[1]} << 32;
        const std::uint32_t all = (1u << count) - 1;
        const std::uint32_t found = static_cast<std::uint32_t>(pair >> (bit % 32)) & all;
        return of.numbers.is_inverted ? found ^ all : found;
    }

    WEIGHTSYNC_HD_INLINE std::uint32_t members(const typename Vector::Lane& lane, int c) const {
        std::uint32_t mask = ~0u;
        if (c > 0) mask = Vector::reached_mask(lane, cuts.at[c - 1]);
        if (c < kDeltaThresholds && c + 1 < block->num_classes) {
            mask &= ~Vector::reached_mask(lane, cuts.at[c]);
        }
        return mask;
    }

    WEIGHTSYNC_HD_INLINE void list(std::uint32_t found, std::uint32_t bit, std::uint32_t first,
                                   std::uint32_t members) const {
        for (; found != 0; ++bit, found >>= 1, members &= members - 1) {
            if ((found & 1) == 0) continue;
            // In turn, so that neighbours in the list are neighbours in memory, nearly.
            const std::uint32_t k = take_one(&block->num_found);
            if (k >= kDecodeCapacity) return;  // which is not the number of changes: that is seen
            block->found_at[k] = static_cast<std::uint16_t>(first + lowest_bit(members));
            block->found_bit[k] = static_cast<std::uint16_t>(bit);
        }
    }

    // Change `i` of a class, which is element `position` and the `k`-th in the list.
    WEIGHTSYNC_HD_INLINE std::uint64_t put_as(std::uint32_t k, std::uint32_t position,
                                              const DeltaDecodeClass& of, std::uint32_t i) const {
        const std::uint32_t from = delta_element_at<kind>(place.old, position);
        std::uint64_t step = parameters->typical[Element::key(from)];
        const std::int32_t exception = delta_exception_of(*block, of, i);
        if (exception >= 0) step = delta_unfold(block->work[exception], step);
        if (step > Element::sign) {
            set_bits(&block->state, kDecodeDamaged);
            return 0;
        }
        const auto down = static_cast<std::uint32_t>(codes.peek(block->signs + of.begin + i) & 1);
        const std::uint32_t to = Element::stepped(from, static_cast<std::uint32_t>(step), down);
        const std::uint32_t slot = out.first + k;
        out.positions[slot] = out.first_position + position;
        if constexpr (Element::bytes == 4) {
            reinterpret_cast<std::uint32_t*>(out.values)[slot] = to;
        } else if constexpr (Element::bytes == 2) {
            reinterpret_cast<std::uint16_t*>(out.values)[slot] = static_cast<std::uint16_t>(to);
        } else {
            out.values[slot] = static_cast<unsigned char>(to);
        }
        return delta_digest_term(place.seed,
                                 place.first_byte + std::uint64_t{position} * Element::bytes,
                                 place.word_shift, from, to);
    }
};

}  // namespace weightsync::lanes
