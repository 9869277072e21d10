// The steps of coding one block by a block of threads, and what they share. A device runs them with
// barriers between, the CPU's twin one after the other.
#pragma once

#include "weightsync/delta_batch.hpp"
#include "weightsync/delta_team_encode.hpp"

namespace weightsync::lanes {

// What the warps counted, and what follows from it.
struct DeltaBlockCounts {
    DeltaRowStart starts[kDeltaWarps][kDeltaMaxRows];
    std::uint32_t totals[kDeltaWarps][kDeltaThresholds + 1];  // by warp; the last: changes
    std::uint32_t base[kDeltaWarps][kDeltaThresholds];        // of the warps before
    std::uint32_t staged[kDeltaWarps];
    std::uint32_t num_changed;
    bool is_fitting;                          // no warp's stage was too small
    std::uint32_t reached[kDeltaThresholds];  // of the block
    std::uint32_t class_changes[kDeltaClasses];
    // By warp and class, its changes; then where they begin in coded order.
    std::uint32_t places[kDeltaWarps][kDeltaClasses];
    std::uint32_t numbers[kDeltaWarps][kDeltaClasses];  // what the warps before add to numbers
    std::uint32_t class_sizes[kDeltaClasses];
    std::uint32_t class_bits[kDeltaClasses + 1];
    DeltaClass classes[kDeltaClasses];
    int num_classes;
    DeltaMode mode;
};

// What a row of a warp adds to its running totals.
WEIGHTSYNC_HD_INLINE void delta_add_row(const DeltaCounts& row, std::uint32_t* running) {
    WEIGHTSYNC_UNROLL
    for (int t = 0; t < kDeltaThresholds; ++t) running[t] += delta_field(row, t);
    running[kDeltaThresholds] += row.low & 1023u;
}

// By one thread a column of the totals (thresholds, then changes), once all warps have counted.
WEIGHTSYNC_HD_INLINE void delta_add_warps(const DeltaStage& stage, int column,
                                          DeltaBlockCounts* counts) {
    bool fits = true;
    std::uint32_t sum = 0;
    WEIGHTSYNC_UNROLL
    for (std::uint32_t warp = 0; warp < kDeltaWarps; ++warp) {
        const std::uint32_t one = counts->totals[warp][column];
        if (column < kDeltaThresholds) {
            counts->base[warp][column] = sum;
        } else {
            counts->staged[warp] = one;
            fits = fits && one <= stage.capacity;
        }
        sum += one;
    }
    if (column < kDeltaThresholds) {
        counts->reached[column] = sum;
    } else {
        counts->num_changed = sum;
        counts->is_fitting = fits;
    }
}

// By one thread a class, and one more: what its numbers take. Clears what is added to later.
WEIGHTSYNC_HD_INLINE void delta_measure_class(std::uint32_t size, const DeltaParameters& parameters,
                                              int c, DeltaBlockCounts* counts) {
    const int num_classes = parameters.num_thresholds + 1;
    if (c > num_classes) return;
    if (c == num_classes) {
        counts->class_bits[c] = DeltaNumbers::bits(counts->num_changed, size);
        return;
    }
    const std::uint32_t from = c == 0 ? size : counts->reached[c - 1];
    const std::uint32_t in_class = from - (c + 1 < num_classes ? counts->reached[c] : 0);
    counts->class_sizes[c] = in_class;
    std::uint32_t changes = 0;
    WEIGHTSYNC_UNROLL
    for (std::uint32_t warp = 0; warp < kDeltaWarps; ++warp) {
        const std::uint32_t one = counts->places[warp][c];
        counts->places[warp][c] = changes;
        changes += one;
    }
    counts->class_changes[c] = changes;
    counts->class_bits[c] = DeltaNumbers::bits(counts->class_changes[c], in_class);
    for (std::uint32_t& length : counts->classes[c].lengths) length = 0;
}

// By one thread, once all classes are measured.
WEIGHTSYNC_HD_INLINE void delta_choose_mode(std::uint32_t size, const DeltaParameters& parameters,
                                            DeltaBlockCounts* counts) {
    counts->mode = delta_choose(size, parameters.num_thresholds + 1, counts->class_sizes,
                                counts->class_changes, counts->class_bits, counts->classes,
                                &counts->num_classes);
}

// By one thread a warp and class, once the mode is chosen: where those changes begin, and the
// number of the first element. It may be below 0: numbers count modulo 2^16.
WEIGHTSYNC_HD_INLINE void delta_begin_places(std::uint32_t warp, int c, DeltaBlockCounts* counts) {
    const std::uint32_t* base = counts->base[warp];
    counts->numbers[warp][c] = (c == 0 ? 0 : base[c - 1]) - (c == kDeltaThresholds ? 0 : base[c]);
    std::uint32_t& begin = counts->places[warp][c];
    if (counts->mode != DeltaMode::gaps) {
        begin += counts->classes[c].begin;
    } else if (c == 0) {
        begin = 0;
        for (std::uint32_t w = 0; w < warp; ++w) begin += counts->staged[w];
    }
}

}  // namespace weightsync::lanes
