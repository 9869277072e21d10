// Staged changes of a block to its bits, by teams of threads: each class by one team (a warp on a
// device, the calling thread on the CPU). Planes lie where counts say, so classes need not wait for
// each other but twice: for their lists, and for their lengths.
#pragma once

#include "weightsync/delta_lanes.hpp"
#include "weightsync/delta_numbers.hpp"

namespace weightsync::lanes {

// A team that is one thread. Others have the same members: `each` calls f(i) for i < count;
// `scan` calls f(i, sum of value(j) for j < i, value(i)) and returns the sum of all; `choose` calls
// f(i, how many before it) for each i that `is_chosen` and returns how many are; `number` calls
// f(i, class(i), how many of its class before it), of kDeltaClasses; `sum` returns the sum of
// value(i). What one call wrote, the next may read. `least` is the first i < count <= 32 of the
// lowest cost(i). Every member of a team makes every call.
struct SoloTeam {
    template <typename F>
    void each(std::uint32_t count, const F& f) const {
        for (std::uint32_t i = 0; i < count; ++i) f(i);
    }
    template <typename Value, typename F>
    std::uint32_t scan(std::uint32_t count, const Value& value, const F& f) const {
        std::uint32_t before = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            const std::uint32_t one = value(i);
            f(i, before, one);
            before += one;
        }
        return before;
    }
    template <typename IsChosen, typename F>
    std::uint32_t choose(std::uint32_t count, const IsChosen& is_chosen, const F& f) const {
        std::uint32_t before = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            if (is_chosen(i)) f(i, before++);
        }
        return before;
    }
    template <typename Class, typename F>
    void number(std::uint32_t count, const Class& class_of, const F& f) const {
        std::uint32_t before[kDeltaClasses] = {};
        for (std::uint32_t i = 0; i < count; ++i) {
            const std::uint32_t c = class_of(i);
            f(i, c, before[c]++);
        }
    }
    template <typename Value>
    std::uint32_t sum(std::uint32_t count, const Value& value) const {
        std::uint32_t total = 0;
        for (std::uint32_t i = 0; i < count; ++i) total += value(i);
        return total;
    }
    template <typename Cost>
    std::uint32_t least(std::uint32_t count, const Cost& cost) const {
        std::uint32_t best = 0;
        std::uint64_t fewest = ~std::uint64_t{0};
        for (std::uint32_t i = 0; i < count; ++i) {
            const std::uint64_t one = cost(i);
            if (one < fewest) best = i;
            if (one < fewest) fewest = one;
        }
        return best;
    }
};

WEIGHTSYNC_HD_INLINE void add_to(std::uint32_t* counter, std::uint32_t value) {
#ifdef __CUDA_ARCH__
    atomicAdd(counter, value);
#else
    *counter += value;
#endif
}

// What it was.
WEIGHTSYNC_HD_INLINE std::uint32_t take_one(std::uint32_t* counter) {
#ifdef __CUDA_ARCH__
    return atomicAdd(counter, 1u);
#else
    return (*counter)++;
#endif
}

WEIGHTSYNC_HD_INLINE void set_bits(std::uint32_t* word, std::uint32_t bits) {
#ifdef __CUDA_ARCH__
    atomicOr(word, bits);
#else
    *word |= bits;
#endif
}

// `value` < 2^count at bit `bit` of zeroed words; count <= 32.
WEIGHTSYNC_HD_INLINE void put_bits(std::uint32_t* words, std::uint32_t bit, std::uint64_t value) {
    const std::uint64_t shifted = value << (bit & 31);
    const auto low = static_cast<std::uint32_t>(shifted);
    const auto high = static_cast<std::uint32_t>(shifted >> 32);
    if (low != 0) set_bits(words + (bit >> 5), low);
    if (high != 0) set_bits(words + (bit >> 5) + 1, high);
}

WEIGHTSYNC_HD_INLINE std::uint32_t golomb_bits(std::uint64_t value, int order) {
    const int top = top_bit(value + (std::uint64_t{1} << order));
    return static_cast<std::uint32_t>(2 * top - order + 1);
}

// Returns the bit behind it.
WEIGHTSYNC_HD_INLINE std::uint32_t put_golomb(std::uint32_t* words, std::uint32_t bit,
                                              std::uint64_t value, int order) {
    const std::uint64_t shifted = value + (std::uint64_t{1} << order);
    const int top = top_bit(shifted);
    bit += static_cast<std::uint32_t>(top - order);
    put_bits(words, bit, 1);
    put_bits(words, bit + 1, shifted & ((std::uint64_t{1} << top) - 1));
    return bit + 1 + static_cast<std::uint32_t>(top);
}

// A rising list as its encoder sees it: the list, or if that is shorter what is not in it.
struct DeltaList {
    const std::uint16_t* numbers;
    std::uint32_t count;
    int rice;
    std::uint32_t quotients;  // sum over the gaps

    WEIGHTSYNC_HD_INLINE std::uint32_t gap(std::uint32_t i) const {
        return std::uint32_t{numbers[i]} - (i == 0 ? 0 : std::uint32_t{numbers[i - 1]} + 1);
    }
    WEIGHTSYNC_HD_INLINE std::uint32_t low_bits() const {
        return count * static_cast<std::uint32_t>(rice);
    }
    WEIGHTSYNC_HD_INLINE std::uint32_t high_bits() const { return count + quotients; }
};

// `unlisted` has room for as many as are listed.
template <typename Team>
WEIGHTSYNC_HD_INLINE DeltaList delta_list(const Team& team, const std::uint16_t* listed,
                                          std::uint32_t count, std::uint32_t size,
                                          std::uint16_t* unlisted) {
    const DeltaNumbers numbers(count, size);
    DeltaList list{listed, numbers.count, numbers.rice, 0};
    if (DeltaNumbers::is_inverted(count, size)) {
        list.numbers = unlisted;
        team.each(count + 1, [&](std::uint32_t i) {  // what lies before the i-th
            const std::uint32_t begin = i == 0 ? 0 : std::uint32_t{listed[i - 1]} + 1;
            const std::uint32_t end = i == count ? size : std::uint32_t{listed[i]};
            for (std::uint32_t number = begin; number < end; ++number) {
                unlisted[number - i] = static_cast<std::uint16_t>(number);
            }
        });
    }
    list.quotients =
        team.sum(list.count, [&](std::uint32_t i) { return list.gap(i) >> list.rice; });
    return list;
}

template <typename Team>
WEIGHTSYNC_HD_INLINE void delta_put_list(const Team& team, const DeltaList& list, std::uint32_t low,
                                         std::uint32_t high, std::uint32_t* words) {
    const std::uint32_t mask = (1u << list.rice) - 1;
    team.scan(
        list.count, [&](std::uint32_t i) { return list.gap(i) >> list.rice; },
        [&](std::uint32_t i, std::uint32_t before, std::uint32_t quotient) {
            if (list.rice > 0) {
                put_bits(words, low + i * static_cast<std::uint32_t>(list.rice),
                         list.gap(i) & mask);
            }
            put_bits(words, high + before + quotient + i, 1);
        });
}

// One class, or all of a block in gaps mode.
struct DeltaClass {
    std::uint32_t size;   // elements
    std::uint32_t begin;  // of its changes in coded order
    std::uint32_t changes;
    std::uint32_t exceptions;
    std::uint32_t code_bits;  // of the exceptions' steps
    int order;
    DeltaList gaps;
    DeltaList exception_gaps;
    std::uint32_t lengths[34];  // exceptions by the bits of their codes
};

// Where the planes of a class begin, in bits: a change takes less than 128 of them.
struct DeltaPlanes {
    std::uint32_t signs;
    std::uint32_t low;
    std::uint32_t high;
    std::uint32_t exception_low;
    std::uint32_t exception_high;
    std::uint32_t codes;
};

// Brings the changes that a warp staged to their places in coded order: by class, each behind those
// of the warps before, or as they come if `is_gaps`. By class, `begins` are the first places and
// `numbers` what the warps before add to numbers.
template <typename Team>
WEIGHTSYNC_HD_INLINE void delta_place(const Team& team, const DeltaStage& stage, std::uint32_t warp,
                                      std::uint32_t staged, bool is_gaps,
                                      const std::uint32_t* begins, const std::uint32_t* numbers) {
    const std::uint32_t from = warp * stage.capacity;
    team.number(
        staged,
        [&](std::uint32_t i) { return is_gaps ? 0u : std::uint32_t{stage.label[from + i]} & 7u; },
        [&](std::uint32_t i, std::uint32_t c, std::uint32_t before) {
            const std::uint32_t to = begins[c] + before;
            stage.listed[to] =
                is_gaps ? stage.position[from + i]
                        : static_cast<std::uint16_t>(stage.number[from + i] + numbers[c]);
            stage.low[to] = stage.high[from + i];
            stage.coded_label[to] = stage.label[from + i];
        });
}

// Length and parameters of everything that a class has. `lengths` are zero.
template <typename Team>
WEIGHTSYNC_HD_INLINE void delta_measure(const Team& team, const DeltaStage& stage, DeltaClass* of) {
    // A copy, since every member of the team writes the same to `of`.
    const std::uint32_t begin = of->begin;
    const std::uint32_t changes = of->changes;
    std::uint32_t* lengths = of->lengths;
    const std::uint32_t* codes = stage.low + begin;
    std::uint16_t* exception = stage.position + begin;
    const DeltaList gaps =
        delta_list(team, stage.listed + begin, changes, of->size, stage.number + begin);
    const std::uint32_t exceptions = team.choose(
        changes, [&](std::uint32_t i) { return codes[i] != 0; },
        [&](std::uint32_t i, std::uint32_t before) {
            exception[before] = static_cast<std::uint16_t>(i);
            const std::uint32_t folded = codes[i] - 1;
            add_to(lengths + (folded == 0 ? 0 : top_bit(folded) + 1), 1);
        });
    const DeltaList exception_gaps =
        delta_list(team, exception, exceptions, changes, stage.unlisted + begin);
    int order = 0;
    if (exceptions > 0) {
        int longest = 33;
        while (lengths[longest] == 0) --longest;
        const auto orders = static_cast<std::uint32_t>(longest < 15 ? longest : 15) + 1;
        order = static_cast<int>(team.least(orders, [&](std::uint32_t i) {
            const int one = static_cast<int>(i);
            std::uint64_t total = 0;
            for (int b = 0; b <= longest; ++b) {
                total += std::uint64_t{lengths[b]} *
                         static_cast<std::uint64_t>(b <= one ? one + 1 : 2 * b - one);
            }
            return total;
        }));
    }
    const std::uint32_t code_bits = team.sum(
        exceptions, [&](std::uint32_t e) { return golomb_bits(codes[exception[e]] - 1, order); });
    of->exceptions = exceptions;
    of->code_bits = code_bits;
    of->order = order;
    of->gaps = gaps;
    of->exception_gaps = exception_gaps;
}

WEIGHTSYNC_HD_INLINE std::uint32_t delta_counts_bits(const DeltaClass& of) {
    if (of.size == 0) return 0;
    std::uint32_t bits = golomb_bits(of.changes, kDeltaCountOrder);
    if (of.changes > 0) bits += golomb_bits(of.exceptions, kDeltaExceptionOrder);
    return bits + (of.exceptions > 0 ? 4 : 0);
}

// Where the planes of class `c` of `count` begin, and (in `total`) where the last one ends.
WEIGHTSYNC_HD_INLINE DeltaPlanes delta_planes(const DeltaClass* classes, int count, int c,
                                              std::uint32_t* total) {
    std::uint32_t length[6] = {};  // of the planes of all classes
    std::uint32_t before[6] = {};  // of those before class c
    std::uint32_t counts = 0;
    for (int i = 0; i < count; ++i) {
        const DeltaClass& one = classes[i];
        const std::uint32_t lengths[6] = {one.changes,
                                          one.gaps.low_bits(),
                                          one.gaps.high_bits(),
                                          one.exception_gaps.low_bits(),
                                          one.exception_gaps.high_bits(),
                                          one.code_bits};
        counts += delta_counts_bits(one);
        for (int plane = 0; plane < 6; ++plane) {
            length[plane] += lengths[plane];
            before[plane] += i < c ? lengths[plane] : 0;
        }
    }
    std::uint32_t begin[6];
    std::uint32_t next = counts;
    for (int plane = 0; plane < 6; ++plane) {
        begin[plane] = next + before[plane];
        next += length[plane];
    }
    *total = next;
    return {begin[0], begin[1], begin[2], begin[3], begin[4], begin[5]};
}

// The counts of all classes, by one thread.
WEIGHTSYNC_HD_INLINE void delta_put_counts(const DeltaClass* classes, int count,
                                           std::uint32_t* words) {
    std::uint32_t bit = 0;
    for (int c = 0; c < count; ++c) {
        const DeltaClass& one = classes[c];
        if (one.size == 0) continue;
        bit = put_golomb(words, bit, one.changes, kDeltaCountOrder);
        if (one.changes == 0) continue;
        bit = put_golomb(words, bit, one.exceptions, kDeltaExceptionOrder);
        if (one.exceptions == 0) continue;
        put_bits(words, bit, static_cast<std::uint64_t>(one.order));
        bit += 4;
    }
}

template <typename Team>
WEIGHTSYNC_HD_INLINE void delta_put_class(const Team& team, const DeltaStage& stage,
                                          const DeltaClass& of, const DeltaPlanes& planes,
                                          std::uint32_t* words) {
    team.each(of.changes, [&](std::uint32_t i) {
        if ((stage.coded_label[of.begin + i] & 8) != 0) put_bits(words, planes.signs + i, 1);
    });
    delta_put_list(team, of.gaps, planes.low, planes.high, words);
    delta_put_list(team, of.exception_gaps, planes.exception_low, planes.exception_high, words);
    const std::uint32_t* codes = stage.low + of.begin;
    const std::uint16_t* exception = stage.position + of.begin;
    team.scan(
        of.exceptions,
        [&](std::uint32_t e) { return golomb_bits(codes[exception[e]] - 1, of.order); },
        [&](std::uint32_t e, std::uint32_t before, std::uint32_t) {
            put_golomb(words, planes.codes + before, codes[exception[e]] - 1, of.order);
        });
}

// Sizes and mode from counts, by one thread: `sizes`, `changes` and `bits` (of the numbers) are
// those of the classes by exponent, the last of `bits` those of positions.
WEIGHTSYNC_HD_INLINE DeltaMode delta_choose(std::uint32_t size, int num_classes,
                                            const std::uint32_t* sizes,
                                            const std::uint32_t* changes, const std::uint32_t* bits,
                                            DeltaClass* classes, int* count) {
    std::uint32_t class_bits = 0;
    std::uint32_t begin = 0;
    for (int c = 0; c < num_classes; ++c) {
        classes[c].size = sizes[c];
        classes[c].begin = begin;
        classes[c].changes = changes[c];
        begin += changes[c];
        if (sizes[c] > 0) class_bits += 12;
        if (changes[c] > 0) class_bits += bits[c];
    }
    *count = num_classes;
    if (num_classes > 1 && bits[num_classes] + 12 > class_bits) return DeltaMode::classes;
    classes[0].size = size;
    classes[0].begin = 0;
    classes[0].changes = begin;
    *count = 1;
    return DeltaMode::gaps;
}

}  // namespace weightsync::lanes
