// The batched segment copy: many strided copies in one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weightsync/control.hpp"
#include "weightsync/convert.hpp"
#include "weightsync/hd.hpp"

namespace weightsync {

struct SegmentDim {
    std::int64_t count;
    std::int64_t source_stride_bytes;
    std::int64_t target_stride_bytes;
};

inline constexpr int kSegmentDims = 3;

// One row of a segment table. A segment is count0 * count1 * count2 runs of `num_bytes` contiguous
// source bytes each; `dims` is outermost first, and unused dims have count 1. Targets of one call
// must not overlap each other or any source.
struct Segment {
    std::int64_t source_ptr;
    std::int64_t target_ptr;
    std::int64_t num_bytes;
    std::int64_t convert;
    SegmentDim dims[kSegmentDims];

    WEIGHTSYNC_HD Convert conversion() const { return static_cast<Convert>(convert); }
    WEIGHTSYNC_HD std::int64_t num_runs() const {
        return dims[0].count * dims[1].count * dims[2].count;
    }
    WEIGHTSYNC_HD std::int64_t source_bytes() const { return num_runs() * num_bytes; }
    WEIGHTSYNC_HD std::int64_t target_run_bytes() const {
        return converted_bytes(num_bytes, conversion());
    }
};

inline constexpr std::size_t kSegmentColumns = 13;
static_assert(sizeof(Segment) == kSegmentColumns * sizeof(std::int64_t));

// Byte offsets of one run from the segment's two pointers.
struct RunOffset {
    std::int64_t source;
    std::int64_t target;
};

WEIGHTSYNC_HD inline RunOffset run_offset(const Segment& segment, std::int64_t run) {
    RunOffset offset{0, 0};
    for (int dim = kSegmentDims - 1; dim >= 0; --dim) {
        const SegmentDim& d = segment.dims[dim];
        const std::int64_t index = run % d.count;
        run /= d.count;
        offset.source += index * d.source_stride_bytes;
        offset.target += index * d.target_stride_bytes;
    }
    return offset;
}

// The same copy with as few dims as possible: dims that continue the run, or each other, on both
// sides are merged, and dims of count 1 are moved outermost. Needs counts >= 1.
WEIGHTSYNC_HD inline Segment coalesced(const Segment& segment) {
    Segment merged = segment;
    for (SegmentDim& d : merged.dims) d = SegmentDim{1, 0, 0};
    int slot = kSegmentDims;  // the next dim goes to slot - 1
    for (int dim = kSegmentDims - 1; dim >= 0; --dim) {
        const SegmentDim& d = segment.dims[dim];
        if (d.count == 1) continue;
        if (slot == kSegmentDims && d.source_stride_bytes == merged.num_bytes &&
            d.target_stride_bytes == merged.target_run_bytes()) {
            merged.num_bytes *= d.count;
            continue;
        }
        if (slot < kSegmentDims) {
            SegmentDim& inner = merged.dims[slot];
            if (d.source_stride_bytes == inner.count * inner.source_stride_bytes &&
                d.target_stride_bytes == inner.count * inner.target_stride_bytes) {
                inner.count *= d.count;
                continue;
            }
        }
        merged.dims[--slot] = d;
    }
    return merged;
}

// Throws std::invalid_argument naming the row and the column. Checks every row before any byte
// moves.
void validate_segments(const Segment* segments, std::int64_t num_segments);

// Copies every segment with up to `num_threads` threads. Returns the source bytes copied, which is
// less than the table's total only if `control.cancel` was raised.
std::int64_t copy_segments(const Segment* segments, std::int64_t num_segments, int num_threads,
                           const CallControl& control);

}  // namespace weightsync
