// Segments whose run is one small element: transposes and strided gathers, copied in tiles.
#pragma once

#include <cstdint>

#include "weightsync/segments.hpp"
#include "weightsync/stream.hpp"

namespace weightsync {

// Bytes along each side of a tile. Wider reads more of a source page while it is open; narrower
// keeps a tile of the smallest elements out of the second-level cache.
inline constexpr std::int64_t kTileRowBytes = 256;

constexpr std::int64_t tile_elements(std::int64_t element_bytes) {
    return kTileRowBytes / element_bytes;
}

// Whether the runs of a coalesced segment are single elements that a tile can hold.
inline bool is_elementwise(const Segment& segment) {
    if (segment.num_runs() == 1) return false;
    if (segment.conversion() == Convert::fp32_to_bf16) return segment.num_bytes == 4;
    const std::int64_t size = segment.num_bytes;
    return size == 1 || size == 2 || size == 4 || size == 8;
}

// A coalesced segment of single elements with its dims put in the order that caches like: `outer`,
// then blocks of the dim along which the source is densest, then the one along which the target is.
class ElementGrid {
  public:
    ElementGrid() = default;
    explicit ElementGrid(const Segment& segment);

    // The grid is cut in units: one `target_dim` index of one block of `source_dim`.
    std::int64_t num_units() const { return outer_.count * num_blocks() * target_dim_.count; }
    std::int64_t unit_bytes() const { return block_ * segment_.num_bytes; }

    // Copies units [begin, end) and returns their source bytes. `stream`, if not null, writes whole
    // lines of the target past the cache; the caller fences.
    std::int64_t copy_units(std::int64_t begin, std::int64_t end, StreamCopy stream) const;

  private:
    std::int64_t num_blocks() const { return (source_dim_.count + block_ - 1) / block_; }

    Segment segment_{};
    SegmentDim outer_{};
    SegmentDim source_dim_{};
    SegmentDim target_dim_{};
    std::int64_t block_ = 1;
};

}  // namespace weightsync
