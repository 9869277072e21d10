// Decoded changes of many spans as one table that a device applies, and takes back, in one launch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weightsync/cuda_lanes.hpp"
#include "weightsync/delta_span.hpp"

namespace weightsync {

// Changes of one span. Addresses are of the device; `positions` are uint32, `values` and `former`
// elements. `count` positions, all below `num_elements` of `target`, which stands at `first_byte`
// of its tensor.
struct PatchRow {
    std::uint64_t target;
    std::uint64_t positions;
    std::uint64_t values;
    std::uint64_t former;
    std::int64_t count;
    std::int64_t element_bytes;  // 1, 2 or 4
    std::uint64_t first_byte;
    std::uint64_t seed;       // of the tensor's digest
    std::int64_t word_shift;  // of its words' bytes
};

// What comparisons found: elements that are not what they should be, and what all of them, as they
// are, add to the digests of their tensors over what they were (`compare` only).
struct PatchFound {
    std::uint64_t different = 0;
    std::uint64_t growth = 0;

    WEIGHTSYNC_HD_INLINE void add(const PatchFound& other) {
        different += other.different;
        growth += other.growth;
    }
};

// Some changes of one row: what one block of threads does.
struct PatchUnit {
    std::uint32_t row;
    std::uint32_t start;
};

inline constexpr std::uint32_t kPatchUnit = 2048;

enum class PatchWork : int {
    exchange = 0,   // values go in, what was there goes to `former`
    take_back = 1,  // `former` goes in
    compare = 2,    // how many elements are not their value
    compare_former = 3,
};

// Does changes first, first + stride, ... of a row, `num` of them or as many as there are. All
// loads come before the first store: a store may alias any later load, so a change at a time would
// wait for memory once for each of them.
template <PatchWork work, typename T, int num>
WEIGHTSYNC_HD_INLINE PatchFound patch_some(const PatchRow& row, std::int64_t first,
                                           std::int64_t stride) {
    constexpr bool is_kept = work == PatchWork::exchange || work == PatchWork::compare;
    const auto* positions = reinterpret_cast<const std::uint32_t*>(row.positions);
    const T* wanted = reinterpret_cast<const T*>(is_kept ? row.values : row.former);
    T* target = reinterpret_cast<T*>(row.target);
    std::uint32_t position[num];
    T value[num];
    T live[num];
    T former[num];
    WEIGHTSYNC_UNROLL
    for (int u = 0; u < num; ++u) {
        const std::int64_t i = first + u * stride;
        position[u] = i < row.count ? positions[i] : 0;
        value[u] = i < row.count ? wanted[i] : T{0};
        if constexpr (work == PatchWork::compare) {
            former[u] = i < row.count ? reinterpret_cast<const T*>(row.former)[i] : T{0};
        }
    }
    if constexpr (work != PatchWork::take_back) {
        WEIGHTSYNC_UNROLL
        for (int u = 0; u < num; ++u) {
            live[u] = first + u * stride < row.count ? target[position[u]] : T{0};
        }
    }
    PatchFound found;
    WEIGHTSYNC_UNROLL
    for (int u = 0; u < num; ++u) {
        const std::int64_t i = first + u * stride;
        if constexpr (work == PatchWork::exchange) {
            if (i < row.count) reinterpret_cast<T*>(row.former)[i] = live[u];
        }
        if constexpr (work == PatchWork::exchange || work == PatchWork::take_back) {
            if (i < row.count) target[position[u]] = value[u];
        } else {
            found.different += live[u] != value[u];
        }
        if constexpr (work == PatchWork::compare) {  // behind the end it is from nothing to nothing
            found.growth +=
                delta_digest_term(row.seed, row.first_byte + std::uint64_t{position[u]} * sizeof(T),
                                  static_cast<int>(row.word_shift), former[u], live[u]);
        }
    }
    return found;
}

// Changes that a thread has in flight.
inline constexpr int kPatchBatch = 8;
inline constexpr std::uint32_t kPatchThreads = 256;
static_assert(kPatchUnit == kPatchBatch * kPatchThreads);

// What one thread of a block does of its unit.
template <PatchWork work>
WEIGHTSYNC_HD_INLINE PatchFound patch_thread(const PatchRow& row, const PatchUnit& unit,
                                             std::uint32_t thread) {
    const std::int64_t first = std::int64_t{unit.start} + thread;
    switch (row.element_bytes) {
        case 1:
            return patch_some<work, std::uint8_t, kPatchBatch>(row, first, kPatchThreads);
        case 2:
            return patch_some<work, std::uint16_t, kPatchBatch>(row, first, kPatchThreads);
        default:
            return patch_some<work, std::uint32_t, kPatchBatch>(row, first, kPatchThreads);
    }
}

// Throws std::invalid_argument for a null address, an unaligned one, or another element size.
std::vector<PatchUnit> cut_patch(const PatchRow* rows, std::int64_t num_rows);

// The CPU's twin of launches one after the other, for tests: rows of this process's memory. Returns
// what comparisons found.
PatchFound run_patch(const PatchRow* rows, std::int64_t num_rows,
                     const std::vector<PatchWork>& works);

// On a device; see cuda_tables.hpp for what holds of streams and errors.
class CudaPatchTable {
  public:
    CudaPatchTable(const PatchRow* rows, std::int64_t num_rows, int device);
    ~CudaPatchTable();

    // Enqueues these works in turn, waits once, and returns what comparisons found.
    PatchFound run(std::uintptr_t stream, const std::vector<PatchWork>& works);
    void close();

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace weightsync
