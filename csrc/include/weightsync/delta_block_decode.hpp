// One block's bits back to changes. Whatever they are, nothing is read or written out of bounds.
#pragma once

#include "weightsync/delta_block.hpp"

namespace weightsync {

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
