// One block to bits.
#pragma once

#include "weightsync/delta_block.hpp"

namespace weightsync {

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
// found_*; returns the new count. One thing after the other for all of them, so that what can be
// done in vectors is.
template <DeltaKind kind>
WEIGHTSYNC_HD_INLINE std::uint32_t delta_find(
    const unsigned char* old, const unsigned char* current, const DeltaParameters& parameters,
    std::uint64_t seed, std::uint64_t first_byte, int word_shift, std::int64_t chunk,
    std::int64_t end, std::uint32_t count, DeltaScratch* s, std::uint64_t* digest) {
    using Element = DeltaElement<kind>;
    const std::uint32_t* const position = s->found_position + count;
    const std::uint32_t found = delta_flatten(s->scan, chunk, end, s->found_position + count);
    DeltaFound* const f = &s->piece;
    for (std::uint32_t i = 0; i < found; ++i) {
        f->from[i] = delta_load<Element::bytes>(old, position[i]);
        f->to[i] = delta_load<Element::bytes>(current, position[i]);
    }
    // Keys are below 256: beyond the thresholds that there are, none is reached.
    std::uint32_t limit[kDeltaThresholds];
    for (int t = 0; t < kDeltaThresholds; ++t) {
        limit[t] = t < s->scan.num_thresholds ? parameters.thresholds[t] : 256u;
    }
    for (std::uint32_t i = 0; i < found; ++i) {
        const std::uint32_t key = Element::key(f->from[i]);
        std::uint32_t c = 0;
        for (int t = 0; t < kDeltaThresholds; ++t) c += key >= limit[t];
        std::uint32_t down = 0;
        f->magnitude[i] = Element::step(f->from[i], f->to[i], &down);
        f->kind[i] = c | down << 8 | key << 16;
    }
    for (std::uint32_t i = 0; i < found; ++i) {
        const std::size_t c = f->kind[i] & 0xFF;
        const std::size_t at = position[i] / kDeltaChunk;
        const std::uint64_t members = s->scan.masks[at][c + 1] & ~s->scan.masks[at][c];
        const std::uint64_t earlier =
            members & ((std::uint64_t{1} << (position[i] % kDeltaChunk)) - 1);
        const std::uint32_t number =
            static_cast<std::uint32_t>(s->scan.before[c + 1][at] - s->scan.before[c][at]) +
            static_cast<std::uint32_t>(__builtin_popcountll(earlier));
        ++s->found_in_class[c];
        s->found[count + i].set(position[i], number, f->magnitude[i], f->kind[i]);
    }
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < found; ++i) {
        sum += delta_digest_term(seed, first_byte + std::uint64_t{position[i]} * Element::bytes,
                                 word_shift, f->from[i], f->to[i]);
    }
    *digest += sum;
    return count + found;
}

// Sorts what was found by class, or leaves it in order of position; returns the mode.
WEIGHTSYNC_HD_INLINE DeltaMode delta_sort(std::uint32_t count, DeltaScratch* s,
                                          DeltaClasses* classes) {
    const int num_classes = s->scan.num_thresholds + 1;
    const std::uint32_t* const counts = s->found_in_class;
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
WEIGHTSYNC_HD_INLINE void delta_prepare(const DeltaParameters& parameters, DeltaScratch* s,
                                        DeltaClasses* classes) {
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
            const std::uint32_t typical = parameters.typical[s->change[begin + i].key];
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

}  // namespace weightsync
