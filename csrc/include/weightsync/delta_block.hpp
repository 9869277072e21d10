// One block to bits and back. Bodies are compiled once for each instruction set.
//
// A sparse block's bits, in planes, so that any part can be found without decoding another:
//   counts      for each class that has elements: changes, then exceptions, then their Golomb order
//   signs       one bit a change, classes in turn
//   low bits    of the gaps between the numbers of changed elements, k bits each
//   high bits   the gaps' quotients in unary
//   exceptions  where a step is not the typical one: low bits, high bits, then the steps themselves
// Where more than half of a class changed, the gaps are those between unchanged ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "weightsync/delta_bits.hpp"
#include "weightsync/delta_span.hpp"

namespace weightsync {

struct DeltaChange {
    std::uint32_t position;  // in the block
    std::uint32_t number;    // in its class, or the position
    std::uint32_t magnitude;
    std::uint8_t class_index;
    std::uint8_t down;
    std::uint16_t unused;
};
static_assert(sizeof(DeltaChange) == 16);

// Arrays have lengths that are no multiple of a page, so that equal indices do not meet in one set
// of a cache.
struct DeltaScratch {
    DeltaScan scan;
    // Encoding: positions, then changes in order of position, then in the order they are coded.
    std::uint32_t found_position[kDeltaBlock + 16];
    DeltaChange found[kDeltaBlock + 16];
    DeltaChange change[kDeltaBlock + 16];
    // Decoding, in the order they are coded.
    std::uint32_t position[kDeltaBlock + 48];
    std::uint32_t magnitude[kDeltaBlock + 48];
    std::uint32_t number[kDeltaBlock + 48];
    std::uint8_t down[kDeltaBlock + 192];
    // Both. An exception is a place among the changes of its class.
    std::uint32_t gaps[kDeltaBlock + 48];
    std::uint32_t exception[kDeltaBlock + 48];
    std::uint32_t exception_gaps[kDeltaBlock + 48];
    std::uint64_t folded[kDeltaBlock + 24];
    unsigned char coded[(std::size_t{1} << 20) + 64];
    std::uint8_t class_of[256];  // by key
};

// A rising list of numbers below `size`, as gaps; of those not in it if that is shorter.
struct DeltaNumbers {
    std::uint32_t count;
    int rice;

    WEIGHTSYNC_HD_INLINE DeltaNumbers(std::uint32_t listed, std::uint32_t size)
        : count(is_inverted(listed, size) ? size - listed : listed),
          rice(count == 0 ? 0 : delta_rice_parameter(count, size)) {}
    WEIGHTSYNC_HD_INLINE static bool is_inverted(std::uint32_t listed, std::uint32_t size) {
        return 2 * listed > size;
    }
    WEIGHTSYNC_HD_INLINE static std::uint32_t bits(std::uint32_t listed, std::uint32_t size) {
        const DeltaNumbers numbers(listed, size);
        return numbers.count == 0 ? 0 : delta_rice_bits(numbers.count, size, numbers.rice);
    }
};

// `stride` is that of `listed`, in words.
template <int stride>
WEIGHTSYNC_HD_INLINE void delta_gaps_of(const std::uint32_t* listed, std::uint32_t count,
                                        std::uint32_t size, std::uint32_t* gaps) {
    if (!DeltaNumbers::is_inverted(count, size)) {
        std::uint32_t next = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            gaps[i] = listed[stride * i] - next;
            next = listed[stride * i] + 1;
        }
        return;
    }
    std::uint32_t next = 0;
    std::uint32_t i = 0;
    for (std::uint32_t number = 0; number < size; ++number) {
        if (i < count && listed[stride * i] == number) {
            ++i;
        } else {
            *gaps++ = number - next;
            next = number + 1;
        }
    }
}

// Several codes a turn: the writer is a chain of dependent steps.
WEIGHTSYNC_HD_INLINE void delta_put_low(DeltaBitWriter* writer, const std::uint32_t* gaps,
                                        const DeltaNumbers& numbers) {
    const int k = numbers.rice;
    if (k == 0) return;
    const std::uint64_t mask = (std::uint64_t{1} << k) - 1;
    std::uint32_t i = 0;
    for (; i + 3 <= numbers.count; i += 3) {
        const std::uint64_t first = gaps[i] & mask;
        const std::uint64_t second = gaps[i + 1] & mask;
        const std::uint64_t third = gaps[i + 2] & mask;
        writer->put(first | second << k | third << (2 * k), 3 * k);
    }
    for (; i < numbers.count; ++i) writer->put(gaps[i] & mask, k);
}

WEIGHTSYNC_HD_INLINE void delta_put_high(DeltaBitWriter* writer, const std::uint32_t* gaps,
                                         const DeltaNumbers& numbers) {
    std::uint32_t i = 0;
    for (; i + 2 <= numbers.count; i += 2) {
        const std::uint64_t first = gaps[i] >> numbers.rice;
        const std::uint64_t second = gaps[i + 1] >> numbers.rice;
        if (first + second > 50) {
            writer->put_unary(first);
            writer->put_unary(second);
        } else {
            const std::uint64_t bits = std::uint64_t{1} | std::uint64_t{2} << second;
            writer->put(bits << first, static_cast<int>(first + second) + 2);
        }
    }
    if (i < numbers.count) writer->put_unary(gaps[i] >> numbers.rice);
}

WEIGHTSYNC_HD_INLINE void delta_put_signs(DeltaBitWriter* writer, const DeltaChange* changes,
                                          std::uint32_t count) {
    std::uint32_t i = 0;
    for (; i + 8 <= count; i += 8) {
        std::uint64_t bits = 0;
        for (std::uint32_t j = 0; j < 8; ++j) bits |= std::uint64_t{changes[i + j].down} << j;
        writer->put(bits, 8);
    }
    for (; i < count; ++i) writer->put(changes[i].down, 1);
}

// The inverse of delta_gaps_of and both planes: writes `listed` numbers; `high` moves on.
WEIGHTSYNC_HD_INLINE void delta_take_numbers(const DeltaBits& bits, std::uint64_t low,
                                             std::uint64_t* high, std::uint32_t listed,
                                             std::uint32_t size, std::uint32_t* scratch,
                                             std::uint32_t* out) {
    const DeltaNumbers numbers(listed, size);
    const bool is_inverted = DeltaNumbers::is_inverted(listed, size);
    std::uint32_t* found = is_inverted ? scratch : out;
    const int k = numbers.rice;
    const std::uint64_t mask = (std::uint64_t{1} << k) - 1;
    std::uint64_t next = 0;
    if (numbers.count > 0) {
        bits.check(low + std::uint64_t{numbers.count} * static_cast<std::uint64_t>(k));
        bits.check(*high);
        std::uint64_t base = *high;
        std::uint64_t start = base;  // of the current code
        std::uint64_t word = bits.peek64(base);
        for (std::uint32_t i = 0; i < numbers.count; ++i) {
            while (word == 0) {
                base += 64;
                bits.check(base);
                word = bits.peek64(base);
            }
            const std::uint64_t end = base + static_cast<std::uint64_t>(__builtin_ctzll(word));
            word &= word - 1;
            next += ((end - start) << k) + (bits.peek(low) & mask);
            low += static_cast<std::uint64_t>(k);
            found[i] = static_cast<std::uint32_t>(next);
            ++next;
            start = end + 1;
        }
        bits.check(start);
        *high = start;
        if (next > size) throw DeltaError("a number lies outside its class");
    }
    if (!is_inverted) return;
    std::uint32_t i = 0;
    for (std::uint32_t number = 0; number < size; ++number) {
        if (i < numbers.count && scratch[i] == number) {
            ++i;
        } else {
            *out++ = number;
        }
    }
}

// The order that codes values of these bit lengths in the fewest bits; `lengths[b]` values of b
// bits, none of more than `longest`.
WEIGHTSYNC_HD_INLINE int delta_golomb_order(const std::uint32_t* lengths, int longest) {
    int best = 0;
    std::uint64_t fewest = ~std::uint64_t{0};
    for (int order = 0; order <= std::min(longest, 15); ++order) {
        std::uint64_t total = 0;
        for (int b = 0; b <= longest; ++b) {
            const int one = b <= order ? order + 1 : 2 * b - order;
            total += std::uint64_t{lengths[b]} * static_cast<std::uint64_t>(one);
        }
        if (total < fewest) {
            fewest = total;
            best = order;
        }
    }
    return best;
}

// What a block's sparse planes are made of: changes of class c are [begin[c], begin[c + 1]).
struct DeltaClasses {
    int count;
    std::uint32_t size[kDeltaClasses];
    std::uint32_t begin[kDeltaClasses + 1];
    std::uint32_t gaps_begin[kDeltaClasses + 1];
    std::uint32_t exceptions_begin[kDeltaClasses + 1];
    int order[kDeltaClasses];

    WEIGHTSYNC_HD_INLINE std::uint32_t changes(int c) const { return begin[c + 1] - begin[c]; }
    WEIGHTSYNC_HD_INLINE std::uint32_t exceptions(int c) const {
        return exceptions_begin[c + 1] - exceptions_begin[c];
    }
};

template <int bytes>
WEIGHTSYNC_HD_INLINE std::uint32_t delta_load(const unsigned char* ptr, std::int64_t i) {
    std::uint32_t u = 0;
    std::memcpy(&u, ptr + i * bytes, bytes);
    return u;
}

template <int bytes>
WEIGHTSYNC_HD_INLINE void delta_store(unsigned char* ptr, std::int64_t i, std::uint32_t u) {
    std::memcpy(ptr + i * bytes, &u, bytes);
}

// --- encoding ---

// Positions of the bits of chunks [chunk, end) of the scan to out; returns their number. Two a
// chunk are written whether they are there or not, since which chunk has how many cannot be
// foretold; `out` has room for two more.
WEIGHTSYNC_HD_INLINE std::uint32_t delta_flatten(const DeltaScan& scan, std::int64_t chunk,
                                                 std::int64_t end, std::uint32_t* out) {
    constexpr std::uint64_t top = std::uint64_t{1} << 63;  // counting zeros of nothing is undefined
    std::uint32_t total = 0;
    for (; chunk < end; ++chunk) {
        std::uint64_t mask = scan.masks[chunk][kDeltaChangedRow];
        const auto count = static_cast<std::uint32_t>(__builtin_popcountll(mask));
        const auto base = static_cast<std::uint32_t>(chunk * kDeltaChunk);
        std::uint32_t* next = out + total;
        total += count;
        next[0] = base + static_cast<std::uint32_t>(__builtin_ctzll(mask | top));
        mask &= mask - 1;
        next[1] = base + static_cast<std::uint32_t>(__builtin_ctzll(mask | top));
        mask &= mask - 1;
        for (next += 2; mask != 0; mask &= mask - 1) {
            *next++ = base + static_cast<std::uint32_t>(__builtin_ctzll(mask));
        }
    }
    return total;
}

// Appends the changes in chunks [chunk, end) of the scan, in order of position, to `count` of
// found_*; returns the new count.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::uint32_t delta_find(const unsigned char* old,
                                              const unsigned char* current, std::uint64_t seed,
                                              std::uint64_t first_byte, int word_shift,
                                              std::int64_t chunk, std::int64_t end,
                                              std::uint32_t count, DeltaScratch* s,
                                              std::uint64_t* digest) {
    using Element = DeltaElement<kind>;
    const std::uint32_t stop =
        count + delta_flatten(s->scan, chunk, end, s->found_position + count);
    std::uint64_t sum = 0;
    for (; count < stop; ++count) {
        const std::uint32_t position = s->found_position[count];
        const std::uint32_t from = delta_load<Element::bytes>(old, position);
        const std::uint32_t to = delta_load<Element::bytes>(current, position);
        const std::size_t c = s->class_of[Element::key(from)];
        const std::size_t at = position / kDeltaChunk;
        const std::uint64_t members = s->scan.masks[at][c + 1] & ~s->scan.masks[at][c];
        const std::uint64_t earlier =
            members & ((std::uint64_t{1} << (position % kDeltaChunk)) - 1);
        std::uint32_t down = 0;
        const std::uint32_t magnitude = Element::step(from, to, &down);
        const std::uint32_t number =
            static_cast<std::uint32_t>(s->scan.before[c + 1][at] - s->scan.before[c][at]) +
            static_cast<std::uint32_t>(__builtin_popcountll(earlier));
        s->found[count] = {position,
                           number,
                           magnitude,
                           static_cast<std::uint8_t>(c),
                           static_cast<std::uint8_t>(down),
                           0};
        sum += delta_digest_term(seed, first_byte + std::uint64_t{position} * Element::bytes,
                                 word_shift, from, to);
    }
    *digest += sum;
    return count;
}

// Sorts what was found by class, or leaves it in order of position; returns the mode.
WEIGHTSYNC_HD_INLINE DeltaMode delta_sort(std::uint32_t count, DeltaScratch* s,
                                          DeltaClasses* classes) {
    const int num_classes = s->scan.num_thresholds + 1;
    std::uint32_t counts[kDeltaClasses] = {};
    for (std::uint32_t i = 0; i < count; ++i) ++counts[s->found[i].class_index];
    const auto size = static_cast<std::uint32_t>(s->scan.num_elements);
    std::uint32_t class_bits = 0;
    std::uint32_t begin = 0;
    for (int c = 0; c < num_classes; ++c) {
        const std::uint32_t in_class = s->scan.class_size(c);
        classes->size[c] = in_class;
        classes->begin[c] = begin;
        begin += counts[c];
        if (in_class > 0) class_bits += 12;  // what its counts take, about
        if (counts[c] > 0) class_bits += DeltaNumbers::bits(counts[c], in_class);
    }
    classes->begin[num_classes] = begin;
    classes->count = num_classes;
    if (num_classes == 1 || DeltaNumbers::bits(count, size) + 12 <= class_bits) {
        classes->count = 1;
        classes->size[0] = size;
        classes->begin[0] = 0;
        classes->begin[1] = count;
        for (std::uint32_t i = 0; i < count; ++i) {
            s->change[i] = s->found[i];
            s->change[i].number = s->found[i].position;
        }
        return DeltaMode::gaps;
    }
    std::uint32_t next[kDeltaClasses];
    std::memcpy(next, classes->begin, sizeof(next));
    for (std::uint32_t i = 0; i < count; ++i) {
        s->change[next[s->found[i].class_index]++] = s->found[i];
    }
    return DeltaMode::classes;
}

// Gaps, exceptions and Golomb orders of all classes.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE void delta_prepare(const unsigned char* old, const DeltaParameters& parameters,
                                        DeltaScratch* s, DeltaClasses* classes) {
    std::uint32_t gaps = 0;
    std::uint32_t exceptions = 0;
    for (int c = 0; c < classes->count; ++c) {
        classes->gaps_begin[c] = gaps;
        classes->exceptions_begin[c] = exceptions;
        const std::uint32_t begin = classes->begin[c];
        const std::uint32_t changes = classes->changes(c);
        delta_gaps_of<4>(&s->change[begin].number, changes, classes->size[c], s->gaps + gaps);
        gaps += DeltaNumbers(changes, classes->size[c]).count;
        const std::uint32_t first = exceptions;
        for (std::uint32_t i = 0; i < changes; ++i) {  // without branches; see delta_flatten
            const std::uint32_t from =
                delta_load<DeltaElement<kind>::bytes>(old, s->change[begin + i].position);
            const std::uint32_t typical = parameters.typical[DeltaElement<kind>::key(from)];
            s->exception[exceptions] = i;
            s->folded[exceptions] = typical;
            exceptions += s->change[begin + i].magnitude != typical;
        }
        if (exceptions == first) continue;
        std::uint32_t lengths[34] = {};
        int longest = 0;
        for (std::uint32_t e = first; e < exceptions; ++e) {
            const std::uint64_t folded = delta_fold(s->change[begin + s->exception[e]].magnitude,
                                                    static_cast<std::uint32_t>(s->folded[e]));
            const int length = folded == 0 ? 0 : 64 - __builtin_clzll(folded);
            s->folded[e] = folded;
            ++lengths[length];
            longest = std::max(longest, length);
        }
        classes->order[c] = delta_golomb_order(lengths, longest);
        delta_gaps_of<1>(s->exception + first, exceptions - first, changes,
                         s->exception_gaps + first);
    }
    classes->exceptions_begin[classes->count] = exceptions;
}

// All planes to s->coded; returns the bytes.
WEIGHTSYNC_HD_INLINE std::int64_t delta_write(DeltaScratch* s, const DeltaClasses& classes) {
    DeltaBitWriter writer(s->coded);
    for (int c = 0; c < classes.count; ++c) {
        if (classes.size[c] == 0) continue;
        writer.put_golomb(classes.changes(c), kDeltaCountOrder);
        if (classes.changes(c) == 0) continue;
        writer.put_golomb(classes.exceptions(c), kDeltaExceptionOrder);
        if (classes.exceptions(c) > 0) writer.put(static_cast<std::uint64_t>(classes.order[c]), 4);
    }
    const std::uint32_t changes = classes.begin[classes.count];
    delta_put_signs(&writer, s->change, changes);
    for (int c = 0; c < classes.count; ++c) {
        const DeltaNumbers numbers(classes.changes(c), classes.size[c]);
        delta_put_low(&writer, s->gaps + classes.gaps_begin[c], numbers);
    }
    for (int c = 0; c < classes.count; ++c) {
        const DeltaNumbers numbers(classes.changes(c), classes.size[c]);
        delta_put_high(&writer, s->gaps + classes.gaps_begin[c], numbers);
    }
    for (int c = 0; c < classes.count; ++c) {
        const DeltaNumbers numbers(classes.exceptions(c), classes.changes(c));
        delta_put_low(&writer, s->exception_gaps + classes.exceptions_begin[c], numbers);
    }
    for (int c = 0; c < classes.count; ++c) {
        const DeltaNumbers numbers(classes.exceptions(c), classes.changes(c));
        delta_put_high(&writer, s->exception_gaps + classes.exceptions_begin[c], numbers);
    }
    for (int c = 0; c < classes.count; ++c) {
        for (std::uint32_t e = classes.exceptions_begin[c]; e < classes.exceptions_begin[c + 1];
             ++e) {
            writer.put_golomb(s->folded[e], classes.order[c]);
        }
    }
    return writer.num_bytes();
}

// Positions and new bits, no matter what the old ones are.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::int64_t delta_write_absolute(const unsigned char* current,
                                                       std::uint32_t count, DeltaScratch* s) {
    const auto size = static_cast<std::uint32_t>(s->scan.num_elements);
    DeltaBitWriter writer(s->coded);
    writer.put_golomb(count, kDeltaCountOrder);
    delta_gaps_of<1>(s->found_position, count, size, s->gaps);
    const DeltaNumbers numbers(count, size);
    delta_put_low(&writer, s->gaps, numbers);
    delta_put_high(&writer, s->gaps, numbers);
    for (std::uint32_t i = 0; i < count; ++i) {
        writer.put(delta_load<DeltaElement<kind>::bytes>(current, s->found_position[i]),
                   DeltaElement<kind>::bits);
    }
    return writer.num_bytes();
}

// --- decoding ---

struct DeltaOutput {
    std::uint32_t* positions;  // in the span
    unsigned char* values;
    std::int64_t count;
    std::int64_t capacity;

    WEIGHTSYNC_HD_INLINE void reserve(std::int64_t more) const {
        if (more > capacity - count) throw DeltaError("it changes more elements than it says");
    }
};

// Reads the counts of all classes; returns the bit after them.
WEIGHTSYNC_HD_INLINE std::uint64_t delta_take_counts(const DeltaBits& bits, DeltaClasses* classes) {
    std::uint64_t bit = 0;
    classes->begin[0] = 0;
    classes->exceptions_begin[0] = 0;
    for (int c = 0; c < classes->count; ++c) {
        std::uint64_t changes = 0;
        std::uint64_t exceptions = 0;
        if (classes->size[c] > 0) changes = bits.take_golomb(&bit, kDeltaCountOrder);
        if (changes > classes->size[c]) throw DeltaError("more changes than a class has elements");
        if (changes > 0) exceptions = bits.take_golomb(&bit, kDeltaExceptionOrder);
        if (exceptions > changes) throw DeltaError("more exceptions than changes");
        classes->order[c] = exceptions > 0 ? static_cast<int>(bits.take(&bit, 4)) : 0;
        classes->begin[c + 1] = classes->begin[c] + static_cast<std::uint32_t>(changes);
        classes->exceptions_begin[c + 1] =
            classes->exceptions_begin[c] + static_cast<std::uint32_t>(exceptions);
    }
    return bit;
}

WEIGHTSYNC_HD_INLINE std::uint64_t delta_low_bits(std::uint32_t listed, std::uint32_t size) {
    const DeltaNumbers numbers(listed, size);
    return std::uint64_t{numbers.count} * static_cast<std::uint64_t>(numbers.rice);
}

// Positions (in the block), magnitudes and signs of all changes, into s.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE void delta_read(const DeltaBits& bits, const unsigned char* old,
                                     DeltaMode mode, const DeltaParameters& parameters,
                                     DeltaLocate locate, DeltaScratch* s, DeltaClasses* classes) {
    using Element = DeltaElement<kind>;
    const std::uint64_t signs = delta_take_counts(bits, classes);
    const std::uint32_t changes = classes->begin[classes->count];
    bits.check(signs + changes);
    for (std::uint32_t i = 0; i < changes; i += 32) {
        const std::uint64_t word = bits.peek(signs + i);
        const std::uint32_t end = std::min(changes - i, 32u);
        for (std::uint32_t j = 0; j < end; ++j) s->down[i + j] = (word >> j) & 1;
    }
    std::uint64_t low = signs + changes;
    std::uint64_t high = low;
    for (int c = 0; c < classes->count; ++c)
        high += delta_low_bits(classes->changes(c), classes->size[c]);
    for (int c = 0; c < classes->count; ++c) {
        const std::uint32_t count = classes->changes(c);
        std::uint32_t* position = s->position + classes->begin[c];
        if (count == 0) continue;
        std::uint32_t* number = mode == DeltaMode::classes ? s->number : position;
        delta_take_numbers(bits, low, &high, count, classes->size[c], s->gaps, number);
        low += delta_low_bits(count, classes->size[c]);
        if (mode == DeltaMode::classes) locate(s->scan, c, number, count, position);
    }
    for (std::uint32_t i = 0; i < changes; ++i) {
        s->magnitude[i] =
            parameters.typical[Element::key(delta_load<Element::bytes>(old, s->position[i]))];
    }
    low = high;
    for (int c = 0; c < classes->count; ++c) {
        high += delta_low_bits(classes->exceptions(c), classes->changes(c));
    }
    for (int c = 0; c < classes->count; ++c) {
        const std::uint32_t count = classes->exceptions(c);
        if (count == 0) continue;
        delta_take_numbers(bits, low, &high, count, classes->changes(c), s->gaps,
                           s->exception + classes->exceptions_begin[c]);
        low += delta_low_bits(count, classes->changes(c));
    }
    for (int c = 0; c < classes->count; ++c) {
        for (std::uint32_t e = classes->exceptions_begin[c]; e < classes->exceptions_begin[c + 1];
             ++e) {
            std::uint32_t& magnitude = s->magnitude[classes->begin[c] + s->exception[e]];
            const std::uint64_t step =
                delta_unfold(bits.take_golomb(&high, classes->order[c]), magnitude);
            if (step > Element::sign) throw DeltaError("a step is longer than its dtype");
            magnitude = static_cast<std::uint32_t>(step);
        }
    }
}

// Appends the changes of a sparse block; returns what they add to the digest.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::uint64_t delta_emit(const unsigned char* old, const DeltaPlace& place,
                                              std::uint32_t first_position, int word_shift,
                                              std::uint32_t changes, const DeltaScratch& s,
                                              DeltaOutput* out) {
    using Element = DeltaElement<kind>;
    out->reserve(changes);
    std::uint64_t sum = 0;
    std::uint32_t* positions = out->positions + out->count;
    const std::uint64_t start =
        (place.start_element + first_position) * static_cast<std::uint64_t>(Element::bytes);
    for (std::uint32_t i = 0; i < changes; ++i) {
        const std::uint32_t from = delta_load<Element::bytes>(old, s.position[i]);
        const std::uint32_t to = Element::stepped(from, s.magnitude[i], s.down[i]);
        positions[i] = first_position + s.position[i];
        delta_store<Element::bytes>(out->values, out->count + i, to);
        sum += delta_digest_term(place.seed, start + std::uint64_t{s.position[i]} * Element::bytes,
                                 word_shift, from, to);
    }
    out->count += changes;
    return sum;
}

}  // namespace weightsync
