// What one look at a block finds: which elements changed, and how many lie below each threshold.
#pragma once

#include <cstdint>

#include "weightsync/delta.hpp"

namespace weightsync {

// Rows of `below` and `before`: row 0 is all zero, row t + 1 belongs to threshold t, and row
// num_thresholds + 1 is all elements. Class c lies between rows c and c + 1.
struct DeltaScan {
    std::uint64_t changed[kDeltaChunks];
    std::uint64_t below[kDeltaClasses + 1][kDeltaChunks];   // bit i: element i of the chunk
    std::uint16_t before[kDeltaClasses + 1][kDeltaChunks];  // elements of earlier chunks
    std::uint32_t total[kDeltaClasses + 1];
    std::int64_t num_elements;
    std::int64_t num_chunks;
    int num_thresholds;

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
