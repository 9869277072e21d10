// What one look at a block finds: which elements changed, and how many lie below each threshold.
#pragma once

#include <cstdint>

#include "weightsync/delta.hpp"

namespace weightsync {

inline constexpr int kDeltaChangedRow = 7;
static_assert(kDeltaClasses < kDeltaChangedRow);

// Rows of `masks` and `before`: row 0 is all zero, row t + 1 belongs to threshold t, and row
// num_thresholds + 1 is all elements. Class c lies between rows c and c + 1.
// A chunk's masks are one cache line; `before` is padded so that its rows do not meet in one set of
// a cache.
struct DeltaScan {
    // [row]: bit i is set if element i of the chunk lies below; [kDeltaChangedRow]: if it changed.
    alignas(64) std::uint64_t masks[kDeltaChunks][8];
    std::uint16_t before[kDeltaClasses + 1][kDeltaChunks + 32];  // members in earlier chunks
    std::uint32_t total[kDeltaClasses + 1];
    std::int64_t num_elements = -1;
    std::int64_t num_chunks = 0;
    int num_thresholds = -1;

    std::uint32_t class_size(int c) const { return total[c + 1] - total[c]; }
};

// Readies a scan of `num_elements` <= kDeltaBlock elements.
void delta_scan_begin(std::int64_t num_elements, int num_thresholds, DeltaScan* scan);

// A block is scanned in pieces, in order: whoever asks for the next one works on the last while it
// is in the nearest cache, and while memory fetches ahead.
inline constexpr std::int64_t kDeltaPiece = 2048;

// Scans elements [first, first + count) of the block at `old`; `first` is a multiple of kDeltaPiece
// and `count` too, but at the block's end. `current` may be null (nothing changed). Thresholds
// rise; a key below threshold t counts there.
using DeltaScanPiece = void (*)(const unsigned char* old, const unsigned char* current,
                                std::int64_t first, std::int64_t count,
                                const std::uint8_t* thresholds, DeltaScan* scan);

// Positions of `count` rising numbers of class c, each < class_size(c).
using DeltaLocate = void (*)(const DeltaScan& scan, int c, const std::uint32_t* numbers,
                             std::int64_t count, std::uint32_t* positions);

struct DeltaScanKernels {
    DeltaScanPiece scan[4];  // by kind
    DeltaLocate locate;
    const char* name;
};

// Picked once for this CPU.
const DeltaScanKernels& delta_scan_kernels();
// The same in plain C++, for tests.
const DeltaScanKernels& delta_scan_portable();

}  // namespace weightsync
