// The sample of both versions that a span's parameters are chosen from: where it lies, and its
// counts. Counting may be done on a device; the choice is host maths.
#pragma once

#include <cstdint>

#include "weightsync/delta.hpp"
#include "weightsync/delta_span.hpp"

namespace weightsync {

struct DeltaSampleCounts {
    std::uint32_t all[256];      // keys of the elements whose keys are counted
    std::uint32_t changed[256];  // keys of those that changed
    std::uint8_t typical[256];   // the most frequent step by key, 1 if none is
    std::uint32_t num_counted;
    std::uint32_t num_compared;
};

inline constexpr std::int64_t kSamplePiece = 1024;   // elements compared in a row
inline constexpr std::int64_t kSampleCounted = 128;  // of these, whose keys are counted all
inline constexpr std::int64_t kSampleEvery = 32768;  // one piece in so many elements
inline constexpr std::int64_t kSampleWhole = 16384;  // a span up to here is looked at whole

struct DeltaSamplePiece {
    std::int64_t begin;
    std::int64_t end;
    std::int64_t counted_end;
};

WEIGHTSYNC_HD_INLINE std::int64_t delta_sample_pieces(std::int64_t num_elements) {
    if (num_elements <= kSampleWhole) return 1;
    const std::int64_t pieces = num_elements / kSampleEvery;
    return pieces < 16 ? 16 : pieces;
}

WEIGHTSYNC_HD_INLINE DeltaSamplePiece delta_sample_piece(std::int64_t num_elements,
                                                         std::int64_t piece) {
    if (num_elements <= kSampleWhole) return {0, num_elements, num_elements};
    const std::int64_t stride = num_elements / delta_sample_pieces(num_elements);
    // Scattered within its stride: rows of a matrix have stripes, and strides may fit them.
    const std::uint32_t random = static_cast<std::uint32_t>(piece) * 0x9E3779B1u;
    const std::int64_t room = stride > kSamplePiece ? stride - kSamplePiece : 0;
    const std::int64_t begin =
        piece * stride +
        static_cast<std::int64_t>((std::uint64_t{random} * static_cast<std::uint64_t>(room)) >> 32);
    const std::int64_t wanted = begin + (stride < kSamplePiece ? stride : kSamplePiece);
    const std::int64_t end = wanted < num_elements ? wanted : num_elements;
    const std::int64_t counted = begin + kSampleCounted;
    return {begin, end, counted < end ? counted : end};
}

// The most frequent step of a key from the counts of steps 1 .. kDeltaMaxTypical ([0]: longer
// ones). Seldom seen, or seen as often as others: 1.
WEIGHTSYNC_HD_INLINE std::uint8_t delta_typical_step(const std::uint32_t* steps) {
    int most = 1;
    for (int step = 2; step <= kDeltaMaxTypical; ++step) {
        if (steps[step] > steps[most]) most = step;
    }
    return static_cast<std::uint8_t>(steps[most] > 1 ? most : 1);
}

DeltaParameters delta_parameters_of(std::int64_t num_elements, const DeltaSampleCounts& counts);

}  // namespace weightsync
