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
#include "weightsync/delta_numbers.hpp"
#include "weightsync/delta_span.hpp"

namespace weightsync {

struct DeltaChange {
    std::uint32_t position;  // in the block
    std::uint32_t number;    // in its class, or the position
    std::uint32_t magnitude;
    std::uint8_t class_index;
    std::uint8_t down;
    std::uint8_t key;  // of the old element
    std::uint8_t unused;

    // In two stores instead of six.
    WEIGHTSYNC_HD_INLINE void set(std::uint32_t at, std::uint32_t number_in_class,
                                  std::uint32_t step, std::uint32_t class_down_key) {
        const std::uint64_t words[2] = {at | std::uint64_t{number_in_class} << 32,
                                        step | std::uint64_t{class_down_key} << 32};
        std::memcpy(this, words, sizeof(words));
    }
};
static_assert(sizeof(DeltaChange) == 16);

// What is known of the changes of one piece of a block, before they are numbered.
struct DeltaFound {
    std::uint32_t from[kDeltaPiece];
    std::uint32_t to[kDeltaPiece];
    std::uint32_t magnitude[kDeltaPiece];
    std::uint32_t kind[kDeltaPiece];  // class, whether down, key: a byte each
};

// Arrays have lengths that are no multiple of a page, so that equal indices do not meet in one set
// of a cache.
struct DeltaScratch {
    DeltaScan scan;
    // Encoding: positions, then changes in order of position, then in the order they are coded.
    std::uint32_t found_position[kDeltaBlock + 16];
    DeltaChange found[kDeltaBlock + 16];
    std::uint32_t found_in_class[kDeltaClasses];
    DeltaFound piece;
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

}  // namespace weightsync
